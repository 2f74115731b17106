"""Layer norm with a gated residual before and a modulation after it: one result whichever form computes it."""

import pytest
import torch
from torch import nn

import telefuser.kernel.triton as kernels
from telefuser.ops import LayerNorm, add_gated, add_layer_norm_modulate, layer_norm_modulate, modulate
from telefuser.ops.quantized_rows import QuantizedRows
from tests.kernel.interpreter import round_fp8_as_hardware_does
from tests.ops.rounding import assert_rounded_once
from tests.tolerances import assert_close

WIDTH = 48
STREAMS = [(torch.float32, torch.bfloat16), (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)]


def vectors(tokens, count=3):
    """Gate, scale and shift as a block cuts them from one projection: [2, tokens, 48] each, strided."""
    return torch.randn(2, tokens, 6, WIDTH).unbind(2)[:count]


def formula(x, scale, shift, weight=None, bias=None, eps=1e-6):
    """In float64."""
    x = x.double()
    x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    x = x if weight is None else x * weight.double() + bias.double()
    return x if scale is None else x * (1 + scale.double()) + shift.double()


@pytest.fixture(params=["native", "kernel"])
def form(request):
    if request.param == "kernel":
        request.getfixturevalue("interpreted_cuda")
    return request.param


@pytest.mark.usefixtures("form", "poison_empty")
@pytest.mark.parametrize(("stream", "branch"), STREAMS)
@pytest.mark.parametrize("tokens", [1, 5])
def test_agrees_with_the_float64_formula(stream, branch, tokens):
    x, y = torch.randn(2, 5, WIDTH).to(stream), torch.randn(2, 5, WIDTH).to(branch)
    gate, scale, shift = vectors(tokens)
    weight, bias = torch.randn(2, WIDTH)
    out = layer_norm_modulate(x, shift, scale, out_dtype=branch)
    assert out.dtype == branch
    assert_close(out, formula(x, scale, shift))
    total, out = add_layer_norm_modulate(x, y, gate, shift, scale)
    assert (total.dtype, out.dtype) == (stream, branch)
    assert_close(total, x.double() + gate.double() * y.double())
    assert_close(out, formula(total, scale, shift))
    assert_close(add_gated(x, y, gate), total)
    total, out = add_layer_norm_modulate(x, y, weight=weight, bias=bias)
    assert_close(total, x.double() + y.double())
    assert_close(out, formula(total, None, None, weight, bias))
    if branch is torch.bfloat16:
        assert_rounded_once(out, formula(total, None, None, weight, bias))


@pytest.mark.usefixtures("form")
def test_fused_equals_the_operators_one_after_another():
    x, y = torch.randn(2, 5, WIDTH), torch.randn(2, 5, WIDTH).bfloat16()
    gate, scale, shift = (vector[:, 0] for vector in vectors(1))  # [B, D]
    norm = LayerNorm(WIDTH, elementwise_affine=False)
    total, out = add_layer_norm_modulate(x, y, gate, shift, scale, out_dtype=torch.float32)
    assert_close(total, torch.addcmul(x, y.float(), gate[:, None]))
    assert_close(out, modulate(norm(total), shift, scale))
    assert_close(layer_norm_modulate(x, shift, scale), modulate(norm(x), shift, scale))


def test_one_launch_each(interpreted_cuda, monkeypatch):
    launched = []
    for name in ("layer_norm", "add_layer_norm", "add_gated", "fused_scale_shift"):
        launch = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *a, name=name, launch=launch: launched.append(name) or launch(*a))
    x, (gate, scale, shift) = torch.randn(2, 5, WIDTH), vectors(1)
    layer_norm_modulate(x, shift, scale)
    add_layer_norm_modulate(x, x, gate, shift, scale)
    add_gated(x, x, gate)
    assert launched == ["layer_norm", "add_layer_norm", "add_gated"]
    layer_norm_modulate(x, nn.Parameter(shift), scale)  # a gradient is wanted
    add_layer_norm_modulate(x.double(), x, gate)
    assert len(launched) == 3


@pytest.mark.usefixtures("form")
def test_gradients_are_those_of_the_formula():
    x, y = (torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    gate, shift, scale = (torch.randn(2, 6, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradcheck(add_layer_norm_modulate, (x, y, gate, shift, scale))


def test_any_rank_and_no_rows():
    # B26
    x = torch.randn(4, WIDTH)
    assert_close(layer_norm_modulate(x, x[0], x[1]), formula(x, x[1], x[0]))
    empty = torch.empty(2, 0, WIDTH)
    assert add_layer_norm_modulate(empty, empty.bfloat16())[1].dtype == torch.bfloat16


@pytest.mark.usefixtures("form")
def test_what_does_not_fit_is_refused():
    x = torch.randn(3, 5, 8)
    with pytest.raises(ValueError, match=r"y of shape \(3, 1, 8\) cannot be added to a residual of shape \(3, 5, 8\)"):
        add_gated(x, x[:, :1])
    with pytest.raises(ValueError, match=r"gate of shape \(5, 8\) does not fit"):
        add_layer_norm_modulate(x, x, torch.randn(5, 8))
    with pytest.raises(ValueError, match=r"bias has shape \(1,\), the rows of x have 8"):
        layer_norm_modulate(x, bias=torch.randn(1))
    with pytest.raises(ValueError, match=r"floating-point tensor, got torch\.int64"):
        layer_norm_modulate(torch.ones(2, 8, dtype=torch.int64))


@pytest.mark.parametrize("on", ["native", "kernel"])
def test_fp8_rows_for_the_next_projection(on, request, monkeypatch):
    if on == "kernel":
        platform = request.getfixturevalue("interpreted_cuda")
        monkeypatch.setattr(type(platform), "fp8_unavailable_reason", lambda *_: None)
        round_fp8_as_hardware_does(monkeypatch)
    x, y, gate, shift, scale = torch.randn(5, 2, 7, 64)
    e4m3 = torch.float8_e4m3fn
    with torch.no_grad():
        rows = layer_norm_modulate(x, shift, scale, out_dtype=e4m3)
        total, added = add_layer_norm_modulate(x, y, gate, shift, scale, out_dtype=e4m3)
        wanted_total, wanted_added = add_layer_norm_modulate(x, y, gate, shift, scale, out_dtype=torch.float32)
    assert isinstance(rows, QuantizedRows)
    assert rows.shape == x.shape
    for got, wanted in ((rows, layer_norm_modulate(x, shift, scale)), (added, wanted_added)):
        # Half a step of e4m3 is 2^-4 of the number at most.
        assert ((got.dequantize(torch.float32) - wanted).abs() <= wanted.abs() / 15 + got.scales / 400).all()
    assert_close(total, wanted_total)
