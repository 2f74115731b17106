"""`LinearFP8` fed with rows that are quantised already."""

import copy

import pytest
import torch
from torch import nn

from telefuser.ops.fp8_quantization import dequantize_rows, quantize_rows
from telefuser.ops.quantized_linear import LinearFP8
from telefuser.ops.quantized_rows import QuantizedRows
from tests.ops.fp8_machines import fresh_table, gpu
from tests.tolerances import assert_close

__all__ = ["fresh_table", "gpu"]
E4M3 = torch.float8_e4m3fn


@pytest.fixture(params=["native", "fp8 product"])
def machine(request, gpu):
    torch.manual_seed(0)
    return gpu() if request.param == "fp8 product" else None


def rows_of(x, dtype=E4M3):
    return QuantizedRows(*quantize_rows(x, dtype))


def test_rows_stand_for_the_tensor_they_were_made_from():
    x = torch.randn(2, 3, 64)
    rows = rows_of(x)
    assert (rows.shape, rows.device) == (x.shape, x.device)
    assert torch.equal(rows.dequantize(torch.bfloat16), dequantize_rows(*rows, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_takes_rows_as_they_are(dtype, bias, machine):
    layer = LinearFP8(nn.Linear(64, 48, bias=bias).to(dtype))
    x = torch.randn(2, 5, 64).to(dtype)
    x[0, 1] = 0
    out = layer(rows_of(x))
    assert out.dtype is layer.compute_dtype is dtype
    if machine is not None:
        # The same values meet the same product as when the layer quantises.
        assert torch.equal(out, layer(x))
    exact = rows_of(x).dequantize(torch.float64) @ layer.dequantize(torch.float64).T
    # The products of PyTorch write bfloat16.
    assert_close(out, exact + layer.bias.double() if bias else exact, "matmul", torch.bfloat16 if machine else dtype)
    assert torch.equal(out[0, 1], layer.bias if bias else torch.zeros(48, dtype=dtype))


def test_the_result_has_the_layers_dtype_through_casts_and_copies(machine):
    layer = LinearFP8(nn.Linear(64, 32, bias=False).bfloat16())
    assert layer.compute_dtype is torch.bfloat16
    rows = rows_of(torch.randn(3, 64))
    for cast in (layer.half(), copy.deepcopy(layer)):
        assert cast(rows).dtype is cast.compute_dtype is torch.float16
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(rows).dtype is torch.bfloat16
    assert LinearFP8.from_quantized(layer.weight, layer.weight_scale, dtype=torch.float32)(rows).dtype is torch.float32


def test_rows_that_do_not_fit_are_refused():
    layer = LinearFP8(nn.Linear(64, 32))
    rows = rows_of(torch.randn(3, 64))
    with pytest.raises(ValueError, match="e5m2"):
        layer(rows_of(torch.randn(3, 64), torch.float8_e5m2))
    with pytest.raises(ValueError, match=r"\[..., 64\].*\(3, 32\)"):
        layer(rows_of(torch.randn(3, 32)))
    with pytest.raises(ValueError, match=r"one float32 scale a row, \(3, 1\)"):
        layer(QuantizedRows(rows.values, rows.scales[:1]))
    with pytest.raises(ValueError, match="float64"):
        layer(QuantizedRows(rows.values, rows.scales.double()))


@pytest.mark.parametrize("kind", [E4M3, torch.float8_e5m2])
def test_a_producer_asks_the_layer_what_to_hand_over(kind, gpu):
    layer, odd = LinearFP8(nn.Linear(64, 32), kind), LinearFP8(nn.Linear(64, 31), kind)
    assert layer.rows_dtype is E4M3
    device = torch.device("cpu")
    assert not layer.takes_rows(device)
    assert layer(rows_of(torch.randn(3, 64), layer.rows_dtype)).isfinite().all()
    gpu()
    assert layer.takes_rows(device) == (kind is E4M3)
    assert not odd.takes_rows(device)
    ask = torch.compile(lambda x: x * (2 if layer.takes_rows(x.device) else 3), backend="eager", fullgraph=True)
    assert ask(torch.ones(1)).item() == (2 if kind is E4M3 else 3)


def test_rows_without_elements(machine):
    layer = LinearFP8(nn.Linear(64, 32))
    assert layer(rows_of(torch.randn(2, 0, 64))).shape == (2, 0, 32)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_rows_pass_through_one_graph(backend, machine):
    torch._dynamo.reset()
    layer = LinearFP8(nn.Linear(64, 32).bfloat16())

    def quantised_by_the_producer(x):
        return layer(QuantizedRows(*quantize_rows(x * 2, E4M3)))

    x = torch.randn(5, 64).bfloat16()
    with torch.no_grad():
        out = torch.compile(quantised_by_the_producer, backend=backend, fullgraph=True)(x)
        assert_close(out, quantised_by_the_producer(x), "matmul")
