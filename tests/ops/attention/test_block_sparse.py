"""Attention over kept blocks against float64 attention under the same mask, written out token by token."""

import sys

import pytest
import torch

from telefuser import kernel, platforms
from telefuser.ops.attention import block_sparse
from telefuser.ops.attention.block_mask import BlockMask
from telefuser.ops.attention.block_sparse import SparseExecutor, block_sparse_attention, describe_executor
from telefuser.ops.attention.dense_backend import Call
from tests.ops.attention.reference import qkv, reference
from tests.tolerances import assert_close


@pytest.fixture(autouse=True)
def fresh_table():
    block_sparse.TABLE.forget()
    yield
    block_sparse.TABLE.forget()


def random_keep(*shape, density=0.4, seed=1):
    generator = torch.Generator().manual_seed(seed)
    keep = torch.rand(*shape, generator=generator) < density
    keep.diagonal(dim1=-2, dim2=-1)[:] = True
    return keep


def by_token(mask):
    """[.., .., S, S], True where the query sees the key."""
    wide = mask.by_head.repeat_interleave(mask.block_size, -1).repeat_interleave(mask.block_size, -2)
    return wide[..., : mask.tokens, : mask.tokens]


def run(q, k, v, mask, return_lse=True, scale=None):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    call = Call(q, k, v, None, q.shape[-1] ** -0.5 if scale is None else scale, return_lse=return_lse)
    out, lse = block_sparse_attention(call, mask)
    return out.transpose(1, 2), lse


def test_a_plan_made_in_inference_mode_serves_training():
    torch.manual_seed(0)
    mask = BlockMask(random_keep(6, 6), 64, 384)
    q, k, v = qkv(1, 384, heads=2)
    with torch.inference_mode():
        wanted, _ = run(q, k, v, mask)
    k.requires_grad_(True)
    out, _ = run(q, k, v, mask)
    assert_close(out, wanted)
    out.sum().backward()
    assert k.grad.abs().sum() > 0


SHAPES = {
    "odd length": ((), 1, 1000),
    "whole blocks": ((), 2, 640),
    "shorter than a block": ((), 2, 50),
    "a head each": ((4,), 2, 333),
    "one head for all": ((1,), 2, 333),
    "an entry each": ((2, 1), 2, 333),
    "an entry and head each": ((2, 4), 2, 333),
}


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("name", SHAPES)
def test_output_and_lse_equal_masked_attention(name, block):
    leading, batch, tokens = SHAPES[name]
    blocks = -(-tokens // block)
    mask = BlockMask(random_keep(*leading, blocks, blocks), block, tokens)
    q, k, v = qkv(batch=batch, queries=tokens)
    out, lse = run(q, k, v, mask, scale=0.3)
    expected, expected_lse = reference(q, k, v, mask=by_token(mask), scale=0.3)
    assert_close(out, expected, "attention", torch.float32)
    assert_close(lse, expected_lse, "attention", torch.float32)
    assert_close(run(q, k, v, mask, return_lse=False, scale=0.3)[0], expected, "attention", torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    mask = BlockMask(random_keep(6, 6), 64, 370)
    q, k, v = qkv(queries=370, dtype=dtype)
    out, lse = run(q, k, v, mask)
    expected, expected_lse = reference(q, k, v, mask=by_token(mask))
    assert out.dtype is dtype
    assert lse.dtype is torch.float32
    assert_close(out, expected, "attention", dtype)
    assert_close(lse, expected_lse, "attention", torch.float32 if dtype is torch.float64 else dtype)


@pytest.mark.parametrize("leading", [(), (4,)])
def test_grouped_key_heads_and_another_value_dim(leading):
    mask = BlockMask(random_keep(*leading, 5, 5), 64, 300)
    q, k, v = qkv(queries=300, key_heads=2)
    v = torch.cat((v, v), dim=-1)[..., :24]
    out, _ = run(q, k, v, mask)
    assert_close(out, reference(q, k, v, mask=by_token(mask))[0], "attention")


def test_strided_views_of_one_projection():
    projected = torch.randn(2, 300, 3, 4, 16)
    q, k, v = projected.unbind(2)
    mask = BlockMask(random_keep(5, 5), 64, 300)
    assert_close(run(q, k, v, mask)[0], reference(q, k, v, mask=by_token(mask))[0], "attention")


def test_a_query_without_keys_gives_zeros():
    keep = random_keep(4, 4)
    keep[2] = False
    mask = BlockMask(keep, 64, 250)
    q, k, v = qkv(queries=250)
    out, lse = run(q, k, v, mask)
    assert out[:, 128:192].eq(0).all()
    assert lse[:, :, 128:192].eq(float("-inf")).all()
    assert_close(out, reference(q, k, v, mask=by_token(mask))[0], "attention")


def test_padding_of_the_last_block_is_no_key():
    """A padded key would have score 0, far above these."""
    mask = BlockMask(torch.ones(2, 2, dtype=torch.bool), 64, 65)
    q, k, v = qkv(queries=65)
    k = k - 50 * q.mean(dim=1, keepdim=True).sign()
    out, lse = run(q, k, v, mask)
    expected, expected_lse = reference(q, k, v)
    assert_close(out, expected, "attention")
    assert_close(lse, expected_lse, "attention")


def test_gradients_equal_masked_attention():
    mask = BlockMask(random_keep(4, 4), 64, 200)
    q, k, v = (t.requires_grad_() for t in qkv(queries=200, heads=2))
    run(q, k, v, mask, return_lse=False)[0].square().sum().backward()
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    scores = torch.einsum("bqnd,bknd->bnqk", *wide[:2]) * 0.25
    weights = scores.masked_fill(~by_token(mask), float("-inf")).softmax(-1)
    torch.einsum("bnqk,bknd->bqnd", weights, wide[2]).square().sum().backward()
    for ours, theirs in zip((q, k, v), wide):
        assert_close(ours.grad, theirs.grad, "matmul")


def test_memory_is_linear_in_the_tokens(monkeypatch):
    """The largest single tensor is that of the gathered keys: twice the tokens at twice the kept blocks is twice it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for item in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(item, torch.Tensor) and item.is_floating_point():
                    self.size = max(self.size, item.numel())
            return result

    sizes = []
    for tokens in (1000, 2000, 4000):
        mask = BlockMask(random_keep(-(-tokens // 64), -(-tokens // 64)), 64, tokens)
        q, k, v = qkv(batch=1, queries=tokens, heads=1)
        with Largest() as largest:
            run(q, k, v, mask)
        sizes.append(largest.size)
    assert all(size <= -(-tokens // 64) * 64 * 16 for size, tokens in zip(sizes, (1000, 2000, 4000)))


def test_rows_with_the_same_keys_share_one_call():
    mask = BlockMask(torch.ones(50, 50, dtype=torch.bool), 64, 3200)
    assert [len(heads[0]) for heads in mask.plan] == [1]
    assert mask.plan is mask.plan
    mask = BlockMask(torch.eye(3, dtype=torch.bool)[[0, 0, 1, 2]][:, [0, 0, 1, 2]], 64, 256)
    assert [(r.first, r.last, r.keys, r.has_last) for r in mask.plan[0][0]] == [
        (0, 2, slice(0, 2), False),
        (2, 3, slice(2, 3), False),
        (3, 4, slice(3, 4), True),
    ]


@pytest.mark.parametrize("tokens", [1000, 960, 1100, 50])
@pytest.mark.parametrize("block", [64, 128])
def test_tiles_cover_what_the_blocks_keep(block, tokens):
    """Tiles of 128 x 64 and 64 x 128: finer ones by repeating, coarser ones where either of the two blocks is kept."""
    blocks = -(-tokens // block)
    mask = BlockMask(random_keep(2, blocks, blocks), block, tokens)
    padded = torch.zeros(1, 2, 2048, 2048, dtype=torch.bool)
    padded[:, :, :tokens, :tokens] = by_token(mask)
    for rows, columns in ((128, 64), (64, 128), (64, 64), (128, 128)):
        tiles = padded.view(1, 2, 2048 // rows, rows, 2048 // columns, columns).any(5).any(3)
        assert torch.equal(mask.tiles(rows, columns), tiles[:, :, : -(-tokens // rows), : -(-tokens // columns)])


def test_density_counts_tokens():
    assert BlockMask(torch.ones(3, 3, dtype=torch.bool), 64, 150).density == pytest.approx(1.0)
    mask = BlockMask(torch.eye(2, dtype=torch.bool), 64, 96)
    assert mask.density == pytest.approx((64**2 + 32**2) / 96**2)
    assert mask.density == pytest.approx(by_token(mask).double().mean().item())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: BlockMask(torch.ones(2, 2), 64, 100), "bool"),
        (lambda: BlockMask(torch.ones(2, 2, dtype=torch.bool), 96, 100), "96; the sparse kernels take 64 or 128"),
        (lambda: BlockMask(torch.ones(2, 2, dtype=torch.bool), 64, 200), "must be 4"),
        (lambda: run(*qkv(queries=100), BlockMask(torch.ones(2, 2, dtype=torch.bool), 64, 101)), "for 101 tokens"),
        (
            lambda: run(*qkv(queries=100, keys=80), BlockMask(torch.ones(2, 2, dtype=torch.bool), 64, 100)),
            "100 queries over 80 keys",
        ),
        (
            lambda: run(*qkv(queries=100), BlockMask(torch.ones(3, 2, 2, dtype=torch.bool), 64, 100)),
            "batch 2 and 4 heads",
        ),
    ],
)
def test_masks_that_do_not_fit_are_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()


# The packages, with stand-ins that have their signatures and compute by float64.

BLOCK_SPARSE = """
def block_sparse_attn_func(q, k, v, cu_seqlens_q, cu_seqlens_k, head_mask_type, streaming_info, base_blockmask,
                           max_seqlen_q_, max_seqlen_k_, p_dropout, deterministic=False, softmax_scale=None,
                           is_causal=False, exact_streaming=False, return_attn_probs=False):
    calls.append(dict(q=q, mask=base_blockmask))
    assert q.dim() == 3 and q.shape[-1] in (64, 128) and p_dropout == 0.0 and streaming_info is None and not is_causal
    assert head_mask_type.dtype is torch.int32 and head_mask_type.tolist() == [1] * q.shape[1]
    assert cu_seqlens_q.dtype is torch.int32 and max_seqlen_q_ == max_seqlen_k_
    assert base_blockmask.shape[1] == q.shape[1]
    outs = []
    for b, (start, stop) in enumerate(zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist())):
        assert stop - start == max_seqlen_q_
        keep = base_blockmask[b].repeat_interleave(128, -1).repeat_interleave(128, -2)
        keep = keep[:, : stop - start, : stop - start]
        qs, ks, vs = (t[start:stop].double().transpose(0, 1) for t in (q, k, v))
        scores = (qs @ ks.transpose(-1, -2) * softmax_scale).masked_fill(~keep, float("-inf"))
        outs.append((scores.softmax(-1) @ vs).transpose(0, 1))
    return torch.cat(outs).to(q.dtype)
"""
SPARGE_SPARSE = """
TILES = (128, 64)

def block_sparse_sage2_attn_cuda(q, k, v, mask_id=None, dropout_p=0.0, scale=None, smooth_k=True, pvthreshd=50,
                                 attention_sink=False, tensor_layout="HND", output_dtype=torch.float16,
                                 return_sparsity=False):
    calls.append(dict(q=q, mask=mask_id))
    assert tensor_layout == "HND" and q.size(-2) >= 128 and q.size(-1) in (64, 128) and mask_id.dtype is torch.int8
    keep = mask_id.bool().repeat_interleave(TILES[0], -2).repeat_interleave(TILES[1], -1)
    keep = keep[..., : q.shape[2], : k.shape[2]]
    scores = (q.double() @ k.double().transpose(-1, -2) * scale).masked_fill(~keep, float("-inf"))
    return (scores.softmax(-1) @ v.double()).to(output_dtype)
"""


FLASH_4 = """
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

def flash_attn_func(q, k, v, softmax_scale=None, causal=False, block_sparse_tensors=None, return_lse=False):
    blocks = block_sparse_tensors
    calls.append(dict(q=q, blocks=blocks))
    assert isinstance(blocks, BlockSparseTensorsTorch) and blocks.block_size in ((64, 64), (128, 128)) and not causal
    assert all(t.dtype is torch.int32 for t in blocks[:4]) and not blocks.mask_block_cnt.any()
    assert blocks.mask_block_cnt.shape == blocks.mask_block_idx.shape[:3] == blocks.full_block_cnt.shape
    size, tokens = blocks.block_size[0], q.shape[1]
    counts, indices = blocks.full_block_cnt, blocks.full_block_idx
    listed = torch.arange(indices.shape[3]) < counts[..., None]
    keep = torch.zeros_like(listed).scatter(-1, indices.long(), listed)
    keep = keep.repeat_interleave(size, -2).repeat_interleave(size, -1)[..., :tokens, :tokens]
    scores = torch.einsum("bqnd,bknd->bnqk", q.double(), k.double()) * softmax_scale
    lse = scores.masked_fill(~keep, float("-inf")).logsumexp(-1)
    weights = torch.exp(scores - lse[..., None].nan_to_num(neginf=0.0)) * keep
    out = torch.einsum("bnqk,bknd->bqnd", weights, v.double()).to(q.dtype)
    return out, lse.float() if return_lse else None
"""
BLOCKS_OF_FLASH_4 = """
from typing import NamedTuple

class BlockSparseTensorsTorch(NamedTuple):
    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: torch.Tensor = None
    full_block_idx: torch.Tensor = None
    cu_total_m_blocks: torch.Tensor = None
    cu_block_idx_offsets: torch.Tensor = None
    block_size: tuple = None
"""


SPARSE_SAGE = """
def sparse_sageattn(q, k, v, mask_id=None, is_causal=False, tensor_layout="HND"):
    calls.append(dict(q=q, mask=mask_id))
    assert tensor_layout == "HND" and q.size(-1) in (64, 128) and mask_id.dtype is torch.int8
    keep = mask_id.bool().repeat_interleave(128, -2).repeat_interleave(64, -1)[..., : q.shape[2], : k.shape[2]]
    scores = (q.double() @ k.double().transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~keep, float("-inf"))
    return (scores.softmax(-1) @ v.double()).to(q.dtype)
"""
FLASHINFER = """
class VariableBlockSparseAttentionWrapper:
    def __init__(self, float_workspace_buffer, backend="auto"):
        assert float_workspace_buffer.dtype is torch.uint8

    def plan(self, block_mask_map, block_row_sz, block_col_sz, num_qo_heads, num_kv_heads, head_dim, causal=False,
             pos_encoding_mode="NONE", use_fp16_qk_reduction=False, logits_soft_cap=None, sm_scale=None,
             rope_scale=None, rope_theta=None, non_blocking=True, q_data_type="float16", kv_data_type=None):
        calls.append(dict(mask=block_mask_map))
        assert block_row_sz.dtype is torch.int32 and num_qo_heads == num_kv_heads == len(block_mask_map)
        rows, columns = block_row_sz[0], block_col_sz[0]
        self.keep = block_mask_map.repeat_interleave(rows, 1).repeat_interleave(columns, 2)
        self.scale, self.dtype = sm_scale, q_data_type

    def run(self, q, k, v):
        assert q.dim() == 3 and q.dtype is self.dtype and q.shape[-1] in (64, 128, 256)
        scores = (q.double() @ k.double().transpose(-1, -2) * self.scale).masked_fill(~self.keep, float("-inf"))
        return (scores.softmax(-1) @ v.double()).to(q.dtype)
"""


def half_qkv(**shape):
    return qkv(**{"queries": 333, "head_dim": 48, "dtype": torch.bfloat16, **shape})


@pytest.mark.parametrize("module", ["block_sparse_attn", "tf_kernel"])
@pytest.mark.parametrize("leading", [(), (2, 4)])
def test_block_sparse_attn_gets_packed_tokens_and_a_mask_a_head(sim_gpu, stub, module, leading):
    """S235: two entries, a length that 128 does not divide, a head dim between two of its own."""
    stub(module, BLOCK_SPARSE)
    sim_gpu((8, 0))
    assert describe_executor() == "BLOCK_SPARSE_ATTN"
    mask = BlockMask(random_keep(*leading, 3, 3), 128, 333)
    q, k, v = half_qkv()
    out, _ = run(q, k, v, mask, return_lse=False)
    assert_close(out, reference(q, k, v, mask=by_token(mask))[0], "attention", torch.bfloat16)
    call = sys.modules[module].calls[0]
    assert call["q"].shape == (2 * 333, 4, 64)
    assert call["mask"].shape == (2, 4, 3, 3)


@pytest.mark.parametrize(
    ("shape", "block", "return_lse"),
    [
        ({"dtype": torch.float32}, 128, False),
        ({"head_dim": 160}, 128, False),
        ({"key_heads": 2}, 128, False),
        ({}, 64, False),
        ({}, 128, True),
    ],
)
def test_what_the_package_does_not_take_is_computed_by_pytorch(sim_gpu, stub, caplog, shape, block, return_lse):
    stub("block_sparse_attn", BLOCK_SPARSE)
    sim_gpu((9, 0))
    blocks = -(-333 // block)
    mask = BlockMask(random_keep(blocks, blocks), block, 333)
    q, k, v = half_qkv(**shape)
    out, _ = run(q, k, v, mask, return_lse=return_lse)
    assert_close(out, reference(q, k, v, mask=by_token(mask))[0], "attention")
    assert "block_sparse_attn" not in sys.modules or not sys.modules["block_sparse_attn"].calls
    assert not caplog.records


def test_a_package_that_fails_is_left_out_and_said_so(sim_gpu, stub, caplog):
    stub(
        "block_sparse_attn",
        BLOCK_SPARSE.replace("calls.append", "raise RuntimeError('no kernel image')\n    calls.append"),
    )
    sim_gpu((9, 0))
    for tokens in (333, 333, 300):
        mask = BlockMask(random_keep(3, 3), 128, tokens)
        q, k, v = half_qkv(queries=tokens)
        out, _ = run(q, k, v, mask, return_lse=False)
        assert_close(out, reference(q, k, v, mask=by_token(mask))[0], "attention")
    texts = [record.getMessage() for record in caplog.records]
    assert [("BLOCK_SPARSE_ATTN" in text, "no kernel image" in text) for text in texts] == [(True, True)] * 2
    assert "for q (2, 4, 333, 48)" in texts[0]
    assert describe_executor() == "TORCH_BLOCKED"


@pytest.mark.parametrize(("arch", "tiles"), [((8, 9), "(128, 64)"), ((9, 0), "(64, 128)")])
def test_the_quantising_kernel_gets_its_tiles(sim_gpu, stub, arch, tiles):
    """S234, S236: `use_sage_attention` with SpargeAttn's block-sparse SageAttention."""
    stub("spas_sage_attn", SPARGE_SPARSE.replace("(128, 64)\n", f"{tiles}\n", 1))
    sim_gpu(arch)
    mask = BlockMask(random_keep(3, 3), 128, 333)
    q, k, v = (t.transpose(1, 2) for t in half_qkv())
    call = Call(q, k, v, None, 0.2)
    out, _ = block_sparse_attention(call, mask, quantised=True)
    expected = reference(q, k, v, mask=by_token(mask), scale=0.2, layout="BNSD")[0]
    assert_close(out, expected, "attention", torch.bfloat16)
    assert len(sys.modules["spas_sage_attn"].calls) == 1
    block_sparse_attention(call, mask)
    assert len(sys.modules["spas_sage_attn"].calls) == 1, "only on request"
    assert describe_executor() == "TORCH_BLOCKED"


def test_a_missing_quantising_kernel_is_replaced_with_one_warning(sim_gpu, caplog):
    """S236."""
    sim_gpu((9, 0))
    mask = BlockMask(random_keep(3, 3), 128, 333)
    q, k, v = (t.transpose(1, 2) for t in half_qkv())
    for _ in range(2):
        out, _ = block_sparse_attention(Call(q, k, v, None, 0.2), mask, quantised=True)
    expected = reference(q, k, v, mask=by_token(mask), scale=0.2, layout="BNSD")[0]
    assert_close(out, expected, "attention", torch.bfloat16)
    assert len(caplog.records) == 1
    assert "package spas_sage_attn is not installed" in caplog.records[0].getMessage()


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("leading", [(), (2, 4)])
def test_flashinfer_plans_once_a_mask(sim_gpu, stub, leading, block):
    """S234: batch entries go as heads; the last block is as long as what is left of the tokens."""
    stub("flashinfer", FLASHINFER)
    sim_gpu((8, 0))
    assert describe_executor() == "FLASHINFER"
    blocks = -(-333 // block)
    mask = BlockMask(random_keep(*leading, blocks, blocks), block, 333)
    q, k, v = half_qkv()
    for _ in range(2):
        out, _ = run(q, k, v, mask, return_lse=False)
        assert_close(out, reference(q, k, v, mask=by_token(mask))[0], "attention", torch.bfloat16)
    assert len(sys.modules["flashinfer"].calls) == 1
    run(q, k, v, mask, return_lse=False, scale=0.3)
    assert len(sys.modules["flashinfer"].calls) == 2


def test_a_plan_of_flashinfer_stays_small(sim_gpu, stub, monkeypatch):
    stub("flashinfer", FLASHINFER)
    sim_gpu((9, 0))
    monkeypatch.setattr(block_sparse, "_FLASHINFER_MAX_KEYS", 100)
    mask = BlockMask(random_keep(3, 3), 128, 333)
    q, k, v = half_qkv()
    assert_close(run(q, k, v, mask, False)[0], reference(q, k, v, mask=by_token(mask))[0], "attention")
    assert not sys.modules["flashinfer"].calls


def test_sparse_sage_is_the_second_that_quantises(sim_gpu, stub):
    """S234, S236: it has no scale of its own, so only the usual one."""
    stub("sparse_sageattn", SPARSE_SAGE)
    sim_gpu((9, 0))
    mask = BlockMask(random_keep(3, 3), 128, 333)
    q, k, v = (t.transpose(1, 2) for t in half_qkv(head_dim=64))
    for scale in (0.125, 0.2):
        out, _ = block_sparse_attention(Call(q, k, v, None, scale), mask, quantised=True)
        expected = reference(q, k, v, mask=by_token(mask), scale=scale, layout="BNSD")[0]
        assert_close(out, expected, "attention", torch.bfloat16)
        assert len(sys.modules["sparse_sageattn"].calls) == 1
    assert sys.modules["sparse_sageattn"].calls[0]["mask"].shape == (2, 4, 3, 6)


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("leading", [(), (2, 4)])
def test_flash_attn_4_gets_lists_of_whole_blocks(sim_gpu, stub, leading, block):
    stub("flash_attn.cute.block_sparsity", BLOCKS_OF_FLASH_4)
    stub("flash_attn.cute", FLASH_4)
    sim_gpu((9, 0))
    assert describe_executor() == "FLASH_ATTN_4"
    blocks = -(-333 // block)
    keep = random_keep(*leading, blocks, blocks)
    keep[..., 1, :] = False
    mask = BlockMask(keep, block, 333)
    q, k, v = half_qkv()
    out, lse = run(q, k, v, mask)
    expected, expected_lse = reference(q, k, v, mask=by_token(mask))
    assert_close(out, expected, "attention", torch.bfloat16)
    assert_close(lse, expected_lse, "attention", torch.bfloat16)
    assert len(sys.modules["flash_attn.cute"].calls) == 1
    sim_gpu((10, 0))
    assert "compute capability 9.x" in block_sparse.TABLE.reason(SparseExecutor.FLASH_ATTN_4)


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("leading", [(), (2, 4)])
def test_our_kernel_needs_no_package(triton_gpu, leading, block, caplog):
    triton_gpu((8, 0))
    assert describe_executor() == "TRITON_BLOCK_SPARSE"
    blocks = -(-333 // block)
    mask = BlockMask(random_keep(*leading, blocks, blocks), block, 333)
    q, k, v = half_qkv(key_heads=2)
    out, lse = run(q, k, v, mask)
    expected, expected_lse = reference(q, k, v, mask=by_token(mask))
    assert out.shape == q.shape
    assert_close(out, expected, "attention", torch.bfloat16)
    assert_close(lse, expected_lse, "attention", torch.bfloat16)
    assert not caplog.records
    assert not block_sparse.TABLE.reason(SparseExecutor.TRITON_BLOCK_SPARSE)


def test_where_our_kernel_does_not_run(triton_gpu, monkeypatch):
    def reason(device=None):
        block_sparse.TABLE.forget()
        return block_sparse.TABLE.reason(SparseExecutor.TRITON_BLOCK_SPARSE, device)

    assert "this platform is cpu" in reason()
    triton_gpu((7, 5))
    assert "compute capability 8.x" in reason()
    triton_gpu((9, 0))
    assert reason() is None
    assert "not on the GPU" in reason(torch.device("meta"))
    monkeypatch.setattr(kernel, "HAS_TRITON", False)
    assert "Triton cannot be imported" in reason()
    monkeypatch.setattr(platforms, "current_platform", platforms.NPUPlatform())
    assert "this platform is npu" in reason()


def test_lists_rise_and_are_made_once():
    mask = BlockMask(random_keep(2, 3, 9, 9), 64, 570)
    for rows, columns in ((64, 64), (128, 64), (64, 128), (128, 128)):
        lists = mask.lists(rows, columns)
        assert mask.lists(rows, columns) is lists
        tiles = mask.tiles(rows, columns)
        assert torch.equal(lists.counts.long(), tiles.sum(-1))
        for *place, count in [(b, n, t, lists.counts[b, n, t]) for b in range(2) for n in range(3) for t in range(5)]:
            assert lists.indices[tuple(place)][:count].tolist() == tiles[tuple(place)].nonzero().flatten().tolist()
        ordered = lists.counts.gather(-1, lists.order.long())
        assert (ordered.diff() <= 0).all()
        assert torch.equal(lists.order.sort().values, torch.arange(tiles.shape[-2]).expand_as(lists.order).int())


@pytest.mark.parametrize(
    ("platform", "expected"),
    [
        (platforms.RocmPlatform, "TRITON_BLOCK_SPARSE"),
        (platforms.NPUPlatform, "TORCH_BLOCKED"),
        (platforms.CpuPlatform, "TORCH_BLOCKED"),
    ],
)
def test_other_machines_import_no_package(monkeypatch, stub, platform, expected):
    stub("block_sparse_attn", BLOCK_SPARSE)
    stub("spas_sage_attn", SPARGE_SPARSE)
    monkeypatch.setattr(kernel, "HAS_TRITON", True)
    monkeypatch.setattr(platforms, "current_platform", platform())
    assert describe_executor() == expected
    assert not {"block_sparse_attn", "spas_sage_attn"} & set(sys.modules)
