"""The Wan 2.1 video VAE: pixels to latents (4x in time, 8x in height and width) and back, for pipelines and training.

Time is causal and a clip's first frame stands alone, so 1 + 4n frames become 1 + n latent frames. The whole clip at
once (`encode_moments`, `decode_raw`: differentiable) and the stream of chunks (`encode`, `decode_chunks`: memory does
not grow with the number of frames) run the same code and agree to rounding.
Shape letters: B batch, z latent channels, F frames, H W grid.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from telefuser.models.wan_video_vae_blocks import Conv3d, Decoder3d, Encoder3d, StreamCache

# Mean and standard deviation of the latents of the published Wan 2.1 VAE, per channel.
WAN21_LATENTS_MEAN = (
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
)
WAN21_LATENTS_STD = (
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.916),
)


class WanVideoVAE(nn.Module):
    """Wan 2.1 VAE with the official state-dict keys.

    Args:
        dim: base width (96 as published). z_dim: latent channels.
        dim_mult: width of each stage in units of `dim`; between two stages the encoder halves H and W.
        num_res_blocks: residual blocks a stage (the decoder has one more).
        attn_scales: must be empty; no published checkpoint has attention outside the middle blocks.
        temperal_downsample: for each halving of H and W, whether time is halved too (the field's spelling).
        dropout: dropout inside the residual blocks, active only in training mode.
        latents_mean, latents_std: z_dim values each; None means the published values for z_dim 16, else 0 and 1.

    Parameters are float32 as in the official run; after `.to(torch.bfloat16)` only the norms are computed in float32.
    Inputs are moved to the parameters' device and dtype. Raises ValueError for sizes that do not fit together.
    """

    def __init__(
        self,
        dim: int = 96,
        z_dim: int = 16,
        dim_mult: Sequence[int] = (1, 2, 4, 4),
        num_res_blocks: int = 2,
        attn_scales: Sequence[float] = (),
        temperal_downsample: Sequence[bool] = (False, True, True),
        dropout: float = 0.0,
        latents_mean: Sequence[float] | None = None,
        latents_std: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        sizes = {"dim": dim, "z_dim": z_dim, "dim_mult": tuple(dim_mult), "num_res_blocks": num_res_blocks}
        if min(dim, z_dim, num_res_blocks, *dim_mult) < 1:
            raise ValueError(f"sizes must be at least 1, got {sizes}")
        temporal = tuple(bool(flag) for flag in temperal_downsample)
        if len(temporal) != len(dim_mult) - 1:
            raise ValueError(
                f"{len(dim_mult)} stages need {len(dim_mult) - 1} temperal_downsample flags, got {temporal}"
            )
        if len(attn_scales):
            raise ValueError(f"attn_scales {attn_scales} is not supported: only () as in every published Wan 2.1 VAE")
        self.z_dim = z_dim
        self.spatial_factor = 2 ** len(temporal)
        self.temporal_factor = 2 ** sum(temporal)
        # Plain numbers, not buffers: they survive construction on the meta device and a cast of the model to bfloat16.
        published = z_dim == len(WAN21_LATENTS_MEAN)
        mean, std = (WAN21_LATENTS_MEAN, WAN21_LATENTS_STD) if published else ((0.0,) * z_dim, (1.0,) * z_dim)
        self.latents_mean = _per_channel("latents_mean", latents_mean, mean)
        self.latents_std = _per_channel("latents_std", latents_std, std)
        if min(self.latents_std) <= 0:
            raise ValueError(f"latents_std must be positive, got {self.latents_std}")

        self.encoder = Encoder3d(dim, z_dim * 2, dim_mult, num_res_blocks, temporal, dropout)
        self.conv1 = Conv3d(z_dim * 2, z_dim * 2, 1)
        self.conv2 = Conv3d(z_dim, z_dim, 1)
        self.decoder = Decoder3d(dim, z_dim, dim_mult, num_res_blocks, temporal[::-1], dropout)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> WanVideoVAE:
        """A VAE from the constructor's arguments as a dict; keys with a leading underscore are notes and skipped.

        Raises ValueError for any other unknown key: it could mean an architecture that this class does not have.
        """
        settings = {key: value for key, value in config.items() if not key.startswith("_")}
        known = list(inspect.signature(cls).parameters)
        if unknown := sorted(settings.keys() - set(known)):
            raise ValueError(f"unknown VAE settings {unknown}; a Wan 2.1 VAE has {known}")
        return cls(**settings)

    @property
    def dtype(self) -> torch.dtype:
        return self.conv2.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.conv2.weight.device

    def encode_moments(self, video: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Raw (mu, logvar), each [B, z, 1 + (F-1)//4, H/8, W/8], of a whole video [B, 3, F, H, W] in [-1, 1].

        Differentiable. Frames that do not fill a group of four are dropped. Raises ValueError for a wrong shape.
        """
        return self._moments(self._checked_video(video))

    def decode_raw(self, z: torch.Tensor) -> torch.Tensor:
        """Unclamped video [B, 3, 1 + 4(F-1), 8H, 8W] of whole un-normalised latents [B, z, F, H, W]. Differentiable."""
        return self.decoder(self.conv2(self._checked_latents(z).to(self.device, self.dtype)))

    @torch.no_grad()
    def encode(self, video: torch.Tensor, streaming: bool = True, chunk_size: int = 1) -> torch.Tensor:
        """Normalised latents [B, z, 1 + (F-1)//4, H/8, W/8] in float32 of a video [B, 3, F, H, W] in [-1, 1].

        The posterior's mean, never a sample. Streaming works on `chunk_size` latent frames at a time; otherwise the
        whole clip is encoded at once: the same numbers, faster on a GPU, memory proportional to F.
        """
        video = self._checked_video(video)
        if not streaming:
            return self.normalize(self._moments(video)[0])
        cache: StreamCache = {}
        num_latents = 1 + (video.shape[2] - 1) // self.temporal_factor
        latents = []
        for start, stop in _spans(num_latents, chunk_size):
            # Latent frame n > 0 covers the `temporal_factor` frames that end with frame n * temporal_factor.
            first = 0 if start == 0 else 1 + (start - 1) * self.temporal_factor
            frames = video[:, :, first : 1 + (stop - 1) * self.temporal_factor]
            latents.append(self._moments(frames, cache)[0])
        return self.normalize(torch.cat(latents, dim=2))

    @torch.no_grad()
    def decode(
        self,
        latents: torch.Tensor,
        streaming: bool = True,
        tiled: bool = False,
        tile_size: tuple[int, int] = (34, 34),
        tile_stride: tuple[int, int] = (18, 16),
        chunk_size: int = 1,
    ) -> torch.Tensor:
        """Video [B, 3, 1 + 4(F-1), 8H, 8W] in float32, clamped to [-1, 1], of normalised latents [B, z, F, H, W].

        Streaming decodes `chunk_size` latent frames at a time; otherwise the whole clip is decoded at once: the same
        numbers, faster on a GPU, memory proportional to F.

        With `tiled` the layers above latent size run tile by tile, `tile_size` and `tile_stride` being (H, W) in latent
        cells. There are no seams to blend: every tile also reads the cells around it that reach its pixels, 7 at the
        published depth, so the result is the untiled one to rounding. An overlap (size - stride) of 14 holds them
        already; a smaller one makes the computed tile larger than `tile_size` by what lacks. Memory: the video, half of
        it for the features at latent size, and the stream of one tile. Raises ValueError for sizes that leave gaps.
        """
        batch, _, num_latents, height, width = self._checked_latents(latents).shape
        spans = _spans(num_latents, chunk_size if streaming else num_latents)
        factor, t_factor = self.spatial_factor, self.temporal_factor
        shape = (batch, 3, 1 + (num_latents - 1) * t_factor, height * factor, width * factor)
        if not tiled:
            video = torch.empty(shape, device=self.device, dtype=torch.float32)
            return _gather(video, self._stream(latents, spans))
        if len(tile_size) != 2 or len(tile_stride) != 2:
            raise ValueError(f"tile_size and tile_stride are (H, W) in latent cells, got {tile_size} and {tile_stride}")
        rows = _tile_axis(height, tile_size[0], tile_stride[0], self.decoder.context)
        columns = _tile_axis(width, tile_size[1], tile_stride[1], self.decoder.context)
        features = self._features(latents, spans)
        video = torch.empty(shape, device=self.device, dtype=torch.float32)
        for row, column in itertools.product(rows, columns):
            tile = video[..., row.pixels(factor), column.pixels(factor)]
            _gather(tile, self._expand_tile(features, spans, row, column))
        return video

    def decode_chunks(self, latents: torch.Tensor, chunk_size: int = 1) -> Iterator[torch.Tensor]:
        """The frames of `decode` in pieces [B, 3, f, 8H, 8W], made on demand, `chunk_size` latent frames at a time.

        The first piece has 1 + 4(chunk_size-1) frames, the others 4 chunk_size. Memory does not grow with F. Any chunk
        size gives the same video; larger is faster on a GPU. Each call is a stream of its own: several may interleave.
        """
        return self._stream(self._checked_latents(latents), _spans(latents.shape[2], chunk_size))

    @torch.no_grad()
    def decode_part_chunks(
        self, latents: torch.Tensor, rows: tuple[int, int], columns: tuple[int, int], chunk_size: int = 1
    ) -> Iterator[torch.Tensor]:
        """`decode_chunks` of a part of the area: pieces [B, 3, f, 8h, 8w] of the latent cells start..stop of each axis.

        The pixels are those of the whole video to rounding: the layers at latent size, 4 % of the work as published and
        with attention over a whole frame, run on the whole area, and the rest on the part with the cells around it
        that reach its pixels (`window`). Raises ValueError for a range outside the area.
        """
        height, width = self._checked_latents(latents).shape[-2:]
        row, column = self.window(*rows, height), self.window(*columns, width)
        return self._stream_part(latents, _spans(latents.shape[2], chunk_size), row, column)

    def window(self, start: int, stop: int, length: int) -> _Tile:
        """What decoding the latent cells start..stop of an axis reads: `window_start`..`window_stop` of `length`."""
        if not 0 <= start < stop <= length:
            raise ValueError(f"the range {start}..{stop} is not within the {length} latent cells of the axis")
        context = self.decoder.context
        return _Tile(start, stop, max(start - context, 0), min(stop + context, length))

    @torch.no_grad()
    def _stream_part(
        self, latents: torch.Tensor, spans: list[tuple[int, int]], row: _Tile, column: _Tile
    ) -> Iterator[torch.Tensor]:
        cache, factor = _new_cache(spans), self.spatial_factor
        for span in spans:
            features = self.decoder.features(self._latent_chunk(latents, span), cache)
            frames = self.decoder.expand(features[..., row.cells, column.cells], cache)
            yield frames[..., row.kept(factor), column.kept(factor)].float().clamp(-1, 1)

    @torch.no_grad()
    def _stream(self, latents: torch.Tensor, spans: list[tuple[int, int]]) -> Iterator[torch.Tensor]:
        cache = _new_cache(spans)
        for span in spans:
            yield self.decoder(self._latent_chunk(latents, span), cache).float().clamp_(-1, 1)

    def _latent_chunk(self, latents: torch.Tensor, span: tuple[int, int]) -> torch.Tensor:
        chunk = latents[:, :, span[0] : span[1]].to(self.device)
        return self.conv2(self.denormalize(chunk).to(self.dtype))

    def _features(self, latents: torch.Tensor, spans: list[tuple[int, int]]) -> torch.Tensor:
        """[B, z, F, H, W] -> [B, C, F, H, W]: the decoder's layers at latent size, streamed over the whole area."""
        cache = _new_cache(spans)
        chunks = (self.decoder.features(self._latent_chunk(latents, span), cache) for span in spans)
        batch, _, frames, height, width = latents.shape
        shape = (batch, self.decoder.feature_dim, frames, height, width)
        return _gather(torch.empty(shape, device=self.device, dtype=self.dtype), chunks)

    def _expand_tile(
        self, features: torch.Tensor, spans: list[tuple[int, int]], row: _Tile, column: _Tile
    ) -> Iterator[torch.Tensor]:
        """The stream of one tile's pixels: decoded with its surroundings, which are cut off again."""
        cache, factor = _new_cache(spans), self.spatial_factor
        for start, stop in spans:
            frames = self.decoder.expand(features[:, :, start:stop, row.cells, column.cells], cache)
            yield frames[..., row.kept(factor), column.kept(factor)].float().clamp(-1, 1)

    def normalize(self, mu: torch.Tensor) -> torch.Tensor:
        """(mu - mean) / std per channel, in float32: what the diffusion model works on."""
        return (mu.float() - _column(self.latents_mean, mu)) / _column(self.latents_std, mu)

    def denormalize(self, latents: torch.Tensor) -> torch.Tensor:
        """The inverse of `normalize`, in float32."""
        return latents.float() * _column(self.latents_std, latents) + _column(self.latents_mean, latents)

    def _moments(self, video: torch.Tensor, cache: StreamCache | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        mu, logvar = self.conv1(self.encoder(video.to(self.device, self.dtype), cache)).chunk(2, dim=1)
        return mu, logvar

    def _checked_video(self, video: torch.Tensor) -> torch.Tensor:
        """The video without the trailing frames that fill no group."""
        if video.ndim != 5 or video.shape[1] != 3 or 0 in video.shape or not video.is_floating_point():
            wanted = "a floating-point [B, 3, F, H, W] in [-1, 1]"
            raise ValueError(f"video must be {wanted}, got {tuple(video.shape)} of {video.dtype}")
        height, width = video.shape[3:]
        if height % self.spatial_factor or width % self.spatial_factor:
            raise ValueError(f"video size {width}x{height} must be divisible by {self.spatial_factor}: crop or pad it")
        return video[:, :, : 1 + (video.shape[2] - 1) // self.temporal_factor * self.temporal_factor]

    def _checked_latents(self, latents: torch.Tensor) -> torch.Tensor:
        if not isinstance(latents, torch.Tensor):
            kind = type(latents).__name__
            raise ValueError(f"latents must be one tensor [B, {self.z_dim}, F, H, W], got {kind}: stack the videos")
        if latents.ndim != 5 or latents.shape[1] != self.z_dim or 0 in latents.shape or not latents.is_floating_point():
            wanted = f"a floating-point [B, {self.z_dim}, F, H, W]"
            raise ValueError(f"latents must be {wanted}, got {tuple(latents.shape)} of {latents.dtype}")
        return latents


class _Tile(NamedTuple):
    """One axis of a tile in latent cells: it writes start..stop and reads window_start..window_stop."""

    start: int
    stop: int
    window_start: int
    window_stop: int

    @property
    def cells(self) -> slice:
        return slice(self.window_start, self.window_stop)

    def pixels(self, factor: int) -> slice:
        return slice(self.start * factor, self.stop * factor)

    def kept(self, factor: int) -> slice:
        """Of the decoded window, the pixels that the tile writes."""
        return slice((self.start - self.window_start) * factor, (self.stop - self.window_start) * factor)


def _tile_axis(length: int, size: int, stride: int, context: int) -> list[_Tile]:
    """Tiles of `size` cells every `stride` cells, the last one moved back to the end; neighbours meet mid-overlap."""
    if not 1 <= stride <= size:
        raise ValueError(f"tile_stride must be from 1 to tile_size, got stride {stride} for size {size} latent cells")
    starts = [*range(0, max(length - size, 0), stride), max(length - size, 0)]
    cuts = [0, *((left + size + right) // 2 for left, right in itertools.pairwise(starts)), length]
    return [
        _Tile(start, stop, max(start - context, 0), min(stop + context, length))
        for start, stop in itertools.pairwise(cuts)
    ]


def _new_cache(spans: list[tuple[int, int]]) -> StreamCache | None:
    """A stream of one chunk is the whole clip and needs to remember nothing."""
    return {} if len(spans) > 1 else None


def _gather(out: torch.Tensor, chunks: Iterator[torch.Tensor]) -> torch.Tensor:
    """Fill `out` along its frames; torch.cat would hold everything twice."""
    done = 0
    for frames in chunks:
        out[:, :, done : done + frames.shape[2]] = frames
        done += frames.shape[2]
    return out


def _spans(length: int, size: int) -> list[tuple[int, int]]:
    if size < 1:
        raise ValueError(f"chunk_size must be at least 1 latent frame, got {size}")
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    # Made on the host and sent without waiting: `torch.tensor(..., device=...)` would let the device finish first.
    return torch.tensor(values, dtype=torch.float32).to(like.device, non_blocking=True).view(1, -1, 1, 1, 1)


def _per_channel(name: str, values: Sequence[float] | None, default: Sequence[float]) -> tuple[float, ...]:
    values = tuple(float(value) for value in (default if values is None else values))
    if len(values) != len(default):
        raise ValueError(f"{name} needs one value for each of the {len(default)} latent channels, got {len(values)}")
    return values
