"""What the attention kernels share: reading a tile of keys or values, and one step of the softmax over it."""

from __future__ import annotations

import torch

from telefuser.kernel import constexpr, jit, tl


@jit
def read_tile(x, start, batch, head, step, lanes, TMA: constexpr, SIZE: constexpr, HEAD_DIM: constexpr):
    """SIZE tokens of x from `start` on, [SIZE, HEAD_DIM]; past the end by TMA zeros, else not to be asked for."""
    if TMA:
        tile = x.load([batch, head, start, 0]).reshape(SIZE, HEAD_DIM)
    else:
        tile = tl.load(x + tl.cast(start, tl.int64) * step + lanes)
    return tile


@jit
def softmax_step(scores, scale, top, total, acc):
    """One step of the online softmax: weights of `scores`, and the state of the rows after them."""
    new = tl.maximum(top, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new[:, None])
    shrink = tl.exp2(top - new)
    return weights, new, total * shrink + tl.sum(weights, 1), acc * shrink[:, None]


def fits_descriptor(x: torch.Tensor) -> bool:
    """The accelerator reads from addresses and in steps of 16 bytes."""
    steps = (step * x.itemsize for size, step in zip(x.shape[:3], x.stride()) if size > 1)
    return x.itemsize <= 2 and x.data_ptr() % 16 == 0 and all(step % 16 == 0 for step in steps)


def descriptor(x: torch.Tensor, columns: int):
    """What the tensor memory accelerator reads tiles of x [B, N, S, D] by, `columns` tokens of a head at a time."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    # A dimension of size 1 may have any stride, and is never stepped along.
    steps = [step if size > 1 else 16 for size, step in zip(x.shape[:3], x.stride())]
    return TensorDescriptor(x, list(x.shape), [*steps, 1], [1, 1, columns, x.shape[3]])
