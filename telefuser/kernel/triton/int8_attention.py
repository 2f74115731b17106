"""Flash attention forward with 8-bit scores. Called by `telefuser.ops.attention.backends` for TRITON_INT8.

Queries and keys come as int8 with a scale for a block of tokens (`quantize_int8.py`); their products are exact in
int32. Weights and values are multiplied in the values' own type, sums are float32. After SageAttention
(https://arxiv.org/abs/2410.02367). Shape letters: B batch, N heads, Nkv key heads, Sq, Skv tokens, D head dim.
"""

from __future__ import annotations

import importlib.util

import torch

from telefuser.kernel import constexpr, jit, tl
from telefuser.kernel.triton.launch import family
from telefuser.kernel.triton.online_softmax import descriptor, fits_descriptor, read_tile, softmax_step

HEAD_DIMS = (64, 128)
QUERY_BLOCK = 128
KEY_BLOCK = 64


@jit
def _int8_attention_kernel(
    q, k, v, q_scale, k_scale, out, lse, queries, keys, group,
    k0, k1, k2, v0, v1, v2, o0, o1, o2,
    HEAD_DIM: constexpr, ROWS: constexpr, COLUMNS: constexpr, TAIL: constexpr, TMA: constexpr, STAGES: constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    key_head = head // group
    row = batch.to(tl.int64) * tl.num_programs(1) + head
    rows = tile * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    lanes = tl.arange(0, HEAD_DIM)
    query = tl.load(
        q + (row * queries + rows[:, None]) * HEAD_DIM + lanes[None, :], mask=rows[:, None] < queries, other=0
    )
    row_scale = tl.load(q_scale + row * tl.num_programs(0) + tile)
    key_tiles = tl.cdiv(keys, COLUMNS)
    k_scale += (batch.to(tl.int64) * (tl.num_programs(1) // group) + key_head) * key_tiles
    k_lanes = columns[:, None] * k2 + lanes[None, :]
    v_lanes = columns[:, None] * v2 + lanes[None, :]
    if not TMA:
        k += batch.to(tl.int64) * k0 + key_head.to(tl.int64) * k1
        v += batch.to(tl.int64) * v0 + key_head.to(tl.int64) * v1

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    whole = key_tiles
    if TAIL:
        whole -= 1
    scale = tl.load(k_scale) * row_scale
    for i in tl.range(0, whole, num_stages=STAGES):
        key = read_tile(k, i * COLUMNS, batch, key_head, k2, k_lanes, TMA, COLUMNS, HEAD_DIM)
        scores = tl.dot(query, tl.trans(key), out_dtype=tl.int32).to(tl.float32)
        weights, top, total, acc = softmax_step(scores, scale, top, total, acc)
        # Read one step ahead, so that no product waits for it.
        scale = tl.load(k_scale + tl.minimum(i + 1, key_tiles - 1)) * row_scale
        value = read_tile(v, i * COLUMNS, batch, key_head, v2, v_lanes, TMA, COLUMNS, HEAD_DIM)
        acc = tl.dot(weights.to(value.dtype), value, acc)
    if TAIL:
        start = whole * COLUMNS
        inside = start + columns < keys
        if TMA:
            key = read_tile(k, start, batch, key_head, k2, k_lanes, TMA, COLUMNS, HEAD_DIM)
            value = read_tile(v, start, batch, key_head, v2, v_lanes, TMA, COLUMNS, HEAD_DIM)
        else:
            key = tl.load(k + start.to(tl.int64) * k2 + k_lanes, mask=inside[:, None], other=0)
            value = tl.load(v + start.to(tl.int64) * v2 + v_lanes, mask=inside[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(key), out_dtype=tl.int32).to(tl.float32)
        # Scaled first: a block of zeros has scale 0, and 0 times -inf is NaN.
        scores = tl.where(inside[None, :], scores * scale, float("-inf"))
        weights, top, total, acc = softmax_step(scores, 1.0, top, total, acc)
        acc = tl.dot(weights.to(value.dtype), value, acc)

    if lse is not None:
        tl.store(lse + row * queries + rows, (top + tl.log2(total)) * 0.6931471805599453, mask=rows < queries)  # ln 2
    acc = acc / total[:, None]
    tl.store(
        out + batch.to(tl.int64) * o0 + head.to(tl.int64) * o1 + rows.to(tl.int64)[:, None] * o2 + lanes[None, :],
        acc.to(out.dtype.element_ty), mask=rows[:, None] < queries,
    )  # fmt: skip


def int8_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_scale: torch.Tensor,
    k_scale: torch.Tensor,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention whose scores, exponents of 2, are (q kᵀ) q_scale k_scale.

    q int8 [B, N, Sq, D] and k int8 [B, Nkv, Skv, D] with scales float32 [B, N, ceil(Sq / 128)] and [B, Nkv, ceil(Skv /
    64)], as `per_block_quant_int8` gives them; v [B, Nkv, Skv, D] in float16, bfloat16 or float32, dense last dim, else
    any strides. D is 64 or 128; query head n reads key head n // (N / Nkv).
    Returns out [B, N, Sq, D] in v's dtype, laid out as [B, Sq, N, D], and the natural-log log-sum-exp of the scores
    [B, N, Sq] in float32 or None. Raises ValueError for what does not fit.
    """
    batch, heads, queries, head_dim = q.shape
    keys = k.shape[2]
    if q.dtype is not torch.int8 or k.dtype is not torch.int8 or head_dim not in HEAD_DIMS:
        raise ValueError(
            f"int8_attention takes int8 q and k and head dims {', '.join(map(str, HEAD_DIMS))}, not {q.dtype}, "
            f"{k.dtype} and {head_dim}"
        )
    sizes = (batch, heads, -(-queries // QUERY_BLOCK)), (batch, k.shape[1], -(-keys // KEY_BLOCK))
    if (q_scale.shape, k_scale.shape) != sizes:
        raise ValueError(
            f"int8_attention: the scales are {tuple(q_scale.shape)} and {tuple(k_scale.shape)}; for these q and k they "
            f"must be {sizes[0]} and {sizes[1]}"
        )
    out = v.new_empty(batch, queries, heads, head_dim).transpose(1, 2)
    lse = v.new_empty(batch, heads, queries, dtype=torch.float32) if return_lse else None
    tma = _has_accelerator(v) and fits_descriptor(k) and fits_descriptor(v)
    key, value = (descriptor(t, KEY_BLOCK) for t in (k, v)) if tma else (k, v)
    _int8_attention_kernel[(-(-queries // QUERY_BLOCK), heads, batch)](
        q.contiguous(), key, value, q_scale.contiguous(), k_scale.contiguous(), out, lse, queries, keys,
        heads // k.shape[1], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
        HEAD_DIM=head_dim, ROWS=QUERY_BLOCK, COLUMNS=KEY_BLOCK, TAIL=keys % KEY_BLOCK != 0, TMA=tma,
        STAGES=3 if tma else 2, num_warps=8, **({"maxnreg": 128} if tma else {}),
    )  # fmt: skip
    return out, lse


def _has_accelerator(x: torch.Tensor) -> bool:
    # Measured on Hopper only.
    return x.is_cuda and family() == "sm90" and importlib.util.find_spec("triton.tools.tensor_descriptor") is not None
