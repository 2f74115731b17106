"""3-D convolution of video features; the VAE takes it from here because PyTorch's choice of CPU routine is poor."""

import torch
import torch.nn.functional as F

from telefuser.ops.base import CustomOpFunction


class _Conv3d(CustomOpFunction):
    def eager(self, x, weight, bias, stride, padding):
        """On a CPU in float32 oneDNN, channels last; everywhere else what PyTorch chooses.

        F.conv3d takes a reference routine where batch * C * F * H <= 20480, so for one chunk of a small video:
        [1, 24, 6, 128, 128] with 24 filters of 3x3x3 takes 139 ms there, 22 ms in oneDNN and 12 ms channels last (one
        core). The layout stays with the features: the L2 norm over 24 channels takes 0.3 ms in it for 8 ms.
        """
        if x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32 and _onednn_may_run(x):
            x = x.contiguous(memory_format=torch.channels_last_3d)
            return torch.mkldnn_convolution(x, weight, bias, padding, stride, (1, 1, 1), 1)
        return self.native_impl(x, weight, bias, stride, padding)


def _onednn_may_run(x: torch.Tensor) -> bool:
    """It is built in and not switched off, x has elements in memory (is not fake) and autocast has no say."""
    mkldnn = torch.backends.mkldnn
    real = type(x) in (torch.Tensor, torch.nn.Parameter) and x.numel() > 0
    return real and mkldnn.is_available() and mkldnn.enabled and not torch.is_autocast_enabled("cpu")


def _native(x, weight, bias, stride, padding):
    return F.conv3d(x, weight, bias, stride, padding)


_conv3d = _Conv3d("conv3d", _native)


def conv3d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: tuple[int, int, int] = (1, 1, 1),
    padding: tuple[int, int, int] = (0, 0, 0),
) -> torch.Tensor:
    """x [B, C, F, H, W] and weight [O, C, kF, kH, kW] to [B, O, F', H', W'], zero padding on both sides of each axis.

    The same numbers as `torch.nn.functional.conv3d` to rounding, differentiable; the memory layout of the result is not
    fixed (channels last on a CPU).
    """
    return _conv3d(x, weight, bias, stride, padding)
