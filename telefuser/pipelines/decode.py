"""From latents to frames: streamed to the host as uint8; tiles when memory is short; latents kept on failure."""

from __future__ import annotations

import json
import logging
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from telefuser import platforms
from telefuser.distributed import announced
from telefuser.pipelines.parallel_decode import decode_shared
from telefuser.pipelines.pixels import NonFiniteError, to_uint8

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)

__all__ = ["NonFiniteError", "VideoDecodeError", "decode_frames", "decode_or_keep", "to_uint8"]


class VideoDecodeError(RuntimeError):
    """Latents could not be decoded. `latents_path` is where they were kept, None if that failed too."""

    def __init__(self, message: str, latents_path: Path | None):
        super().__init__(message)
        self.latents_path = latents_path


@torch.no_grad()
def decode_frames(vae: torch.nn.Module, latents: torch.Tensor, tiled: bool = False) -> torch.Tensor:
    """Frames [F, H, W, 3] uint8 on the host of one video's latents [z, F', H/8, W/8].

    Untiled, the frames leave the device chunk by chunk, so its memory does not grow with their number. Tiled needs less
    for large frames and more for long videos.
    """
    if tiled:
        return to_uint8(vae.decode(latents[None], tiled=True)[0]).cpu().contiguous()
    return torch.cat([to_uint8(chunk[0]).cpu() for chunk in vae.decode_chunks(latents[None])]).contiguous()


def decode_or_keep(
    vae: torch.nn.Module,
    latents: torch.Tensor,
    settings: Mapping[str, Any],
    device_mesh: DeviceMesh | None = None,
) -> torch.Tensor:
    """`decode_frames`; when memory runs out once more in tiles, and on any failure the latents are kept in a file.

    device_mesh: of all processes of the job, which then share the decoding; each gets the frames.

    Raises:
        VideoDecodeError: naming the file and what to do with it.
    """
    try:
        try:
            frames = None if device_mesh is None else decode_shared(vae, latents, device_mesh)
            return decode_frames(vae, latents) if frames is None else frames
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
    if announced()[0]:
        return VideoDecodeError(f"{message} Process 0 keeps the latents.", None)
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
