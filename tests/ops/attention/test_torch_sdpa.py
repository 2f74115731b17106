"""The SDPA path: chunks of queries where only the formula is left, and the fused kernels' log-sum-exp."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from telefuser.ops.attention import attention, torch_sdpa
from tests.ops.attention.reference import qkv, reference
from tests.tolerances import assert_close


@pytest.fixture
def small_budget(monkeypatch):
    """Chunks of 3 query rows for the shapes below, and every call counts as large."""
    monkeypatch.setattr(torch_sdpa, "MAX_SCORE_BYTES", 3 * 2 * 4 * 20 * 4)


@pytest.fixture
def row_counts(monkeypatch):
    """How many query rows each chunk had."""
    counts = []
    real = torch_sdpa._math_chunk

    def spy(q, *rest):
        counts.append(q.shape[-2])
        return real(q, *rest)

    monkeypatch.setattr(torch_sdpa, "_math_chunk", spy)
    return counts


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", [None, "keep", "bias", "keys"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_equal_the_formula(small_budget, row_counts, is_causal, mask, dtype):
    """B136."""
    q, k, v = qkv(queries=16, keys=20, key_heads=2, dtype=dtype)
    mask = {
        None: None,
        "keep": torch.rand(2, 1, 16, 20) > 0.4,
        "bias": torch.randn(4, 16, 20, dtype=dtype),
        "keys": torch.arange(20) < 13,
    }[mask]
    with sdpa_kernel([SDPBackend.MATH]):
        out = attention(q, k, v, attn_mask=mask, is_causal=is_causal)
    assert row_counts == [3, 3, 3, 3, 3, 1]
    assert_close(out, reference(q, k, v, mask, is_causal=is_causal)[0], "attention", dtype)


def test_a_fused_kernel_is_left_alone(small_budget, row_counts):
    q, k, v = qkv(queries=16, keys=20)
    assert_close(attention(q, k, v), reference(q, k, v)[0], "attention")
    assert row_counts == []


def test_a_device_that_pytorch_does_not_choose_for_gets_the_formula(row_counts, monkeypatch):
    """S058: nothing is known about what its SDPA does with a mask (B70)."""
    monkeypatch.setattr(torch_sdpa, "_chooses_by_itself", lambda t: False)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: pytest.fail("called"))
    q, k, v = qkv(queries=16, keys=20)
    mask = torch.rand(16, 20) > 0.4
    assert_close(attention(q, k, v, attn_mask=mask), reference(q, k, v, mask)[0], "attention")
    assert_close(attention(q, k, v, return_lse=True)[1], reference(q, k, v)[1], "attention")
    assert row_counts == [16, 16]


def test_grouped_heads_are_repeated_before_a_score_matrix_is_made(small_budget, row_counts, monkeypatch):
    """B64: a kernel that wants equal heads gets them, and no score matrix is allocated."""
    real = torch._fused_sdp_choice

    def picky(q, k, v, *rest, **options):
        return SDPBackend.MATH.value if q.shape[1] != k.shape[1] else real(q, k, v, *rest, **options)

    monkeypatch.setattr(torch, "_fused_sdp_choice", picky)
    q, k, v = qkv(queries=16, keys=20, key_heads=2)
    assert_close(attention(q, k, v), reference(q, k, v)[0], "attention")
    assert row_counts == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_fused_log_sum_exp_needs_no_formula(row_counts, dtype):
    q, k, v = qkv(queries=40, keys=33, key_heads=2, head_dim=20, dtype=dtype)
    out, lse = attention(q, k, v, return_lse=True)
    expected, expected_lse = reference(q, k, v)
    assert row_counts == []
    assert lse.dtype is torch.float32
    assert lse.shape == (2, 4, 40)
    assert_close(lse, expected_lse, "attention", dtype)
    assert_close(out, expected, "attention", dtype)


@pytest.mark.parametrize("is_causal", [False, True])
def test_parts_merged_by_their_log_sum_exp_are_the_whole(is_causal):
    """What ring attention does with it; base 2 or a missing scale would show."""
    q, k, v = (t.double() for t in qkv(queries=12, keys=24))
    mask = torch.ones(12, 24, dtype=torch.bool).tril(4) if is_causal else torch.ones(12, 24, dtype=torch.bool)
    parts = [
        attention(q, k[:, s], v[:, s], attn_mask=mask[:, s], return_lse=True) for s in (slice(0, 10), slice(10, 24))
    ]
    lse = torch.stack([lse for _, lse in parts])
    weights = (lse - lse.logsumexp(0)).exp().transpose(-1, -2).unsqueeze(-1)
    merged = sum(w * out for w, (out, _) in zip(weights, parts))
    assert torch.allclose(merged, reference(q, k, v, mask)[0], atol=1e-6)


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in other units, or not there")
def test_the_score_matrix_of_8192_tokens_is_never_whole():
    """B136: the whole matrix would be 2 GiB; at most 1 GiB more than before may be resident, exact to 1e-5."""
    code = """
import resource, torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from telefuser.ops.attention import attention
torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 8192, 8, 64).unbind(0)
attention(q[:, :64], k[:, :64], v[:, :64])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with sdpa_kernel([SDPBackend.MATH]):
    out = attention(q, k, v)
extra = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
rows = torch.arange(0, 8192, 512)
scores = torch.einsum("bqnd,bknd->bnqk", q[:, rows].double(), k.double()) * 64**-0.5
expected = torch.einsum("bnqk,bknd->bqnd", scores.softmax(-1), v.double())
print(extra, (out[:, rows] - expected).abs().max().item())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    extra_gib, error = map(float, done.stdout.split())
    assert extra_gib <= 1.0
    assert error <= 1e-5
