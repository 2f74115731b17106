"""Blocks of tokens to int8 with one scale each: the operands of the scores in `int8_attention.py`.

The scale is the block's largest magnitude / 127, without an addend; values are rounded half away from zero, as in
SageAttention's per-block form (https://arxiv.org/abs/2410.02367).
"""

from __future__ import annotations

import torch

from telefuser.kernel import constexpr, jit, tl
from telefuser.kernel.triton.rows import block_of, check


@jit
def _per_block_quant_int8_kernel(
    x, mean, out, scales, factor, tokens, width, heads,
    x0, x1, x2, x3, m0, m1, m2,
    BLOCK: constexpr, WIDTH: constexpr,
):  # fmt: skip
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.arange(0, WIDTH)
    inside = (rows < tokens)[:, None] & (cols < width)[None, :]
    offsets = rows.to(tl.int64)[:, None] * x2 + cols.to(tl.int64)[None, :] * x3
    v = tl.load(x + batch * x0 + head * x1 + offsets, mask=inside, other=0.0)
    if mean is not None:
        center = tl.load(mean + batch * m0 + head * m1 + cols.to(tl.int64) * m2, mask=cols < width, other=0.0)
        # The difference is rounded to the inputs' type, as PyTorch's own subtraction would.
        v = (v.to(tl.float32) - center.to(tl.float32)[None, :]).to(v.dtype)
    v = tl.where(inside, v.to(tl.float32) * factor, 0.0)
    scale = tl.div_rn(tl.max(tl.max(tl.abs(v), 1), 0), 127.0)
    tl.store(scales + row * tl.num_programs(0) + tl.program_id(0), scale)
    # Of a block of zeros all quotients are 0.
    v = tl.div_rn(v, tl.where(scale == 0.0, 1.0, scale))
    v += tl.where(v >= 0, 0.5, -0.5)
    tl.store(out + (row * tokens + rows[:, None]) * width + cols[None, :], v.to(tl.int8), mask=inside)


def per_block_quant_int8(
    x: torch.Tensor, block: int, mean: torch.Tensor | None = None, factor: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x - mean) * factor ≈ q * scale, with a scale for each `block` tokens of a head.

    x [B, N, S, D] in float16, bfloat16 or float32, any strides, D at most 256. block: a power of two up to 256.
    mean [B, N, 1, D] in x's dtype is subtracted in x's dtype: "K smoothing", which leaves a softmax over keys as it is.
    factor: for queries the softmax scale times log2(e), so that scores are exponents of 2.
    Returns q int8 [B, N, S, D] and scale float32 [B, N, ceil(S / block)], both contiguous; a block of zeros has scale
    0. Raises ValueError for other dtypes, blocks, widths and means.
    """
    check("per_block_quant_int8", x)
    if x.dim() != 4 or x.shape[3] > 256 or block not in (16, 32, 64, 128, 256):
        raise ValueError(
            f"per_block_quant_int8 takes x [B, N, S, D] with D up to 256 and blocks of 16, 32, 64, 128 or 256 tokens, "
            f"not {tuple(x.shape)} and {block}"
        )
    batch, heads, tokens, width = x.shape
    if mean is not None and (mean.shape != (batch, heads, 1, width) or mean.dtype is not x.dtype):
        raise ValueError(
            f"per_block_quant_int8: mean is {mean.dtype} {tuple(mean.shape)}; give {x.dtype} {(batch, heads, 1, width)}"
        )
    out = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    blocks = -(-tokens // block)
    scales = torch.empty(batch, heads, blocks, dtype=torch.float32, device=x.device)
    if out.numel() == 0:
        return out, scales.zero_()
    center = (0, 0, 0) if mean is None else (mean.stride(0), mean.stride(1), mean.stride(3))
    _per_block_quant_int8_kernel[(blocks, batch * heads)](
        x, mean, out, scales, factor, tokens, width, heads, *x.stride(), *center,
        BLOCK=block, WIDTH=block_of(width, 256), num_warps=max(block * block_of(width, 256) // 2048, 1),
    )  # fmt: skip
    return out, scales
