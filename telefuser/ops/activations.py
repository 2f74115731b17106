"""Activations and the projections in front of them, with diffusers' names and state-dict keys.

Rounding as in the norms: half-precision inputs are computed in float32 and rounded once; a gated form rounds after
the product only.
"""

import torch
import torch.nn.functional as F
from torch import nn

import telefuser.kernel.triton as kernels
from telefuser import platforms
from telefuser.ops.base import CustomOp, CustomOpFunction
from telefuser.ops.fp8_quantization import kernels_quantize, quantize_rows_native
from telefuser.ops.normalization import compute_dtype
from telefuser.ops.quantized_rows import QuantizedRows

ACT2CLS = {"swish": nn.SiLU, "silu": nn.SiLU, "mish": nn.Mish, "gelu": nn.GELU, "relu": nn.ReLU}


def get_activation(act_fn: str) -> nn.Module:
    """A module for "silu" (or "swish"), "mish", "gelu" (exact) or "relu", in any case; ValueError for another name."""
    name = act_fn.lower() if isinstance(act_fn, str) else act_fn
    if name not in ACT2CLS:
        raise ValueError(f"unknown activation {act_fn!r}; choose one of {', '.join(ACT2CLS)}")
    return ACT2CLS[name]()


def _quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


def _gelu_tanh(x):
    return F.gelu(x, approximate="tanh")


_NATIVE = {"gelu": F.gelu, "gelu_tanh": _gelu_tanh, "quick_gelu": _quick_gelu, "silu": F.silu}
_TF_KERNEL = {"gelu": "gelu_and_mul", "gelu_tanh": "gelu_tanh_and_mul", "silu": "silu_and_mul"}


def _activate_native(x, activation):
    return _NATIVE[activation](x.to(compute_dtype(x))).to(x.dtype)


def _activate_cuda(x, activation):
    return kernels.activate(x, activation)


def _gated_native(x, activation, gate_first):
    first, second = x.to(compute_dtype(x)).chunk(2, dim=-1)
    gate, hidden = (first, second) if gate_first else (second, first)
    return (hidden * _NATIVE[activation](gate)).to(x.dtype)


def _gated_cuda(x, activation, gate_first):
    # The extension reads the gate first, in aligned 16-byte steps; halves in the other order would have to be swapped
    # in memory.
    name = _TF_KERNEL.get(activation)
    if gate_first and name and x.dtype in (torch.float16, torch.bfloat16) and x.numel() and x.is_contiguous():
        fused = getattr(platforms.current_platform.tf_kernel, name, None)
        if fused is not None and x.shape[-1] // 2 * x.element_size() % 16 == 0:
            return fused(x)
    return kernels.activate_and_mul(x, activation, gate_first)


def _activate_quantized_native(x, activation, dtype):
    return QuantizedRows(*quantize_rows_native(_NATIVE[activation](x.to(compute_dtype(x))), dtype))


def _activate_quantized_cuda(x, activation, dtype):
    if not kernels_quantize(dtype, x.device):
        return _activate_quantized_native(x, activation, dtype)
    return QuantizedRows(*kernels.activate_quant_fp8(x, activation, dtype))


def _gated_quantized_native(x, activation, gate_first, dtype):
    first, second = x.to(compute_dtype(x)).chunk(2, dim=-1)
    gate, hidden = (first, second) if gate_first else (second, first)
    return QuantizedRows(*quantize_rows_native(hidden * _NATIVE[activation](gate), dtype))


def _gated_quantized_cuda(x, activation, gate_first, dtype):
    if not kernels_quantize(dtype, x.device):
        return _gated_quantized_native(x, activation, gate_first, dtype)
    return QuantizedRows(*kernels.activate_and_mul_quant_fp8(x, activation, gate_first, dtype))


_activate_quantized = CustomOpFunction(
    "activate_quantized", _activate_quantized_native, cuda_impl=_activate_quantized_cuda
)
_gated_quantized = CustomOpFunction("gated_quantized", _gated_quantized_native, cuda_impl=_gated_quantized_cuda)
_activate = CustomOpFunction("activate", _activate_native, cuda_impl=_activate_cuda)
_activate_and_mul = CustomOpFunction("activate_and_mul", _gated_native, cuda_impl=_gated_cuda)


def _gated(
    x: torch.Tensor, activation: str, gate_first: bool, out_dtype: torch.dtype | None = None
) -> torch.Tensor | QuantizedRows:
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"a gated activation splits the last dimension in two halves; x has shape {tuple(x.shape)}")
    if out_dtype is not None:
        return _gated_quantized(x, activation, gate_first, out_dtype)
    return _activate_and_mul(x, activation, gate_first)


def silu_and_mul(x: torch.Tensor, fp8_dtype: torch.dtype | None = None) -> torch.Tensor | QuantizedRows:
    """silu(x[..., :D]) * x[..., D:] for x [..., 2D]: the gate first, unlike `SwiGLU`. ValueError for an odd width.

    fp8_dtype: give `QuantizedRows` of that dtype, quantised from the unrounded values.
    """
    return _gated(x, "silu", True, fp8_dtype)


def gelu_and_mul(x: torch.Tensor, fp8_dtype: torch.dtype | None = None) -> torch.Tensor | QuantizedRows:
    """gelu(x[..., :D]) * x[..., D:] for x [..., 2D]: the gate first, unlike `GEGLU`. fp8_dtype: see `silu_and_mul`."""
    return _gated(x, "gelu", True, fp8_dtype)


def gelu_tanh(x: torch.Tensor, fp8_dtype: torch.dtype | None = None) -> torch.Tensor | QuantizedRows:
    """`GELUTanh` of x, or of it `QuantizedRows` with values in fp8_dtype, quantised from the unrounded values."""
    if fp8_dtype is not None:
        return _activate_quantized(x, "gelu_tanh", fp8_dtype)
    return _activate(x, "gelu_tanh")


class FP32SiLU(CustomOp):
    """x * sigmoid(x) in float32 (float64 for float64), rounded once to x's dtype. x: any shape, floating point."""

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return _activate_native(x, "silu")

    def forward_cuda(self, x: torch.Tensor) -> torch.Tensor:
        return _activate_cuda(x, "silu")


class GELUTanh(CustomOp):
    """The tanh approximation of GELU alone, rounded once to x's dtype. x: any shape and strides, floating point.

    Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.
    """

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        # PyTorch computes half precision in float32 here and keeps no float32 copy for the backward pass.
        return _gelu_tanh(x)

    def forward_cuda(self, x: torch.Tensor) -> torch.Tensor:
        return _activate_cuda(x, "gelu_tanh")


class GELU(nn.Module):
    """A projection [..., dim_in] -> [..., dim_out], then GELU.

    Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.
    approximate: "none" for x * Phi(x), "tanh" for its tanh approximation; ValueError otherwise.
    """

    def __init__(self, dim_in: int, dim_out: int, approximate: str = "none", bias: bool = True):
        super().__init__()
        if approximate not in ("none", "tanh"):
            raise ValueError(f"approximate is {approximate!r}; choose 'none' or 'tanh'")
        self.proj = nn.Linear(dim_in, dim_out, bias=bias)
        self.approximate = approximate

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _activate(self.proj(hidden_states), "gelu_tanh" if self.approximate == "tanh" else "gelu")


class GEGLU(nn.Module):
    """A projection to 2 * dim_out split in halves: first half * gelu(second half), the exact GELU.

    [..., dim_in] -> [..., dim_out]. Shazeer, "GLU Variants Improve Transformer", 2020.
    """

    def __init__(self, dim_in: int, dim_out: int, bias: bool = True):
        super().__init__()
        self.proj = nn.Linear(dim_in, dim_out * 2, bias=bias)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _gated(self.proj(hidden_states), "gelu", gate_first=False)


class SwiGLU(nn.Module):
    """A projection to 2 * dim_out split in halves: first half * silu(second half).

    [..., dim_in] -> [..., dim_out]. Shazeer, "GLU Variants Improve Transformer", 2020.
    """

    def __init__(self, dim_in: int, dim_out: int, bias: bool = True):
        super().__init__()
        self.proj = nn.Linear(dim_in, dim_out * 2, bias=bias)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _gated(self.proj(hidden_states), "silu", gate_first=False)


class ApproximateGELU(nn.Module):
    """A projection [..., dim_in] -> [..., dim_out], then x * sigmoid(1.702 x), which is not gated.

    Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016, section 2.
    """

    def __init__(self, dim_in: int, dim_out: int, bias: bool = True):
        super().__init__()
        self.proj = nn.Linear(dim_in, dim_out, bias=bias)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _activate(self.proj(hidden_states), "quick_gelu")


class LinearActivation(nn.Module):
    """A projection [..., dim_in] -> [..., dim_out], then one of `get_activation`'s functions."""

    def __init__(self, dim_in: int, dim_out: int, bias: bool = True, activation: str = "silu"):
        super().__init__()
        self.proj = nn.Linear(dim_in, dim_out, bias=bias)
        self.activation = get_activation(activation)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.activation(self.proj(hidden_states))
