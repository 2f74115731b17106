"""Launch settings of the row kernels: fixed, from the width and dtype of the rows and the family of the device.

Nothing is tuned at run time, so that a first call may be captured in a graph and every process computes alike.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch


class Launch(NamedTuple):
    """How a row kernel runs."""

    # Threads for one row.
    threads: int
    # Rows that one program takes one after another, with what they share (weights, modulation) kept in registers.
    rows: int
    # Rows that are on their way from memory at once within a program; 1 leaves that to the other programs.
    stages: int


# Float32 values of a row that a program holds in registers: 64 a thread with the 256 threads of the safe settings.
MAX_IN_REGISTERS = 16384
# (widest row, settings) in rising order: 8 to 20 elements a thread make 16-byte accesses and leave registers for
# several programs on a processor. Right on every device, so it serves those that nobody has measured.
SAFE = ((512, Launch(32, 4, 1)), (1024, Launch(64, 4, 1)), (3072, Launch(128, 4, 1)), (1 << 62, Launch(256, 4, 1)))
# (kernel, family, bytes an element) -> the same kind of table.
# sm90: best of `python -m benchmarks ops --sweep` on one H200 at 32760 rows of 1536 and of 5120; rows of 1024 and
# narrower keep the safe settings.
MEASURED: dict[tuple[str, str, int], tuple[tuple[int, Launch], ...]] = {
    ("norm", "sm90", 2): (*SAFE[:2], (3072, Launch(64, 2, 1)), (1 << 62, Launch(128, 4, 1))),
    ("norm", "sm90", 4): (*SAFE[:2], (3072, Launch(64, 2, 1)), (1 << 62, Launch(128, 8, 1))),
    ("add_norm", "sm90", 2): (*SAFE[:2], (3072, Launch(64, 4, 2)), (1 << 62, Launch(128, 4, 2))),
    ("add_norm", "sm90", 4): (*SAFE[:2], (3072, Launch(128, 2, 1)), (1 << 62, Launch(128, 32, 2))),
    ("norm_rotary", "sm90", 2): (*SAFE[:2], (3072, Launch(64, 2, 1)), (1 << 62, Launch(128, 1, 1))),
}


def launch_of(kernel: str, width: int, x: torch.Tensor) -> Launch:
    """The settings of `kernel` for rows of `width` elements of x's dtype on x's device."""
    return _launch_of(kernel, width, x.dtype.itemsize, "cpu" if x.device.type == "cpu" else family())


@functools.lru_cache(1024)
def _launch_of(kernel: str, width: int, itemsize: int, family: str) -> Launch:
    table = MEASURED.get((kernel, family, itemsize), SAFE)
    return next(launch for widest, launch in table if width <= widest)


@functools.cache
def family() -> str:
    """ "sm90" and the like for NVIDIA, "amd64" or "amd32" by the size of an AMD wave (CDNA has 64 lanes, RDNA 32)."""
    target = _target()
    return f"amd{target.warp_size}" if target.backend == "hip" else f"sm{target.arch}"


def warps_of_threads(threads: int, x: torch.Tensor) -> int:
    """Warps (waves) that make up `threads` on x's device."""
    lanes = 32 if x.device.type == "cpu" or torch.version.hip is None else _target().warp_size
    return max(threads // lanes, 1)


@functools.cache
def _target():
    from triton.runtime import driver

    return driver.active.get_current_target()
