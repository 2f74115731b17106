import pytest
import torch

from telefuser.kernel.triton import fused_scale_shift, modulate
from tests.kernel.layouts import LAYOUTS, strided
from tests.tolerances import assert_close


def formula(x, scale, shift, constant=1.0):
    return x.double() * (constant + scale.double()) + shift.double()


@pytest.mark.usefixtures("poison_empty")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 63, 100, 1128, 2049])
def test_agrees_with_the_float64_formula(dtype, width, device):
    # S184, S189, S273: float32 arithmetic, one rounding, the dtype of x
    for other in (dtype, torch.float32):
        x = torch.randn(2, 3, width).to(device=device, dtype=dtype)
        scale, shift = torch.randn(2, 2, 1, width).to(device=device, dtype=other).unbind(0)
        out = fused_scale_shift(x, scale, shift)
        assert out.dtype == dtype
        assert_close(out, formula(x, scale, shift))
    assert_close(fused_scale_shift(x, scale, shift, 0.25), formula(x, scale, shift, 0.25))


@pytest.mark.usefixtures("poison_empty")
@pytest.mark.parametrize("shape", [(2, 8), (2, 1, 8), (2, 5, 8), (1, 1, 8), (8,), (1, 5, 8), (2, 1, 1), ()], ids=str)
def test_every_shape_of_scale_and_shift(shape, device):
    # S186, S188
    x = torch.randn(2, 5, 8, device=device)
    scale, shift = torch.randn(shape, device=device), torch.randn(shape, device=device)
    wide = [t.unsqueeze(1) if t.dim() == 2 else t for t in (scale, shift)]
    assert_close(fused_scale_shift(x, scale, shift), formula(x, *wide))


def test_batch_rows_are_not_mistaken_for_tokens(device):
    # S186: [B, D] with B equal to S
    x, scale, shift = (torch.randn(s, device=device) for s in ((3, 3, 8), (3, 8), (3, 8)))
    assert_close(fused_scale_shift(x, scale, shift), formula(x, scale[:, None], shift[:, None]))


@pytest.mark.usefixtures("poison_empty")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_input_equals_contiguous_input(layout, device):
    # B30
    x = strided(layout, 12, torch.float32, device)
    scale, shift = torch.randn(2, 1, 2, 12, device=device), strided(layout, 12, torch.float32, device, seed=1)
    out = fused_scale_shift(x, scale, shift)
    assert out.is_contiguous()
    assert torch.equal(out, fused_scale_shift(x.contiguous(), scale.contiguous(), shift.contiguous()))


def test_six_dimensions_with_broadcast_rows(device):
    x, scale = torch.randn(2, 3, 2, 2, 2, 6, device=device), torch.randn(2, 1, 2, 1, 1, 6, device=device)
    x = x.transpose(1, 4)
    scale = scale.transpose(1, 4)
    assert_close(fused_scale_shift(x, scale, scale), formula(x, scale, scale))


def test_scale_and_shift_are_read_where_they_lie(device, monkeypatch):
    # S187, B30: the chunks of one projection, neither copied nor expanded
    launches = []

    class Recorder:
        def __getitem__(self, grid):
            return lambda *args, **options: launches.append((grid, args))

    monkeypatch.setattr(modulate, "_fused_scale_shift_kernel", Recorder())
    chunks = torch.randn(2, 6 * 8, device=device).chunk(6, dim=1)
    fused_scale_shift(torch.randn(2, 5, 8, device=device), chunks[4], chunks[3])
    ((grid, (_, scale, shift, *_)),) = launches
    assert grid == (10,)
    assert [scale.data_ptr(), shift.data_ptr()] == [chunks[4].data_ptr(), chunks[3].data_ptr()]
    assert scale.stride() == shift.stride() == (48, 0, 1)


def test_empty_input_launches_nothing(device, monkeypatch):
    # B26
    monkeypatch.setattr(modulate, "_fused_scale_shift_kernel", None)
    out = fused_scale_shift(*(torch.empty(2, n, 8, device=device, dtype=torch.float16) for n in (0, 1, 1)))
    assert out.shape == (2, 0, 8)
    assert out.dtype == torch.float16


def test_refuses_what_it_would_compute_wrongly(device):
    x = torch.randn(2, 3, 8, device=device)
    with pytest.raises(ValueError, match=r"not torch\.float64"):
        fused_scale_shift(x.double(), x, x)
    with pytest.raises(RuntimeError):
        fused_scale_shift(x, x[:, :2], x)
