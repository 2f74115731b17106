"""Activations of a tensor, and of one half of its last dimension times the other. Called by
`telefuser.ops.activations`.

Arithmetic is float32 and the result is rounded once, so the gated forms lose nothing between the activation and the
product.
"""

from __future__ import annotations

import torch

from telefuser.kernel import constexpr, jit, tl
from telefuser.kernel.triton.launch import warps_of_threads
from telefuser.kernel.triton.rows import block_of, check, row_offset, row_views, sizes, strides, warps_of

ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu", "silu")
MAX_BLOCK = 2048
# A contiguous tensor is one long row, cut where it suits: 16 elements a thread of 128.
FLAT_BLOCK, FLAT_THREADS = 2048, 128


@jit
def _activation(v, ACTIVATION: constexpr):
    if ACTIVATION == "gelu":
        result = 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 * (1 + tanh(u)) is sigmoid(2u), which needs no tanh and loses no digits for negative u.
        result = v * tl.sigmoid(1.5957691216057308 * (v + 0.044715 * v * v * v))
    elif ACTIVATION == "quick_gelu":
        result = v * tl.sigmoid(1.702 * v)
    else:
        result = v * tl.sigmoid(v)
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
        tl.store(out + cols, _activation(v, ACTIVATION).to(out.dtype.element_ty), mask=mask)


@jit
def _activate_flat_kernel(x, out, elements, ACTIVATION: constexpr, BLOCK: constexpr):
    cols = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < elements
    v = _activation(tl.load(x + cols, mask=mask, other=0.0).to(tl.float32), ACTIVATION)
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
        v = _activation(tl.load(gate + at, mask=mask, other=0.0).to(tl.float32), ACTIVATION)
        v = v * tl.load(hidden + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + cols, v.to(out.dtype.element_ty), mask=mask)


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(x), elementwise.

    x: any shape and strides, float16, bfloat16 or float32. activation: "gelu" (exact), "gelu_tanh", "quick_gelu" (x *
    sigmoid(1.702 x)) or "silu". Returns a contiguous tensor of x's shape and dtype. Raises ValueError for another
    dtype or name.
    """
    _check("activate", x, activation)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    if x.is_contiguous():
        _activate_flat_kernel[(-(-x.numel() // FLAT_BLOCK),)](
            x, out, x.numel(), ACTIVATION=activation, BLOCK=FLAT_BLOCK, num_warps=warps_of_threads(FLAT_THREADS, x)
        )
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
    _check("activate_and_mul", x, activation)
    if x.shape[-1] % 2:
        raise ValueError(f"activate_and_mul splits the last dimension in two halves; it is {x.shape[-1]}")
    first, second = x.chunk(2, dim=-1)
    gate, hidden = (first, second) if gate_first else (second, first)
    out = torch.empty(gate.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    for gates, values, target in row_views(gate, hidden, out):
        n0, n1, n2, width = sizes(gates)
        block = block_of(width, MAX_BLOCK)
        _activate_and_mul_kernel[(n0 * n1 * n2,)](
            gates, values, target, n1, n2, *strides(gates),
            width, ACTIVATION=activation, BLOCK=block, num_warps=warps_of(block),
        )  # fmt: skip
    return out


def _check(name: str, x: torch.Tensor, activation: str) -> None:
    check(name, x)
    if activation not in ACTIVATIONS:
        raise ValueError(f"{name} knows {', '.join(ACTIVATIONS)}, not {activation!r}")
