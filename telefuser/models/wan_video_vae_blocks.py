"""Layers of the Wan 2.1 video VAE; `wan_video_vae.WanVideoVAE` puts them together.

Every layer that looks back in time takes an optional `StreamCache`. Without one it sees the whole clip and zeros before
it; with one it continues where the last call with that cache stopped. Both run the same code and give the same numbers.
Shape letters: B batch, C channels, F frames, H W grid.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F

from telefuser.ops.attention import attention
from telefuser.ops.convolution import conv3d

# Layer -> its last input frames. A plain dict handed from call to call: no module holds a stream's state, so several
# streams can use one model in turn.
StreamCache = dict[nn.Module, torch.Tensor]


class Streamed:
    """Marks a layer whose `forward` takes the stream's cache as second argument."""


class StreamSequential(nn.Sequential):
    """`nn.Sequential` that hands the stream's cache to the layers that need it."""

    def forward(self, x: torch.Tensor, cache: StreamCache | None = None) -> torch.Tensor:
        return run_layers(self, x, cache)


def run_layers(layers, x: torch.Tensor, cache: StreamCache | None = None) -> torch.Tensor:
    for layer in layers:
        x = layer(x, cache) if isinstance(layer, (Streamed, StreamSequential)) else layer(x)
    return x


class Conv3d(nn.Conv3d):
    """`nn.Conv3d` through the operator, which knows the fast routine and layout of the device."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return conv3d(x, self.weight, self.bias, self.stride, self.padding)


class CausalConv3d(Streamed, Conv3d):
    """3-D convolution that pads time on the left only: output frame t sees input frames up to t."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: Sequence[int] = (3, 3, 3)) -> None:
        time, height, width = kernel_size
        super().__init__(in_channels, out_channels, kernel_size, padding=(0, height // 2, width // 2))
        self.history = time - 1

    def forward(self, x: torch.Tensor, cache: StreamCache | None = None) -> torch.Tensor:
        tail = None if cache is None else cache.get(self)
        if tail is None:
            x = F.pad(x, (0, 0, 0, 0, self.history, 0))
        else:
            x = torch.cat([tail, x], dim=2)
        if cache is not None:
            # A clone, because a view would keep the whole chunk alive (3 times the memory at 4 frames a chunk).
            cache[self] = x[:, :, -self.history :].clone()
        return super().forward(x)


class ChannelRMSNorm(nn.Module):
    """x / max(|x|, 1e-12) * sqrt(C) * gamma with the L2 norm over the channels (dim 1), at least in float32."""

    def __init__(self, dim: int, num_axes: int = 3) -> None:
        super().__init__()
        self.scale = dim**0.5
        self.gamma = nn.Parameter(torch.ones(dim, *(1,) * num_axes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=wide)
        return (x * (self.scale / norm.clamp_min(1e-12)) * self.gamma.to(wide)).to(x.dtype)


class SiLU(nn.Module):
    """SiLU over a norm's fresh result, in place unless autograd needs it (0.6 GB less at 832x480 in the last stage)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x, inplace=not x.requires_grad)


class ResidualBlock(Streamed, nn.Module):
    """norm, SiLU, conv, norm, SiLU, dropout, conv, plus the input (through a 1x1x1 convolution if widths differ)."""

    def __init__(self, in_dim: int, out_dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.residual = StreamSequential(
            ChannelRMSNorm(in_dim),
            SiLU(),
            CausalConv3d(in_dim, out_dim),
            ChannelRMSNorm(out_dim),
            SiLU(),
            nn.Dropout(dropout),
            CausalConv3d(out_dim, out_dim),
        )
        self.shortcut = nn.Identity() if in_dim == out_dim else Conv3d(in_dim, out_dim, 1)

    def forward(self, x: torch.Tensor, cache: StreamCache | None = None) -> torch.Tensor:
        return self.residual(x, cache).add_(self.shortcut(x))


class AttentionBlock(nn.Module):
    """Single-head self attention over the pixels of each frame; head dim = all channels (384 as published)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = ChannelRMSNorm(dim, num_axes=2)
        self.to_qkv = nn.Conv2d(dim, dim * 3, 1)
        self.proj = nn.Conv2d(dim, dim, 1)
        nn.init.zeros_(self.proj.weight)  # as published: training starts with the block as identity

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, channels, frames, height, width = x.shape
        y = self.norm(frames_to_batch(x)).flatten(2).transpose(1, 2)  # [B*F, S, C]
        qkv = F.linear(y, self.to_qkv.weight.flatten(1), self.to_qkv.bias).unsqueeze(2)  # [B*F, S, 1, 3C]
        y = attention(*qkv.chunk(3, dim=-1)).squeeze(2)  # [B*F, S, C]
        y = F.linear(y, self.proj.weight.flatten(1), self.proj.bias)
        y = y.view(batch, frames, height, width, channels).permute(0, 4, 1, 2, 3)  # [B, C, F, H, W]
        return x + y


class Downsample(Streamed, nn.Module):
    """Halves H and W (pads right and bottom only); with `temporal` also F, the first frame apart: 1+2n -> 1+n."""

    def __init__(self, dim: int, temporal: bool) -> None:
        super().__init__()
        self.resample = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(dim, dim, 3, stride=2))
        self.time_conv = Conv3d(dim, dim, (3, 1, 1), stride=(2, 1, 1)) if temporal else None

    def forward(self, x: torch.Tensor, cache: StreamCache | None = None) -> torch.Tensor:
        x = batch_to_frames(self.resample(frames_to_batch(x)), batch=x.shape[0])
        if self.time_conv is None:
            return x
        last = None if cache is None else cache.get(self)
        if cache is not None:
            cache[self] = x[:, :, -1:].clone()
        if last is not None:
            return self.time_conv(torch.cat([last, x], dim=2))
        if x.shape[2] == 1:
            return x
        return torch.cat([x[:, :, :1], self.time_conv(x)], dim=2)


class Upsample(Streamed, nn.Module):
    """Doubles H and W and halves C; with `temporal` also doubles F, the first frame apart: 1+n -> 1+2n."""

    def __init__(self, dim: int, temporal: bool) -> None:
        super().__init__()
        self.resample = nn.Sequential(
            nn.Upsample(scale_factor=(2.0, 2.0), mode="nearest-exact"), nn.Conv2d(dim, dim // 2, 3, padding=1)
        )
        self.time_conv = CausalConv3d(dim, dim * 2, (3, 1, 1)) if temporal else None

    def forward(self, x: torch.Tensor, cache: StreamCache | None = None) -> torch.Tensor:
        if self.time_conv is not None:
            x = self._double_frames(x, cache)
        return batch_to_frames(self.resample(frames_to_batch(x)), batch=x.shape[0])

    def _double_frames(self, x: torch.Tensor, cache: StreamCache | None) -> torch.Tensor:
        if cache is not None and self in cache:
            return interleave_frames(self.time_conv(x, cache))
        if cache is not None:
            cache[self] = x.new_empty(0)  # only says that the first frame is past
        if x.shape[2] == 1:
            return x
        # The first frame passes through and is no history for the second one, which starts from zeros.
        return torch.cat([x[:, :, :1], interleave_frames(self.time_conv(x[:, :, 1:], cache))], dim=2)


def interleave_frames(x: torch.Tensor) -> torch.Tensor:
    """[B, 2C, F, H, W] -> [B, C, 2F, H, W]: the two halves of the channels become the even and the odd frames.

    One copy, frame by frame, that keeps channels last if they are: the next thing read is frames.
    """
    halves = x.unflatten(1, (2, -1))  # [B, 2, C, F, H, W]
    if x.is_contiguous(memory_format=torch.channels_last_3d):
        return halves.permute(0, 3, 1, 4, 5, 2).flatten(1, 2).permute(0, 4, 1, 2, 3)
    return halves.permute(0, 3, 1, 2, 4, 5).flatten(1, 2).transpose(1, 2)


def frames_to_batch(x: torch.Tensor) -> torch.Tensor:
    """[B, C, F, H, W] -> [B*F, C, H, W], a view for one clip."""
    return x.transpose(1, 2).flatten(0, 1)


def batch_to_frames(x: torch.Tensor, batch: int) -> torch.Tensor:
    """[B*F, C, H, W] -> [B, C, F, H, W], a view."""
    return x.unflatten(0, (batch, -1)).transpose(1, 2)


def _middle(dim: int, dropout: float) -> StreamSequential:
    return StreamSequential(ResidualBlock(dim, dim, dropout), AttentionBlock(dim), ResidualBlock(dim, dim, dropout))


def _head(dim: int, out_channels: int) -> StreamSequential:
    return StreamSequential(ChannelRMSNorm(dim), SiLU(), CausalConv3d(dim, out_channels))


class Encoder3d(Streamed, nn.Module):
    """Pixels [B, 3, F, H, W] to features [B, out_channels, F', H/8, W/8] for four stages."""

    def __init__(self, dim, out_channels, dim_mult, num_res_blocks, temporal_downsample, dropout=0.0) -> None:
        super().__init__()
        widths = [dim * mult for mult in (1, *dim_mult)]
        self.conv1 = CausalConv3d(3, widths[0])
        layers: list[nn.Module] = []
        for stage, (in_dim, out_dim) in enumerate(itertools.pairwise(widths)):
            for block in range(num_res_blocks):
                layers.append(ResidualBlock(in_dim if block == 0 else out_dim, out_dim, dropout))
            if stage < len(temporal_downsample):
                layers.append(Downsample(out_dim, temporal_downsample[stage]))
        self.downsamples = StreamSequential(*layers)
        self.middle = _middle(widths[-1], dropout)
        self.head = _head(widths[-1], out_channels)

    def forward(self, x: torch.Tensor, cache: StreamCache | None = None) -> torch.Tensor:
        return run_layers((self.conv1, self.downsamples, self.middle, self.head), x, cache)


class Decoder3d(Streamed, nn.Module):
    """Latents [B, z, F', H', W'] to pixels, in two halves: `features` stays at latent size, `expand` grows to pixels.

    The split lets a tiled decode keep whole what sees far (the attention, half of the receptive field) and small (1/64
    of the pixels' area), and tile only what is large.
    """

    def __init__(self, dim, z_dim, dim_mult, num_res_blocks, temporal_upsample, dropout=0.0) -> None:
        super().__init__()
        widths = [dim * mult for mult in (dim_mult[-1], *reversed(dim_mult))]
        self.conv1 = CausalConv3d(z_dim, widths[0])
        self.middle = _middle(widths[0], dropout)
        layers: list[nn.Module] = []
        for stage, (in_dim, out_dim) in enumerate(itertools.pairwise(widths)):
            in_dim = in_dim if stage == 0 else in_dim // 2  # the upsampling before it halved the channels
            for block in range(num_res_blocks + 1):
                layers.append(ResidualBlock(in_dim if block == 0 else out_dim, out_dim, dropout))
            if stage < len(temporal_upsample):
                layers.append(Upsample(out_dim, temporal_upsample[stage]))
        self.upsamples = StreamSequential(*layers)
        self.head = _head(widths[-1], 3)
        self.num_latent_layers = num_res_blocks + 1  # of `upsamples`, those before the first Upsample
        self.feature_dim = widths[1]
        # How many latent cells around a cell its pixels see through `expand`: walked back from the head's 3x3
        # convolution (1 pixel) through each stage's convolutions and the upsampling before it, which halves the
        # distance. 7 at the published depth.
        self.context = 1
        for _ in temporal_upsample:
            self.context = -(-(self.context + 2 * (num_res_blocks + 1) + 1) // 2)

    def forward(self, x: torch.Tensor, cache: StreamCache | None = None) -> torch.Tensor:
        return self.expand(self.features(x, cache), cache)

    def features(self, x: torch.Tensor, cache: StreamCache | None = None) -> torch.Tensor:
        """[B, z, F', H', W'] -> [B, feature_dim, F', H', W']."""
        return run_layers((self.conv1, self.middle, *list(self.upsamples)[: self.num_latent_layers]), x, cache)

    def expand(self, x: torch.Tensor, cache: StreamCache | None = None) -> torch.Tensor:
        """[B, feature_dim, F', H', W'] -> [B, 3, F, H, W]."""
        return self.head(run_layers(list(self.upsamples)[self.num_latent_layers :], x, cache), cache)
