import pytest
import torch

from telefuser.kernel.triton import add_gated, add_layer_norm, launch, layer_norm, normalization, rms_norm
from tests.kernel.layouts import LAYOUTS, strided
from tests.tolerances import assert_close

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NORMS = [rms_norm, layer_norm]


def formula(norm, x, weight=None, bias=None, eps=1e-6):
    """The norm in float64."""
    x = x.double()
    if norm is layer_norm:
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    x = x if weight is None else x * weight.double()
    return x if bias is None else x + bias.double()


@pytest.mark.usefixtures("poison_empty")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 63, 100, 1128])
def test_agrees_with_the_float64_formula(norm, dtype, width, device):
    # S163, S173, B20, B22: one rounding, whatever the dtype of the weight
    for rows, weight_dtype, affine in (
        (1, dtype, "wb"),
        (5, torch.float32, "w"),
        (7, torch.bfloat16, "b"),
        (3, dtype, ""),
    ):
        x = (torch.randn(rows, width) * 2 + 0.5).to(device=device, dtype=dtype)
        weight = (1 + 0.3 * torch.randn(width)).to(device=device, dtype=weight_dtype) if "w" in affine else None
        bias = torch.randn(width).to(device=device, dtype=weight_dtype) if "b" in affine else None
        out = norm(x, weight, bias, 1e-6)
        assert out.dtype == dtype
        wanted = formula(norm, x, weight, bias)
        if width == 1 and norm is layer_norm:
            # A single element is its own mean: exactly the bias, or zero.
            assert torch.equal(out, wanted.to(dtype))
        else:
            assert_close(out, wanted)


@pytest.mark.usefixtures("poison_empty")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("width", [8193, 65537])
def test_rows_wider_than_one_block(norm, width, device):
    x, weight = torch.randn(2, width, device=device), torch.randn(width, device=device)
    assert_close(norm(x, weight, None, 1e-6), formula(norm, x, weight))


@pytest.mark.usefixtures("poison_empty")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_input_equals_contiguous_input(norm, layout, device):
    # B30, S169
    x = strided(layout, 12, torch.float32, device)
    before = x.clone()
    out = norm(x, None, None, 1e-6)
    assert out.is_contiguous()
    assert torch.equal(out, norm(x.contiguous(), None, None, 1e-6))
    assert torch.equal(x, before)


@pytest.mark.parametrize("norm", NORMS)
def test_any_number_of_dimensions(norm, device):
    x = torch.randn(2, 3, 2, 2, 2, 6, device=device)
    for view in (x, x.permute(4, 2, 0, 3, 1, 5), x[0, 0, 0, 0, 0]):
        assert_close(norm(view, None, None, 1e-6), formula(norm, view))


def test_strided_weight(device):
    x, weight = torch.randn(3, 8, device=device), torch.randn(16, device=device)[::2]
    assert_close(rms_norm(x, weight, weight, 1e-6), formula(rms_norm, x, weight, weight))


@pytest.mark.parametrize("norm", NORMS)
def test_empty_input_launches_nothing(norm, device, monkeypatch):
    # B26
    for kernel in ("_norm_kernel", "_norm_wide_kernel"):
        monkeypatch.setattr(normalization, kernel, None)
    for shape in ((0, 128), (2, 0, 128)):
        out = norm(torch.empty(shape, dtype=torch.bfloat16, device=device))
        assert out.shape == shape
        assert out.dtype == torch.bfloat16


def test_rms_norm_of_large_half_precision_values(device):
    # B38: squares of 300 * randn overflow float16, which would give all zeros
    x = (torch.randn(4, 1024, generator=torch.Generator().manual_seed(0)) * 300).half().to(device)
    out = rms_norm(x)
    assert 3.0 < out.abs().max() < 4.5
    assert_close(out, formula(rms_norm, x, eps=1e-5))


def test_layer_norm_of_a_large_mean(device):
    # B38: the two-pass variance; one pass in float32 is off by thousands
    x = 1e4 + torch.randn(4, 1024, generator=torch.Generator().manual_seed(0)).to(device)
    assert (layer_norm(x).double() - formula(layer_norm, x)).abs().max() <= 2e-3


def test_refuses_what_it_would_compute_wrongly(device):
    x = torch.randn(2, 8, device=device)
    with pytest.raises(ValueError, match=r"not torch\.float64"):
        rms_norm(x.double())
    with pytest.raises(ValueError, match=r"weight has shape \(7,\), the rows of x have 8"):
        layer_norm(x, torch.ones(7, device=device))


# With a residual before the norm and a modulation after it


def surrounded(x, y, gate, weight, bias, scale, shift):
    """(total, norm of it) in float64; the norm sees total as it is stored."""
    total = x.double() + y.double() * (1 if gate is None else gate.double())
    out = formula(layer_norm, total.to(x.dtype), weight, bias)
    out = out if scale is None else out * (1 + scale.double())
    return total, out if shift is None else out + shift.double()


@pytest.mark.usefixtures("poison_empty")
@pytest.mark.parametrize(("stream", "branch"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)])
@pytest.mark.parametrize("width", [2, 63, 96, 128, 1128])
def test_residual_norm_and_modulation_in_one_pass(stream, branch, width, device):
    x, y = torch.randn(2, 5, width).to(device, stream), torch.randn(2, 5, width).to(device, branch)
    affine = torch.randn(2, width).to(device)
    for tokens in (1, 5):
        # One modulation a sample, or one a token; cut from one projection
        gate, scale, shift = torch.randn(2, tokens, 6, width).to(device).unbind(2)[1:4]
        for given in ((gate, None, None, scale, shift), (None, *affine, None, None), (gate, *affine, scale, None)):
            total, out = add_layer_norm(x, y, given[0], given[1], given[2], 1e-6, given[3], given[4])
            assert (total.dtype, out.dtype) == (stream, branch)
            wanted_total, wanted = surrounded(x, y, *given)
            assert_close(total, wanted_total)
            # A width of 2 gives plus and minus one, so that the sum's rounding decides about the sign of near ties.
            if width > 2:
                assert_close(out, formula_after(total, given))
            assert torch.equal(add_gated(x, y, given[0]), total)
        out = layer_norm(x, *affine, 1e-6, scale, shift, branch)
        assert out.dtype == branch
        wanted = formula(layer_norm, x, *affine) * (1 + scale.double()) + shift.double()
        assert_close(out, wanted)


def formula_after(total, given):
    """The second result in float64, from the first as it was stored."""
    return surrounded(total, torch.zeros_like(total), None, *given[1:])[1]


@pytest.mark.usefixtures("poison_empty")
@pytest.mark.parametrize("width", [100, 128])
def test_rows_too_wide_for_registers_agree(width, device, monkeypatch):
    monkeypatch.setattr(launch, "MAX_IN_REGISTERS", 64)
    monkeypatch.setattr(normalization, "BLOCK_OF_WIDE_ROWS", 32)
    x, y, gate, scale, shift = (torch.randn(2, 5, width, device=device) for _ in range(5))
    weight, bias = torch.randn(2, width, device=device)
    total, out = add_layer_norm(x, y, gate, weight, bias, 1e-6, scale, shift)
    wanted_total, wanted = surrounded(x, y, gate, weight, bias, scale, shift)
    assert_close(total, wanted_total)
    assert_close(out, wanted)
    assert_close(rms_norm(x, weight, bias, 1e-6), formula(rms_norm, x, weight, bias))


@pytest.mark.usefixtures("poison_empty")
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("shape", [(2, 5, 12), (7, 12), (12,), (2, 3, 5, 12), (2, 2, 2, 3, 12)], ids=str)
def test_every_row_is_reached_whatever_a_program_takes(rows, shape, device, monkeypatch):
    monkeypatch.setattr(launch, "launch_of", lambda *_: launch.Launch(32, rows, 1))
    x, y, gate = (torch.randn(shape, device=device) for _ in range(3))
    views = [(x, y, gate)]
    if len(shape) > 2:
        views.append(tuple(t.transpose(0, 1) for t in (x, y, gate)))
    for x, y, gate in views:
        total, out = add_layer_norm(x, y, gate, scale=gate)
        wanted_total, wanted = surrounded(x, y, gate, None, None, gate, None)
        assert_close(total, wanted_total)
        assert_close(out, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_residual_equals_contiguous(layout, device):
    # B30
    x, y, gate = (strided(layout, 12, torch.float32, device, seed) for seed in range(3))
    outs = add_layer_norm(x, y, gate, None, None, 1e-6, y, x)
    wanted = add_layer_norm(*(t.contiguous() for t in (x, y, gate)), None, None, 1e-6, y.contiguous(), x.contiguous())
    assert all(map(torch.equal, outs, wanted))


def test_a_residual_of_nothing(device):
    x = torch.empty(2, 0, 8, device=device)
    assert [t.shape for t in add_layer_norm(x, x)] == [x.shape, x.shape]


def test_refuses_another_shape_of_the_added(device):
    with pytest.raises(ValueError, match=r"y has shape \(2, 1, 8\), x has \(2, 3, 8\)"):
        add_gated(torch.randn(2, 3, 8, device=device), torch.randn(2, 1, 8, device=device))
