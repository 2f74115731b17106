"""Huawei Ascend NPUs, through `torch_npu`."""

from types import ModuleType

import torch

from telefuser.platforms.interface import BasePlatform, DeviceLike


class NPUPlatform(BasePlatform):
    """`torch_npu` is installed and sees at least one Ascend device."""

    device_name = "npu"
    device_type = "npu"
    vendor_device = "Ascend NPU"
    device_control_env_var = "ASCEND_RT_VISIBLE_DEVICES"
    visibility_env_vars = ("ASCEND_RT_VISIBLE_DEVICES",)
    dispatch_key = "PrivateUse1"
    dist_backend = "hccl"
    full_dist_backend = "npu:hccl"
    op_keys = ("npu",)

    @classmethod
    def build_reason(cls) -> str | None:
        try:
            import torch_npu  # noqa: F401  (adds torch.npu)
        except ModuleNotFoundError as error:
            return (
                "torch_npu is not installed" if error.name == "torch_npu" else f"torch_npu cannot be imported: {error}"
            )
        except Exception as error:  # noqa: BLE001  (a build for another PyTorch or without CANN fails in any way)
            return f"torch_npu cannot be imported: {type(error).__name__}: {error}"
        return None if hasattr(torch, "npu") else "torch_npu is installed but adds no torch.npu"

    @classmethod
    def unavailable_reason(cls) -> str | None:
        try:
            return super().unavailable_reason()
        except RuntimeError as error:
            # Without the driver, counting devices raises instead of giving 0.
            return f"torch_npu cannot count devices: {error}"

    @classmethod
    def device_module(cls) -> ModuleType:
        # torch.get_device_module("npu") knows the word only after torch_npu has renamed PyTorch's private backend.
        return torch.npu

    @classmethod
    def get_device_capability(cls, device: DeviceLike = None) -> None:
        return None

    @classmethod
    def ipc_collect(cls) -> None:
        return None

    def device_arch(self, device: DeviceLike = None) -> str:
        return self.get_device_name(device)

    def fp8_unavailable_reason(self, device: DeviceLike = None) -> str | None:
        return "no FP8 matrix product is known for this device"
