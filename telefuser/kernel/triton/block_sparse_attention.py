"""Flash attention forward over listed tiles of keys. Called by `telefuser.ops.attention.block_sparse`.

Every tile of queries has a list of the tiles of keys that it sees, and works through it with an online softmax in base
2 (FlashAttention-2, https://arxiv.org/abs/2307.08691). Only the sequence's last tile is masked, by its token numbers.
Shape letters: B batch, N heads, Nkv key heads, S tokens, D head dim, Tq and Tk tiles of queries and keys.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from typing import NamedTuple

import torch

from telefuser.kernel import constexpr, jit, tl
from telefuser.kernel.triton.launch import family
from telefuser.kernel.triton.online_softmax import descriptor, fits_descriptor, read_tile, softmax_step
from telefuser.kernel.triton.rows import KERNEL_DTYPES

HEAD_DIMS = (64, 128)


class Tiles(NamedTuple):
    """How the kernel runs: `rows` queries by `columns` keys at a time, and how these come into shared memory."""

    rows: int
    columns: int
    warps: int
    stages: int
    # By the tensor memory accelerator (sm90 and up, half precision), else by plain pointers.
    tma: bool = False
    # At most so many registers a thread, where that lets a second program onto a processor.
    registers: int | None = None


# A tile must not be larger than a block of the mask. Right on every device: 96 KiB of shared memory at most.
_SAFE = {64: Tiles(64, 64, 4, 2), 128: Tiles(128, 64, 8, 2)}
# AMD's shared memory is 64 KiB in all; float32 takes twice the space.
_SMALL = {64: Tiles(64, 64, 4, 1), 128: Tiles(64, 64, 4, 1)}
# sm90: best of a sweep on one H200 at 32760 tokens, 12 heads of 128, density 0.1 to 0.45: 490 to 538 TFLOP/s on the
# kept blocks of 128, 463 to 502 on those of 64; 8 warps, or 128 keys at once, reach 353 to 510. Two programs or more
# share a processor then: one's softmax runs beside the other's products.
_MEASURED = {
    ("sm90", 64): Tiles(64, 64, 4, 3, True),
    ("sm90", 128): Tiles(128, 64, 4, 2, True),
}


def attention_tiles(block_size: int, x: torch.Tensor) -> Tiles:
    """The settings for masks of `block_size` (64 or 128) and tensors like `x` on x's device."""
    return _tiles(block_size, x.dtype.itemsize, "cpu" if x.device.type == "cpu" else family())


@functools.cache
def _tiles(block_size: int, itemsize: int, device_family: str) -> Tiles:
    if itemsize > 2 or device_family.startswith("amd"):
        return _SMALL[block_size]
    tiles = _MEASURED.get((device_family, block_size), _SAFE[block_size])
    # Triton takes tensor descriptors from the host since 3.4.
    return tiles if importlib.util.find_spec("triton.tools.tensor_descriptor") else tiles._replace(tma=False)


@jit
def _block_sparse_attention_kernel(
    q, k, v, out, lse, counts, indices, order, scale, tokens, key_tiles, group,
    q0, q1, q2, k0, k1, k2, v0, v1, v2, o0, o1, o2, l0, l1, c0, c1, i0, i1, i2,
    HEAD_DIM: constexpr, ROWS: constexpr, COLUMNS: constexpr, TAIL: constexpr, TMA: constexpr, STAGES: constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    batch = tl.program_id(2)
    key_head = head // group
    wide_head = head.to(tl.int64)
    wide_batch = batch.to(tl.int64)
    tile = tl.load(order + wide_batch * c0 + wide_head * c1 + tl.program_id(0))
    count = tl.load(counts + wide_batch * c0 + wide_head * c1 + tile)
    listed = indices + wide_batch * i0 + wide_head * i1 + tile.to(tl.int64) * i2

    rows = tile * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    lanes = tl.arange(0, HEAD_DIM)
    query = tl.load(
        q + wide_batch * q0 + wide_head * q1 + rows.to(tl.int64)[:, None] * q2 + lanes[None, :],
        mask=rows[:, None] < tokens, other=0.0,
    )  # fmt: skip
    k_lanes = columns[:, None] * k2 + lanes[None, :]
    v_lanes = columns[:, None] * v2 + lanes[None, :]
    if not TMA:
        k += wide_batch * k0 + key_head.to(tl.int64) * k1
        v += wide_batch * v0 + key_head.to(tl.int64) * v1

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    has_tail = False
    if TAIL:
        # Lists rise, so the sequence's last tile, which is cut off, is the last of a list.
        has_tail = (count > 0) & (tl.load(listed + tl.maximum(count - 1, 0)) == key_tiles - 1)
        count -= has_tail.to(tl.int32)
    # The number of a tile is read one step ahead: no load then waits for its own address.
    index = tl.load(listed)
    for i in tl.range(0, count, num_stages=STAGES):
        start = index * COLUMNS
        index = tl.load(listed + tl.minimum(i + 1, key_tiles - 1))
        key = read_tile(k, start, batch, key_head, k2, k_lanes, TMA, COLUMNS, HEAD_DIM)
        # "ieee" is about float32 only, which would be rounded to 10 bits otherwise.
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        weights, top, total, acc = softmax_step(scores, scale, top, total, acc)
        value = read_tile(v, start, batch, key_head, v2, v_lanes, TMA, COLUMNS, HEAD_DIM)
        acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
    if TAIL:
        if has_tail:
            start = (key_tiles - 1) * COLUMNS
            inside = start + columns < tokens
            if TMA:
                key = read_tile(k, start, batch, key_head, k2, k_lanes, TMA, COLUMNS, HEAD_DIM)
                value = read_tile(v, start, batch, key_head, v2, v_lanes, TMA, COLUMNS, HEAD_DIM)
            else:
                key = tl.load(k + start.to(tl.int64) * k2 + k_lanes, mask=inside[:, None], other=0.0)
                value = tl.load(v + start.to(tl.int64) * v2 + v_lanes, mask=inside[:, None], other=0.0)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee")
            scores = tl.where(inside[None, :], scores, float("-inf"))
            weights, top, total, acc = softmax_step(scores, scale, top, total, acc)
            acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")

    if lse is not None:
        tl.store(
            lse + wide_batch * l0 + wide_head * l1 + rows,
            (top + tl.log2(total)) * 0.6931471805599453,  # ln 2
            mask=rows < tokens,
        )
    # A row without a key has added nothing up.
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out + wide_batch * o0 + wide_head * o1 + rows.to(tl.int64)[:, None] * o2 + lanes[None, :],
        acc.to(out.dtype.element_ty), mask=rows[:, None] < tokens,
    )  # fmt: skip


def attend_listed_tiles(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    counts: torch.Tensor,
    indices: torch.Tensor,
    order: torch.Tensor,
    scale: float,
    tiles: Tiles,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """softmax(q kᵀ scale) v over the listed tiles of keys.

    q [B, N, S, D], k and v [B, Nkv, S, D] in float16, bfloat16 or float32, D 64 or 128, dense last dims, else any
    strides. Query head n reads key head n // (N / Nkv).
    counts int32 [B or 1, N or 1, Tq]: how many tiles of keys a tile of queries sees.
    indices int32 [B or 1, N or 1, Tq, Tk]: which, in rising order; what lies behind `counts` is not used.
    order int32, like counts: the order in which the tiles of queries are started.
    tiles: as `attention_tiles` gives it; the lists are for its rows and columns.
    Returns out [B, N, S, D], laid out as [B, S, N, D], and the natural-log log-sum-exp [B, N, S] in float32 or None; 0
    and -inf for a query without keys. Raises ValueError for another dtype or head dim.
    """
    batch, heads, tokens, head_dim = q.shape
    if q.dtype not in KERNEL_DTYPES or head_dim not in HEAD_DIMS:
        raise ValueError(
            f"attend_listed_tiles takes float16, bfloat16 or float32 and head dims "
            f"{', '.join(map(str, HEAD_DIMS))}, not {q.dtype} and {head_dim}"
        )
    if scale <= 0:
        # The kernel takes the maximum before it scales.
        q, scale = (-q, -scale) if scale else (torch.zeros_like(q), 1.0)
    out = q.new_empty(batch, tokens, heads, head_dim).transpose(1, 2)
    lse = q.new_empty(batch, heads, tokens, dtype=torch.float32) if return_lse else None
    counts, order = (t.expand(batch, heads, -1) for t in (counts, order))
    indices = indices.expand(batch, heads, -1, -1)
    strides = *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3]
    strides += (heads * tokens, tokens, *counts.stride()[:2], *indices.stride()[:3])
    tma = tiles.tma and fits_descriptor(k) and fits_descriptor(v)
    keys, values = (descriptor(t, tiles.columns) for t in (k, v)) if tma else (k, v)
    _block_sparse_attention_kernel[(counts.shape[2], heads, batch)](
        q, keys, values, out, lse, counts, indices, order, scale * math.log2(math.e), tokens,
        -(-tokens // tiles.columns), heads // k.shape[1], *strides,
        HEAD_DIM=head_dim, ROWS=tiles.rows, COLUMNS=tiles.columns, TAIL=tokens % tiles.columns != 0, TMA=tma,
        STAGES=tiles.stages, num_warps=tiles.warps,
        **({} if tiles.registers is None else {"maxnreg": tiles.registers}),
    )  # fmt: skip
    return out, lse
