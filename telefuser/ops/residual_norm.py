"""Layer norm with what stands around it in a transformer block: a gated residual addition before, a modulation after.

Each group is one pass over memory where there is a kernel. The residual stream keeps its dtype (float32 in Wan), while
the normed rows come out in the dtype that the next projection computes in. Rounding is that of `normalization`: all
arithmetic in float32 (float64 for a float64 stream), one rounding for each result. An FP8 dtype for the normed rows
gives them as `QuantizedRows`, quantised from the unrounded values: what a projection with FP8 weights takes as it is.
"""

import torch
import torch.nn.functional as F

import telefuser.kernel.triton as kernels
from telefuser.ops.base import CustomOpFunction
from telefuser.ops.fp8_quantization import FP8_DTYPES, kernels_quantize, quantize_rows_native
from telefuser.ops.normalization import beside, compute_dtype
from telefuser.ops.quantized_rows import QuantizedRows


def _norm_native(x, scale, shift, weight, bias, eps, out_dtype):
    wide = compute_dtype(x)
    weight, bias = (vector if vector is None else vector.to(wide) for vector in (weight, bias))
    h = F.layer_norm(x.to(wide), x.shape[-1:], weight, bias, eps)
    if scale is not None:
        h = h * (scale.to(wide) + 1.0)
    if shift is not None:
        h = h + shift.to(wide)
    if out_dtype in FP8_DTYPES:
        return QuantizedRows(*quantize_rows_native(h, out_dtype))
    return h.to(out_dtype)


def _add_native(x, y, gate):
    wide = x.to(compute_dtype(x))
    # Mixed dtypes promote, which spares training a float32 copy of y.
    return (wide + y if gate is None else torch.addcmul(wide, y, gate)).to(x.dtype)


def _add_norm_native(x, y, gate, scale, shift, weight, bias, eps, out_dtype):
    total = _add_native(x, y, gate)
    return total, _norm_native(total, scale, shift, weight, bias, eps, out_dtype)


def _norm_cuda(x, scale, shift, weight, bias, eps, out_dtype):
    if out_dtype not in FP8_DTYPES:
        return kernels.layer_norm(x, weight, bias, eps, scale, shift, out_dtype)
    if not kernels_quantize(out_dtype, x.device):
        return _norm_native(x, scale, shift, weight, bias, eps, out_dtype)
    return QuantizedRows(*kernels.layer_norm(x, weight, bias, eps, scale, shift, out_dtype))


def _add_norm_cuda(x, y, gate, scale, shift, weight, bias, eps, out_dtype):
    if out_dtype not in FP8_DTYPES:
        return kernels.add_layer_norm(x, y, gate, weight, bias, eps, scale, shift, out_dtype)
    if not kernels_quantize(out_dtype, x.device):
        return _add_norm_native(x, y, gate, scale, shift, weight, bias, eps, out_dtype)
    total, out = kernels.add_layer_norm(x, y, gate, weight, bias, eps, scale, shift, out_dtype)
    return total, QuantizedRows(*out)


def _add_cuda(x, y, gate):
    return kernels.add_gated(x, y, gate)


_norm = CustomOpFunction("layer_norm_modulate", _norm_native, cuda_impl=_norm_cuda)
_add_norm = CustomOpFunction("add_layer_norm_modulate", _add_norm_native, cuda_impl=_add_norm_cuda)
_add = CustomOpFunction("add_gated", _add_native, cuda_impl=_add_cuda)


def layer_norm_modulate(
    x: torch.Tensor,
    shift: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor | QuantizedRows:
    """n * (1 + scale) + shift with n = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension.

    Ba et al., "Layer Normalization", 2016; Peebles and Xie, "Scalable Diffusion Models with Transformers", 2022.
    x: [..., D] floating point, any strides.  shift, scale: as for `modulate`, or None.  weight, bias: [D] or None.
    Returns x's shape in out_dtype: x's own where not given; `QuantizedRows` for an FP8 one. ValueError where shift,
    scale, weight or bias does not fit x, or x is not floating point.
    """
    scale, shift = _vector("scale", scale, x), _vector("shift", shift, x)
    if weight is not None or bias is not None:
        _check_affine(x, weight, bias)
    return _norm(x, scale, shift, weight, bias, eps, out_dtype or x.dtype)


def add_layer_norm_modulate(
    x: torch.Tensor,
    y: torch.Tensor,
    gate: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | QuantizedRows]:
    """(total, `layer_norm_modulate` of total) with total = x + gate * y in x's dtype: the new residual stream as well.

    y: x's shape, any float dtype and strides.  gate: as shift and scale, or None for 1.  The norm sees total as it is
    stored.  out_dtype: y's where not given. Everything else as for `layer_norm_modulate`; ValueError for another y.
    """
    _check_added(x, y)
    _check_affine(x, weight, bias)
    gate, scale, shift = _vector("gate", gate, x), _vector("scale", scale, x), _vector("shift", shift, x)
    return _add_norm(x, y, gate, scale, shift, weight, bias, eps, out_dtype or y.dtype)


def add_gated(x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
    """x + gate * y in x's dtype, rounded once: `add_layer_norm_modulate` without the norm, for the end of a stack."""
    _check_added(x, y)
    return _add(x, y, _vector("gate", gate, x))


def _vector(name: str, vector: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    return None if vector is None else beside(name, vector, x)


def _check_added(x: torch.Tensor, y: torch.Tensor) -> None:
    if y.shape != x.shape:
        raise ValueError(f"y of shape {tuple(y.shape)} cannot be added to a residual of shape {tuple(x.shape)}")


def _check_affine(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and vector.shape != x.shape[-1:]:
            raise ValueError(f"{name} has shape {tuple(vector.shape)}, the rows of x have {x.shape[-1]} elements")
