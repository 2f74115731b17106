"""RMS and layer norm of rows in one pass over memory, with what surrounds them in a transformer: a gated residual
addition before, a scale and shift after, and the quantisation to FP8 that a quantised projection wants.
Called by `telefuser.ops.normalization` and `telefuser.ops.residual_norm`.

A row lies in registers as two pieces, so it is read once, and the next rows are on their way while it is computed;
weights and modulation are applied in float32 and the result is rounded once. Rows too wide for registers are walked in
blocks, and the later passes read the cache.
"""

from __future__ import annotations

import torch

from telefuser.kernel import constexpr, jit, tl
from telefuser.kernel.triton import launch
from telefuser.kernel.triton.quantize import FP8_DTYPES, constants_of, row_factors, row_peaks, scales_of
from telefuser.kernel.triton.rows import (
    check,
    contiguous_like,
    dense_columns,
    load,
    pieces,
    spread,
    tile_pair,
    token_views,
    vector,
)

BLOCK_OF_WIDE_ROWS = 4096


@jit
def _gate(gate, rows, last, gate_step, cols, mask, SHARED: constexpr):
    if gate is not None:
        return vector(gate, rows, last, gate_step, cols, mask, SHARED)
    else:
        return tl.full([1, 1], 1.0, tl.float32)


@jit
def _residual(v, y, added, gate, total, rows, last, width, cols, mask):
    """v in float32, or v + gate * added, which is rounded to the dtype of `total`, stored there, and goes on as
    rounded."""
    v = v.to(tl.float32)
    if y is not None:
        rounded = (v + added.to(tl.float32) * gate).to(total.dtype.element_ty)
        _store(total, rounded, rows, last, width, cols, mask)
        v = rounded.to(tl.float32)
    return v


@jit
def _store(out, v, rows, last, width, cols, mask):
    there = (rows < last)[:, None]
    if mask is not None:
        there = there & mask[None, :]
    tl.store(out + rows.to(tl.int64)[:, None] * width + cols[None, :], v.to(out.dtype.element_ty), mask=there)


@jit
def _factor(weight, scale, rows, last, scale_step, cols, mask, SHARED: constexpr):
    factor = tl.full([1, 1], 1.0, tl.float32)
    if scale is not None:
        factor = 1.0 + vector(scale, rows, last, scale_step, cols, mask, SHARED)
    if weight is not None:
        factor = factor * vector(weight, rows, last, 0, cols, mask, True)
    return factor


@jit
def _offset(bias, scale, shift, rows, last, scale_step, shift_step, cols, mask, SHARED: constexpr):
    """What bias and shift add behind the factor: (n * weight + bias) * (1 + scale) + shift."""
    offset = tl.full([1, 1], 0.0, tl.float32)
    if bias is not None:
        offset = vector(bias, rows, last, 0, cols, mask, True)
        if scale is not None:
            offset = offset * (1.0 + vector(scale, rows, last, scale_step, cols, mask, SHARED))
    if shift is not None:
        offset = offset + vector(shift, rows, last, shift_step, cols, mask, SHARED)
    return offset


@jit(do_not_specialize=["n1", "tiles", "rows"])
def _norm_kernel(
    x, y, gate, weight, bias, scale, shift, total, out, scales,
    n1, tiles, rows, x0, x1, y0, y1, gate0, gate1, scale0, scale1, shift0, shift1, width, eps, unit, smallest,
    RMS: constexpr, SHARED: constexpr, HEAD: constexpr, TAIL: constexpr, WHOLE: constexpr, TILE: constexpr,
    AHEAD: constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    i0 = (program // tiles).to(tl.int64)
    first = (program % tiles) * rows
    last = tl.minimum(first + rows, n1)
    x += i0 * x0
    if y is not None:
        y += i0 * y0
        total += i0 * n1 * width
        if gate is not None:
            gate += i0 * gate0
    if scale is not None:
        scale += i0 * scale0
    if shift is not None:
        shift += i0 * shift0
    if out is not None:
        out += i0 * n1 * width
    if scales is not None:
        scales += i0 * n1
    lanes = tl.arange(0, TILE)
    head = tl.arange(0, HEAD)
    now = first + lanes
    if TAIL > 0:
        tail = HEAD + tl.arange(0, TAIL)
        # Without a mask the loads of a row that its two pieces fill stay whole.
        mask = None if WHOLE else tail < width
    if SHARED:
        gate_head = _gate(gate, now, last, 0, head, None, True)
        factor_head = _factor(weight, scale, now, last, 0, head, None, True)
        offset_head = _offset(bias, scale, shift, now, last, 0, 0, head, None, True)
        if TAIL > 0:
            gate_tail = _gate(gate, now, last, 0, tail, mask, True)
            factor_tail = _factor(weight, scale, now, last, 0, tail, mask, True)
            offset_tail = _offset(bias, scale, shift, now, last, 0, 0, tail, mask, True)
    next_v, next_y = tile_pair(x, y, now, last, x1, y1, head, None)
    if TAIL > 0:
        next_w, next_z = tile_pair(x, y, now, last, x1, y1, tail, mask)
    for start in range(first, last, TILE):
        now = start + lanes
        v, added = next_v, next_y
        if AHEAD:
            next_v, next_y = tile_pair(x, y, now + TILE, last, x1, y1, head, None)
        if TAIL > 0:
            w, added_w = next_w, next_z
            if AHEAD:
                next_w, next_z = tile_pair(x, y, now + TILE, last, x1, y1, tail, mask)
        if not SHARED:
            gate_head = _gate(gate, now, last, gate1, head, None, False)
        v = _residual(v, y, added, gate_head, total, now, last, width, head, None)
        if TAIL > 0:
            if not SHARED:
                gate_tail = _gate(gate, now, last, gate1, tail, mask, False)
            w = _residual(w, y, added_w, gate_tail, total, now, last, width, tail, mask)
        if out is not None:
            if not RMS:
                # Differences first: mean(x^2) - mean^2 in float32 is off by thousands for rows around 1e4.
                mean = tl.sum(v, 1)
                if TAIL > 0:
                    mean += tl.sum(w, 1)
                mean = (mean / width)[:, None]
                v -= mean
                if TAIL > 0:
                    w -= mean
                    if not WHOLE:
                        w = tl.where(mask[None, :], w, 0.0)
            squares = tl.sum(v * v, 1)
            if TAIL > 0:
                squares += tl.sum(w * w, 1)
            norm = (1.0 / tl.sqrt(squares / width + eps))[:, None]
            if not SHARED:
                factor_head = _factor(weight, scale, now, last, scale1, head, None, False)
                offset_head = _offset(bias, scale, shift, now, last, scale1, shift1, head, None, False)
            v = v * norm * factor_head + offset_head
            if TAIL > 0:
                if not SHARED:
                    factor_tail = _factor(weight, scale, now, last, scale1, tail, mask, False)
                    offset_tail = _offset(bias, scale, shift, now, last, scale1, shift1, tail, mask, False)
                w = w * norm * factor_tail + offset_tail
            if scales is not None:
                peaks = row_peaks(v)
                if TAIL > 0:
                    peaks = tl.maximum(peaks, row_peaks(w))
                factors = row_factors(peaks, scales, now, last, unit, smallest)
                v *= factors
                if TAIL > 0:
                    w *= factors
            _store(out, v, now, last, width, head, None)
            if TAIL > 0:
                _store(out, w, now, last, width, tail, mask)


@jit
def _residual_of_block(x, y, gate, total, cols, mask):
    v = load(x, cols, mask)
    if y is not None:
        added = load(y, cols, mask)
        if gate is not None:
            added = added * load(gate, cols, mask)
        rounded = (v + added).to(total.dtype.element_ty)
        tl.store(total + cols, rounded, mask=mask)
        v = rounded.to(tl.float32)
    return v


@jit
def _modulated_block(v, norm, weight, bias, scale, shift, cols, mask):
    v = v * norm
    if weight is not None:
        v = v * load(weight, cols, mask)
    if bias is not None:
        v = v + load(bias, cols, mask)
    if scale is not None:
        v = v * (1.0 + load(scale, cols, mask))
    if shift is not None:
        v = v + load(shift, cols, mask)
    return tl.where(mask, v, 0.0)


@jit(do_not_specialize=["n1"])
def _norm_wide_kernel(
    x, y, gate, weight, bias, scale, shift, total, out, scales,
    n1, x0, x1, y0, y1, gate0, gate1, scale0, scale1, shift0, shift1, width, eps, unit, smallest,
    RMS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    i0, i1 = (row // n1).to(tl.int64), (row % n1).to(tl.int64)
    at = row.to(tl.int64) * width
    x += i0 * x0 + i1 * x1
    if y is not None:
        y += i0 * y0 + i1 * y1
        total += at
        if gate is not None:
            gate += i0 * gate0 + i1 * gate1
    if scale is not None:
        scale += i0 * scale0 + i1 * scale1
    if shift is not None:
        shift += i0 * shift0 + i1 * shift1
    lanes = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        cols = start + lanes
        sums += _residual_of_block(x, y, gate, total, cols, cols < width)
    if out is not None:
        mean = tl.sum(sums if not RMS else tl.zeros([BLOCK], tl.float32), 0) / width
        squares = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            cols = start + lanes
            v = _residual_of_block(x, y, gate, total, cols, cols < width)
            v = tl.where(cols < width, v - mean, 0.0)
            squares += v * v
        norm = 1.0 / tl.sqrt(tl.sum(squares, 0) / width + eps)
        factor = 1.0
        if scales is not None:
            peaks = tl.zeros([1], tl.int32)
            for start in range(0, width, BLOCK):
                cols = start + lanes
                v = _residual_of_block(x, y, gate, total, cols, cols < width) - mean
                v = _modulated_block(v, norm, weight, bias, scale, shift, cols, cols < width)
                peaks = tl.maximum(peaks, row_peaks(v[None, :]))
            rows = row + tl.arange(0, 1)
            factor = row_factors(peaks, scales, rows, row + 1, unit, smallest)
            factor = tl.sum(factor)
        for start in range(0, width, BLOCK):
            cols = start + lanes
            v = _residual_of_block(x, y, gate, total, cols, cols < width) - mean
            v = _modulated_block(v, norm, weight, bias, scale, shift, cols, cols < width) * factor
            tl.store(out + at + cols, v.to(out.dtype.element_ty), mask=cols < width)


Quantized = tuple[torch.Tensor, torch.Tensor]


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor | Quantized:
    """x / sqrt(mean(x^2) + eps) * weight + bias over the last dimension.

    x: [..., D] float16, bfloat16 or float32, any strides. weight, bias: [D], any float dtype, or None. Returns a
    contiguous tensor of x's shape in out_dtype, x's own where not given; for an FP8 out_dtype (values, scales [..., 1])
    as `per_token_quant_fp8` gives them. Raises ValueError for another dtype or a vector that is not [D]. Fewer than
    2^31 rows.
    """
    return _launch("rms_norm", x, weight, bias, eps, rms=True, out_dtype=out_dtype)[1]


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor | Quantized:
    """n * (1 + scale) + shift with n = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias; var divides by D.

    scale, shift: broadcastable to x, as `fused_scale_shift` takes them, or None. Everything else as for `rms_norm`.
    """
    return _launch("layer_norm", x, weight, bias, eps, scale=scale, shift=shift, out_dtype=out_dtype)[1]


def add_layer_norm(
    x: torch.Tensor,
    y: torch.Tensor,
    gate: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | Quantized]:
    """(total, `layer_norm` of it) with total = x + gate * y rounded to x's dtype, in one pass.

    y: x's shape, any float dtype and strides.  gate: broadcastable to x, as scale and shift are, or None for 1.
    out_dtype: y's where not given. Everything else as for `layer_norm`. Raises ValueError for a y of another shape.
    """
    around = {"y": y, "gate": gate, "scale": scale, "shift": shift}
    return _launch("add_layer_norm", x, weight, bias, eps, **around, out_dtype=out_dtype or y.dtype)


def add_gated(x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
    """x + gate * y, rounded once to x's dtype: the first half of `add_layer_norm`, with its arguments and errors."""
    return _launch("add_gated", x, None, None, 0.0, y=y, gate=gate, normed=False)[0]


def _launch(
    name, x, weight, bias, eps, rms=False, y=None, gate=None, scale=None, shift=None, out_dtype=None, normed=True
) -> tuple[torch.Tensor | None, torch.Tensor | Quantized | None]:
    out_dtype = out_dtype or x.dtype
    inputs = (x, y, gate, weight, bias, scale, shift)
    signature, pointers = launch.signature(*inputs)
    key = (name, out_dtype, eps, signature)
    replay = launch.find_replay(key)
    if replay is None:
        _check(name, x, y, weight, bias)
    total = None if y is None else contiguous_like(x, x.dtype)
    out = contiguous_like(x, out_dtype) if normed else None
    scales = scales_of(x) if out_dtype in FP8_DTYPES else None
    if replay is not None:
        replay(*pointers, *(t if t is None else t.data_ptr() for t in (total, out, scales)))
    elif x.numel() > 0:
        _launch_first(key, inputs, total, out, scales, eps, rms)
    return total, out if scales is None else (out, scales)


def _check(name, x, y, weight, bias) -> None:
    check(name, x, x.shape[-1], weight=weight, bias=bias)
    if y is not None and y.shape != x.shape:
        raise ValueError(f"{name}: y has shape {tuple(y.shape)}, x has {tuple(x.shape)}")


def _launch_first(key, inputs, total, out, scales, eps, rms) -> None:
    """Launch what `inputs` need, and keep it where it is one launch on them as they lie."""
    x, y, gate, weight, bias, scale, shift = inputs
    weight, bias = (t if t is None else t.contiguous() for t in (weight, bias))
    x, y = dense_columns(x), y if y is None else dense_columns(y)
    gate, scale, shift = (t if t is None else spread(t, x, dense=True) for t in (gate, scale, shift))
    # A row's scale lies beside all of its elements.
    given = (x, y, gate, scale, shift, total, out, scales if scales is None else scales.expand(x.shape))
    present = [t for t in given if t is not None]
    launched = []
    for views in token_views(*present):
        found = iter(views)
        x, y, gate, scale, shift, total, out, scales = (None if t is None else next(found) for t in given)
        tensors = (x, y, gate, weight, bias, scale, shift, total, out, scales)
        launched.append((tensors, _run(tensors, eps, rms)))
    if len(launched) == 1:
        tensors, program = launched[0]
        if all(a is b or a.data_ptr() == b.data_ptr() for a, b in zip(inputs, tensors)):
            launch.keep_replay(key, *program)


def _run(tensors, eps, rms) -> tuple[object, int, tuple]:
    """One launch for views of rank 3: its program, its grid and the arguments behind the tensors."""
    x, y, gate, _, _, scale, shift, _, out, scales = tensors
    n0, n1, width = x.shape
    steps = [(0, 0) if t is None else t.stride()[:2] for t in (x, y, gate, scale, shift)]
    strides = [step for pair in steps for step in pair]
    quantized = (0.0, 0.0) if scales is None else constants_of(out.dtype)
    if width > launch.MAX_IN_REGISTERS:
        others = (n1, *strides, width, eps, *quantized, rms, BLOCK_OF_WIDE_ROWS)
        return _norm_wide_kernel[(n0 * n1,)](*tensors, *others, num_warps=8), n0 * n1, others
    kernel = ("rms_norm" if rms else "norm") if y is None else "add_norm"
    settings = launch.launch_of(kernel if scales is None else f"{kernel}_fp8", width, x)
    tiles = -(-n1 // settings.rows)
    head, tail = pieces(width)
    shared = not any(step for _, step in steps[2:])
    others = (n1, tiles, settings.rows, *strides, width, eps, *quantized)
    others += (rms, shared, head, tail, head + tail == width, settings.tile, settings.rows > settings.tile)
    warps = launch.warps_of_threads(settings.threads, x)
    return _norm_kernel[(n0 * tiles,)](*tensors, *others, num_warps=warps), n0 * tiles, others
