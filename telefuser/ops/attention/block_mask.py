"""A mask over blocks of tokens, and the plan by which it is worked through: what the executors of sparse attention get.

Shape letters: B batch, N heads, S tokens, Nb = ceil(S / block size).
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from telefuser.ops.attention.radial_attention_core import check_block_size


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

    def tiles(self, rows: int, columns: int) -> torch.Tensor:
        """`by_head` over tiles of `rows` queries by `columns` keys, 64 or 128: finer by repeating, coarser by OR."""
        keep = self.by_head
        for dim, size in ((-2, rows), (-1, columns)):
            if size < self.block_size:
                keep = keep.repeat_interleave(2, dim)
                # Half a block may hold all the tokens that are left.
                keep = keep.narrow(dim, 0, -(-self.tokens // size))
            elif size > self.block_size:
                even = keep.shape[dim] // 2 * 2
                pairs = keep.narrow(dim, 0, even).unflatten(dim, (-1, 2)).any(dim=dim)
                keep = torch.cat((pairs, keep.narrow(dim, even, keep.shape[dim] - even)), dim=dim)
        return keep

    def lists(self, rows: int, columns: int) -> "TileLists":
        """`tiles(rows, columns)` as lists; made once for each pair, on the mask's device and without waiting for it."""
        return self.once((rows, columns), lambda: _listed(self.tiles(rows, columns)))

    def once(self, key: tuple, make: Callable[[], Any]) -> Any:
        """What `make` gave the first time under `key`: what an executor derives from the mask lives as long as it."""
        if key not in self._made:
            # It outlives the call, which may be one under inference mode.
            with torch.inference_mode(False):
                self._made[key] = make()
        return self._made[key]

    @functools.cached_property
    def _made(self) -> dict[tuple, Any]:
        return {}

    @property
    def plan(self) -> list[list[list["Run"]]]:
        """`plan[b][n]`: the runs of query blocks that share their key blocks; made once, waits for the device once."""
        device = self.keep.device
        return self.once(("plan",), lambda: [[_runs(keep, device) for keep in heads] for heads in self.by_head.cpu()])


class TileLists(NamedTuple):
    """The tiles of keys that each tile of queries sees, int32, B and N as the mask has them (1: the same for all).

    counts: [B, N, Tq], how many.
    indices: [B, N, Tq, Tk], which, in rising order, then the others.
    order: [B, N, Tq], the tiles of queries, longest lists first, so that no long one is left for the end.
    """

    counts: torch.Tensor
    indices: torch.Tensor
    order: torch.Tensor


def _listed(keep: torch.Tensor) -> TileLists:
    counts = keep.sum(dim=-1, dtype=torch.int32)
    # Stable: what is kept comes first and stays in order.
    indices = keep.to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices
    order = counts.sort(dim=-1, descending=True, stable=True).indices
    return TileLists(counts, indices.to(torch.int32), order.to(torch.int32))


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
