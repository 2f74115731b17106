"""The feed-forward network of a transformer block, with diffusers' state-dict keys (`net.0.proj`, `net.2`)."""

import math

import torch
from torch import nn

from telefuser.ops.activations import GEGLU, GELU, ApproximateGELU, LinearActivation, SwiGLU


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
