"""Attention over the kept blocks of a block mask: the mask with its plan, the executors, and the choice among them.

`sparse_attention` makes the masks and calls `block_sparse_attention`. A new executor is a member of `SparseExecutor`
and one decorated function here. Shape letters: B batch, N heads, S tokens, D head dim, Nb = ceil(S / block size).
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

import torch
import torch.nn.functional as F

from telefuser.ops.attention import torch_sdpa as sdpa
from telefuser.ops.attention.dense_backend import Call
from telefuser.ops.attention.radial_attention_core import check_block_size
from telefuser.ops.backend_table import Backend, BackendTable, Entry


class SparseExecutor(Enum):
    """What computes attention over kept blocks."""

    TORCH_BLOCKED = auto()


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Which blocks of queries see which blocks of keys, in one sequence of `tokens`.

    keep: bool [Nb, Nb], or [N, Nb, Nb] or [B, N, Nb, Nb] where heads (or batch entries) differ; sizes of 1 broadcast.
    block_size: 64 or 128; the last block holds what is left of the tokens. A query without a key gives zeros.
    Raises ValueError for another block size or a grid that is not Nb x Nb.
    """

    keep: torch.Tensor
    block_size: int
    tokens: int

    def __post_init__(self):
        check_block_size(self.block_size)
        blocks = -(-self.tokens // self.block_size)
        if self.keep.dtype is not torch.bool or self.keep.dim() not in (2, 3, 4):
            raise ValueError(
                f"a block mask is bool [Nb, Nb], [N, Nb, Nb] or [B, N, Nb, Nb], "
                f"not {self.keep.dtype} {tuple(self.keep.shape)}"
            )
        if tuple(self.keep.shape[-2:]) != (blocks, blocks):
            raise ValueError(
                f"the block mask {tuple(self.keep.shape)} does not fit {self.tokens} tokens in blocks of "
                f"{self.block_size}; its last two sizes must be {blocks}"
            )

    @functools.cached_property
    def by_head(self) -> torch.Tensor:
        """`keep` with four dims."""
        return self.keep[(None,) * (4 - self.keep.dim())]

    @functools.cached_property
    def density(self) -> float:
        """The share of token pairs that is computed, in 0..1; waits for the device once."""
        size = torch.full((self.keep.shape[-1],), float(self.block_size), dtype=torch.float64)
        size[-1] = self.tokens - (len(size) - 1) * self.block_size
        pairs = self.keep.cpu().double() * size[:, None] * size
        return float(pairs.sum() / (self.keep[..., 0, 0].numel() * self.tokens**2))

    @functools.cached_property
    def plan(self) -> list[list[list["Run"]]]:
        """`plan[b][n]`: the runs of query blocks that share their key blocks; made once, waits for the device once."""
        return [[_runs(keep, self.keep.device) for keep in heads] for heads in self.by_head.cpu()]


class Run(NamedTuple):
    """Query blocks `first` up to before `last`, their key blocks, and whether the sequence's last block is one of them.

    keys: a slice where they follow one another, which costs no copy, else indices on the mask's device.
    """

    first: int
    last: int
    keys: slice | torch.Tensor
    has_last: bool


def _runs(keep: torch.Tensor, device: torch.device) -> list[Run]:
    changes = (keep[1:] != keep[:-1]).any(dim=-1).nonzero().flatten() + 1
    bounds = list(itertools.pairwise([0, *changes.tolist(), len(keep)]))
    keys = [keep[first].nonzero().flatten() for first, _ in bounds]
    # One transfer for all of them.
    on_device = torch.cat(keys).to(device).split([len(k) for k in keys])
    runs = []
    for (first, last), blocks, indices in zip(bounds, keys, on_device):
        low, high = (int(blocks[0]), int(blocks[-1]) + 1) if len(blocks) else (0, 0)
        runs.append(Run(first, last, slice(low, high) if high - low == len(blocks) else indices, high == len(keep)))
    return runs


@dataclass(frozen=True)
class SparseBackend(Backend):
    """What an executor takes.

    dtypes: None takes every one. has_grad: whether autograd can go through it. has_lse: whether it returns the
    log-sum-exp. is_exact: False for kernels that quantise.
    """

    dtypes: tuple[torch.dtype, ...] | None = None
    has_grad: bool = False
    has_lse: bool = False
    is_exact: bool = True


TABLE = BackendTable("sparse attention", SparseExecutor.TORCH_BLOCKED, "it is not part of this version")


def executor(impl: SparseExecutor, **declared) -> Callable:
    """Decorate an adapter `(entry, call, mask) -> (out, lse or None)` with its record, `SparseBackend(...)`."""

    def register(run: Callable) -> Callable:
        TABLE.register(SparseBackend(impl=impl, run=run, **declared))
        return run

    return register


def block_sparse_attention(call: Call, mask: BlockMask) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of `call` (self-attention, without a mask of its own) over the blocks that `mask` keeps.

    Returns out [B, N, S, Dv] and, if the call asks for it, the log-sum-exp [B, N, S] in float32, -inf without a key.
    Raises ValueError where the mask is for other sizes or lies on another device.
    """
    batch, heads, queries, _ = call.q.shape
    if queries != mask.tokens or call.k.shape[2] != mask.tokens:
        raise ValueError(
            f"the block mask is for {mask.tokens} tokens, not for {queries} queries over {call.k.shape[2]} keys"
        )
    if mask.by_head.shape[0] not in (1, batch) or mask.by_head.shape[1] not in (1, heads):
        raise ValueError(f"the block mask {tuple(mask.keep.shape)} does not fit batch {batch} and {heads} heads")
    if mask.keep.device != call.q.device:
        raise ValueError(f"the block mask is on {mask.keep.device} and q on {call.q.device}; make it on q's device")
    while True:
        record, entry = _choose(call)
        try:
            return record.run(entry, call, mask)
        except torch.OutOfMemoryError:
            raise
        # Nobody asked for this package by name: what it fails with is logged, and the next one tried.
        except Exception as error:
            if record.impl is TABLE.fallback:
                raise
            TABLE.mark_broken(record.impl, error)


def _choose(call: Call) -> tuple[SparseBackend, Entry]:
    for record in TABLE:
        entry = TABLE.probe(record.impl, call.q.device)
        if isinstance(entry, Entry) and _takes(record, call):
            return record, entry
    return TABLE.record(TABLE.fallback), Entry()


def _takes(record: SparseBackend, call: Call) -> bool:
    return (
        (record.dtypes is None or call.q.dtype in record.dtypes)
        and (record.has_lse or not call.return_lse)
        and (record.has_grad or not sdpa.needs_grad(call.q, call.k, call.v))
    )


def describe_executor(device: torch.device | None = None) -> str:
    """The executor that computes sparse attention on `device` (default: the current one), for logs."""
    return next(record.impl.name for record in TABLE if TABLE.reason(record.impl, device) is None)


@executor(SparseExecutor.TORCH_BLOCKED, has_grad=True, has_lse=True)
def torch_blocked(entry: Entry, call: Call, mask: BlockMask) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Exact on any device: each run of query blocks attends to its gathered key blocks through PyTorch's own attention.

    Beside the inputs and the output it holds the keys and values of one run, so memory is linear in S.
    """
    plan = mask.plan
    if len(plan) == 1 and len(plan[0]) == 1:
        return _attend_runs(call, plan[0][0], mask)
    per_entry = []
    groups = call.q.shape[1] // call.k.shape[1]
    for b in range(call.q.shape[0]):
        runs = plan[b if len(plan) > 1 else 0]
        if len(runs) == 1:
            per_entry.append(_attend_runs(_part(call, b, slice(None), slice(None)), runs[0], mask))
            continue
        heads = [
            _attend_runs(_part(call, b, slice(n, n + 1), slice(n // groups, n // groups + 1)), runs[n], mask)
            for n in range(len(runs))
        ]
        per_entry.append(_join(heads, dim=1))
    return _join(per_entry, dim=0)


def _part(call: Call, b: int, heads: slice, key_heads: slice) -> Call:
    entry = slice(b, b + 1)
    return call._replace(q=call.q[entry, heads], k=call.k[entry, key_heads], v=call.v[entry, key_heads])


def _join(parts: list, dim: int):
    outs, lses = zip(*parts)
    return torch.cat(outs, dim=dim), None if lses[0] is None else torch.cat(lses, dim=dim)


def _attend_runs(call: Call, runs: list[Run], mask: BlockMask):
    size, padding = mask.block_size, -mask.tokens % mask.block_size
    k, v = (F.pad(t, (0, 0, 0, padding)).unflatten(2, (-1, size)) for t in (call.k, call.v))  # [B, Nkv, Nb, size, D]
    outs, lses = [], []
    for run in runs:
        q = call.q[:, :, run.first * size : run.last * size]
        keys, values = (_gather(t, run, padding) for t in (k, v))
        if keys.shape[2] == 0:
            out = q.new_zeros(*q.shape[:3], v.shape[4])
            lse = q.new_full(q.shape[:3], float("-inf"), dtype=torch.float32)
        else:
            out, lse = sdpa.torch_sdpa(q, keys, values, None, call.scale, False, return_lse=call.return_lse)
        # The pieces are joined as [B, S, N, D]: the layout that the caller most likely wants back.
        outs.append(out.transpose(1, 2))
        lses.append(lse)
    out = torch.cat(outs, dim=1).transpose(1, 2)
    return out, torch.cat(lses, dim=2) if call.return_lse else None


def _gather(blocks: torch.Tensor, run: Run, padding: int) -> torch.Tensor:
    """The tokens of the run's key blocks [B, Nkv, n, D], in order and without the padding behind the last token."""
    part = blocks[:, :, run.keys] if isinstance(run.keys, slice) else blocks.index_select(2, run.keys)
    part = part.flatten(2, 3)
    return part[:, :, : part.shape[2] - padding] if run.has_last else part
