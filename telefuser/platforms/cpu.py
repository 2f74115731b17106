"""The CPU: where tests run, where a pipeline runs that asks for it, and what is left when no accelerator is found."""

import contextlib
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from telefuser.platforms.interface import BasePlatform, DeviceLike

try:
    import resource
except ImportError:  # Windows has no such module
    resource = None


@dataclass(frozen=True)
class CpuProperties:
    """The part of a GPU's properties that a CPU has too. total_memory is in bytes."""

    name: str
    total_memory: int
    multi_processor_count: int


class CpuPlatform(BasePlatform):
    """Always there. Memory figures are those of this process and of the memory it may use."""

    device_name = "cpu"
    device_type = "cpu"
    vendor_device = "CPU"
    device_control_env_var = "CPU_VISIBLE_MEMORY_NODES"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    full_dist_backend = "cpu:gloo"

    @classmethod
    def build_reason(cls) -> None:
        return None

    @classmethod
    def unavailable_reason(cls) -> None:
        return None

    @classmethod
    def is_accelerator_available(cls) -> bool:
        return False

    @classmethod
    def default_device(cls) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def current_device(cls) -> int:
        return 0

    @classmethod
    def set_device(cls, device: DeviceLike) -> None:
        return None

    @classmethod
    def device_count(cls) -> int:
        return 1

    @classmethod
    def device_ctx(cls, device: DeviceLike) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    @classmethod
    def synchronize(cls, device: DeviceLike = None) -> None:
        return None

    @classmethod
    def get_device_name(cls, device: DeviceLike = None) -> str:
        names = _fields("/proc/cpuinfo").get("model name")
        return names or platform.processor() or platform.machine()

    @classmethod
    def get_device_properties(cls, device: DeviceLike = None) -> CpuProperties:
        return CpuProperties(cls.get_device_name(), cls.get_device_total_memory(), os.cpu_count() or 1)

    @classmethod
    def get_device_capability(cls, device: DeviceLike = None) -> None:
        return None

    def device_arch(self, device: DeviceLike = None) -> str:
        return platform.machine()

    def fp8_unavailable_reason(self, device: DeviceLike = None) -> str | None:
        return "a CPU has no FP8 matrix unit"

    @classmethod
    def empty_cache(cls) -> None:
        return None

    @classmethod
    def ipc_collect(cls) -> None:
        return None

    @classmethod
    def reset_peak_memory_stats(cls, device: DeviceLike = None) -> None:
        # 5 resets the peak resident size (proc(5)). Without that file the peak stays that of the whole process.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    @classmethod
    def max_memory_allocated(cls, device: DeviceLike = None) -> int:
        peak = _fields("/proc/self/status").get("VmHWM")
        if peak is not None:
            return _kilobytes(peak)
        if resource is None:
            return 0
        usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return usage if sys.platform == "darwin" else usage * 1024

    @classmethod
    def get_device_total_memory(cls, device: DeviceLike = None) -> int:
        total = _physical_memory()
        limit = _cgroup_limit()
        return total if limit is None else min(total, limit)

    @classmethod
    def get_device_free_memory(cls, device: DeviceLike = None) -> int:
        available = _fields("/proc/meminfo").get("MemAvailable")
        free = cls.get_device_total_memory() if available is None else _kilobytes(available)
        limit = _cgroup_limit()
        return free if limit is None else max(0, min(free, limit - _cgroup_usage()))


def _fields(path: str) -> dict[str, str]:
    """The `name: value` lines of a file under /proc; empty where there is none (macOS, Windows)."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _kilobytes(text: str) -> int:
    return int(text.split()[0]) * 1024


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


# A container sees the memory of its host; what the kernel lets it use stands in its control group, version 2 or 1.
_CGROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def _cgroup_limit() -> int | None:
    for folder, limit, _, _ in _CGROUPS:
        text = _read(folder / limit)
        if text is not None:
            # "max", or in version 1 a number near 2^63, stands for no limit.
            return int(text) if text.isdigit() and int(text) < 2**60 else None
    return None


def _cgroup_usage() -> int:
    for folder, _, current, inactive in _CGROUPS:
        text = _read(folder / current)
        if text is not None:
            # Pages of files that nobody touched lately are dropped on demand, so they count as free.
            stat = dict(line.split() for line in (_read(folder / "memory.stat") or "").splitlines())
            return int(text) - int(stat.get(inactive, 0))
    return 0


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
