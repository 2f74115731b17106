"""Rotation of every head of a row, and of queries and keys behind an RMS norm over their full width. Called by
`telefuser.ops.rotary`.

One program takes the query and the key of a token, so that both use the angles it read, and the next token's are on
their way while it computes. Neighbouring pairs lie in one thread: a row is read and written in whole vectors, and pairs
are taken apart in registers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from telefuser.kernel import constexpr, jit, tl
from telefuser.kernel.triton import launch
from telefuser.kernel.triton.rows import check, contiguous_like, dense_columns, load, pieces


@jit
def turn(a, b, cos, sin):
    """(a, b) turned. What is rounded before the sum is written out: the same numbers whichever kernel does it."""
    return tl.fma(a, cos, -(b * sin)), tl.fma(a, sin, b * cos)


@jit
def _raw(pointer, cols, mask):
    """A row's elements as stored."""
    if mask is None:
        return tl.load(pointer + cols)
    else:
        return tl.load(pointer + cols, mask=mask, other=0.0)


@jit
def _norm(v, w, width, eps, TAIL: constexpr):
    squares = tl.sum(v * v, 0)
    if TAIL > 0:
        squares += tl.sum(w * w, 0)
    return 1.0 / tl.sqrt(squares / width + eps)


@jit
def _store_turned(v, weight, cols, mask, cos, sin, out, SIZE: constexpr):
    """`v` [SIZE] times the weight, its pairs (2i, 2i+1) turned by cos and sin [SIZE / 2], rounded and stored."""
    if weight is not None:
        v *= load(weight, cols, mask)
    a, b = tl.split(tl.reshape(v, [SIZE // 2, 2]))
    a, b = turn(a, b, cos, sin)
    v = tl.reshape(tl.join(a, b), [SIZE])
    tl.store(out + cols, v.to(out.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["n1", "tiles", "rows"])
def _norm_rotary_kernel(
    q, k, q_weight, k_weight, cos, sin, q_out, k_out,
    n1, tiles, rows, q0, q1, k0, k1, cos0, cos1, sin0, sin1, width, eps,
    NORM: constexpr, HALF: constexpr, HEAD: constexpr, TAIL: constexpr, WHOLE: constexpr, AHEAD: constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    i0 = (program // tiles).to(tl.int64)
    first = (program % tiles) * rows
    last = tl.minimum(first + rows, n1)
    q += i0 * q0
    q_out += i0 * n1 * width
    if k is not None:
        k += i0 * k0
        k_out += i0 * n1 * width
    cos += i0 * cos0
    sin += i0 * sin0
    head = tl.arange(0, HEAD)
    angle = tl.arange(0, HEAD // 2) % HALF
    if TAIL > 0:
        tail = HEAD + tl.arange(0, TAIL)
        pairs = HEAD // 2 + tl.arange(0, TAIL // 2)
        mask = None if WHOLE else tail < width
        pair_mask = None if WHOLE else pairs < width // 2
    if AHEAD:
        at = first.to(tl.int64)
        next_q = _raw(q + at * q1, head, None)
        if TAIL > 0:
            next_q_tail = _raw(q + at * q1, tail, mask)
        if k is not None:
            next_k = _raw(k + at * k1, head, None)
            if TAIL > 0:
                next_k_tail = _raw(k + at * k1, tail, mask)
    for i in range(0, last - first):
        # All loads come before the first sum, which every thread waits for.
        i1 = first.to(tl.int64) + i
        if AHEAD:
            v = next_q.to(tl.float32)
            # The last row is read twice, the second time from the cache.
            at = tl.minimum(i1 + 1, last - 1)
            next_q = _raw(q + at * q1, head, None)
            if TAIL > 0:
                v_tail = next_q_tail.to(tl.float32)
                next_q_tail = _raw(q + at * q1, tail, mask)
            if k is not None:
                w = next_k.to(tl.float32)
                next_k = _raw(k + at * k1, head, None)
                if TAIL > 0:
                    w_tail = next_k_tail.to(tl.float32)
                    next_k_tail = _raw(k + at * k1, tail, mask)
        else:
            v = load(q + i1 * q1, head, None)
            if TAIL > 0:
                v_tail = load(q + i1 * q1, tail, mask)
            if k is not None:
                w = load(k + i1 * k1, head, None)
                if TAIL > 0:
                    w_tail = load(k + i1 * k1, tail, mask)
        cos_row, sin_row = cos + i1 * cos1, sin + i1 * sin1
        if TAIL > 0:
            c_tail, s_tail = load(cos_row, pairs % HALF, pair_mask), load(sin_row, pairs % HALF, pair_mask)
        else:
            v_tail = v
            w_tail = v
        c, s = load(cos_row, angle, None), load(sin_row, angle, None)
        out = i1 * width
        if NORM:
            norm = _norm(v, v_tail, width, eps, TAIL)
            v *= norm
            v_tail *= norm
        _store_turned(v, q_weight, head, None, c, s, q_out + out, HEAD)
        if TAIL > 0:
            _store_turned(v_tail, q_weight, tail, mask, c_tail, s_tail, q_out + out, TAIL)
        if k is not None:
            if NORM:
                norm = _norm(w, w_tail, width, eps, TAIL)
                w *= norm
                w_tail *= norm
            _store_turned(w, k_weight, head, None, c, s, k_out + out, HEAD)
            if TAIL > 0:
                _store_turned(w_tail, k_weight, tail, mask, c_tail, s_tail, k_out + out, TAIL)


def rms_norm_rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_heads: int,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k through `rms_norm` over all C columns, then the pairs (2i, 2i+1) of each head turned, rounded once.

    q, k: [B, S, C] float16, bfloat16 or float32 of one dtype, any strides. q_weight, k_weight: [C] or None. cos, sin:
    broadcastable to [B, S, 1, D/2] with D = C / num_heads even, or [S, D/2]; any float dtype. Returns contiguous
    [B, S, num_heads, D] tensors of q's dtype. Raises ValueError for other shapes and dtypes, and for C above 16384.
    """
    signature, pointers = launch.signature(q, k, q_weight, k_weight, cos, sin)
    key = ("rms_norm_rotary", num_heads, eps, signature)
    replay = launch.find_replay(key)
    if replay is None:
        _check(q, k, q_weight, k_weight, num_heads)
    batch, tokens, width = q.shape
    shape = (batch, tokens, num_heads, width // num_heads)
    q_out, k_out = contiguous_like(q, q.dtype).view(shape), contiguous_like(q, q.dtype).view(shape)
    if replay is not None:
        replay(*pointers, q_out.data_ptr(), k_out.data_ptr())
    elif q.numel() > 0:
        _launch(key, (q, k, q_weight, k_weight, cos, sin), q_out, k_out, eps)
    return q_out, k_out


def rotate_rows(key: tuple, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The pairs (2i, 2i+1) of x [B, S, N, D] turned by cos and sin, as `apply_rotary_embedding` does, row by row.

    Only for what `turns_in_rows` admits. The launch is kept for `key`.
    """
    out = contiguous_like(x, x.dtype)
    _launch(key, (x, None, None, None, cos, sin), out, None, None)
    return out


def replay_rows(replay: Callable[..., None], x: torch.Tensor, pointers: list[int]) -> torch.Tensor:
    """`rotate_rows` once more, for the addresses of other tensors of the same kind."""
    out = contiguous_like(x, x.dtype)
    x_pointer, cos, sin = pointers
    replay(x_pointer, None, None, None, cos, sin, out.data_ptr(), None)
    return out


def turns_in_rows(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether the heads of a token of x [B, S, N, D] lie one after another and share a row of angles."""
    if not x.dim() == cos.dim() == sin.dim() == 4 or x.numel() == 0:
        return False
    _, _, heads, size = x.shape
    lies_in_rows = x.stride(3) == 1 and (heads == 1 or x.stride(2) == size)
    return lies_in_rows and heads * size <= launch.MAX_IN_REGISTERS and cos.shape[2] == sin.shape[2] == 1


def _check(q, k, q_weight, k_weight, num_heads) -> None:
    width = q.shape[-1]
    check("rms_norm_rotary", q, width, q_weight=q_weight, k_weight=k_weight)
    if k.shape != q.shape or k.dtype != q.dtype:
        raise ValueError(f"rms_norm_rotary: q is {q.dtype} {tuple(q.shape)}, k is {k.dtype} {tuple(k.shape)}")
    if q.dim() != 3 or width > launch.MAX_IN_REGISTERS or width % (2 * num_heads):
        raise ValueError(
            f"rms_norm_rotary takes [B, S, C] with C at most {launch.MAX_IN_REGISTERS} and {num_heads} heads of an "
            f"even width, not {tuple(q.shape)}"
        )


def _launch(key, inputs, q_out, k_out, eps) -> None:
    """Launch for q and perhaps k; without eps there is no norm. Kept where the inputs are read as they lie."""
    q, k, q_weight, k_weight, cos, sin = inputs
    batch, tokens, heads, size = q_out.shape
    width, half = heads * size, size // 2
    if eps is not None:
        q, k = dense_columns(q), dense_columns(k)
        q_weight, k_weight = (w if w is None else w.contiguous() for w in (q_weight, k_weight))
    cos, sin = (t[:, None] if t.dim() == 2 else t for t in (cos, sin))
    cos, sin = (dense_columns(t.expand(*t.shape[:-2], 1, half)).expand(batch, tokens, 1, half) for t in (cos, sin))
    settings = launch.launch_of("norm_rotary" if k is not None else "rotary", width, q)
    tiles = -(-tokens // settings.rows)
    head, tail = pieces(width)
    tensors = (q, k, q_weight, k_weight, cos, sin, q_out, k_out)
    steps = [step for t in (q, k, cos, sin) for step in ((0, 0) if t is None else t.stride()[:2])]
    rest = (tokens, tiles, settings.rows, *steps, width, eps or 0.0)
    rest += (eps is not None, half, head, tail, head + tail == width, settings.rows > 1)
    grid = batch * tiles
    warps = launch.warps_of_threads(settings.threads, q)
    program = _norm_rotary_kernel[(grid,)](*tensors, *rest, num_warps=warps)
    if all(a is b or a.data_ptr() == b.data_ptr() for a, b in zip(inputs, tensors)):
        launch.keep_replay(key, program, grid, rest)
