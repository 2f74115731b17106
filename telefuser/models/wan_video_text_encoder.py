"""UMT5 encoder, the text tower of Wan: token ids to one vector a token. State-dict keys are the official ones.

Differs from T5 (Raffel et al. 2019, arXiv:1910.10683) by a relative position bias of its own in every layer, as in
UMT5 (Chung et al. 2023, arXiv:2304.09151). Shape letters: B prompts, L tokens, N heads, D head dim, C width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from telefuser.ops.attention import attention
from telefuser.ops.normalization import RMSNorm

NORM_EPS = 1e-6
MAX_DISTANCE = 128


def relative_position_buckets(length: int, num_buckets: int, max_distance: int = MAX_DISTANCE) -> torch.Tensor:
    """Bucket of each distance key - query in -(length-1) .. length-1: int64 [2 * length - 1] on CPU.

    The upper half of the buckets is for keys to the right. In each half, half of the buckets hold one distance each,
    the others grow logarithmically up to `max_distance` (Raffel et al. 2019, section 2.1). Made on CPU: another
    device's logarithm may round differently at the powers of two, where buckets begin.
    """
    relative = torch.arange(-(length - 1), length)
    half = num_buckets // 2
    num_exact = half // 2
    distance = relative.abs()
    growth = torch.log(distance.clamp(min=1).float() / num_exact) / math.log(max_distance / num_exact)
    far = (num_exact + (growth * (half - num_exact)).long()).clamp(max=half - 1)
    return torch.where(distance < num_exact, distance, far) + half * (relative > 0)


def _finite_half(x: torch.Tensor) -> torch.Tensor:
    """UMT5's residual stream passes 65504 in float16; clamped, it stays finite. Other dtypes have the range."""
    return x.clamp(-65504.0, 65504.0) if x.dtype == torch.float16 else x


class RelativePositionBias(nn.Module):
    """Learned bias a head and distance bucket."""

    def __init__(self, num_buckets: int, num_heads: int):
        super().__init__()
        self.num_buckets = num_buckets
        self.embedding = nn.Embedding(num_buckets, num_heads)
        nn.init.normal_(self.embedding.weight, std=(2 * num_buckets * num_heads) ** -0.5)

    def forward(self, length: int) -> torch.Tensor:
        """Additive bias [1, N, length, length] (query, key) in the dtype of the weight."""
        device = self.embedding.weight.device
        by_distance = self.embedding(relative_position_buckets(length, self.num_buckets).to(device, non_blocking=True))
        position = torch.arange(length, device=device)
        index = position[None, :] - position[:, None] + (length - 1)
        return by_distance[index].permute(2, 0, 1)[None]


class SelfAttention(nn.Module):
    """Attention among the tokens of a prompt, scores unscaled: x [B, L, C], bias [1 or B, N, L, L] -> [B, L, C]."""

    def __init__(self, dim: int, dim_attn: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.q = nn.Linear(dim, dim_attn, bias=False)
        self.k = nn.Linear(dim, dim_attn, bias=False)
        self.v = nn.Linear(dim, dim_attn, bias=False)
        self.o = nn.Linear(dim_attn, dim, bias=False)
        # T5 does not scale the scores; the initial size of q carries the 1/sqrt(D) instead.
        nn.init.normal_(self.q.weight, std=(dim * dim_attn // num_heads) ** -0.5)
        nn.init.normal_(self.k.weight, std=dim**-0.5)
        nn.init.normal_(self.v.weight, std=dim**-0.5)
        nn.init.normal_(self.o.weight, std=dim_attn**-0.5)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        q, k, v = (linear(x).unflatten(-1, (self.num_heads, -1)) for linear in (self.q, self.k, self.v))  # [B, L, N, D]
        return self.o(attention(q, k, v, attn_mask=bias, scale=1.0).flatten(2))


class FeedForward(nn.Module):
    """fc2(gelu(gate(x)) * fc1(x)) with the tanh form of GELU."""

    def __init__(self, dim: int, dim_ffn: int, dropout: float):
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(dim, dim_ffn, bias=False), nn.GELU(approximate="tanh"))
        self.fc1 = nn.Linear(dim, dim_ffn, bias=False)
        self.fc2 = nn.Linear(dim_ffn, dim, bias=False)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.gate[0].weight, std=dim**-0.5)
        nn.init.normal_(self.fc1.weight, std=dim**-0.5)
        nn.init.normal_(self.fc2.weight, std=dim_ffn**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.dropout(self.fc1(x) * self.gate(x)))


class EncoderBlock(nn.Module):
    """Attention and feed-forward, each after an RMSNorm and added to x [B, L, C].

    padding: bool [B, 1, 1, L], True on what nobody may attend to.  shared_bias: replaces the layer's own position bias.
    """

    def __init__(self, dim, dim_attn, dim_ffn, num_heads, num_buckets, shared_pos, dropout):
        super().__init__()
        self.norm1 = RMSNorm(dim, eps=NORM_EPS)
        self.attn = SelfAttention(dim, dim_attn, num_heads)
        self.norm2 = RMSNorm(dim, eps=NORM_EPS)
        self.ffn = FeedForward(dim, dim_ffn, dropout)
        self.pos_embedding = None if shared_pos else RelativePositionBias(num_buckets, num_heads)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, padding: torch.Tensor | None, shared_bias: torch.Tensor | None) -> torch.Tensor:
        bias = self.pos_embedding(x.shape[1]) if shared_bias is None else shared_bias
        bias = bias.to(x.dtype)
        if padding is not None:
            # The lowest finite value, not -inf: a prompt without a single valid token then gives numbers, not NaN.
            bias = bias.masked_fill(padding, torch.finfo(x.dtype).min)
        x = _finite_half(x + self.dropout(self.attn(self.norm1(x), bias)))
        return _finite_half(x + self.dropout(self.ffn(self.norm2(x))))


class WanTextEncoder(nn.Module):
    """UMT5 encoder; the defaults are UMT5-XXL.

    Args:
        vocab: rows of the token embedding.
        dim: width C of the output.
        dim_attn: width of all heads together; a multiple of `num_heads`.
        dim_ffn: inner width of the gated feed-forward.
        num_buckets: distance buckets of the position bias.
        shared_pos: one position bias for all layers instead of one each.
        dropout: used in training mode only.

    Raises:
        ValueError: `dim_attn` is no multiple of `num_heads`.
    """

    def __init__(
        self,
        vocab: int = 256384,
        dim: int = 4096,
        dim_attn: int = 4096,
        dim_ffn: int = 10240,
        num_heads: int = 64,
        num_layers: int = 24,
        num_buckets: int = 32,
        shared_pos: bool = False,
        dropout: float = 0.1,
    ):
        super().__init__()
        if dim_attn % num_heads:
            raise ValueError(f"dim_attn {dim_attn} is no multiple of num_heads {num_heads}")
        self.vocab, self.dim = vocab, dim
        self.token_embedding = nn.Embedding(vocab, dim)
        self.pos_embedding = RelativePositionBias(num_buckets, num_heads) if shared_pos else None
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            EncoderBlock(dim, dim_attn, dim_ffn, num_heads, num_buckets, shared_pos, dropout) for _ in range(num_layers)
        )
        self.norm = RMSNorm(dim, eps=NORM_EPS)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> WanTextEncoder:
        """The encoder of a `config` with the names of the arguments; others are ignored, absent ones are UMT5-XXL's."""
        names = (
            "vocab", "dim", "dim_attn", "dim_ffn", "num_heads", "num_layers", "num_buckets", "shared_pos", "dropout",
        )  # fmt: skip
        return cls(**{name: config[name] for name in names if name in config})

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Encode token ids.

        Args:
            ids: [B, L] integer token ids.
            mask: [B, L], non-zero where a token counts; None where all do. Rows of the output past a prompt's tokens
                are computed but mean nothing.

        Returns:
            [B, L, C] in the dtype of the weights.
        """
        padding = None if mask is None else (mask == 0)[:, None, None, :]
        shared_bias = None if self.pos_embedding is None else self.pos_embedding(ids.shape[1])
        x = self.dropout(self.token_embedding(ids))
        for block in self.blocks:
            x = block(x, padding, shared_bias)
        return self.dropout(self.norm(x))
