import pytest
import torch

from telefuser.kernel.triton import layer_norm, normalization, rms_norm
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
    for kernel in ("_rms_norm_kernel", "_layer_norm_kernel"):
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
