import pytest
import torch

from telefuser.kernel.triton import per_token_quant_fp8
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
