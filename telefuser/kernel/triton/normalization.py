"""RMS and layer norm of rows in one pass over memory, with what surrounds them in a transformer: a gated residual
addition before and a scale and shift after. Called by `telefuser.ops.normalization` and `telefuser.ops.residual_norm`.

A row lies in registers as two pieces, so it is read once; weights and modulation are applied in float32 and the result
is rounded once. Rows too wide for registers are walked in blocks, and the later passes read the cache.
"""

from __future__ import annotations

import torch

from telefuser.kernel import constexpr, jit, tl
from telefuser.kernel.triton import launch
from telefuser.kernel.triton.rows import check, dense_columns, load, pieces, spread, token_views

BLOCK_OF_WIDE_ROWS = 4096


@jit
def _residual(x, y, y_at, gate, gate_at, total, cols, mask):
    """x, or x + gate * y, which is rounded to the dtype of `total`, stored there, and goes on as rounded."""
    v = load(x, cols, mask)
    if y is not None:
        added = load(y + y_at, cols, mask)
        if gate is not None:
            added = added * load(gate + gate_at, cols, mask)
        rounded = (v + added).to(total.dtype.element_ty)
        tl.store(total + cols, rounded, mask=mask)
        v = rounded.to(tl.float32)
    return v


@jit
def _factor(weight, scale, scale_at, cols, mask):
    factor = 1.0
    if scale is not None:
        factor = 1.0 + load(scale + scale_at, cols, mask)
    if weight is not None:
        factor = factor * load(weight, cols, mask)
    return factor


@jit
def _offset(bias, scale, scale_at, shift, shift_at, cols, mask):
    """What bias and shift add behind the factor: (n * weight + bias) * (1 + scale) + shift."""
    offset = 0.0
    if bias is not None:
        offset = load(bias, cols, mask)
        if scale is not None:
            offset = offset * (1.0 + load(scale + scale_at, cols, mask))
    if shift is not None:
        offset = offset + load(shift + shift_at, cols, mask)
    return offset


@jit(do_not_specialize=["n1", "tiles", "rows"])
def _norm_kernel(
    x, y, gate, weight, bias, scale, shift, total, out,
    n1, tiles, rows, x0, x1, y0, y1, gate0, gate1, scale0, scale1, shift0, shift1, width, eps,
    RMS: constexpr, SHARED: constexpr, HEAD: constexpr, TAIL: constexpr, STAGES: constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    i0 = (program // tiles).to(tl.int64)
    first = ((program % tiles) * rows).to(tl.int64)
    head = tl.arange(0, HEAD)
    if TAIL > 0:
        tail = HEAD + tl.arange(0, TAIL)
        mask = tail < width
    if SHARED:
        factor_head = _factor(weight, scale, i0 * scale0, head, None)
        offset_head = _offset(bias, scale, i0 * scale0, shift, i0 * shift0, head, None)
        if TAIL > 0:
            factor_tail = _factor(weight, scale, i0 * scale0, tail, mask)
            offset_tail = _offset(bias, scale, i0 * scale0, shift, i0 * shift0, tail, mask)
    for i in tl.range(0, tl.minimum(rows, n1 - first).to(tl.int32), num_stages=STAGES):
        i1 = first + i
        at = (i0 * n1 + i1) * width
        y_at, gate_at = i0 * y0 + i1 * y1, i0 * gate0 + i1 * gate1
        scale_at, shift_at = i0 * scale0 + i1 * scale1, i0 * shift0 + i1 * shift1
        x_row = x + i0 * x0 + i1 * x1
        total_row = total
        if total is not None:
            total_row = total + at
        v = _residual(x_row, y, y_at, gate, gate_at, total_row, head, None)
        if TAIL > 0:
            w = _residual(x_row, y, y_at, gate, gate_at, total_row, tail, mask)
        if out is not None:
            if not RMS:
                # Differences first: mean(x^2) - mean^2 in float32 is off by thousands for rows around 1e4.
                mean = tl.sum(v, 0)
                if TAIL > 0:
                    mean += tl.sum(w, 0)
                mean /= width
                v -= mean
                if TAIL > 0:
                    w = tl.where(mask, w - mean, 0.0)
            squares = tl.sum(v * v, 0)
            if TAIL > 0:
                squares += tl.sum(w * w, 0)
            norm = 1.0 / tl.sqrt(squares / width + eps)
            if not SHARED:
                factor_head = _factor(weight, scale, scale_at, head, None)
                offset_head = _offset(bias, scale, scale_at, shift, shift_at, head, None)
            v = v * norm * factor_head + offset_head
            tl.store(out + at + head, v.to(out.dtype.element_ty))
            if TAIL > 0:
                if not SHARED:
                    factor_tail = _factor(weight, scale, scale_at, tail, mask)
                    offset_tail = _offset(bias, scale, scale_at, shift, shift_at, tail, mask)
                w = w * norm * factor_tail + offset_tail
                tl.store(out + at + tail, w.to(out.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["n1"])
def _norm_wide_kernel(
    x, y, gate, weight, bias, scale, shift, total, out,
    n1, x0, x1, y0, y1, gate0, gate1, scale0, scale1, shift0, shift1, width, eps,
    RMS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    i0, i1 = (row // n1).to(tl.int64), (row % n1).to(tl.int64)
    at = row.to(tl.int64) * width
    y_at, gate_at = i0 * y0 + i1 * y1, i0 * gate0 + i1 * gate1
    scale_at, shift_at = i0 * scale0 + i1 * scale1, i0 * shift0 + i1 * shift1
    x += i0 * x0 + i1 * x1
    if total is not None:
        total += at
    lanes = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        cols = start + lanes
        sums += _residual(x, y, y_at, gate, gate_at, total, cols, cols < width)
    if out is not None:
        mean = tl.sum(sums if not RMS else tl.zeros([BLOCK], tl.float32), 0) / width
        squares = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            cols = start + lanes
            v = _residual(x, y, y_at, gate, gate_at, total, cols, cols < width)
            v = tl.where(cols < width, v - mean, 0.0)
            squares += v * v
        norm = 1.0 / tl.sqrt(tl.sum(squares, 0) / width + eps)
        for start in range(0, width, BLOCK):
            cols = start + lanes
            mask = cols < width
            v = _residual(x, y, y_at, gate, gate_at, total, cols, mask)
            v = (v - mean) * norm * _factor(weight, scale, scale_at, cols, mask)
            v += _offset(bias, scale, scale_at, shift, shift_at, cols, mask)
            tl.store(out + at + cols, v.to(out.dtype.element_ty), mask=mask)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight + bias over the last dimension.

    x: [..., D] float16, bfloat16 or float32, any strides. weight, bias: [D], any float dtype, or None. Returns a
    contiguous tensor of x's shape and dtype. Raises ValueError for another dtype or a vector that is not [D]. Fewer
    than 2^31 rows.
    """
    return _launch("rms_norm", x, weight, bias, eps, rms=True)[1]


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """n * (1 + scale) + shift with n = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias; var divides by D.

    scale, shift: broadcastable to x, as `fused_scale_shift` takes them, or None.  out_dtype: x's where not given.
    Everything else as for `rms_norm`.
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """(total, `layer_norm` of it) with total = x + gate * y rounded to x's dtype, in one pass.

    y: x's shape, any float dtype and strides.  gate: broadcastable to x, as scale and shift are, or None for 1.
    out_dtype: y's where not given. Everything else as for `layer_norm`. Raises ValueError for a y of another shape.
    """
    return _launch(
        "add_layer_norm", x, weight, bias, eps, y=y, gate=gate, scale=scale, shift=shift, out_dtype=out_dtype or y.dtype
    )


def add_gated(x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
    """x + gate * y, rounded once to x's dtype: the first half of `add_layer_norm`, with its arguments and errors."""
    return _launch("add_gated", x, None, None, 0.0, y=y, gate=gate, normed=False)[0]


def _launch(
    name, x, weight, bias, eps, rms=False, y=None, gate=None, scale=None, shift=None, out_dtype=None, normed=True
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    width = x.shape[-1]
    check(name, x, width, weight=weight, bias=bias)
    if y is not None and y.shape != x.shape:
        raise ValueError(f"{name}: y has shape {tuple(y.shape)}, x has {tuple(x.shape)}")
    total = None if y is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device) if normed else None
    if x.numel() == 0:
        return total, out
    weight = weight if weight is None else weight.contiguous()
    bias = bias if bias is None else bias.contiguous()
    x, y = dense_columns(x), y if y is None else dense_columns(y)
    gate = gate if gate is None else spread(gate, x, dense=True)
    scale = scale if scale is None else spread(scale, x, dense=True)
    shift = shift if shift is None else spread(shift, x, dense=True)
    given = (x, y, gate, scale, shift, total, out)
    if x.dim() == 3:
        # The models' rank is its own only view; without a search for others a call costs the host 10 us, not 12.
        _run(*given, weight, bias, eps, rms)
        return total, out
    present = [t for t in given if t is not None]
    for views in token_views(*present):
        found = iter(views)
        _run(*(None if t is None else next(found) for t in given), weight, bias, eps, rms)
    return total, out


def _run(x, y, gate, scale, shift, total, out, weight, bias, eps, rms) -> None:
    """One launch for views of rank 3."""
    n0, n1, width = x.shape
    tensors = (x, y, gate, weight, bias, scale, shift, total, out)
    scale_steps, shift_steps = _steps(scale), _steps(shift)
    strides = (*_steps(x), *_steps(y), *_steps(gate), *scale_steps, *shift_steps)
    if width > launch.MAX_IN_REGISTERS:
        _norm_wide_kernel[(n0 * n1,)](
            *tensors, n1, *strides, width, eps, RMS=rms, BLOCK=BLOCK_OF_WIDE_ROWS, num_warps=8
        )
        return
    threads, rows, stages = launch.launch_of("norm" if y is None else "add_norm", width, x)
    tiles = -(-n1 // rows)
    head, tail = pieces(width)
    _norm_kernel[(n0 * tiles,)](
        *tensors, n1, tiles, rows, *strides, width, eps,
        RMS=rms, SHARED=not (scale_steps[1] or shift_steps[1]), HEAD=head, TAIL=tail, STAGES=stages,
        num_warps=launch.warps_of_threads(threads, x),
    )  # fmt: skip


def _steps(x: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if x is None else x.stride()[:2]
