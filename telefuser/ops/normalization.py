"""RMSNorm, LayerNorm, adaptive layer norm and modulation, as the Wan models use them.

Rounding, the same on every path: float16 and bfloat16 inputs are computed in float32, weight and bias included, and
the result is rounded once to the input's dtype, whatever the dtype of the weights. float64 is computed in float64.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

import telefuser.kernel.triton as kernels
from telefuser import platforms
from telefuser.ops.base import CustomOp, CustomOpFunction

_HALF = frozenset({torch.float16, torch.bfloat16})
_FLOATS = _HALF | {torch.float32, torch.float64}


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """float64 for float64, float32 for every smaller float dtype; ValueError for a tensor that is not real floating
    point.
    """
    if not x.is_floating_point():
        raise ValueError(f"expected a floating-point tensor, got {x.dtype}; convert it first")
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class _Norm(CustomOp):
    """Parameters and checks of a norm over the last dimension, `dim` wide; ValueError for dim below 1 and for an eps
    that is negative or not finite.
    """

    def __init__(self, dim, eps, elementwise_affine, bias, device, dtype):
        super().__init__()
        if dim < 1:
            raise ValueError(f"{type(self).__name__} got dim {dim}; a row needs at least one element")
        if not 0 <= eps < math.inf:
            raise ValueError(f"{type(self).__name__} got eps {eps}; give a finite number of 0 or more")
        self.dim = dim
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        make = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(dim, **make)) if elementwise_affine else None
        self.bias = nn.Parameter(torch.empty(dim, **make)) if elementwise_affine and bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weight one, bias zero."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}, elementwise_affine={self.elementwise_affine}, bias={self.bias is not None}"

    def _check_width(self, x: torch.Tensor) -> None:
        if x.dim() == 0 or x.shape[-1] != self.dim:
            raise ValueError(f"{type(self).__name__} over {self.dim} elements got a tensor of shape {tuple(x.shape)}")


def rms_norm_unrounded(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """`RMSNorm`'s formula for x [..., D], weight and bias [D] or None, left in the dtype that it is computed in."""
    h = x.to(compute_dtype(x))
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        h = h * weight.to(h.dtype)
    return h if bias is None else h + bias.to(h.dtype)


class RMSNorm(_Norm):
    """x / sqrt(mean(x^2) + eps) * weight + bias over the last dimension.

    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    dim: width of the last dimension.  eps: added to the mean square.  elementwise_affine: have a weight, and with
    `bias` also a bias.
    x: [..., dim] floating point, any strides. Returns x's shape and dtype. ValueError for another width or dtype.
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(dim, eps, elementwise_affine, bias, device, dtype)

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        self._check_width(x)
        return rms_norm_unrounded(x, self.weight, self.bias, self.eps).to(x.dtype)

    def forward_cuda(self, x: torch.Tensor) -> torch.Tensor:
        self._check_width(x)
        rmsnorm = getattr(platforms.current_platform.tf_kernel, "rmsnorm", None)
        if rmsnorm is not None and self._suits_tf_kernel(x):
            return rmsnorm(x.view(-1, self.dim), self.weight, self.eps).view(x.shape)
        return kernels.rms_norm(x, self.weight, self.bias, self.eps)

    def _suits_tf_kernel(self, x: torch.Tensor) -> bool:
        """The extension has one form: half precision, rows one after another, a weight of the same dtype, no bias."""
        weight = self.weight
        return (
            x.dtype in _HALF
            and weight is not None
            and weight.dtype == x.dtype
            and self.bias is None
            and x.is_contiguous()
            and x.numel() > 0
        )


class LayerNorm(_Norm):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension; var divides by dim.

    Ba, Kiros and Hinton, "Layer Normalization", 2016. Arguments, result and errors as for `RMSNorm`.
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(dim, eps, elementwise_affine, bias, device, dtype)

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        self._check_width(x)
        wide = compute_dtype(x)
        weight = None if self.weight is None else self.weight.to(wide)
        bias = None if self.bias is None else self.bias.to(wide)
        return F.layer_norm(x.to(wide), (self.dim,), weight, bias, self.eps).to(x.dtype)

    def forward_cuda(self, x: torch.Tensor) -> torch.Tensor:
        self._check_width(x)
        return kernels.layer_norm(x, self.weight, self.bias, self.eps)


NORMS = {"layer_norm": LayerNorm, "rms_norm": RMSNorm}


class AdaLayerNormContinuous(nn.Module):
    """norm(x) * (1 + scale) + shift, with scale and shift, in this order, projected from SiLU(conditioning).

    State-dict keys are diffusers'.
    x: [B, S, embedding_dim].  conditioning: [B, conditioning_embedding_dim], or [B, S, ...] for one a token.
    norm_type: "layer_norm" or "rms_norm", else ValueError.  bias: of the projection and of a LayerNorm.
    The conditioning is cast to the dtype of the projection's weight. Norm and modulation round once, to x's dtype.
    """

    def __init__(
        self,
        embedding_dim: int,
        conditioning_embedding_dim: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        bias: bool = True,
        norm_type: str = "layer_norm",
    ):
        super().__init__()
        if norm_type not in NORMS:
            raise ValueError(f"norm_type is {norm_type!r}; choose one of {', '.join(NORMS)}")
        self.silu = nn.SiLU()
        self.linear = nn.Linear(conditioning_embedding_dim, embedding_dim * 2, bias=bias)
        # An RMSNorm has no bias here, as in diffusers' checkpoints.
        self.norm = NORMS[norm_type](embedding_dim, eps, elementwise_affine, bias=bias and norm_type == "layer_norm")

    def forward(self, x: torch.Tensor, conditioning: torch.Tensor) -> torch.Tensor:
        embedded = self.silu(conditioning)
        # A projection with an 8-bit weight quantises its input itself.
        if self.linear.weight.dtype.itemsize > 1:
            embedded = embedded.to(self.linear.weight.dtype)
        scale, shift = self.linear(embedded).chunk(2, dim=-1)
        normed = self.norm(x.to(compute_dtype(x)))
        return modulate(normed, shift, scale).to(x.dtype)


def _scale_shift_native(x, scale, shift, scale_constant):
    wide = compute_dtype(x)
    return (x.to(wide) * (scale.to(wide) + scale_constant) + shift.to(wide)).to(x.dtype)


def _scale_shift_cuda(x, scale, shift, scale_constant):
    return kernels.fused_scale_shift(x, scale, shift, scale_constant)


_fused_scale_shift = CustomOpFunction("fused_scale_shift", _scale_shift_native, cuda_impl=_scale_shift_cuda)


def fused_scale_shift(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, scale_constant: float = 1.0
) -> torch.Tensor:
    """x * (scale_constant + scale) + shift: scale comes before shift. Shapes, dtypes and errors as for `modulate`."""
    return _fused_scale_shift(x, beside("scale", scale, x), beside("shift", shift, x), scale_constant)


def modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x * (1 + scale) + shift: shift comes before scale. Peebles and Xie, "Scalable Diffusion Models with
    Transformers", 2022.

    x: [B, S, D], or any other rank.
    shift, scale: [B, D] (one row a batch item, whatever S is), [B, 1, D], [B, S, D], [1, 1, D] or [D]; any strides,
    as `chunk` leaves them, never expanded in memory; any float dtype.
    Returns x's shape and dtype. Raises ValueError where shift or scale does not fit x, or one of them is not floating
    point.
    """
    return _fused_scale_shift(x, beside("scale", scale, x), beside("shift", shift, x), 1.0)


def beside(name: str, vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A view of `vector` that broadcasts to x's shape and never beyond it; ValueError where it does not fit, or is not
    real floating point: a complex one would lose its imaginary part on the way to x's dtype.
    """
    given, want = vector.shape, x.shape
    if len(given) == len(want) == 3 and vector.dtype in _FLOATS:
        # The models' own case, decided in 1 us of the host's time; the loop below takes 5.
        if given[2] in (1, want[2]) and given[1] in (1, want[1]) and given[0] in (1, want[0]):
            return vector
    if not vector.is_floating_point():
        raise ValueError(f"{name} must hold real floating-point numbers, not {vector.dtype}")
    if vector.dim() == 2:
        # [B, D] would otherwise line up with [S, D], silently so when B equals S.
        for _ in range(x.dim() - 2):
            vector = vector.unsqueeze(1)
    fits = vector.dim() <= x.dim() and all(
        have in (1, want) for have, want in zip(reversed(vector.shape), reversed(x.shape))
    )
    if not fits:
        raise ValueError(
            f"{name} of shape {tuple(given)} does not fit x of shape {tuple(x.shape)}: "
            "expected [B, D], or a shape that broadcasts to x's"
        )
    return vector
