"""Rotary position embedding. Called by `telefuser.ops.rotary`.

A program rotates a tile of rows of the third dimension (the heads of one token in [B, S, H, D]); cos and sin
broadcast over it. Neighbouring pairs are loaded and stored whole and taken apart in registers: two loads of every
second element would each fetch the whole row. Arithmetic is float32, whatever the dtype of the tables, with one
rounding at the end.
"""

from __future__ import annotations

import torch

from telefuser.kernel import constexpr, jit, tl
from telefuser.kernel.triton import launch, norm_rotary
from telefuser.kernel.triton.rows import block_of, check, sizes, strides, warps_of

MAX_BLOCK = 128
TILE = 2048


@jit(do_not_specialize=["n1", "n2", "tiles"])
def _apply_rotary_embedding_kernel(
    x, cos, sin, out, n1, n2, tiles,
    x0, x1, x2, x3, cos0, cos1, cos2, cos3, sin0, sin1, sin2, sin3,
    half, INTERLEAVED: constexpr, SHARED: constexpr, ROWS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    token = program // tiles
    i0 = (token // n1).to(tl.int64)
    i1 = (token % n1).to(tl.int64)
    rows = (program % tiles) * ROWS + tl.arange(0, ROWS)
    i2 = rows.to(tl.int64)[:, None]
    x += i0 * x0 + i1 * x1
    cos += i0 * cos0 + i1 * cos1
    sin += i0 * sin0 + i1 * sin1
    out += token.to(tl.int64) * n2 * half * 2
    for start in range(0, half, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        mask = (rows < n2)[:, None] & (pairs < half)[None, :]
        j = pairs.to(tl.int64)[None, :]
        if SHARED:
            # One row of angles for the whole tile
            there = (pairs < half)[None, :]
            c, s = tl.load(cos + j * cos3, mask=there, other=0.0), tl.load(sin + j * sin3, mask=there, other=0.0)
        else:
            c = tl.load(cos + i2 * cos2 + j * cos3, mask=mask, other=0.0)
            s = tl.load(sin + i2 * sin2 + j * sin3, mask=mask, other=0.0)
        c, s = c.to(tl.float32), s.to(tl.float32)
        if INTERLEAVED:
            cols = 2 * start + tl.arange(0, 2 * BLOCK)
            mask = (rows < n2)[:, None] & (cols < 2 * half)[None, :]
            cols = cols.to(tl.int64)[None, :]
            v = tl.load(x + i2 * x2 + cols * x3, mask=mask, other=0.0).to(tl.float32)
            a, b = tl.split(tl.reshape(v, [ROWS, BLOCK, 2]))
            a, b = norm_rotary.turn(a, b, c, s)
            v = tl.reshape(tl.join(a, b), [ROWS, 2 * BLOCK])
            tl.store(out + i2 * (2 * half) + cols, v.to(out.dtype.element_ty), mask=mask)
        else:
            first, second = j, j + half
            a = tl.load(x + i2 * x2 + first * x3, mask=mask, other=0.0).to(tl.float32)
            b = tl.load(x + i2 * x2 + second * x3, mask=mask, other=0.0).to(tl.float32)
            tl.store(out + i2 * (2 * half) + first, (a * c - b * s).to(out.dtype.element_ty), mask=mask)
            tl.store(out + i2 * (2 * half) + second, (a * s + b * c).to(out.dtype.element_ty), mask=mask)


def apply_rotary_embedding(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """Rotate pairs of the last dimension: (a, b) -> (a cos - b sin, a sin + b cos). Su et al., "RoFormer", 2021.

    x: rank 1 to 4, e.g. [B, S, H, D], float16, bfloat16 or float32, any strides, D even. cos, sin: broadcastable to
    [..., D/2], any float dtype and strides; a [S, D/2] beside a [B, S, H, D] x means [S, 1, D/2]. Pairs are (2i,
    2i+1) if `interleaved`, else (i, i + D/2). Returns a contiguous tensor of x's shape and dtype. Raises ValueError
    for another dtype, rank or an odd D.
    """
    signature, pointers = launch.signature(x, cos, sin)
    key = ("apply_rotary_embedding", interleaved, signature)
    replay = launch.find_replay(key)
    if replay is not None:
        return norm_rotary.replay_rows(replay, x, pointers)
    check("apply_rotary_embedding", x)
    if not 1 <= x.dim() <= 4 or x.shape[-1] % 2:
        raise ValueError(
            f"apply_rotary_embedding takes up to four dimensions, the last one even; x has shape {tuple(x.shape)}"
        )
    cos, sin = (t[None, :, None] if t.dim() == 2 and x.dim() == 4 else t for t in (cos, sin))
    if interleaved and norm_rotary.turns_in_rows(x, cos, sin):
        return norm_rotary.rotate_rows(key, x, cos, sin)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    half = x.shape[-1] // 2
    cos, sin = (t.expand(*x.shape[:-1], half) for t in (cos, sin))
    n0, n1, n2, _ = sizes(x)
    block = block_of(half, MAX_BLOCK)
    rows = _tile_of(n2, TILE // block)
    tiles = -(-n2 // rows)
    shared = strides(cos)[2] == strides(sin)[2] == 0
    _apply_rotary_embedding_kernel[(n0 * n1 * tiles,)](
        x, cos, sin, out, n1, n2, tiles,
        *strides(x), *strides(cos), *strides(sin),
        half, INTERLEAVED=interleaved, SHARED=shared, ROWS=rows, BLOCK=block, num_warps=warps_of(rows * block),
    )  # fmt: skip
    return out


def _tile_of(rows: int, limit: int) -> int:
    """A power of two of rows for a tile, such that at most a quarter of all lanes idle: 16 for 12 heads and for 40."""
    tile = block_of(rows, limit)
    while tile > 4 and -(-rows // tile) * tile * 3 > rows * 4:
        tile //= 2
    return tile
