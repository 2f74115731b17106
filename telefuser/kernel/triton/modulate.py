"""Scale and shift of rows, the modulation of adaptive norms. Called by `telefuser.ops.normalization.modulate`."""

from __future__ import annotations

import torch

from telefuser.kernel import constexpr, jit, tl
from telefuser.kernel.triton import launch
from telefuser.kernel.triton.rows import (
    block_of,
    check,
    contiguous_like,
    row_offset,
    row_views,
    sizes,
    spread,
    strides,
    warps_of,
)

MAX_BLOCK = 2048


@jit(do_not_specialize=["n1", "n2"])
def _fused_scale_shift_kernel(
    x, scale, shift, out, constant, n1, n2,
    x0, x1, x2, x3, scale0, scale1, scale2, scale3, shift0, shift1, shift2, shift3,
    width, BLOCK: constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    x += row_offset(row, n1, n2, x0, x1, x2)
    scale += row_offset(row, n1, n2, scale0, scale1, scale2)
    shift += row_offset(row, n1, n2, shift0, shift1, shift2)
    out += row.to(tl.int64) * width
    lanes = tl.arange(0, BLOCK)
    for start in range(0, width, BLOCK):
        cols = start + lanes
        mask = cols < width
        at = cols.to(tl.int64)
        v = tl.load(x + at * x3, mask=mask, other=0.0).to(tl.float32)
        factor = tl.load(scale + at * scale3, mask=mask, other=0.0).to(tl.float32) + constant
        v = v * factor + tl.load(shift + at * shift3, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + cols, v.to(out.dtype.element_ty), mask=mask)


def fused_scale_shift(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, scale_constant: float = 1.0
) -> torch.Tensor:
    """x * (scale_constant + scale) + shift.

    x: [..., D] float16, bfloat16 or float32, any strides. scale, shift: any float dtype, any strides, broadcastable
    to x's shape; a [B, D] beside a [B, S, D] x means [B, 1, D]. They are read through stride 0, never expanded in
    memory. Returns a contiguous tensor of x's shape and dtype. Raises ValueError for another dtype of x, RuntimeError
    where scale or shift do not broadcast.
    """
    signature, pointers = launch.signature(x, scale, shift)
    key = ("fused_scale_shift", scale_constant, signature)
    replay = launch.find_replay(key)
    if replay is None:
        check("fused_scale_shift", x)
    out = contiguous_like(x, x.dtype)
    if replay is not None:
        replay(*pointers, out.data_ptr())
        return out
    if x.numel() == 0:
        return out
    scale, shift = spread(scale, x), spread(shift, x)
    views = list(row_views(x, scale, shift, out))
    for tensors in views:
        rows, factors, offsets, _ = tensors
        n0, n1, n2, width = sizes(rows)
        block = block_of(width, MAX_BLOCK)
        steps = (*strides(rows), *strides(factors), *strides(offsets))
        grid, others = n0 * n1 * n2, (float(scale_constant), n1, n2, *steps, width, block)
        program = _fused_scale_shift_kernel[(grid,)](*tensors, *others, num_warps=warps_of(block))
        if len(views) == 1:
            launch.keep_replay(key, program, grid, others)
    return out
