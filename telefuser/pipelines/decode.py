"""From latents to frames: streamed to the host as uint8; tiles when memory is short; latents kept on failure."""

from __future__ import annotations

import json
import logging
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from telefuser import platforms

logger = logging.getLogger(__name__)


class NonFiniteError(RuntimeError):
    """A model produced NaN or infinity."""


class VideoDecodeError(RuntimeError):
    """Latents could not be decoded. `latents_path` is where they were kept, None if that failed too."""

    def __init__(self, message: str, latents_path: Path | None):
        super().__init__(message)
        self.latents_path = latents_path


def to_uint8(video: torch.Tensor) -> torch.Tensor:
    """Pixels [3, F, H, W] in [-1, 1] to [F, H, W, 3] uint8, rounded to the nearest level (half to even).

    Raises NonFiniteError for NaN or infinity, which would become black or any other colour.
    """
    if not torch.isfinite(video.sum()) and not torch.isfinite(video).all():
        raise NonFiniteError("the VAE produced NaN or infinity: check the weights and the VAE's latents_mean and _std")
    return ((video + 1) * 127.5).round_().clamp_(0, 255).to(torch.uint8).permute(1, 2, 3, 0)


@torch.no_grad()
def decode_frames(vae: torch.nn.Module, latents: torch.Tensor, tiled: bool = False) -> torch.Tensor:
    """Frames [F, H, W, 3] uint8 on the host of one video's latents [z, F', H/8, W/8].

    Untiled, the frames leave the device chunk by chunk, so its memory does not grow with their number. Tiled needs less
    for large frames and more for long videos.
    """
    if tiled:
        return to_uint8(vae.decode(latents[None], tiled=True)[0]).cpu().contiguous()
    return torch.cat([to_uint8(chunk[0]).cpu() for chunk in vae.decode_chunks(latents[None])]).contiguous()


def decode_or_keep(vae: torch.nn.Module, latents: torch.Tensor, settings: Mapping[str, Any]) -> torch.Tensor:
    """`decode_frames`; when memory runs out once more in tiles, and on any failure the latents are kept in a file.

    Raises:
        VideoDecodeError: naming the file and what to do with it.
    """
    try:
        try:
            return decode_frames(vae, latents)
        except torch.OutOfMemoryError:
            pass  # Retried below, where the exception no longer holds the failed attempt's tensors.
        platforms.platform_of(latents.device).empty_cache()
        logger.warning("out of memory while decoding the video; decoding it again in tiles")
        return decode_frames(vae, latents, tiled=True)
    except Exception as error:
        raise _keep_latents(latents, settings, error) from error


def _keep_latents(latents: torch.Tensor, settings: Mapping[str, Any], error: Exception) -> VideoDecodeError:
    """Save the latents in the working folder, else in the system's folder for temporary files, and say so."""
    message = f"could not decode the video ({type(error).__name__}: {error})."
    if isinstance(error, torch.OutOfMemoryError):
        message += " Tiles did not help: use a smaller size or fewer frames, or decode on another device."
    name = f"telefuser-latents-{secrets.token_hex(4)}.safetensors"
    tensors = {"latents": latents.detach().cpu().contiguous()}
    metadata = {"settings": json.dumps(dict(settings), ensure_ascii=False)}
    for folder in (Path.cwd(), Path(tempfile.gettempdir())):
        path = folder / name
        try:
            save_file(tensors, path, metadata=metadata)
        except (OSError, SafetensorError):
            path.unlink(missing_ok=True)
            continue
        message += (
            f" The latents are kept in {path}: WanPipeline.decode_latents(load_file({str(path)!r})['latents'],"
            " tiled=True) goes on from there."
        )
        return VideoDecodeError(message, path)
    return VideoDecodeError(f"{message} The latents could not be kept either.", None)
