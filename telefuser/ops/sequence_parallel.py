"""How a model splits its tokens over the processes of a mesh and puts them together again.

Models reach the mesh through here. The parts fit `long_context_attention`, which computes attention among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from telefuser.distributed import get_attention_strategy, get_device_mesh, get_group, get_rank, get_world_size
from telefuser.distributed.comm import gather_tokens, split_sizes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class TokenSplit:
    """Who holds which tokens: the i-th process, in the order of the mesh dimensions (ring, ulysses), `counts[i]`.

    Tokens are dealt without padding: the first processes hold one more where their number does not divide.
    """

    device_mesh: DeviceMesh
    counts: tuple[int, ...]

    def own(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """This process's part of `x`, a view; `x` holds all tokens in `dim`."""
        index = self._ring_rank * self._num_ulysses + get_rank(self.device_mesh, "ulysses")
        return x.narrow(dim, sum(self.counts[:index]), self.counts[index])

    def gather(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """All parts of `x` in the order of the tokens, the same on every process.

        Raises ValueError where a gradient is wanted: each process would hold that of its own tokens only.
        """
        if torch.is_grad_enabled() and x.requires_grad:
            raise ValueError(
                "a model with sequence parallelism runs forward only; call it under torch.inference_mode() or "
                "torch.no_grad()"
            )
        num_ulysses, start = self._num_ulysses, self._ring_rank * self._num_ulysses
        ulysses, ring = get_group(self.device_mesh, "ulysses"), get_group(self.device_mesh, "ring")
        if ulysses is not None:
            x = gather_tokens(x, dim, list(self.counts[start : start + num_ulysses]), ulysses)
        if ring is not None:
            sums = [sum(self.counts[i : i + num_ulysses]) for i in range(0, len(self.counts), num_ulysses)]
            x = gather_tokens(x, dim, sums, ring)
        return x

    @property
    def _num_ulysses(self) -> int:
        return get_world_size(self.device_mesh, "ulysses")

    @property
    def _ring_rank(self) -> int:
        return get_rank(self.device_mesh, "ring")


def split_tokens(num_tokens: int, device_mesh: DeviceMesh | None) -> TokenSplit | None:
    """How `num_tokens` are split over the mesh; None where they stay together (no mesh, or none of its dimensions)."""
    if get_attention_strategy(device_mesh) == "local":
        return None
    parts = get_world_size(device_mesh, "ring") * get_world_size(device_mesh, "ulysses")
    return TokenSplit(device_mesh, tuple(split_sizes(num_tokens, parts)))


def sequence_parallel_mesh(device_mesh: DeviceMesh | None = None) -> DeviceMesh:
    """`device_mesh`, or the mesh made last; ValueError where there is none or its dimensions have no names."""
    mesh = get_device_mesh() if device_mesh is None else device_mesh
    get_attention_strategy(mesh)
    return mesh
