"""RMS and layer normalisation of rows. Called by `telefuser.ops.normalization`.

A row of any width is walked in blocks; sums are kept in float32 a lane, then reduced. Weight and bias are applied in
float32, and the result is rounded once. One block holds a row of the usual widths, so that the later passes over it
read the cache, not the memory.
"""

from __future__ import annotations

import torch

from telefuser.kernel import constexpr, jit, tl
from telefuser.kernel.triton.rows import block_of, check, row_offset, row_views, sizes, strides, warps_of

MAX_BLOCK = 8192


@jit(do_not_specialize=["n1", "n2"])
def _rms_norm_kernel(x, weight, bias, out, n1, n2, s0, s1, s2, s3, width, eps, BLOCK: constexpr):
    row = tl.program_id(0)
    x += row_offset(row, n1, n2, s0, s1, s2)
    out += row.to(tl.int64) * width
    lanes = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        cols = start + lanes
        v = tl.load(x + cols.to(tl.int64) * s3, mask=cols < width, other=0.0).to(tl.float32)
        squares += v * v
    scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / width + eps)
    for start in range(0, width, BLOCK):
        cols = start + lanes
        mask = cols < width
        v = tl.load(x + cols.to(tl.int64) * s3, mask=mask, other=0.0).to(tl.float32) * scale
        if weight is not None:
            v = v * tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
        if bias is not None:
            v = v + tl.load(bias + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + cols, v.to(out.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["n1", "n2"])
def _layer_norm_kernel(x, weight, bias, out, n1, n2, s0, s1, s2, s3, width, eps, BLOCK: constexpr):
    row = tl.program_id(0)
    x += row_offset(row, n1, n2, s0, s1, s2)
    out += row.to(tl.int64) * width
    lanes = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        cols = start + lanes
        sums += tl.load(x + cols.to(tl.int64) * s3, mask=cols < width, other=0.0).to(tl.float32)
    mean = tl.sum(sums, 0) / width
    # Two passes: mean(x^2) - mean^2 in float32 is off by thousands for rows around 1e4 with unit spread.
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        cols = start + lanes
        v = tl.load(x + cols.to(tl.int64) * s3, mask=cols < width, other=0.0).to(tl.float32)
        v = tl.where(cols < width, v - mean, 0.0)
        squares += v * v
    scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / width + eps)
    for start in range(0, width, BLOCK):
        cols = start + lanes
        mask = cols < width
        v = (tl.load(x + cols.to(tl.int64) * s3, mask=mask, other=0.0).to(tl.float32) - mean) * scale
        if weight is not None:
            v = v * tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
        if bias is not None:
            v = v + tl.load(bias + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + cols, v.to(out.dtype.element_ty), mask=mask)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight + bias over the last dimension.

    x: [..., D] float16, bfloat16 or float32, any strides. weight, bias: [D], any float dtype, or None. Returns a
    contiguous tensor of x's shape and dtype. Raises ValueError for another dtype or a vector that is not [D]. Fewer
    than 2^31 rows.
    """
    return _launch("rms_norm", _rms_norm_kernel, x, weight, bias, eps)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-6
) -> torch.Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension; var divides by D.

    Arguments, result and errors as for `rms_norm`.
    """
    return _launch("layer_norm", _layer_norm_kernel, x, weight, bias, eps)


def _launch(
    name: str, kernel, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    width = x.shape[-1]
    check(name, x, width, weight=weight, bias=bias)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    weight = weight if weight is None else weight.contiguous()
    bias = bias if bias is None else bias.contiguous()
    block = block_of(width, MAX_BLOCK)
    for rows, target in row_views(x, out):
        n0, n1, n2, _ = sizes(rows)
        kernel[(n0 * n1 * n2,)](
            rows, weight, bias, target, n1, n2, *strides(rows), width, eps, BLOCK=block, num_warps=warps_of(block)
        )
    return out
