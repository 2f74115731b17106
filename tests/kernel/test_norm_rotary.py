import pytest
import torch

from telefuser.kernel.triton import norm_rotary, rms_norm_rotary
from tests.tolerances import assert_close


def formula(x, weight, cos, sin, heads, eps=1e-6):
    """Norm over the whole width, then rotation of each head, in float64."""
    x = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()
    x = (x if weight is None else x * weight.double()).unflatten(-1, (heads, -1, 2))
    turned = torch.view_as_complex(x.contiguous()) * torch.complex(cos.double(), sin.double())
    return torch.view_as_real(turned).flatten(-2)


def tables(*shape, dtype=torch.float32, device="cpu"):
    angles = torch.rand(shape, dtype=torch.float64) * 6
    return angles.cos().to(device=device, dtype=dtype), angles.sin().to(device=device, dtype=dtype)


@pytest.mark.usefixtures("poison_empty")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "width"), [(1, 2), (3, 2), (2, 24), (3, 10), (5, 64), (3, 128)])
def test_agrees_with_the_float64_formula(dtype, heads, width, device):
    # Heads whose rows are all head (2, 2 * 32), head and tail, and a tail of masked lanes
    for batch, table_dtype, has_weight in ((2, torch.float32, True), (1, torch.float64, False)):
        q, k = (torch.randn(2, 5, heads * width).to(device=device, dtype=dtype) for _ in range(2))
        weights = [torch.randn(heads * width, device=device) for _ in range(2)] if has_weight else [None, None]
        cos, sin = tables(batch, 5, 1, width // 2, dtype=table_dtype, device=device)
        outs = rms_norm_rotary(q, k, *weights, cos, sin, heads)
        for out, x, weight in zip(outs, (q, k), weights):
            assert out.dtype == dtype
            assert out.is_contiguous()
            assert_close(out, formula(x, weight, cos, sin, heads))


@pytest.mark.usefixtures("poison_empty")
def test_slices_of_one_projection_are_read_where_they_lie(device):
    # B30
    qkv = torch.randn(2, 5, 3, 48, device=device)
    before = qkv.clone()
    q, k, _ = qkv.unbind(2)
    cos, sin = tables(1, 5, 1, 12, device=device)
    outs = rms_norm_rotary(q, k, None, None, cos, sin, 2)
    contiguous = rms_norm_rotary(q.contiguous(), k.contiguous(), None, None, cos, sin, 2)
    columns = rms_norm_rotary(q.mT.contiguous().mT, k.repeat_interleave(2, -1)[..., ::2], None, None, cos, sin, 2)
    for out, same, also in zip(outs, contiguous, columns):
        assert torch.equal(out, same)
        assert torch.equal(out, also)
    assert torch.equal(qkv, before)


def test_empty_input_launches_nothing(device, monkeypatch):
    # B26
    monkeypatch.setattr(norm_rotary, "_norm_rotary_kernel", None)
    x = torch.empty(2, 0, 48, device=device)
    assert rms_norm_rotary(x, x, None, None, *tables(1, 0, 1, 12, device=device), 2)[1].shape == (2, 0, 2, 24)


def test_refuses_what_it_would_compute_wrongly(device):
    x, (cos, sin) = torch.randn(2, 5, 48, device=device), tables(1, 5, 1, 12, device=device)
    with pytest.raises(ValueError, match="5 heads of an even width"):
        rms_norm_rotary(x, x, None, None, cos, sin, 5)
    with pytest.raises(ValueError, match=r"q is torch\.float32 .* k is torch\.bfloat16"):
        rms_norm_rotary(x, x.bfloat16(), None, None, cos, sin, 2)
    with pytest.raises(ValueError, match=r"not torch\.float64"):
        rms_norm_rotary(x.double(), x.double(), None, None, cos, sin, 2)
