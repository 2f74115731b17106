"""RMS norm over the full width of queries and keys, then rotation of each head. Called by `telefuser.ops.rotary`.

One program takes the query and the key of a token, so that both use the angles it read. Neighbouring pairs lie in one
thread: a row is read and written in whole vectors, and pairs are taken apart in registers.
"""

from __future__ import annotations

import torch

from telefuser.kernel import constexpr, jit, tl
from telefuser.kernel.triton import launch
from telefuser.kernel.triton.rows import check, dense_columns, load, pieces


@jit
def _store_turned(v, weight, cols, mask, cos, sin, out, SIZE: constexpr):
    """`v` [SIZE] times the weight, its pairs (2i, 2i+1) turned by cos and sin [SIZE / 2], rounded and stored."""
    if weight is not None:
        v *= load(weight, cols, mask)
    a, b = tl.split(tl.reshape(v, [SIZE // 2, 2]))
    v = tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), [SIZE])
    tl.store(out + cols, v.to(out.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["n1", "tiles", "rows"])
def _rms_norm_rotary_kernel(
    q, k, q_weight, k_weight, cos, sin, q_out, k_out,
    n1, tiles, rows, q0, q1, k0, k1, cos0, cos1, sin0, sin1, width, eps,
    HALF: constexpr, HEAD: constexpr, TAIL: constexpr, STAGES: constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    i0 = (program // tiles).to(tl.int64)
    first = ((program % tiles) * rows).to(tl.int64)
    head = tl.arange(0, HEAD)
    if TAIL > 0:
        tail = HEAD + tl.arange(0, TAIL)
        tail_pairs = HEAD // 2 + tl.arange(0, TAIL // 2)
        mask = tail < width
        pair_mask = tail_pairs < width // 2
    for i in tl.range(0, tl.minimum(rows, n1 - first).to(tl.int32), num_stages=STAGES):
        i1 = first + i
        at = (i0 * n1 + i1) * width
        # All loads come before the first sum, which every thread waits for.
        q_row, cos_row, sin_row = q + i0 * q0 + i1 * q1, cos + i0 * cos0 + i1 * cos1, sin + i0 * sin0 + i1 * sin1
        k_row = k + i0 * k0 + i1 * k1
        q_head, k_head = load(q_row, head, None), load(k_row, head, None)
        if TAIL > 0:
            q_tail, k_tail = load(q_row, tail, mask), load(k_row, tail, mask)
            c_tail, s_tail = load(cos_row, tail_pairs % HALF, pair_mask), load(sin_row, tail_pairs % HALF, pair_mask)
        angle = tl.arange(0, HEAD // 2) % HALF
        c_head, s_head = load(cos_row, angle, None), load(sin_row, angle, None)

        squares = tl.sum(q_head * q_head, 0)
        if TAIL > 0:
            squares += tl.sum(q_tail * q_tail, 0)
        norm = 1.0 / tl.sqrt(squares / width + eps)
        _store_turned(q_head * norm, q_weight, head, None, c_head, s_head, q_out + at, HEAD)
        if TAIL > 0:
            _store_turned(q_tail * norm, q_weight, tail, mask, c_tail, s_tail, q_out + at, TAIL)
        squares = tl.sum(k_head * k_head, 0)
        if TAIL > 0:
            squares += tl.sum(k_tail * k_tail, 0)
        norm = 1.0 / tl.sqrt(squares / width + eps)
        _store_turned(k_head * norm, k_weight, head, None, c_head, s_head, k_out + at, HEAD)
        if TAIL > 0:
            _store_turned(k_tail * norm, k_weight, tail, mask, c_tail, s_tail, k_out + at, TAIL)


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
    broadcastable to [B, S, 1, D/2] with D = C / num_heads even, any float dtype. Returns contiguous [B, S, num_heads,
    D] tensors of q's dtype. Raises ValueError for other shapes and dtypes, and for C above 16384.
    """
    width = q.shape[-1]
    check("rms_norm_rotary", q, width, q_weight=q_weight, k_weight=k_weight)
    if k.shape != q.shape or k.dtype != q.dtype:
        raise ValueError(f"rms_norm_rotary: q is {q.dtype} {tuple(q.shape)}, k is {k.dtype} {tuple(k.shape)}")
    if q.dim() != 3 or width > launch.MAX_IN_REGISTERS or width % (2 * num_heads):
        raise ValueError(
            f"rms_norm_rotary takes [B, S, C] with C at most {launch.MAX_IN_REGISTERS} and {num_heads} heads of an "
            f"even width, not {tuple(q.shape)}"
        )
    batch, tokens, _ = q.shape
    half = width // num_heads // 2
    q_out = torch.empty((batch, tokens, num_heads, 2 * half), dtype=q.dtype, device=q.device)
    k_out = torch.empty(q_out.shape, dtype=q.dtype, device=q.device)
    if q.numel() == 0:
        return q_out, k_out
    cos, sin = (dense_columns(t.expand(-1, -1, 1, half)).expand(batch, tokens, 1, half) for t in (cos, sin))
    q, k = dense_columns(q), dense_columns(k)
    weights = [w if w is None else w.contiguous() for w in (q_weight, k_weight)]
    threads, rows, stages = launch.launch_of("norm_rotary", width, q)
    tiles = -(-tokens // rows)
    head, tail = pieces(width)
    _rms_norm_rotary_kernel[(batch * tiles,)](
        q, k, *weights, cos, sin, q_out, k_out,
        tokens, tiles, rows, *q.stride()[:2], *k.stride()[:2], *cos.stride()[:2], *sin.stride()[:2], width, eps,
        HALF=half, HEAD=head, TAIL=tail, STAGES=stages, num_warps=launch.warps_of_threads(threads, q),
    )  # fmt: skip
    return q_out, k_out
