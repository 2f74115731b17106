"""AMD GPUs. A ROCm build of PyTorch answers through the `torch.cuda` API, yet this is no kind of `CudaPlatform`."""

import torch

from telefuser.platforms.interface import BasePlatform, DeviceLike


class RocmPlatform(BasePlatform):
    """A `+rocm` (HIP) build of PyTorch that sees at least one AMD GPU."""

    device_name = "rocm"
    device_type = "cuda"
    vendor_device = "AMD GPU"
    device_control_env_var = "CUDA_VISIBLE_DEVICES"
    visibility_env_vars = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    dispatch_key = "CUDA"
    # RCCL registers itself under NCCL's name.
    dist_backend = "nccl"
    full_dist_backend = "cuda:nccl"
    op_keys = ("rocm", "cuda")

    @classmethod
    def build_reason(cls) -> str | None:
        return None if torch.version.hip is not None else f"PyTorch {torch.__version__} is not a ROCm build"

    @property
    def fp8_dtype(self) -> torch.dtype:
        # CDNA3 (MI300) computes the fnuz variant, whose largest value is 240; later chips took the common one, 448.
        arch = self.rocm_arch() or ""
        return torch.float8_e4m3fnuz if arch.startswith("gfx94") else torch.float8_e4m3fn

    def rocm_arch(self, device: DeviceLike = None) -> str | None:
        index = self._index(device)
        if index is None:
            return None
        if index not in self._arch_by_index:
            # "gfx942:sramecc+:xnack-": what follows the colon are settings of the card, not its instruction set.
            self._arch_by_index[index] = self.get_device_properties(index).gcnArchName.split(":")[0]
        return self._arch_by_index[index]

    def device_arch(self, device: DeviceLike = None) -> str:
        return self.rocm_arch(device)

    def fp8_unavailable_reason(self, device: DeviceLike = None) -> str | None:
        arch = self.rocm_arch(device) or ""
        if arch.startswith(("gfx94", "gfx95", "gfx12")):
            return None
        return f"FP8 matrix products need gfx94x, gfx95x or gfx12xx, this device is {arch or device}"
