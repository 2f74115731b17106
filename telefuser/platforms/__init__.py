"""Which machine this process runs on. `current_platform` is chosen once, on import; no device is started by it.

Read it at call time, as `platforms.current_platform`, so that a test can put another one in its place.
"""

import logging
import os

import torch

from telefuser.platforms.cpu import CpuPlatform
from telefuser.platforms.cuda import CudaPlatform
from telefuser.platforms.interface import BasePlatform
from telefuser.platforms.npu import NPUPlatform
from telefuser.platforms.rocm import RocmPlatform

__all__ = [
    "BasePlatform",
    "CpuPlatform",
    "CudaPlatform",
    "NPUPlatform",
    "RocmPlatform",
    "candidates",
    "current_platform",
    "platform_of",
    "resolve_device",
]

logger = logging.getLogger(__name__)

# In the order of the search.
PLATFORMS: tuple[type[BasePlatform], ...] = (RocmPlatform, CudaPlatform, NPUPlatform, CpuPlatform)


def _is_rocm_available() -> bool:
    return RocmPlatform.is_available()


def _is_cuda_available() -> bool:
    return CudaPlatform.is_available()


def _is_npu_available() -> bool:
    return NPUPlatform.is_available()


def _resolve_current_platform() -> BasePlatform:
    """The first platform that is there: ROCm, CUDA, NPU, CPU. What comes after a hit is not probed."""
    if _is_rocm_available():
        return RocmPlatform()
    if _is_cuda_available():
        return CudaPlatform()
    if _is_npu_available():
        return NPUPlatform()
    _warn_of_hidden_devices()
    return CpuPlatform()


def _warn_of_hidden_devices() -> None:
    """Several visibility variables compose: one may number the devices that another left over, and nothing remains."""
    for platform in PLATFORMS:
        named = any(os.environ.get(name, "").strip() not in ("", "-1") for name in platform.visibility_env_vars)
        # An empty value or -1 hides the devices on purpose.
        if named and platform.build_reason() is None:
            logger.warning(
                "%s; running on the CPU. Unset the variables that are not meant to hide it.",
                platform.unavailable_reason(),
            )


current_platform: BasePlatform = _resolve_current_platform()


def candidates() -> list[tuple[str, str | None]]:
    """Every platform in the order of the search as (name, why it was not chosen), None for the chosen one."""
    chosen = current_platform.device_name
    rows = []
    for platform in PLATFORMS:
        if platform.device_name == chosen:
            rows.append((chosen, None))
        else:
            rows.append((platform.device_name, platform.unavailable_reason() or f"{chosen} comes first"))
    return rows


def platform_of(device: str | torch.device) -> BasePlatform:
    """The platform that drives `device`: the current one, or the CPU's for the CPU of a machine with an accelerator."""
    return current_platform if torch.device(device).type == current_platform.device_type else CpuPlatform()


def resolve_device(device: str | torch.device | None = None) -> torch.device:
    """The device to run on, with its index.

    None and "auto" give the default device of the current platform. A device that is named must be there: ValueError
    says what was asked for and what is available, because a silent change to the CPU would falsify a comparison.
    """
    if device is None or device == "auto":
        return current_platform.default_device()
    wanted = _parse_device(device)
    if wanted is None:
        raise ValueError(f"device {device!r} is not here: {_why_absent(device)}. Available: {_available_devices()}")
    if wanted.type == current_platform.device_type and wanted.index is None:
        return current_platform.default_device()
    return wanted


def _parse_device(device: str | torch.device) -> torch.device | None:
    """`device` as torch.device, the CPU without an index; None where it cannot be had."""
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        return None
    index = parsed.index or 0
    if parsed.type == "cpu":
        return torch.device("cpu") if index == 0 else None
    if parsed.type != current_platform.device_type or index >= current_platform.device_count():
        return None
    return parsed


def _why_absent(device: str | torch.device) -> str:
    kind = str(device).partition(":")[0]
    if kind == current_platform.device_type:
        return f"{current_platform.device_count()} {current_platform.vendor_device} visible"
    reasons = [
        platform.unavailable_reason() or f"this process runs on {current_platform.device_name}"
        for platform in PLATFORMS
        if kind == platform.device_type
    ]
    return "; ".join(reasons) or "TeleFuser has no such platform"


def _available_devices() -> str:
    names = ["auto", "cpu"]
    if current_platform.device_type != "cpu":
        names += [f"{current_platform.device_type}:{index}" for index in range(current_platform.device_count())]
    return ", ".join(names)
