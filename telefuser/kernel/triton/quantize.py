"""Rows to FP8 with one scale each, as they are or behind an activation, in one pass over memory. Called by
`telefuser.ops.fp8_quantization`, whose module text has the formula, and `telefuser.ops.activations`.

Only for GPUs whose Triton knows the FP8 type asked for: compute capability 8.9 and up for e4m3fn.
"""

from __future__ import annotations

import functools

import torch

from telefuser.kernel import constexpr, jit, tl
from telefuser.kernel.triton import launch
from telefuser.kernel.triton.activation import ACTIVATIONS, activated
from telefuser.kernel.triton.rows import check, contiguous_like, load, pieces, tile_pair

FP8_DTYPES = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})
BLOCK_OF_WIDE_ROWS = 8192


@functools.cache
def constants_of(dtype: torch.dtype) -> tuple[float, float]:
    """What a row's peak is multiplied by to give its scale, and the smallest scale."""
    return 1 / torch.finfo(dtype).max, torch.finfo(torch.float32).tiny


def scales_of(x: torch.Tensor) -> torch.Tensor:
    """An uninitialised [..., 1] float32 for the scales of x's rows; of rows without elements the smallest scale."""
    scales = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    return scales if x.shape[-1] else scales.fill_(torch.finfo(torch.float32).tiny)


@jit
def row_peaks(v):
    """The largest absolute value of each row of v [rows, cols] float32, as the bits of a float32.

    The bits of floats without sign are in the order of the floats, and NaN is above them all: a maximum of floats
    would drop it.
    """
    return tl.max(tl.abs(v).to(tl.int32, bitcast=True), 1)


@jit
def row_factors(peaks, scales, rows, last, unit, smallest):
    """Store the scales that follow from `peaks`, and return their reciprocals [rows, 1]."""
    scale = peaks.to(tl.float32, bitcast=True) * unit
    # Not a maximum, which would drop NaN. The native form's arithmetic: the values then equal its to the bit.
    scale = tl.where(scale < smallest, smallest, scale)
    tl.store(scales + rows.to(tl.int64), scale, mask=rows < last)
    return tl.div_rn(1.0, scale)[:, None]


@jit
def _of_pair(v, w, y, ACTIVATION: constexpr):
    v = v.to(tl.float32)
    if ACTIVATION is not None:
        v = activated(v, ACTIVATION)
    if y is not None:
        v *= w.to(tl.float32)
    return v


@jit(do_not_specialize=["count", "rows"])
def _quantize_rows_kernel(
    x, y, out, scales, count, rows, x_step, y_step, width, unit, smallest,
    ACTIVATION: constexpr, HEAD: constexpr, TAIL: constexpr, WHOLE: constexpr, TILE: constexpr,
    AHEAD: constexpr,
):  # fmt: skip
    first = tl.program_id(0) * rows
    last = tl.minimum(first + rows, count)
    lanes = tl.arange(0, TILE)
    head = tl.arange(0, HEAD)
    next_v, next_y = tile_pair(x, y, first + lanes, last, x_step, y_step, head, None)
    if TAIL > 0:
        tail = HEAD + tl.arange(0, TAIL)
        mask = None if WHOLE else tail < width
        next_w, next_z = tile_pair(x, y, first + lanes, last, x_step, y_step, tail, mask)
    for start in range(first, last, TILE):
        now = start + lanes
        there = (now < last)[:, None]
        v = _of_pair(next_v, next_y, y, ACTIVATION)
        if TAIL > 0:
            w = _of_pair(next_w, next_z, y, ACTIVATION)
        # The next rows are on their way while these are computed.
        if AHEAD:
            next_v, next_y = tile_pair(x, y, now + TILE, last, x_step, y_step, head, None)
        peaks = row_peaks(v)
        if TAIL > 0:
            if AHEAD:
                next_w, next_z = tile_pair(x, y, now + TILE, last, x_step, y_step, tail, mask)
            peaks = tl.maximum(peaks, row_peaks(w))
        factors = row_factors(peaks, scales, now, last, unit, smallest)
        at = out + now.to(tl.int64)[:, None] * width
        tl.store(at + head[None, :], (v * factors).to(out.dtype.element_ty), mask=there)
        if TAIL > 0:
            if not WHOLE:
                there = there & mask[None, :]
            tl.store(at + tail[None, :], (w * factors).to(out.dtype.element_ty), mask=there)


@jit
def _quantize_wide_kernel(
    x, y, out, scales, x_step, y_step, width, unit, smallest, ACTIVATION: constexpr, BLOCK: constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x += row * x_step
    if y is not None:
        y += row * y_step
    lanes = tl.arange(0, BLOCK)
    peaks = tl.zeros([1], tl.int32)
    for start in range(0, width, BLOCK):
        v = _block(x, y, start + lanes, width, ACTIVATION)
        peaks = tl.maximum(peaks, row_peaks(v[None, :]))
    factor = tl.sum(row_factors(peaks, scales, row + tl.arange(0, 1), row + 1, unit, smallest))
    for start in range(0, width, BLOCK):
        cols = start + lanes
        v = _block(x, y, cols, width, ACTIVATION) * factor
        tl.store(out + row * width + cols, v.to(out.dtype.element_ty), mask=cols < width)


@jit
def _block(x, y, cols, width, ACTIVATION: constexpr):
    v = load(x, cols, cols < width)
    if ACTIVATION is not None:
        v = activated(v, ACTIVATION)
    if y is not None:
        v *= load(y, cols, cols < width)
    return v


def per_token_quant_fp8(x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K] -> q [..., K] of the FP8 `dtype` and scale [..., 1] float32 with x ≈ q * scale; both contiguous.

    x: float16, bfloat16 or float32, any strides; it is copied only where its leading dimensions do not fold into one
    or its columns are no neighbours. Fewer than 2^31 rows. Raises ValueError for another dtype of x or of the result.
    """
    return _quantize("per_token_quant_fp8", x, None, None, dtype)


def activate_quant_fp8(
    x: torch.Tensor, activation: str, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """`per_token_quant_fp8` of activation(x), which is left in float32 between the two.

    activation: as for `activate`; everything else as for `per_token_quant_fp8`.
    """
    return _quantize("activate_quant_fp8", x, None, activation, dtype)


def activate_and_mul_quant_fp8(
    x: torch.Tensor, activation: str, gate_first: bool = False, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """`per_token_quant_fp8` of what `activate_and_mul` gives for x [..., 2K], left in float32 between the two."""
    if x.shape[-1] % 2:
        raise ValueError(f"activate_and_mul splits the last dimension in two halves; it is {x.shape[-1]}")
    first, second = x.chunk(2, dim=-1)
    gate, hidden = (first, second) if gate_first else (second, first)
    return _quantize("activate_and_mul_quant_fp8", gate, hidden, activation, dtype)


def _quantize(name, x, y, activation, dtype) -> tuple[torch.Tensor, torch.Tensor]:
    signature, pointers = launch.signature(x, y)
    key = (name, activation, dtype, signature)
    replay = launch.find_replay(key)
    if replay is None:
        _check(name, x, activation, dtype)
    out, scales = contiguous_like(x, dtype), scales_of(x)
    if replay is not None:
        replay(*pointers, out.data_ptr(), scales.data_ptr())
    elif out.numel() > 0:
        _launch_first(key, x, y, out, scales, activation)
    return out, scales


def _check(name, x, activation, dtype) -> None:
    check(name, x)
    if dtype not in FP8_DTYPES:
        raise ValueError(f"{name} gives {', '.join(sorted(map(str, FP8_DTYPES)))}, not {dtype}")
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"{name} knows {', '.join(ACTIVATIONS)}, not {activation!r}")


def _launch_first(key, x, y, out, scales, activation) -> None:
    """Launch, and keep the launch where it reads the inputs as they lie."""
    width, count = x.shape[-1], scales.numel()
    rows, others = (t if t is None else _matrix(t, count, width) for t in (x, y))
    tensors = (rows, others, out, scales)
    steps = rows.stride(0), 0 if others is None else others.stride(0)
    if width > launch.MAX_IN_REGISTERS:
        rest = (*steps, width, *constants_of(out.dtype), activation, BLOCK_OF_WIDE_ROWS)
        grid = count
        program = _quantize_wide_kernel[(grid,)](*tensors, *rest, num_warps=8)
    else:
        settings = launch.launch_of("quantize" if activation is None else "quantize_activated", width, x)
        head, tail = pieces(width)
        grid = -(-count // settings.rows)
        rest = (count, settings.rows, *steps, width, *constants_of(out.dtype))
        rest += (activation, head, tail, head + tail == width, settings.tile, settings.rows > settings.tile)
        warps = launch.warps_of_threads(settings.threads, x)
        program = _quantize_rows_kernel[(grid,)](*tensors, *rest, num_warps=warps)
    if rows.data_ptr() == x.data_ptr() and (y is None or others.data_ptr() == y.data_ptr()):
        launch.keep_replay(key, program, grid, rest)


def _matrix(x: torch.Tensor, count: int, width: int) -> torch.Tensor:
    """`x` as [count, width] with neighbouring columns, copied only where it has to be."""
    x = x.reshape(count, width)
    return x if x.stride(1) == 1 or width == 1 else x.contiguous()
