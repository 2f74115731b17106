"""`attention` on the CPU: numbers against the float64 formula, layouts, masks, dtypes, errors."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from telefuser import platforms
from telefuser.core.config import AttentionConfig, AttnImplType
from telefuser.ops.attention import attention
from tests.ops.attention.reference import qkv, reference
from tests.tolerances import assert_close

HALVES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES])
@pytest.mark.parametrize(("queries", "keys"), [(16, 16), (33, 7), (7, 33), (1, 257), (1, 1)])
def test_equals_the_formula(dtype, queries, keys):
    """S219, B50."""
    q, k, v = qkv(queries=queries, keys=keys, dtype=dtype)
    out = attention(q, k, v)
    assert out.dtype is dtype
    assert_close(out, reference(q, k, v)[0], "attention", dtype)


def test_one_query_over_one_key_gives_the_value_exactly():
    """B50."""
    for dtype in (torch.float32, *HALVES):
        q, k, v = qkv(queries=1, dtype=dtype)
        assert torch.equal(attention(q, k, v), v)


@pytest.mark.parametrize("output_layout", ["BSND", "BNSD"])
@pytest.mark.parametrize("input_layout", ["BSND", "BNSD"])
def test_all_layout_pairs_agree(input_layout, output_layout):
    """S247, S248, S249, B66."""
    q, k, v = qkv(batch=2, queries=33, heads=4, head_dim=64)
    expected = reference(q, k, v)[0]
    if input_layout == "BNSD":
        q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    out = attention(q, k, v, input_layout=input_layout, output_layout=output_layout)
    if output_layout == "BNSD":
        assert out.shape == (2, 4, 33, 64)
        out = out.transpose(1, 2)
    assert_close(out, expected, "attention")
    assert out.flatten(2).shape == (2, 33, 256)


def test_strided_qkv_reaches_the_kernel_without_a_copy(monkeypatch):
    """S245, S246: the memory that SDPA reads is that of the fused projection."""
    packed = torch.randn(2, 16, 3, 4, 8)
    q, k, v = packed.unbind(2)
    seen = []
    real = F.scaled_dot_product_attention

    def spy(*tensors, **kwargs):
        seen.extend((t.data_ptr(), t.stride()) for t in tensors[:3])
        return real(*tensors, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    out = attention(q, k, v, input_layout="BSND", output_layout="BSND")
    assert seen == [(t.data_ptr(), t.transpose(1, 2).stride()) for t in (q, k, v)]
    assert_close(out, reference(q, k, v)[0], "attention")


class Allocations(TorchDispatchMode):
    """The operators whose results lie in memory of their own."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        result = operator(*arguments, **(options or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((arguments, options)) if isinstance(t, Tensor)}
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.numel() > 1]
        if any(t.untyped_storage().data_ptr() not in given for t in made):
            self.names.append(operator.overloadpacket.__name__)
        return result


@pytest.mark.parametrize("layout", ["BSND", "BNSD"])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("how", ["packed", "by projection"])
def test_strided_qkv_costs_one_allocation_and_that_is_the_result(layout, return_lse, how):
    """S246: from the projections to the output nothing is copied, whatever the layout asked for."""
    if how == "packed":
        q, k, v = torch.randn(2, 48, 3, 4, 32).unbind(2)
    else:
        q, k, v = (torch.randn(2, 48, 4 * 32).unflatten(-1, (4, 32)) for _ in range(3))
    given = [t.transpose(1, 2) if layout == "BNSD" else t for t in (q, k, v)]
    with torch.no_grad(), Allocations() as made:
        result = attention(*given, input_layout=layout, return_lse=return_lse, attn_impl="sdpa")
        (result[0] if return_lse else result).flatten(2)
    assert made.names == ["_scaled_dot_product_flash_attention_for_cpu"]


def test_a_strided_last_dim_gives_the_dense_result():
    """B62."""
    q, k, v = (torch.randn(1, 2, 64, 33).transpose(-1, -2) for _ in range(3))
    strided = attention(q, k, v, input_layout="BNSD", output_layout="BNSD")
    dense = attention(*(t.contiguous() for t in (q, k, v)), input_layout="BNSD", output_layout="BNSD")
    assert torch.allclose(strided, dense, atol=1e-6)
    mask = torch.randn(1, 1, 33, 66)[..., ::2]
    out = attention(q, k, v, attn_mask=mask, input_layout="BNSD", output_layout="BNSD")
    assert_close(out, reference(q, k, v, mask, layout="BNSD")[0], "attention")


def test_inputs_are_left_alone():
    q, k, v = qkv()
    mask = torch.zeros(16, 16).masked_fill(torch.ones(16, 16).triu(1).bool(), torch.finfo(torch.float32).min)
    copies = [t.clone() for t in (q, k, v, mask)]
    attention(q, k, v, attn_mask=mask, is_causal=True, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip((q, k, v, mask), copies))


@pytest.mark.parametrize("scale", [None, 1.0, 0.3])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(16, 16), (9, 20), (20, 9)])
def test_scale_and_causal_from_the_top_left(scale, is_causal, queries, keys):
    """S239."""
    q, k, v = qkv(queries=queries, keys=keys)
    out, lse = attention(q, k, v, scale=scale, is_causal=is_causal, return_lse=True)
    expected, expected_lse = reference(q, k, v, scale=scale, is_causal=is_causal)
    assert_close(out, expected, "attention")
    assert_close(lse, expected_lse, "attention")
    assert_close(attention(q, k, v, scale=scale, is_causal=is_causal), expected, "attention")


def test_the_config_gives_scale_and_causal_and_the_arguments_win():
    q, k, v = qkv()
    config = AttentionConfig(AttnImplType.TORCH_SDPA, scale=0.5, is_causal=True)
    assert_close(attention(q, k, v, config), reference(q, k, v, scale=0.5, is_causal=True)[0], "attention")
    assert_close(attention(q, k, v, config, scale=0.1), reference(q, k, v, scale=0.1, is_causal=True)[0], "attention")


MASKS = {
    "keep": lambda g: torch.rand(2, 4, 16, 12, generator=g) > 0.3,
    "keep for keys": lambda g: torch.tensor([True] * 9 + [False] * 3).view(1, 1, 1, 12).expand(2, 1, 1, 12),
    "bias": lambda g: torch.randn(1, 4, 16, 12, generator=g),
    "bias for heads": lambda g: torch.randn(4, 1, 12, generator=g),
    "bias for queries": lambda g: torch.randn(16, 1, generator=g),
    "large negative": lambda g: torch.tensor([0.0, 0.0, -1e4, -1e4] * 3),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_masks_of_every_kind(name, is_causal, return_lse):
    """S239: bool keeps, floating point adds; a causal mask applies besides."""
    q, k, v = qkv(queries=16, keys=12)
    mask = MASKS[name](torch.Generator().manual_seed(1))
    result = attention(q, k, v, attn_mask=mask, is_causal=is_causal, return_lse=return_lse)
    expected, expected_lse = reference(q, k, v, mask, is_causal=is_causal)
    assert_close(result[0] if return_lse else result, expected, "attention")
    if return_lse:
        assert_close(result[1], expected_lse, "attention")


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("return_lse", [False, True])
def test_rows_that_see_nothing(dtype, return_lse):
    """B56: 0, for -inf and for the lowest finite value alike. 393 is not a multiple of 8."""
    q, k, v = qkv(queries=393, keys=393, heads=2, dtype=dtype)
    bias = torch.zeros(393, 393, dtype=dtype)
    bias[5] = float("-inf")
    bias[7] = torch.finfo(dtype).min
    bias[9, 3:] = torch.finfo(dtype).min
    result = attention(q, k, v, attn_mask=bias, return_lse=return_lse)
    out = result[0] if return_lse else result
    assert out.isfinite().all()
    assert (out[:, [5, 7]] == 0).all()
    assert_close(out[:, 9:10], reference(q[:, 9:10], k[:, :3], v[:, :3])[0], "attention", dtype)
    keep = torch.ones(393, 393, dtype=torch.bool)
    keep[5] = False
    assert (attention(q, k, v, attn_mask=keep)[:, 5] == 0).all()
    if return_lse:
        assert (result[1][..., [5, 7]] == float("-inf")).all()


def test_gradients_past_a_row_that_sees_nothing_are_finite():
    q, k, v = (t.requires_grad_() for t in qkv())
    keep = torch.ones(16, 16, dtype=torch.bool)
    keep[3] = False
    bias = torch.zeros(16, 16).masked_fill(~keep, float("-inf"))
    for mask in (keep, bias):
        attention(q, k, v, attn_mask=mask).sum().backward()
        assert all(t.grad.isfinite().all() for t in (q, k, v))
        assert (q.grad[:, 3] == 0).all()
        q.grad = k.grad = v.grad = None


def test_rows_that_only_the_causal_mask_empties():
    q, k, v = qkv(queries=6, keys=6)
    keep = torch.ones(6, 6, dtype=torch.bool)
    keep[2, :3] = False
    out = attention(q, k, v, attn_mask=keep, is_causal=True)
    assert (out[:, 2] == 0).all()
    assert_close(out, reference(q, k, v, keep, is_causal=True)[0], "attention")


@pytest.mark.parametrize("dtype", HALVES)
def test_a_float32_mask_beside_half_precision_is_cast(dtype):
    """B58."""
    q, k, v = qkv(queries=32, heads=4, head_dim=64, dtype=dtype)
    mask = torch.full((32, 32), float("-inf")).triu(1)
    out = attention(q, k, v, attn_mask=mask)
    assert_close(out, reference(q, k, v, mask)[0], "attention", dtype)
    lowest = torch.zeros(32, 32).masked_fill(torch.ones(32, 32).triu(1).bool(), torch.finfo(torch.float32).min)
    assert_close(attention(q, k, v, attn_mask=lowest), reference(q, k, v, mask)[0], "attention", dtype)


@pytest.mark.parametrize("keys", [33, 65])
def test_broadcast_keys_and_values(keys):
    """B60: stride 0 along the batch."""
    q = torch.randn(4, 33, 8, 64)
    k, v = (torch.randn(1, keys, 8, 64).expand(4, -1, -1, -1) for _ in range(2))
    mask = torch.rand(4, 1, 33, keys) > 0.2
    out = attention(q, k, v, attn_mask=mask)
    assert_close(out, reference(q, k, v, mask)[0], "attention")


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("return_lse", [False, True])
def test_grouped_key_heads(key_heads, return_lse):
    """B64."""
    q, k, v = qkv(batch=1, queries=128, heads=8, key_heads=key_heads, head_dim=64)
    result = attention(q, k, v, return_lse=return_lse)
    expected, expected_lse = reference(q, k, v)
    assert_close(result[0] if return_lse else result, expected, "attention")
    if return_lse:
        assert_close(result[1], expected_lse, "attention")


def test_heads_that_do_not_divide_are_named():
    """B64."""
    q, k, v = qkv(heads=8, key_heads=3)
    with pytest.raises(ValueError, match="8 query heads are not a multiple of 3 key heads"):
        attention(q, k, v)


def test_a_value_head_dim_of_its_own():
    q, k, v = qkv()
    v = torch.cat([v, v + 1], dim=-1)
    out, lse = attention(q, k, v, return_lse=True)
    expected, expected_lse = reference(q, k, v)
    assert out.shape == (2, 16, 4, 32)
    assert_close(out, expected, "attention")
    assert_close(lse, expected_lse, "attention")


@pytest.mark.parametrize("output_layout", ["BSND", "BNSD"])
def test_nothing_to_attend_to_or_from(output_layout, monkeypatch):
    """B26: empty and zero results without a kernel."""
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: pytest.fail("launched"))
    q, k, v = qkv(queries=0, keys=5)
    assert attention(q, k, v).shape == (2, 0, 4, 16)
    q, k, v = qkv(queries=5, keys=0)
    out, lse = attention(q, k, v, output_layout=output_layout, return_lse=True)
    assert out.shape == ((2, 5, 4, 16) if output_layout == "BSND" else (2, 4, 5, 16))
    assert (out == 0).all()
    assert (lse == float("-inf")).all()
    assert lse.shape == (2, 4, 5)
    assert attention(*qkv(batch=0)).shape == (0, 16, 4, 16)


def test_wider_queries_and_keys_are_cast_to_the_values_dtype():
    """B24: a norm that autocast left in float32."""
    q, k, v = qkv()
    half = v.bfloat16()
    out = attention(q, k, half)
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, attention(q.bfloat16(), k.bfloat16(), half))


def test_autocast_decides_the_dtype_on_every_path():
    """S242: as PyTorch's own SDPA does; the chunked and the log-sum-exp path must not differ."""
    q, k, v = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        plain = attention(q, k, v)
        with_lse, lse = attention(q, k, v, attn_mask=torch.ones(16, 16, dtype=torch.bool), return_lse=True)
    assert plain.dtype is torch.bfloat16
    assert with_lse.dtype is torch.bfloat16
    assert lse.dtype is torch.float32
    assert_close(plain, reference(q, k, v)[0], "attention", torch.bfloat16)
    assert_close(with_lse, reference(q, k, v)[0], "attention", torch.bfloat16)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_equal_those_of_the_formula(return_lse, masked):
    q, k, v = (t.double().requires_grad_() for t in qkv(queries=9, keys=7, key_heads=2))
    bias = torch.randn(9, 7, dtype=torch.float64, requires_grad=True) if masked else None

    def loss(compute):
        for t in (q, k, v, bias):
            if t is not None:
                t.grad = None
        out, lse = compute()
        (out.square().sum() + (lse.sin().sum() if return_lse else 0)).backward()
        return [t.grad.clone() for t in (q, k, v, bias) if t is not None]

    def ours():
        result = attention(q, k, v, attn_mask=bias, return_lse=return_lse)
        return result if return_lse else (result, None)

    def formula():
        qh, kh, vh = (
            q.transpose(1, 2),
            k.transpose(1, 2).repeat_interleave(2, 1),
            v.transpose(1, 2).repeat_interleave(2, 1),
        )
        scores = qh @ kh.transpose(-1, -2) * 16**-0.5 + (bias if masked else 0)
        return (scores.softmax(-1) @ vh).transpose(1, 2), scores.logsumexp(-1)

    # The log-sum-exp is float32 by contract, and its gradient passes through that cast.
    limit = 1e-6 if return_lse else 1e-10
    for got, expected in zip(loss(ours), loss(formula)):
        assert torch.allclose(got, expected, rtol=limit, atol=limit)


def test_dropout_reaches_sdpa_and_excludes_the_log_sum_exp():
    q, k, v = qkv(queries=64, keys=64)
    config = AttentionConfig(dropout=0.5)
    torch.manual_seed(0)
    dropped = attention(q, k, v, config)
    torch.manual_seed(0)
    assert torch.equal(dropped, attention(q, k, v, config))
    assert not torch.allclose(dropped, attention(q, k, v))
    with pytest.raises(ValueError, match=r"dropout 0\.5"):
        attention(q, k, v, config, return_lse=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_layout": "BHSD"}, "input_layout is 'BHSD'; choose one of BSND, BNSD"),
        ({"output_layout": "SBND"}, "output_layout is 'SBND'"),
        ({"attn_impl": "flash9"}, "'flash9' is unknown"),
        ({"attention_config": AttnImplType.TORCH_SDPA}, "give an AttentionConfig"),
        (
            {"attn_mask": torch.ones(2, 4, 16, 15, dtype=torch.bool)},
            r"\(2, 4, 16, 15\) does not broadcast .* \[2, 4, 16, 16\]",
        ),
        ({"attn_mask": torch.ones(1, 2, 4, 16, 16)}, "does not broadcast"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    """B66."""
    with pytest.raises(ValueError, match=message):
        attention(*qkv(), **change)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_an_integer_mask_is_a_type_error(dtype):
    """B70."""
    with pytest.raises(TypeError, match="give bool"):
        attention(*qkv(), attn_mask=torch.ones(16, 16, dtype=dtype))


def test_shapes_that_do_not_fit_are_shown():
    q, k, v = qkv()
    for bad in ((q, k[:1], v), (q, k, v[:, :3]), (q[..., :8], k, v), (q, k[0], v), (q, k[:, :, :2], v)):
        with pytest.raises(ValueError, match=r"\(2, 16, 4, 16\)"):
            attention(*bad)
    with pytest.raises(ValueError, match="int64"):
        attention(q.long(), k, v)
    with pytest.raises(TypeError):
        attention(q, k, v, causal=True)


def test_what_is_no_tensor_is_named():
    q, k, v = qkv()
    for name in ("q", "k", "v", "attn_mask"):
        with pytest.raises(TypeError, match=f"{name} must be a tensor, not list"):
            attention(**{"q": q, "k": k, "v": v, name: [[1.0]]})
    with pytest.raises(TypeError, match="k must be a tensor, not NoneType"):
        attention(q, None, v)


def test_heads_of_no_width_are_refused():
    q, k, v = qkv()
    with pytest.raises(ValueError, match="head dim of q and k is 0"):
        attention(q[..., :0], k[..., :0], v)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), float("-inf")])
def test_a_scale_that_is_not_finite_is_refused(scale):
    with pytest.raises(ValueError, match=f"scale is {scale}"):
        attention(*qkv(), scale=scale)


def test_tensors_on_different_devices_are_named():
    """B16."""
    q, k, v = qkv()
    for bad in ((q.to("meta"), k, v), (q, k, v.to("meta"))):
        with pytest.raises(RuntimeError, match=r"same device, but .* meta"):
            attention(*bad)
    with pytest.raises(RuntimeError, match="same device"):
        attention(q, k, v, attn_mask=torch.ones(16, device="meta"))


@pytest.mark.parametrize("platform", [platforms.NPUPlatform, platforms.RocmPlatform, platforms.CpuPlatform])
@pytest.mark.parametrize(
    "mask",
    [
        torch.tensor([0.0, 0.0, -1e4, -1e4] * 4),
        torch.linspace(-0.1, 0.1, 16),
        torch.tensor([True, True, False, True] * 4),
        (torch.arange(16) < 11).view(1, 1, 1, 16).expand(2, 1, 1, 16),
    ],
)
def test_masks_mean_the_same_on_every_platform(monkeypatch, platform, mask):
    """S058, B70."""
    q, k, v = qkv()
    expected = attention(q, k, v, attn_mask=mask)
    monkeypatch.setattr(platforms, "current_platform", platform())
    assert torch.equal(attention(q, k, v, attn_mask=mask), expected)
    assert_close(expected, reference(q, k, v, mask)[0], "attention")


def test_the_checks_survive_optimised_python():
    """B42, B50: no assert guards a caller's input."""
    code = """
import torch
from telefuser.ops.attention import attention
from telefuser.core.config import AttentionConfig, AttnImplType
q = torch.randn(1, 1, 16, 64); kv = torch.randn(1, 257, 16, 64)
config = AttentionConfig.dense_attention(AttnImplType.FLASH_ATTN_2)
assert_ = lambda ok: ok or exit(3)
assert_(attention(q, kv, kv, config).isfinite().all())
assert_(torch.equal(attention(q, q, q, config), q))
try:
    attention(q, kv[:, :, :3], kv[:, :, :3], config)
except ValueError:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "refused"
    assert done.stderr.count("FLASH_ATTN_2 cannot be used") == 1
