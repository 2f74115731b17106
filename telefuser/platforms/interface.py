"""What a kind of machine must tell the rest of TeleFuser: facts as class attributes, and every torch device call.

Nothing outside this package asks for the vendor: code asks `current_platform` for the fact it needs.
"""

import contextlib
import os
from types import ModuleType
from typing import Any

import torch

DeviceLike = torch.device | str | int | None


class BasePlatform:
    """One kind of machine. Making an instance touches no device; methods do, when they are called.

    device_name: "cuda", "rocm", "npu" or "cpu".  device_type: what `torch.device` calls it.
    device_control_env_var: the variable that hides devices; visibility_env_vars: all that can.
    dispatch_key: PyTorch's dispatch key.  dist_backend, full_dist_backend: names for `init_process_group`.
    op_keys: `forward_<key>` methods of an operator in the order of preference; without any, `forward_native`.
    """

    device_name: str
    device_type: str
    vendor_device: str
    device_control_env_var: str
    visibility_env_vars: tuple[str, ...] = ()
    dispatch_key: str
    dist_backend: str
    full_dist_backend: str
    op_keys: tuple[str, ...] = ()

    def __init__(self):
        # Properties do not change while a process runs, and asking takes a driver call: kept by device index.
        self._arch_by_index: dict[int, Any] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    # Selection

    @classmethod
    def build_reason(cls) -> str | None:
        """Why the installed PyTorch cannot drive such devices at all, or None when it can."""
        raise NotImplementedError

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Why this platform cannot be used here, or None when it can. Relies on what PyTorch sees, on nothing else."""
        reason = cls.build_reason()
        if reason is not None:
            return reason
        module = cls.device_module()
        if module.is_available() and module.device_count() > 0:
            return None
        settings = cls.visibility_settings()
        return f"no {cls.vendor_device} is visible to PyTorch" + (f" ({settings})" if settings else "")

    @classmethod
    def is_available(cls) -> bool:
        """Whether this platform can be used here."""
        return cls.unavailable_reason() is None

    @classmethod
    def visibility_settings(cls) -> str:
        """The visibility variables that are set, as they would be typed in a shell."""
        return ", ".join(f'{name}="{os.environ[name]}"' for name in cls.visibility_env_vars if name in os.environ)

    # Capabilities: asked lazily, so that importing never starts a device

    @property
    def tf_kernel(self) -> ModuleType | None:
        """The `tf_kernel` extension, imported on first use, or None where it is absent or made for other hardware."""
        return None

    @property
    def fp8_dtype(self) -> torch.dtype:
        """The e4m3 variant whose products the hardware computes."""
        return torch.float8_e4m3fn

    def cuda_arch(self, device: DeviceLike = None) -> tuple[int, int] | None:
        """NVIDIA compute capability (major, minor), or None for every other vendor's device."""
        return None

    def rocm_arch(self, device: DeviceLike = None) -> str | None:
        """AMD architecture such as "gfx942", or None for every other vendor's device."""
        return None

    def device_arch(self, device: DeviceLike = None) -> str:
        """The architecture for people to read."""
        raise NotImplementedError

    def fp8_unavailable_reason(self, device: DeviceLike = None) -> str | None:
        """Why the device computes no FP8 matrix product, or None when it does."""
        raise NotImplementedError

    # Devices

    @classmethod
    def device_module(cls) -> ModuleType:
        """torch.cuda, torch.npu or torch.cpu."""
        return torch.get_device_module(cls.device_type)

    @classmethod
    def is_accelerator_available(cls) -> bool:
        """Whether there is a device other than the CPU."""
        return cls.is_available()

    @classmethod
    def device_count(cls) -> int:
        """The number of visible devices."""
        return cls.device_module().device_count()

    @classmethod
    def default_device(cls) -> torch.device:
        """The device, with its index, that work goes to when the caller names none."""
        module = cls.device_module()
        # Before the first use nothing else than 0 can be current, and asking would start the device.
        return torch.device(cls.device_type, module.current_device() if module.is_initialized() else 0)

    @classmethod
    def current_device(cls) -> int:
        """The index of the device that new tensors without an index go to."""
        return cls.device_module().current_device()

    @classmethod
    def set_device(cls, device: DeviceLike) -> None:
        """Make `device` the current one."""
        cls.device_module().set_device(device)

    @classmethod
    def device_ctx(cls, device: DeviceLike) -> contextlib.AbstractContextManager:
        """A context in which `device` is the current one."""
        return cls.device_module().device(device)

    @classmethod
    def synchronize(cls, device: DeviceLike = None) -> None:
        """Wait for the work queued on `device`."""
        cls.device_module().synchronize(device)

    @classmethod
    def get_device_name(cls, device: DeviceLike = None) -> str:
        """The product name."""
        return cls.device_module().get_device_name(device)

    @classmethod
    def get_device_properties(cls, device: DeviceLike = None) -> Any:
        """An object with at least `name` and `total_memory` (bytes)."""
        if device is None:
            device = cls.current_device()
        return cls.device_module().get_device_properties(device)

    @classmethod
    def get_device_capability(cls, device: DeviceLike = None) -> tuple[int, int] | None:
        """What torch reports. An AMD (9, 4) is no Hopper: use `cuda_arch` and `rocm_arch` to choose a kernel."""
        return cls.device_module().get_device_capability(device)

    # Memory, in bytes

    @classmethod
    def empty_cache(cls) -> None:
        """Give cached, unused memory back to the system."""
        cls.device_module().empty_cache()

    @classmethod
    def ipc_collect(cls) -> None:
        """Free memory that other processes no longer hold."""
        cls.device_module().ipc_collect()

    @classmethod
    def reset_peak_memory_stats(cls, device: DeviceLike = None) -> None:
        """Start a new measurement for `max_memory_allocated`."""
        cls.device_module().reset_peak_memory_stats(device)

    @classmethod
    def max_memory_allocated(cls, device: DeviceLike = None) -> int:
        """The most memory in use at once since the last reset."""
        return cls.device_module().max_memory_allocated(device)

    @classmethod
    def get_device_total_memory(cls, device: DeviceLike = None) -> int:
        """All memory of `device`."""
        return cls.get_device_properties(device).total_memory

    @classmethod
    def get_device_free_memory(cls, device: DeviceLike = None) -> int:
        """What can still be allocated on `device`, the cache of PyTorch's own allocator included."""
        module = cls.device_module()
        free, _ = module.mem_get_info(device)
        return free + module.memory_reserved(device) - module.memory_allocated(device)

    @classmethod
    def init_cudnn_optimizations(cls) -> None:
        """Let cuDNN time its convolution algorithms and keep the fastest; nothing to do without cuDNN."""

    # Shared by the subclasses

    @classmethod
    def _index(cls, device: DeviceLike) -> int | None:
        """The index of `device`, the current one where it has none; None for a device of another platform."""
        if isinstance(device, int):
            return device
        if device is not None:
            device = torch.device(device)
            if device.type != cls.device_type:
                return None
            if device.index is not None:
                return device.index
        return cls.current_device()
