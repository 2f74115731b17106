"""Activations of a tensor, and of one half of its last dimension times the other. Called by
`telefuser.ops.activations`.

Arithmetic is float32 and the result is rounded once, so the gated forms lose nothing between the activation and the
product.
"""

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
    strides,
    warps_of,
)

ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu", "silu")
MAX_BLOCK = 2048
# A contiguous tensor is one long row, cut where it suits: 16 elements a thread of 128.
FLAT_BLOCK, FLAT_THREADS = 2048, 128


@jit
def _sigmoid(v):
    """sigmoid(v / log2(e)). A square of rsqrt in place of a division, and 2^x in place of e^x, are 12 instructions an
    element where the plain form takes 20: with an FP8 result that is the limit, not the memory."""
    root = tl.rsqrt(1.0 + tl.exp2(-v))
    return root * root


@jit
def activated(v, ACTIVATION: constexpr):
    if ACTIVATION == "gelu":
        result = 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 * (1 + tanh(u)) is sigmoid(2u), which needs no tanh and loses no digits for negative u:
        # 2u = 2 sqrt(2 / pi) (v + 0.044715 v^3)
        result = v * _sigmoid(v * (2.302208198144325 + 0.1029432395800235 * (v * v)))
    elif ACTIVATION == "quick_gelu":
        result = v * _sigmoid(2.4554669595930156 * v)
    else:
        result = v * _sigmoid(1.4426950408889634 * v)
    return result


@jit(do_not_specialize=["n1", "n2"])
def _activate_kernel(x, out, n1, n2, s0, s1, s2, s3, width, ACTIVATION: constexpr, BLOCK: constexpr):
    row = tl.program_id(0)
    x += row_offset(row, n1, n2, s0, s1, s2)
    out += row.to(tl.int64) * width
    lanes = tl.arange(0, BLOCK)
    for start in range(0, width, BLOCK):
        cols = start + lanes
        mask = cols < width
        v = tl.load(x + cols.to(tl.int64) * s3, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + cols, activated(v, ACTIVATION).to(out.dtype.element_ty), mask=mask)


@jit
def _activate_flat_kernel(x, out, elements, ACTIVATION: constexpr, BLOCK: constexpr):
    cols = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < elements
    v = activated(tl.load(x + cols, mask=mask, other=0.0).to(tl.float32), ACTIVATION)
    tl.store(out + cols, v.to(out.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["n1", "n2"])
def _activate_and_mul_kernel(gate, hidden, out, n1, n2, s0, s1, s2, s3, width, ACTIVATION: constexpr, BLOCK: constexpr):
    row = tl.program_id(0)
    offset = row_offset(row, n1, n2, s0, s1, s2)
    gate += offset
    hidden += offset
    out += row.to(tl.int64) * width
    lanes = tl.arange(0, BLOCK)
    for start in range(0, width, BLOCK):
        cols = start + lanes
        mask = cols < width
        at = cols.to(tl.int64) * s3
        v = activated(tl.load(gate + at, mask=mask, other=0.0).to(tl.float32), ACTIVATION)
        v = v * tl.load(hidden + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + cols, v.to(out.dtype.element_ty), mask=mask)


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(x), elementwise.

    x: any shape and strides, float16, bfloat16 or float32. activation: "gelu" (exact), "gelu_tanh", "quick_gelu" (x *
    sigmoid(1.702 x)) or "silu". Returns a contiguous tensor of x's shape and dtype. Raises ValueError for another
    dtype or name.
    """
    signature, pointers = launch.signature(x)
    key = ("activate", activation, signature)
    replay = launch.find_replay(key)
    if replay is None:
        _check("activate", x, activation)
    out = contiguous_like(x, x.dtype)
    if replay is not None:
        replay(*pointers, out.data_ptr())
        return out
    if x.numel() == 0:
        return out
    if x.is_contiguous():
        grid = -(-x.numel() // FLAT_BLOCK)
        others = (x.numel(), activation, FLAT_BLOCK)
        warps = launch.warps_of_threads(FLAT_THREADS, x)
        launch.keep_replay(key, _activate_flat_kernel[(grid,)](x, out, *others, num_warps=warps), grid, others)
        return out
    for rows, target in row_views(x, out):
        n0, n1, n2, width = sizes(rows)
        block = block_of(width, MAX_BLOCK)
        _activate_kernel[(n0 * n1 * n2,)](
            rows, target, n1, n2, *strides(rows), width, ACTIVATION=activation, BLOCK=block, num_warps=warps_of(block)
        )
    return out


def activate_and_mul(x: torch.Tensor, activation: str, gate_first: bool = False) -> torch.Tensor:
    """hidden * activation(gate) of the two halves of the last dimension: hidden, gate; with `gate_first` gate, hidden.

    x: [..., 2D] of rank 1 or more, any strides. Returns a contiguous [..., D] of x's dtype. Raises ValueError as
    `activate` does, and for an odd last dimension.
    """
    signature, (start,) = launch.signature(x)
    key = ("activate_and_mul", activation, gate_first, signature)
    replay = launch.find_replay(key)
    if replay is not None:
        out = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
        middle = start + out.shape[-1] * x.stride(-1) * x.element_size()
        replay(*((start, middle) if gate_first else (middle, start)), out.data_ptr())
        return out
    _check("activate_and_mul", x, activation)
    if x.shape[-1] % 2:
        raise ValueError(f"activate_and_mul splits the last dimension in two halves; it is {x.shape[-1]}")
    first, second = x.chunk(2, dim=-1)
    gate, hidden = (first, second) if gate_first else (second, first)
    out = torch.empty(gate.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    views = list(row_views(gate, hidden, out))
    for gates, values, target in views:
        n0, n1, n2, width = sizes(gates)
        block = block_of(width, MAX_BLOCK)
        grid, others = n0 * n1 * n2, (n1, n2, *strides(gates), width, activation, block)
        program = _activate_and_mul_kernel[(grid,)](gates, values, target, *others, num_warps=warps_of(block))
        if len(views) == 1:
            launch.keep_replay(key, program, grid, others)
    return out


def _check(name: str, x: torch.Tensor, activation: str) -> None:
    check(name, x)
    if activation not in ACTIVATIONS:
        raise ValueError(f"{name} knows {', '.join(ACTIVATIONS)}, not {activation!r}")
