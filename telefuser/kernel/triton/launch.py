"""Launch settings of the row kernels, fixed, from the width and dtype of the rows and the family of the device; and the
replay of launches that were made before.

Nothing is tuned at run time, so that a first call may be captured in a graph and every process computes alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch


class Launch(NamedTuple):
    """How a row kernel runs."""

    # Threads of a program.
    threads: int
    # Rows that a program takes one after another, with what they share (weights, modulation) kept in registers. The
    # next ones are on their way from memory while it computes.
    rows: int
    # Rows that it takes at once: one sum over all of them costs one wait.
    tile: int


# Float32 values of a row that a program holds in registers: 64 a thread with the 256 threads of the safe settings.
MAX_IN_REGISTERS = 16384
# (widest row, settings) in rising order: 8 to 20 elements a thread make 16-byte accesses and leave registers for
# several programs on a processor. Right on every device, so it serves those that nobody has measured.
SAFE = ((512, Launch(32, 4, 1)), (1024, Launch(64, 4, 1)), (3072, Launch(128, 4, 1)), (1 << 62, Launch(256, 4, 1)))
# (kernel, family, bytes an element) -> the same kind of table.
# sm90: best of `python -m benchmarks ops --sweep` on one H200 at 32760 rows of 1536 and of 5120; rows of 1024 and
# narrower keep the safe settings.
MEASURED: dict[tuple[str, str, int], tuple[tuple[int, Launch], ...]] = {
    ("rms_norm", "sm90", 2): (*SAFE[:2], (3072, Launch(128, 2, 2)), (1 << 62, Launch(128, 2, 1))),
    ("norm", "sm90", 2): (*SAFE[:2], (3072, Launch(32, 8, 2)), (1 << 62, Launch(128, 8, 1))),
    ("norm", "sm90", 4): (*SAFE[:2], (3072, Launch(32, 2, 2)), (1 << 62, Launch(256, 16, 1))),
    ("norm_fp8", "sm90", 4): (*SAFE[:2], (3072, Launch(32, 16, 1)), (1 << 62, Launch(128, 32, 1))),
    ("add_norm", "sm90", 2): (*SAFE[:2], (3072, Launch(64, 2, 2)), (1 << 62, Launch(128, 16, 1))),
    ("add_norm", "sm90", 4): (*SAFE[:2], (3072, Launch(128, 1, 1)), (1 << 62, Launch(128, 16, 1))),
    ("add_norm_fp8", "sm90", 4): (*SAFE[:2], (3072, Launch(128, 16, 1)), (1 << 62, Launch(256, 16, 1))),
    ("norm_rotary", "sm90", 2): (*SAFE[:2], (3072, Launch(32, 4, 1)), (1 << 62, Launch(128, 1, 1))),
    ("rotary", "sm90", 2): (*SAFE[:2], (3072, Launch(64, 16, 1)), (1 << 62, Launch(128, 2, 1))),
    ("quantize", "sm90", 2): (
        *SAFE[:2],
        (3072, Launch(32, 4, 1)),
        (10240, Launch(64, 2, 1)),
        (1 << 62, Launch(256, 8, 1)),
    ),
    ("quantize_activated", "sm90", 2): (
        *SAFE[:2],
        (3072, Launch(32, 4, 1)),
        (10240, Launch(64, 2, 1)),
        (1 << 62, Launch(256, 8, 1)),
    ),
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


# A launcher's work on the host - checks, views, settings, Triton's own look at each argument - has the same outcome for
# tensors of the same dtypes, shapes, strides and alignment, and is 60 us of a call on a host where the launch itself is
# 9 us. So what it led to is kept, by such a signature, and done again.
_REPLAYS: dict[tuple, Callable[..., None]] = {}
# Some kilobytes each; a model needs a few dozen, a long process with ever new shapes starts over.
MAX_REPLAYS = 4096


def signature(*tensors: torch.Tensor | None) -> tuple[tuple, list[int | None]]:
    """What decides how a kernel is launched for these tensors (all on the first one's device), and where they lie."""
    key, pointers = [tensors[0].get_device()], []
    for t in tensors:
        if t is None:
            key.append(None)
            pointers.append(None)
        else:
            pointer = t.data_ptr()
            key.append((t.dtype, t.shape, t.stride(), pointer % 16))
            pointers.append(pointer)
    return tuple(key), pointers


def find_replay(key: tuple) -> Callable[..., None] | None:
    """What `keep_replay` kept for `key`: a function of the addresses of the tensors in the kernel's order."""
    return _REPLAYS.get(key)


def keep_replay(key: tuple, compiled: object, grid: int, others: tuple) -> None:
    """Keep one launch for `key`: the program that Triton returned from it, and the arguments after the tensors.

    others: every argument that is not a tensor, the constants too, in the kernel's order. Nothing is kept where Triton
    gives no program back (its interpreter) or takes other arguments (before 3.4).
    """
    if not hasattr(compiled, "packed_metadata") or not _can_replay():
        return
    if len(_REPLAYS) >= MAX_REPLAYS:
        _REPLAYS.clear()
    _REPLAYS[key] = _replay_of(compiled, grid, others)


@functools.cache
def _can_replay() -> bool:
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 4)


def _replay_of(compiled, grid: int, others: tuple) -> Callable[..., None]:
    from triton import knobs
    from triton.runtime import driver

    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    runner = compiled[(grid, 1, 1)]
    device = driver.active.get_current_device()
    get_stream, hooks = driver.active.get_current_stream, knobs.runtime

    def replay(*pointers: int | None) -> None:
        if hooks.launch_enter_hook is not None or hooks.launch_exit_hook is not None:
            # A profiler listens, and wants to be told what is launched.
            runner(*pointers, *others)
            return
        run(grid, 1, 1, get_stream(device), function, metadata, None, None, None, *pointers, *others)

    return replay
