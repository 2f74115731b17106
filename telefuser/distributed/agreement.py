"""What all processes of a job must agree on before they start: the same request, the first one's random choices."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from telefuser.distributed.comm import gather_results


def require_same(text: str, what: str, device_type: str | None) -> None:
    """ValueError on every process unless all of the job call this with one `text`, which describes `what`.

    device_type: that the process group exchanges; None does nothing, for a process by itself.
    """
    if device_type is None:
        return
    digest = int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:7], "big")
    found = gather_all([digest], device_type)
    differing = [rank for rank, (number,) in enumerate(found) if number != found[0][0]]
    if differing:
        raise ValueError(f"process(es) {differing} have another {what} than process 0: give all of them the same one")


def numbers_of_first(numbers: Sequence[int], device_type: str | None) -> tuple[int, ...]:
    """The `numbers` of process 0, equally many on all and each from 0 to 2^63-1; None as for `require_same`."""
    return tuple(numbers) if device_type is None else tuple(gather_all(numbers, device_type)[0])


def gather_all(numbers: Sequence[int], device_type: str) -> list[list[int]]:
    """The `numbers` (equally many) of every process of the job, by rank."""
    own = torch.tensor(list(numbers), dtype=torch.int64, device=device_type)
    return torch.stack(gather_results(own, dist.group.WORLD)).tolist()
