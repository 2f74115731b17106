"""Matrix product of FP8 rows with a scale a row: what `torch._scaled_mm` does not take. Called by
`telefuser.ops.fp8_gemm`.

Any sizes, e4m3 and e5m2 in any pairing, results in float16, bfloat16 or float32. Only for GPUs whose Triton knows the
FP8 types: NVIDIA of compute capability 8.9 and up, AMD CDNA3 and up. Shape letters: M rows of x, K elements a row, N
rows of the weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from telefuser.kernel import constexpr, jit, tl
from telefuser.kernel.triton.launch import family

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_OUT = (torch.float16, torch.bfloat16, torch.float32)
# Rows of the weight whose tiles neighbouring programs share in the level-2 cache.
_GROUP = 8


class Tile(NamedTuple):
    """What one program computes, how deep it reads ahead, and with how many warps."""

    m: int
    n: int
    k: int
    stages: int
    warps: int


# Shared memory: (m + n) * k bytes a stage. Ada (sm89) and workstation Blackwell (sm12x) have 99 KiB, AMD has 64 KiB.
SAFE = Tile(128, 128, 128, 2, 8)
FEW_ROWS = Tile(64, 128, 128, 2, 4)
_ADA, _HOPPER = Tile(128, 128, 128, 3, 8), Tile(128, 256, 128, 3, 8)
LARGE = {"sm89": _ADA, "sm120": _ADA, "sm121": _ADA, "sm90": _HOPPER, "sm100": _HOPPER, "sm103": _HOPPER}


@jit(do_not_specialize=["M"])
def _scaled_mm_fp8_kernel(
    x, x_scale, weight, weight_scale, bias, out, M, N, K,
    BLOCK_M: constexpr, BLOCK_N: constexpr, BLOCK_K: constexpr, GROUP: constexpr, EVEN_K: constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    in_group = GROUP * tiles_n
    first = program // in_group * GROUP
    size = min(tiles_m - first, GROUP)
    tile_m = first + program % in_group % size
    tile_n = program % in_group // size

    rows, cols = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    # Rows past the end read rows at the start again: no mask, so that loads stay whole. They are never stored.
    x += (rows % M).to(tl.int64)[:, None] * K + ks[None, :]
    weight += (cols % N).to(tl.int64)[:, None] * K + ks[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            a, b = tl.load(x), tl.load(weight)
        else:
            a = tl.load(x, mask=ks[None, :] < K - start, other=0.0)
            b = tl.load(weight, mask=ks[None, :] < K - start, other=0.0)
        total = tl.dot(a, tl.trans(b), total)
        x += BLOCK_K
        weight += BLOCK_K

    row_mask, col_mask = rows < M, cols < N
    total *= tl.load(x_scale + rows, mask=row_mask, other=0.0)[:, None]
    total *= tl.load(weight_scale + cols, mask=col_mask, other=0.0)[None, :]
    if bias is not None:
        total += tl.load(bias + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    out += rows.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(out, total.to(out.dtype.element_ty), mask=row_mask[:, None] & col_mask[None, :])


def scaled_mm_fp8(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """(x * x_scale) (weight * weight_scale)ᵀ + bias [M, N] in `dtype`, added up in float32 and rounded once.

    x [M, K], weight [N, K]: FP8, of one kind or two; copied where they are not contiguous.
    x_scale [M, 1], weight_scale [N, 1]: float32.
    bias [N]: float16, bfloat16 or float32, or None.  dtype: one of these three.
    On Hopper the tensor cores add up in 14 bits, as `torch._scaled_mm` does with fast accumulation.
    Raises ValueError for other dtypes and for shapes that do not fit.
    """
    _check(x, x_scale, weight, weight_scale, bias, dtype)
    (rows, width), columns = x.shape, weight.shape[0]
    out = torch.empty(rows, columns, dtype=dtype, device=x.device)
    if out.numel() == 0:
        return out
    # Rows at multiples of 16 bytes can be read 16 bytes at a time; otherwise it is one byte at a time.
    x, weight = _padded(x), _padded(weight)
    bias = None if bias is None else bias.contiguous()
    width = x.shape[1]
    tile = _tile(rows, x.device)
    grid = (-(-rows // tile.m) * -(-columns // tile.n),)
    _scaled_mm_fp8_kernel[grid](
        x, x_scale.contiguous(), weight, weight_scale.contiguous(), bias, out, rows, columns, width,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, GROUP=_GROUP, EVEN_K=width % tile.k == 0,
        num_stages=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return out


def _tile(rows: int, device: torch.device) -> Tile:
    if rows <= FEW_ROWS.m:
        return FEW_ROWS
    return SAFE if device.type == "cpu" else LARGE.get(family(), SAFE)


def _padded(values: torch.Tensor) -> torch.Tensor:
    """`values` [R, K] contiguous, with zeros up to a multiple of 16 columns."""
    rest = -values.shape[1] % 16
    if not rest:
        return values.contiguous()
    # As bytes: zero is all bits zero in every kind of FP8, and not every PyTorch pads those.
    return torch.nn.functional.pad(values.view(torch.uint8), (0, rest)).view(values.dtype)


def _check(x, x_scale, weight, weight_scale, bias, dtype) -> None:
    if x.dtype not in _FP8 or weight.dtype not in _FP8 or dtype not in _OUT:
        raise ValueError(f"scaled_mm_fp8 multiplies FP8 into float16, bfloat16 or float32, not {x.dtype} into {dtype}")
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"scaled_mm_fp8 takes x [M, K] and weight [N, K], got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    for name, scale, size in (("x_scale", x_scale, len(x)), ("weight_scale", weight_scale, len(weight))):
        if scale.shape != (size, 1) or scale.dtype is not torch.float32:
            raise ValueError(
                f"scaled_mm_fp8: {name} must be [{size}, 1] float32, got {tuple(scale.shape)} {scale.dtype}"
            )
    if bias is not None and (bias.shape != (len(weight),) or bias.dtype not in _OUT):
        raise ValueError(f"scaled_mm_fp8: bias must be [{len(weight)}], got {tuple(bias.shape)} {bias.dtype}")
