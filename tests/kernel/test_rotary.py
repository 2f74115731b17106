import pytest
import torch

from telefuser.kernel.triton import apply_rotary_embedding, rotary
from tests.kernel.layouts import LAYOUTS, strided
from tests.tolerances import assert_close


def tables(*shape, dtype=torch.float32, device="cpu"):
    angles = torch.rand(shape, dtype=torch.float64) * 6
    return angles.cos().to(device=device, dtype=dtype), angles.sin().to(device=device, dtype=dtype)


def formula(x, cos, sin, interleaved=True):
    """Rotation as a complex product in float64; cos and sin broadcast to [..., D/2]."""
    half = x.shape[-1] // 2
    pairs = (
        x.double().unflatten(-1, (half, 2)) if interleaved else x.double().unflatten(-1, (2, half)).transpose(-1, -2)
    )
    turned = torch.view_as_real(torch.complex(*pairs.unbind(-1)) * torch.complex(cos.double(), sin.double()))
    return (turned if interleaved else turned.transpose(-1, -2)).flatten(-2)


@pytest.mark.usefixtures("poison_empty")
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "width"), [(1, 2), (5, 32), (12, 126), (17, 128), (3, 1128)])
def test_agrees_with_the_complex_product(interleaved, dtype, heads, width, device):
    for table_dtype in (torch.float32, torch.float64):
        x = torch.randn(2, 3, heads, width).to(device=device, dtype=dtype)
        cos, sin = tables(3, width // 2, dtype=table_dtype, device=device)
        out = apply_rotary_embedding(x, cos, sin, interleaved)
        assert out.dtype == dtype
        assert_close(out, formula(x, cos[:, None], sin[:, None], interleaved))


@pytest.mark.usefixtures("poison_empty")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_input_equals_contiguous_input(layout, device):
    # B30
    x = strided(layout, 12, torch.float32, device)
    cos, sin = tables(2, 3, 1, 6, device=device)
    out = apply_rotary_embedding(x, cos, sin, True)
    assert out.is_contiguous()
    assert torch.equal(out, apply_rotary_embedding(x.contiguous(), cos, sin, True))


def test_tokens_in_the_third_dimension(device):
    x, (cos, sin) = torch.randn(2, 3, 40, 8, device=device), tables(1, 1, 40, 4, device=device)
    assert_close(apply_rotary_embedding(x, cos, sin, True), formula(x, cos, sin))


def test_tables_are_read_where_they_lie(device):
    # Every second column of a full-width table, without a copy
    x, (cos, sin) = torch.randn(2, 3, 4, 8, device=device), tables(3, 4, device=device)
    wide = [t.repeat_interleave(2, -1) for t in (cos, sin)]
    out = apply_rotary_embedding(x, wide[0][:, ::2], wide[1][:, ::2], True)
    assert torch.equal(out, apply_rotary_embedding(x, cos, sin, True))


def test_empty_input_launches_nothing(device, monkeypatch):
    # B26
    monkeypatch.setattr(rotary, "_apply_rotary_embedding_kernel", None)
    out = apply_rotary_embedding(torch.empty(2, 0, 4, 8, device=device), *tables(0, 4, device=device))
    assert out.shape == (2, 0, 4, 8)


def test_refuses_what_it_would_compute_wrongly(device):
    cos, sin = tables(3, 4, device=device)
    with pytest.raises(ValueError, match="the last one even"):
        apply_rotary_embedding(torch.randn(2, 3, 4, 7, device=device), cos, sin)
    with pytest.raises(ValueError, match="up to four dimensions"):
        apply_rotary_embedding(torch.randn(1, 2, 3, 4, 8, device=device), cos, sin)
    with pytest.raises(ValueError, match=r"not torch\.float64"):
        apply_rotary_embedding(torch.randn(2, 3, 4, 8, device=device).double(), cos, sin)


def test_tiles_fit_the_number_of_heads():
    assert {heads: rotary._tile_of(heads, 32) for heads in (1, 5, 12, 17, 32, 40)} == {
        1: 1, 5: 4, 12: 16, 17: 4, 32: 32, 40: 16,
    }  # fmt: skip
