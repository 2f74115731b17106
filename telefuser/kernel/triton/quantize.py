"""Rows to FP8 with one scale each. Called by `telefuser.ops.fp8_quantization`, whose module text has the formula.

Only for GPUs whose Triton knows the FP8 type asked for: compute capability 8.9 and up for e4m3fn.
"""

from __future__ import annotations

import torch

from telefuser.kernel import constexpr, jit, tl
from telefuser.kernel.triton.rows import block_of, check, warps_of

MAX_BLOCK = 8192
_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


@jit
def _per_token_quant_fp8_kernel(x, out, scales, s0, s1, width, unit, smallest, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * s0
    out += row * width
    lanes = tl.arange(0, BLOCK)
    peaks = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        cols = start + lanes
        v = tl.load(x + cols.to(tl.int64) * s1, mask=cols < width, other=0.0).to(tl.float32)
        # The second clause keeps NaN, which a maximum would drop.
        peaks = tl.where((tl.abs(v) > peaks) | (v != v), tl.abs(v), peaks)
    peak = tl.max(peaks, 0)
    nans = tl.sum((peaks != peaks).to(tl.int32), 0)
    # The native form's arithmetic, its correctly rounded division too: the values then equal its to the bit.
    scale = tl.maximum(peak * unit, smallest)
    scale = tl.where(nans > 0, float("nan"), scale)
    tl.store(scales + row, scale)
    factor = tl.div_rn(1.0, scale)
    for start in range(0, width, BLOCK):
        cols = start + lanes
        mask = cols < width
        v = tl.load(x + cols.to(tl.int64) * s1, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + cols, (v * factor).to(out.dtype.element_ty), mask=mask)


def per_token_quant_fp8(x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K] -> q [..., K] of the FP8 `dtype` and scale [..., 1] float32 with x ≈ q * scale; both contiguous.

    x: float16, bfloat16 or float32, any strides; it is copied only where its leading dimensions do not fold into one.
    Fewer than 2^31 rows. Raises ValueError for another dtype of x or of the result.
    """
    check("per_token_quant_fp8", x)
    if dtype not in _DTYPES:
        raise ValueError(f"per_token_quant_fp8 gives {', '.join(map(str, _DTYPES))}, not {dtype}")
    width = x.shape[-1]
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    if scales.numel() == 0:
        return out, scales
    rows = x.reshape(scales.numel(), width)
    block = block_of(width, MAX_BLOCK)
    _per_token_quant_fp8_kernel[(rows.shape[0],)](
        rows, out, scales, *rows.stride(), width,
        1 / torch.finfo(dtype).max, torch.finfo(torch.float32).tiny, BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip
    return out, scales
