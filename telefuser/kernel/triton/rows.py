"""What the row kernels share: a program handles a row, or a tile of rows, of a tensor of any rank and strides.

A tensor of rank 4 or less is walked through its strides as they are (stride 0 of a broadcast included), without a copy.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from telefuser.kernel import constexpr, jit, tl

# float64 is left to PyTorch: the kernels accumulate in float32.
KERNEL_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})


@jit
def row_offset(row, n1, n2, s0, s1, s2):
    """Element offset (64-bit) of row number `row` of a [n0, n1, n2, D] tensor with leading strides s0, s1, s2."""
    # Row numbers stay below 2^31 (grid axis 0), so the divisions are 32-bit; only the products need 64 bits.
    i0 = (row // n2 // n1).to(tl.int64)
    i1 = (row // n2 % n1).to(tl.int64)
    i2 = (row % n2).to(tl.int64)
    return i0 * s0 + i1 * s1 + i2 * s2


@jit
def load(pointer, cols, mask):
    """Neighbouring elements in float32; mask None where all lanes are in the row, so that the load stays whole."""
    if mask is None:
        v = tl.load(pointer + cols)
    else:
        v = tl.load(pointer + cols, mask=mask, other=0.0)
    return v.to(tl.float32)


@jit
def tile(pointer, rows, last, step, cols, mask):
    """Rows of neighbouring elements as stored, [rows, cols]; zero in rows from `last` on and where mask is not set."""
    there = (rows < last)[:, None]
    if mask is not None:
        there = there & mask[None, :]
    return tl.load(pointer + rows.to(tl.int64)[:, None] * step + cols[None, :], mask=there, other=0.0)


@jit
def tile_pair(x, y, rows, last, x_step, y_step, cols, mask):
    """The tiles of x and of y; without y x's twice."""
    v = tile(x, rows, last, x_step, cols, mask)
    if y is not None:
        return v, tile(y, rows, last, y_step, cols, mask)
    else:
        return v, v


@jit
def vector(pointer, rows, last, step, cols, mask, SHARED: constexpr):
    """What stands beside a tile in float32: [1, cols] that all rows share, or [rows, cols]."""
    if SHARED:
        v = load(pointer, cols, mask)[None, :]
    else:
        v = tile(pointer, rows, last, step, cols, mask).to(tl.float32)
    return v


def contiguous_like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised contiguous tensor of x's shape. `empty_like`, which keeps strides, takes 4 us, `empty` 9."""
    if not x.is_contiguous():
        return torch.empty(x.shape, dtype=dtype, device=x.device)
    return torch.empty_like(x) if dtype is x.dtype else torch.empty_like(x, dtype=dtype)


def sizes(x: torch.Tensor) -> tuple[int, int, int, int]:
    """The shape of `x` (rank 1 to 4) with ones in front."""
    return (1,) * (4 - x.dim()) + tuple(x.shape)


def strides(x: torch.Tensor) -> tuple[int, int, int, int]:
    """The strides of `x` (rank 1 to 4) with zeros in front."""
    return (0,) * (4 - x.dim()) + x.stride()


def block_of(width: int, limit: int) -> int:
    """The smallest power of two that holds `width`, at most `limit`."""
    return min(1 << max(width - 1, 0).bit_length(), limit)


def warps_of(elements: int) -> int:
    """Warps for a program that handles `elements` at a time: about 8 elements a thread, at most 8 warps."""
    return min(max(elements // 256, 1), 8)


def check(name: str, x: torch.Tensor, width: int | None = None, **vectors: torch.Tensor | None) -> None:
    """Refuse what kernel `name` would compute wrongly: other dtypes, and vectors without `width` elements."""
    if x.dtype not in KERNEL_DTYPES:
        raise ValueError(f"{name} takes float16, bfloat16 or float32, not {x.dtype}; use the operator's forward_native")
    for key, vector in vectors.items():
        if vector is not None and vector.shape != (width,):
            raise ValueError(f"{name}: {key} has shape {tuple(vector.shape)}, the rows of x have {width} elements")


def row_views(*tensors: torch.Tensor) -> Iterable[tuple[torch.Tensor, ...]]:
    """Views of rank 4 or less that cover `tensors` (of one shape); several only where five dimensions do not fold."""
    if tensors[0].dim() == 0:
        return (tuple(t[None] for t in tensors),)
    if tensors[0].dim() <= 4:
        return (tensors,)
    tensors = _fold(tensors)
    if tensors[0].dim() <= 4:
        return (tensors,)
    return [views for parts in zip(*(t.unbind(0) for t in tensors)) for views in row_views(*parts)]


def _fold(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Merge neighbouring leading dimensions wherever every tensor's strides allow it."""
    folded: list[tuple[int, list[int]]] = []
    for size, *steps in zip(tensors[0].shape[:-1], *(t.stride()[:-1] for t in tensors)):
        if size == 1:
            continue
        if folded and all(outer == inner * size for outer, inner in zip(folded[-1][1], steps)):
            folded[-1] = (folded[-1][0] * size, steps)
        else:
            folded.append((size, steps))
    shape = [size for size, _ in folded] + [tensors[0].shape[-1]]
    return tuple(t.as_strided(shape, [steps[i] for _, steps in folded] + [t.stride(-1)]) for i, t in enumerate(tensors))


def token_views(*tensors: torch.Tensor) -> Iterable[tuple[torch.Tensor, ...]]:
    """As `row_views`, of rank 3 exactly: fewer strides for a launch to pass on."""
    rank = tensors[0].dim()
    if rank == 3:
        return (tensors,)
    if rank < 3:
        return (tuple(t[(None,) * (3 - rank)] for t in tensors),)
    tensors = _fold(tensors)
    if tensors[0].dim() <= 3:
        return token_views(*tensors)
    return [views for parts in zip(*(t.unbind(0) for t in tensors)) for views in token_views(*parts)]


@functools.lru_cache(1024)
def pieces(width: int) -> tuple[int, int]:
    """Powers of two (head, tail) with head <= width <= head + tail; the tail is 0 where the head is all.

    A row of 1536 is 1024 + 512 and one of 5120 is 4096 + 1024, without idle lanes: a single block would be 2048, 8192.
    """
    head = 1 << (width.bit_length() - 1)
    return head, block_of(width - head, head) if width > head else 0


def spread(vector: torch.Tensor, x: torch.Tensor, dense: bool = False) -> torch.Tensor:
    """A view of `vector` with x's shape; a [B, D] beside a [B, S, D] x means [B, 1, D].

    dense: with neighbouring columns, for which the rows that `vector` itself has are copied where they lack them.
    """
    if vector.dim() == 2 and x.dim() == 3:
        vector = vector.unsqueeze(1)
    if dense:
        vector = dense_columns(vector.expand(*vector.shape[:-1], x.shape[-1]))
    return vector.expand(x.shape)


def dense_columns(x: torch.Tensor) -> torch.Tensor:
    """`x`, copied only where its last dimension does not lie element after element."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
