import pytest
import torch

from telefuser.kernel.triton import (
    activate,
    activate_and_mul,
    activate_and_mul_quant_fp8,
    activate_quant_fp8,
    add_layer_norm,
    launch,
    layer_norm,
    normalization,
    per_token_quant_fp8,
    quantize,
    rms_norm,
)
from tests.kernel.interpreter import round_fp8_as_hardware_does
from tests.kernel.layouts import LAYOUTS, strided

FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture(autouse=True)
def fp8_here(device, monkeypatch):
    if device.type == "cpu":
        round_fp8_as_hardware_does(monkeypatch)
    elif torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("Triton compiles e4m3 from compute capability 8.9 on")  # B82


def formula(x, dtype):
    """Row scales and values as the text of `telefuser.ops.fp8_quantization` has them."""
    wide = x.float()
    scale = (wide.abs().amax(-1, keepdim=True) * (1 / torch.finfo(dtype).max)).clamp_min(2.0**-126)
    return (wide * (1 / scale)).to(dtype), scale


def assert_same(got, wanted):
    (q, scale), (wanted_q, wanted_scale) = got, wanted
    assert q.dtype == wanted_q.dtype
    assert torch.equal(scale, wanted_scale)
    assert torch.equal(q.view(torch.uint8), wanted_q.view(torch.uint8))


@pytest.mark.usefixtures("poison_empty")
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("width", [1, 63, 100, 1128, 8193])
def test_equals_the_formula_to_the_bit(dtype, width, device):
    for rows, given in ((1, torch.float32), (5, torch.bfloat16), (3, torch.float16)):
        x = (torch.randn(rows, width) * 3).to(device=device, dtype=given)
        assert_same(per_token_quant_fp8(x, dtype), formula(x, dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_input_equals_contiguous_input(layout, device):
    x = strided(layout, 12, torch.float32, device)
    before = x.clone()
    q, scale = per_token_quant_fp8(x)
    assert q.is_contiguous()
    assert scale.shape == (*x.shape[:-1], 1)
    assert_same((q, scale), per_token_quant_fp8(x.contiguous()))
    assert torch.equal(x, before)


def test_rows_do_not_share_a_scale(device):
    # B80, and rows of zeros or of the smallest numbers
    x = torch.randn(6, 64)
    x[1] *= 1e6
    x[2] = 0
    x[3] *= 1e-38
    x[4] = 1e-45
    x = x.to(device)
    q, scale = per_token_quant_fp8(x)
    assert_same((q, scale), formula(x, torch.float8_e4m3fn))
    assert torch.equal(q[2].float(), torch.zeros(64, device=device))
    assert q.float().isfinite().all()
    assert (q.float().abs().amax(-1)[[0, 1, 5]] == 448).all()


# The interpreter computes with numpy, which warns of the NaN that is asked for.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_nan_and_infinity_mark_their_own_row(device):
    x = torch.randn(4, 64, device=device)
    x[1, 5], x[2, 7] = float("nan"), float("inf")
    q, scale = per_token_quant_fp8(x)
    values = q.float() * scale
    assert values[[0, 3]].isfinite().all()
    assert values[1].isnan().any()
    assert values[2].isnan().any()


def test_empty_tensors_launch_nothing(device):
    # B26
    for shape in ((0, 128), (2, 0, 128), (2, 0)):
        q, scale = per_token_quant_fp8(torch.empty(shape, device=device))
        assert q.shape == shape
        assert scale.shape == (*shape[:-1], 1)


def test_refuses_what_it_would_compute_wrongly(device):
    with pytest.raises(ValueError, match="float64"):
        per_token_quant_fp8(torch.ones(2, 4, dtype=torch.float64, device=device))
    with pytest.raises(ValueError, match="int8"):
        per_token_quant_fp8(torch.ones(2, 4, device=device), torch.int8)


# Behind another step, left in float32 between the two


def assert_stands_for(got, wanted, dtype):
    """Scales are those of the float64 rows, values within half a step of FP8 and float32's own error."""
    q, scale = got
    assert q.dtype == dtype
    assert scale.dtype == torch.float32
    assert scale.shape == (*wanted.shape[:-1], 1)
    peak = wanted.abs().amax(-1, keepdim=True)
    torch.testing.assert_close(scale.double(), peak / torch.finfo(dtype).max, rtol=1e-4, atol=2.0**-126)
    # e4m3 has 4 digits, its smallest step is 2^-9; e5m2 has 3 and 2^-16.
    digits, smallest = (2.0**-4, 2.0**-9) if dtype is torch.float8_e4m3fn else (2.0**-3, 2.0**-16)
    limit = wanted.abs() * digits + scale.double() * smallest
    assert ((q.double() * scale.double() - wanted).abs() <= limit * 1.001).all()


@pytest.mark.usefixtures("poison_empty")
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("width", [2, 63, 100, 1128])
def test_norms_give_fp8_rows(dtype, width, device):
    x, y, gate, scale, shift = torch.randn(5, 2, 5, width).to(device)
    weight, bias = torch.randn(2, width).to(device)
    total, out = add_layer_norm(x, y, gate, weight, bias, 1e-6, scale, shift, dtype)
    wanted_total, wanted = add_layer_norm(x, y, gate, weight, bias, 1e-6, scale, shift)
    assert torch.equal(total, wanted_total)
    assert_stands_for(out, wanted.double(), dtype)
    assert_stands_for(layer_norm(x, weight, bias, 1e-6, out_dtype=dtype), layer_norm(x, weight, bias).double(), dtype)
    assert_stands_for(rms_norm(x, weight, out_dtype=dtype), rms_norm(x, weight).double(), dtype)


@pytest.mark.usefixtures("poison_empty")
@pytest.mark.parametrize("shape", [(2, 5, 96), (7, 96), (2, 3, 5, 96), (2, 2, 2, 3, 96)], ids=str)
def test_every_row_of_any_rank_has_its_scale(shape, device):
    x = torch.randn(shape).to(device)
    for view in (x, x.transpose(0, 1)):
        for got, wanted in (
            (layer_norm(view, out_dtype=torch.float8_e4m3fn), layer_norm(view)),
            (activate_quant_fp8(view, "silu"), activate(view, "silu")),
        ):
            assert_stands_for(got, wanted.double(), torch.float8_e4m3fn)


@pytest.mark.usefixtures("poison_empty")
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("width", [64, 100, 1128])
def test_activations_give_fp8_rows(dtype, width, device):
    x = torch.randn(5, width).to(device)
    assert_stands_for(activate_quant_fp8(x, "gelu_tanh", dtype), activate(x, "gelu_tanh").double(), dtype)
    for gate_first in (False, True):
        wanted = activate_and_mul(x, "silu", gate_first).double()
        assert_stands_for(activate_and_mul_quant_fp8(x, "silu", gate_first, dtype), wanted, dtype)


@pytest.mark.usefixtures("poison_empty")
def test_rows_too_wide_for_registers(device, monkeypatch):
    monkeypatch.setattr(launch, "MAX_IN_REGISTERS", 64)
    monkeypatch.setattr(normalization, "BLOCK_OF_WIDE_ROWS", 32)
    monkeypatch.setattr(quantize, "BLOCK_OF_WIDE_ROWS", 32)
    x, scale, shift = torch.randn(3, 2, 5, 100).to(device)
    e4m3 = torch.float8_e4m3fn
    got = layer_norm(x, scale=scale, shift=shift, out_dtype=e4m3)
    assert_stands_for(got, layer_norm(x, scale=scale, shift=shift).double(), e4m3)
    assert_same(per_token_quant_fp8(x), formula(x, e4m3))
    assert_stands_for(activate_quant_fp8(x, "gelu_tanh"), activate(x, "gelu_tanh").double(), e4m3)


def test_a_row_with_nan_comes_back_as_nan_and_zeros_as_zeros(device):
    x = torch.randn(4, 64).to(device)
    x[1, 3], x[2] = float("nan"), 0
    for values, scales in (per_token_quant_fp8(x), activate_quant_fp8(x, "silu"), layer_norm(x, out_dtype=FORMATS[0])):
        assert scales.isnan().flatten().tolist() == [False, True, False, False]
        assert values[1].float().isnan().all()
        assert (values[2].float() == 0).all()
    assert (per_token_quant_fp8(torch.empty(3, 0, device=device))[1] == 2.0**-126).all()
