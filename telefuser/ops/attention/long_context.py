"""`long_context_attention`: attention over a token sequence that the processes of a mesh hold in parts.

Ulysses exchanges tokens for heads, Ring passes keys and values around, USP does both; every result equals attention
over the whole sequence. Shape letters: B batch, S tokens of the whole sequence, N heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from telefuser.core.config import AttentionConfig
from telefuser.distributed import get_attention_strategy, get_group, get_rank, get_world_size
from telefuser.distributed.comm import Ring, gather_heads, gather_numbers, scatter_heads
from telefuser.ops.attention.attention_impl import attention, check_inputs, one_dtype

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_AGREED = ("batch", "query heads", "key heads", "head dim", "head dim of v", "dtype", "is_causal")


def long_context_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention_config: AttentionConfig | None = None,
    sparse_state: object | None = None,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
    input_layout: str = "BSND",
    output_layout: str = "BSND",
    device_mesh: DeviceMesh | None = None,
    is_causal: bool = False,
    *,
    token_counts: Sequence[int] | None = None,
) -> torch.Tensor:
    """`attention` of this process's queries over the keys of all processes that share the sequence.

    q, k, v: this process's part of the tokens, shaped as for `attention`; parts follow each other in the order of the
        mesh dimensions (ring, ulysses) and may have any lengths, 0 included. All processes must call it, with the same
        arguments apart from these lengths. The dtype rules are those of `attention`.
    device_mesh: its dimensions `ulysses` and `ring` say who shares the sequence; None, or a mesh with neither, computes
        `attention(q, k, v, ...)` on this process alone.
    token_counts: the lengths of all parts, where the caller knows them and q and k have the same; without it every call
        exchanges them first, and an input that does not fit raises ValueError on every process.

    Heads need not be a multiple of the Ulysses degree: the first N % degree processes compute one more, and those
    beyond N none. Grouped key heads are sent to every process that reads them.

    Returns this process's part of the output, [B, S_own, N, Dv] in BSND, in v's dtype. Ring merges the blocks by their
    log-sum-exp in float32. Differentiable through Ulysses, not through Ring.
    Raises ValueError for what `attention` refuses; for tensors on another device type than the mesh's; and in a split
    sequence for a mask, for a sparse pattern or dropout on Ring, and for a causal Ring whose q and k parts differ.
    """
    strategy = get_attention_strategy(device_mesh)
    options = {"attention_config": attention_config, "sparse_state": sparse_state, "scale": scale}
    if strategy == "local":
        layouts = {"input_layout": input_layout, "output_layout": output_layout}
        return attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, **options, **layouts)
    problem = None
    try:
        check_inputs(q, k, v, attn_mask, input_layout, output_layout)
        _check_split(q, k, v, attention_config, attn_mask, device_mesh, strategy)
    except (ValueError, RuntimeError, TypeError) as error:
        problem = error
    if problem is not None and token_counts is not None:
        raise problem
    if problem is None:
        q, k, v = one_dtype(q, k, v)
        if input_layout == "BNSD":
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    is_causal = is_causal or (problem is None and attention_config is not None and attention_config.is_causal)
    q_counts, kv_counts = _settle_counts(q, k, v, is_causal, device_mesh, token_counts, problem)
    if is_causal and strategy != "ulysses" and q_counts != kv_counts:
        raise ValueError(f"causal attention on a ring needs q and k split alike, not {q_counts} and {kv_counts}")
    out = _split_attention(q, k, v, device_mesh, q_counts, kv_counts, is_causal, options)
    return out if output_layout == "BSND" else out.transpose(1, 2)


def _check_split(q, k, v, config, attn_mask, device_mesh, strategy):
    if config is not None and not isinstance(config, AttentionConfig):
        raise ValueError(f"attention_config is {config!r}; give an AttentionConfig or None")
    if attn_mask is not None:
        raise ValueError(
            "attn_mask cannot be used where the mesh splits the tokens: no process holds the whole score matrix; "
            "leave the masked keys out of k and v, or compute on one process (device_mesh=None)"
        )
    if q.device.type != device_mesh.device_type:
        group = get_group(device_mesh, "ulysses") or get_group(device_mesh, "ring")
        raise ValueError(
            f"q, k, v are on {q.device} but the mesh exchanges {device_mesh.device_type!r} tensors (backend "
            f"{torch.distributed.get_backend(group)}); move them there or make the mesh for {q.device.type!r}"
        )
    if strategy == "ulysses":
        return
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if needs_grad:
        raise ValueError("Ring has no backward pass; use sp_ulysses_degree alone or call it under torch.no_grad()")
    if config is not None and (config.is_sparse() or config.dropout):
        what = config.attn_impl.name if config.is_sparse() else f"dropout {config.dropout}"
        raise ValueError(f"{what} does not work on Ring, which sees a part of the keys at a time; use Ulysses alone")


def _settle_counts(q, k, v, is_causal, device_mesh, token_counts, problem) -> tuple[list[int], list[int]]:
    """The lengths of the q and of the k parts of all processes, in the order of the tokens."""
    if token_counts is not None:
        counts = list(token_counts)
        num_parts = get_world_size(device_mesh, "ring") * get_world_size(device_mesh, "ulysses")
        own = get_rank(device_mesh, "ring") * get_world_size(device_mesh, "ulysses") + get_rank(device_mesh, "ulysses")
        if len(counts) != num_parts or q.shape[1] != counts[own] or k.shape[1] != counts[own]:
            raise ValueError(
                f"token_counts {counts} do not fit: {num_parts} processes share the tokens, and this one "
                f"(number {own}) holds {q.shape[1]} queries and {k.shape[1]} keys"
            )
        return counts, counts
    if problem is None:
        agreed = [q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3], _DTYPES.index(q.dtype), int(is_causal)]
        numbers = [0, q.shape[1], k.shape[1], *agreed]
    else:
        numbers = [1] + [0] * (2 + len(_AGREED))
    rows = gather_numbers(numbers, device_mesh)
    if problem is not None:
        raise problem
    failed = [index for index, row in enumerate(rows) if row[0]]
    if failed:
        raise ValueError(
            f"part(s) {failed} of the token sequence do not fit attention; their processes' errors say why"
        )
    for row in rows:
        differing = [name for name, own, other in zip(_AGREED, rows[0][3:], row[3:]) if own != other]
        if differing:
            found = [tuple(row[3:]) for row in rows]
            raise ValueError(f"the processes differ in {', '.join(differing)}: {_AGREED} are {found} in token order")
    return [row[1] for row in rows], [row[2] for row in rows]


def _split_attention(q, k, v, device_mesh, q_counts, kv_counts, is_causal, options):
    num_heads, ulysses, ring = q.shape[2], get_group(device_mesh, "ulysses"), get_group(device_mesh, "ring")
    if ulysses is None:
        return _ring_attention(q, k, v, Ring(ring), kv_counts, is_causal, options)
    row = get_rank(device_mesh, "ring") * ulysses.size()
    own_counts = q_counts[row : row + ulysses.size()]
    q, k, v = scatter_heads(q, k, v, ulysses, own_counts, kv_counts[row : row + ulysses.size()])
    if q.shape[2] == 0:
        # Not fresh zeros: the gradient's way back must run on every process, or the others wait for this one.
        out = q[..., :1].expand(*q.shape[:3], v.shape[3])
    elif ring is None:
        out = attention(q, k, v, is_causal=is_causal, **options)
    else:
        blocks = [sum(kv_counts[i : i + ulysses.size()]) for i in range(0, len(kv_counts), ulysses.size())]
        out = _ring_attention(q, k, v, Ring(ring), blocks, is_causal, options)
    return gather_heads(out, ulysses, own_counts, num_heads)


def _ring_attention(q, k, v, ring: Ring, kv_counts: list[int], is_causal: bool, options: dict) -> torch.Tensor:
    """Attention of this process's queries over the blocks of all: each comes by once (arXiv:2310.01889)."""
    config = options["attention_config"]
    if config is not None and config.is_causal:
        # Blocks before the own one are seen whole; whether this one is masked is said call by call.
        options = {**options, "attention_config": replace(config, is_causal=False)}
    longest = max(kv_counts)
    block, out, lse = _pack(k, v, longest), None, None
    for step in range(ring.size):
        source = (ring.rank - step) % ring.size
        is_last = step + 1 == ring.size
        if not is_last:
            ring.start(block)
        if not is_causal or source <= ring.rank:
            keys, values = _unpack(block, kv_counts[source], longest, k, v)
            mask_own = is_causal and source == ring.rank
            part = attention(q, keys, values, is_causal=mask_own, return_lse=True, **options)
            out, lse = part if out is None else merge_attn_states(out, lse, *part)
        if not is_last:
            block = ring.finish()
    return out.to(v.dtype)


def _pack(k: torch.Tensor, v: torch.Tensor, longest: int) -> torch.Tensor:
    """k and v in one flat tensor of the size of the longest block, so that all processes pass equal sizes on."""
    block = k.new_empty(_v_start(k, longest) + longest * _per_token(v))
    keys, values = _unpack(block, k.shape[1], longest, k, v)
    keys.copy_(k)
    values.copy_(v)
    return block


def _unpack(block: torch.Tensor, count: int, longest: int, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """The `count` keys and values in `block`, views shaped like k and v apart from that."""
    places = ((k, 0), (v, _v_start(k, longest)))
    return [block[start : start + count * _per_token(t)].view(t.shape[0], count, *t.shape[2:]) for t, start in places]


def _per_token(t: torch.Tensor) -> int:
    return t.shape[0] * t.shape[2] * t.shape[3]


def _v_start(k: torch.Tensor, longest: int) -> int:
    # Kernels read 16 bytes at a time and want them aligned; 64 elements are 128 bytes in half precision.
    return -(-longest * _per_token(k) // 64) * 64


def merge_attn_states(
    prev_out: torch.Tensor, prev_lse: torch.Tensor, cur_out: torch.Tensor, cur_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two sets of keys from attention over each: out [B, S, N, Dv] and lse [B, N, S] float32.

    The shares are exp(lse) of each over their sum (arXiv:2112.05682), in float32 or wider, which the result keeps: what
    is rounded at every block of a ring adds up. A row without keys in either set (-inf) stays 0 and -inf.
    """
    wide = torch.promote_types(prev_out.dtype, torch.float32)
    share = torch.sigmoid(cur_lse - prev_lse).nan_to_num(nan=0.0).transpose(1, 2).unsqueeze(-1).to(wide)  # [B, S, N, 1]
    return torch.lerp(prev_out.to(wide), cur_out.to(wide), share), torch.logaddexp(prev_lse, cur_lse)
