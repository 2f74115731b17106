"""One video's decoding shared by the processes of a mesh: each makes the pixels of a rectangle, and all get the frames.

Not by time: a chunk of frames needs what every chunk before it left in the convolutions. A rectangle needs only the
cells around it, 7 at the published depth, so nothing is exchanged before the pixels.
"""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from telefuser.distributed.agreement import gather_all
from telefuser.distributed.comm import split_ranges

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from telefuser.models.wan_video_vae import WanVideoVAE

logger = logging.getLogger(__name__)

# A split whose largest window is still this share of the area saves less than the exchange and the uneven ends cost.
MAX_SHARE = 0.8
_warned: set[tuple] = set()


class Part(NamedTuple):
    """The latent cells start..stop that one process decodes."""

    rows: tuple[int, int]
    columns: tuple[int, int]


def plan_parts(vae: WanVideoVAE, height: int, width: int, num_parts: int) -> tuple[list[Part], float]:
    """At most `num_parts` rectangles of a latent area, and the share of the area that the slowest of them computes.

    Of all grids, the one with the smallest largest window (rectangle and surroundings): 0.35 for 60x104 cells on four.
    """
    best: tuple[float, list[Part]] | None = None
    for down in range(1, min(num_parts, height) + 1):
        across = min(num_parts // down, width)
        rows, columns = split_ranges(height, down), split_ranges(width, across)
        share = _longest(vae, rows, height) * _longest(vae, columns, width) / (height * width)
        if best is None or share < best[0]:
            best = share, [Part(*cell) for cell in itertools.product(rows, columns)]
    return best[1], best[0]


def _longest(vae: WanVideoVAE, ranges: list[tuple[int, int]], length: int) -> int:
    windows = [vae.window(*cells, length) for cells in ranges]
    return max(window.window_stop - window.window_start for window in windows)


def decode_shared(
    vae: WanVideoVAE, latents: torch.Tensor, device_mesh: DeviceMesh, max_share: float = MAX_SHARE
) -> torch.Tensor | None:
    """Frames [F, H, W, 3] uint8 on the host of latents [z, F', H/8, W/8], equal on all processes; all must call it.

    They are those of one process to rounding: a level of 255 at most. None where sharing saves too little (the largest
    window is more than `max_share` of the area): each process then decodes the video itself.

    Raises what this process's part raised, RuntimeError where another's failed, and on all processes
    torch.OutOfMemoryError where one ran out of memory.
    """
    num_processes, (height, width) = dist.get_world_size(), latents.shape[-2:]
    parts, share = plan_parts(vae, height, width, num_processes)
    if share > max_share:
        _warn_once(height, width, num_processes, share)
        return None
    rank, flat, received, problem = dist.get_rank(), None, [], None
    try:
        own = _decode_part(vae, latents, parts[rank]) if rank < len(parts) else None
        flat, *received = _buffers(vae, latents, parts, num_processes)
        if own is not None:
            flat[: own.numel()] = own.view(-1)
    except (RuntimeError, ValueError) as error:  # torch.OutOfMemoryError, NonFiniteError
        problem = error
    # Asked before the frames are exchanged: a process that failed would leave the others waiting.
    outcome = 0 if problem is None else 2 if isinstance(problem, torch.OutOfMemoryError) else 1
    outcomes = [number for (number,) in gather_all([outcome], device_mesh.device_type)]
    failed = [number for number, found in enumerate(outcomes) if found]
    if 2 in outcomes and 1 not in outcomes:
        raise torch.OutOfMemoryError(f"process(es) {failed} ran out of memory")
    if problem is not None:
        raise problem
    if failed:
        raise RuntimeError(f"process(es) {failed} could not decode their part of the video")
    dist.all_gather(received, flat)
    return _assemble(vae, latents, parts, received)


def _decode_part(vae: WanVideoVAE, latents: torch.Tensor, part: Part) -> torch.Tensor:
    from telefuser.pipelines.decode import to_uint8

    return torch.cat([to_uint8(chunk[0]) for chunk in vae.decode_part_chunks(latents[None], *part)]).contiguous()


def _sizes(vae: WanVideoVAE, latents: torch.Tensor, parts: list[Part]) -> tuple[int, list[tuple[int, int]]]:
    """How many frames there are, and the height and width of each part in pixels."""
    factor, frames = vae.spatial_factor, 1 + (latents.shape[1] - 1) * vae.temporal_factor
    return frames, [tuple((stop - start) * factor for start, stop in part) for part in parts]


def _buffers(vae: WanVideoVAE, latents: torch.Tensor, parts: list[Part], num_processes: int) -> list[torch.Tensor]:
    """Room for what this process sends and for what it gets from each.

    Backends gather equal sizes; smaller parts travel with a tail that nobody reads.
    """
    frames, sizes = _sizes(vae, latents, parts)
    longest = max(height * width for height, width in sizes) * frames * 3
    return [torch.empty(longest, dtype=torch.uint8, device=latents.device) for _ in range(1 + num_processes)]


def _assemble(vae: WanVideoVAE, latents: torch.Tensor, parts: list[Part], received: list[torch.Tensor]) -> torch.Tensor:
    frames, sizes = _sizes(vae, latents, parts)
    factor, (rows, columns) = vae.spatial_factor, latents.shape[-2:]
    video = torch.empty(frames, rows * factor, columns * factor, 3, dtype=torch.uint8)
    for part, (height, width), pixels in zip(parts, sizes, received):
        down, across = (slice(start * factor, stop * factor) for start, stop in part)
        video[:, down, across] = pixels[: frames * height * width * 3].view(frames, height, width, 3).cpu()
    return video


def _warn_once(height: int, width: int, num_processes: int, share: float) -> None:
    key = (height, width, num_processes)
    if key not in _warned:
        _warned.add(key)
        logger.warning(
            "decoding a %dx%d latent area is not shared by %d processes: with its surroundings the largest part would "
            "be %.0f %% of it; each process decodes the video", height, width, num_processes, share * 100
        )  # fmt: skip
