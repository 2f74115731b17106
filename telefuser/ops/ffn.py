"""The feed-forward network of a transformer block, with diffusers' state-dict keys (`net.0.proj`, `net.2`), and the
first half of Wan's: a projection and GELU in one step.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from telefuser.ops.activations import GEGLU, GELU, ApproximateGELU, LinearActivation, SwiGLU, gelu_tanh
from telefuser.ops.base import CustomOpFunction
from telefuser.ops.quantized_rows import QuantizedRows


def _gelu_tanh(dim_in, dim_out, bias):
    return GELU(dim_in, dim_out, approximate="tanh", bias=bias)


# "geglu-approximate" is not gated: the name is diffusers', and so are the checkpoints that use it.
PROJECTIONS = {
    "gelu": GELU,
    "gelu-approximate": _gelu_tanh,
    "geglu": GEGLU,
    "geglu-approximate": ApproximateGELU,
    "swiglu": SwiGLU,
    "linear-silu": LinearActivation,
}


def _linear_gelu_native(x, weight, bias):
    return gelu_tanh(F.linear(x, weight, bias))


def _linear_gelu_cuda(x, weight, bias):
    # The matrix product applies the GELU to its float32 sums as it writes them: no pass of its own (0.25 of 1.45 ms at
    # 32760x1536x8960 on an H200) and one rounding less. Its tanh is not exact enough for a float32 result.
    if x.dtype not in _HALF or x.numel() == 0 or weight.dtype != x.dtype or bias.dtype != x.dtype:
        return _linear_gelu_native(x, weight, bias)
    return torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True).unflatten(0, x.shape[:-1])


_HALF = frozenset({torch.float16, torch.bfloat16})
_linear_gelu = CustomOpFunction("linear_gelu_tanh", _linear_gelu_native, cuda_impl=_linear_gelu_cuda)


def linear_gelu_tanh(
    x: torch.Tensor | QuantizedRows, linear: nn.Module, fp8_dtype: torch.dtype | None = None
) -> torch.Tensor | QuantizedRows:
    """The tanh approximation of GELU of linear(x): [..., in_features] -> [..., out_features].

    x: what `linear` takes, of rank 2 or more.  fp8_dtype: give `QuantizedRows` of that dtype.
    A plain nn.Linear in half precision on a GPU does both in one kernel; any other module, or one with hooks, is called
    as it is.
    """
    is_plain = type(linear) is nn.Linear and not linear._forward_hooks and not linear._forward_pre_hooks
    if is_plain and fp8_dtype is None and linear.bias is not None and linear.weight.dtype == x.dtype in _HALF:
        return _linear_gelu(x, linear.weight, linear.bias)
    return gelu_tanh(linear(x), fp8_dtype)


class FeedForward(nn.Module):
    """Projection and activation, dropout, projection back: [..., dim] -> [..., dim_out].

    dim_out: dim when not given.  mult: hidden width in units of dim, an int or a float.  inner_dim: the hidden width
    itself, instead of mult; with a gated activation it is the width after the gate.  A hidden width below 1 is a
    ValueError.  dropout: its probability, in training mode only.  activation_fn: "gelu", "gelu-approximate" (tanh),
    "geglu", "geglu-approximate" (x * sigmoid(1.702 x), not gated), "swiglu" or "linear-silu", else ValueError.
    final_dropout: drop out after the last projection too.  bias: of both projections.
    """

    def __init__(
        self,
        dim: int,
        dim_out: int | None = None,
        mult: float = 4,
        dropout: float = 0.0,
        activation_fn: str = "geglu",
        final_dropout: bool = False,
        inner_dim: int | None = None,
        bias: bool = True,
    ):
        super().__init__()
        if activation_fn not in PROJECTIONS:
            raise ValueError(f"unknown activation_fn {activation_fn!r}; choose one of {', '.join(PROJECTIONS)}")
        width = dim * mult if inner_dim is None else inner_dim
        if not 1 <= width < math.inf:
            # Without hidden units the output would be the last bias, whatever the input.
            raise ValueError(f"the hidden width must be at least 1, got {width} (dim {dim}, mult {mult})")
        inner_dim = int(width)
        self.net = nn.ModuleList(
            [
                PROJECTIONS[activation_fn](dim, inner_dim, bias=bias),
                nn.Dropout(dropout),
                nn.Linear(inner_dim, dim if dim_out is None else dim_out, bias=bias),
            ]
        )
        if final_dropout:
            self.net.append(nn.Dropout(dropout))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        for layer in self.net:
            hidden_states = layer(hidden_states)
        return hidden_states
