"""NVIDIA GPUs, and the one door to the `tf_kernel` extension."""

import functools
import logging
from types import ModuleType

import torch

from telefuser.platforms.interface import BasePlatform, DeviceLike

logger = logging.getLogger(__name__)


class CudaPlatform(BasePlatform):
    """A CUDA build of PyTorch that sees at least one NVIDIA GPU."""

    device_name = "cuda"
    device_type = "cuda"
    vendor_device = "NVIDIA GPU"
    device_control_env_var = "CUDA_VISIBLE_DEVICES"
    visibility_env_vars = ("CUDA_VISIBLE_DEVICES",)
    dispatch_key = "CUDA"
    dist_backend = "nccl"
    full_dist_backend = "cuda:nccl"
    op_keys = ("cuda",)

    @classmethod
    def build_reason(cls) -> str | None:
        # A HIP build answers torch.cuda too, so only the versions tell the two vendors apart.
        if torch.version.hip is not None:
            return f"PyTorch {torch.__version__} is a ROCm build"
        if torch.version.cuda is None:
            return f"PyTorch {torch.__version__} is built without CUDA"
        return None

    @property
    def tf_kernel(self) -> ModuleType | None:
        return _import_tf_kernel()

    def cuda_arch(self, device: DeviceLike = None) -> tuple[int, int] | None:
        index = self._index(device)
        if index is None:
            return None
        if index not in self._arch_by_index:
            self._arch_by_index[index] = tuple(self.get_device_capability(index))
        return self._arch_by_index[index]

    def device_arch(self, device: DeviceLike = None) -> str:
        major, minor = self.cuda_arch(device)
        return f"sm_{major}{minor}"

    def fp8_unavailable_reason(self, device: DeviceLike = None) -> str | None:
        arch = self.cuda_arch(device)
        if arch is not None and arch >= (8, 9):
            return None
        found = f"this device has {arch[0]}.{arch[1]}" if arch else f"{device} is no NVIDIA GPU"
        return f"FP8 matrix products need compute capability 8.9 or higher, {found}"

    @classmethod
    def init_cudnn_optimizations(cls) -> None:
        torch.backends.cudnn.benchmark = True


@functools.cache
def _import_tf_kernel() -> ModuleType | None:
    try:
        import tf_kernel
    except ModuleNotFoundError as error:
        if error.name == "tf_kernel":
            return None
        reason = error
    except (ImportError, OSError, RuntimeError) as error:
        # Built for another PyTorch or CUDA, the loader finds missing symbols: the rest works without the extension.
        reason = error
    else:
        return tf_kernel
    logger.warning("tf_kernel is installed but cannot be loaded (%s); its kernels are not used", reason)
    return None
