"""Video files: checked before the run, written through a temporary file, frames kept losslessly when encoding fails."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from av.video.reformatter import ColorRange, Colorspace

FORMATS = {".mp4": "mp4", ".mov": "mov", ".mkv": "matroska"}
ENCODER = "libx264"
# Visually lossless for H.264; a moving 832x480 clip then takes 0.1 to 0.3 bytes a pixel-frame at worst.
CRF = "18"
_BYTES_PER_PIXEL = 0.25
# BT.709, limited range: what players assume of video that says nothing, said all the same. Numbers of ITU-T H.273.
_BT709 = 1


class VideoWriteError(RuntimeError):
    """A video could not be written. `frames_path` is the lossless copy of the frames, None if that failed too."""

    def __init__(self, message: str, frames_path: Path | None):
        super().__init__(message)
        self.frames_path = frames_path


def check_output(path: str | Path, num_frames: int = 0, height: int = 0, width: int = 0) -> Path:
    """Whether a video of that size can be written to `path`; called before the run, so that a typo does not cost it.

    Raises:
        ValueError: unknown suffix, no such folder, something else than a file in its place, no permission, a name that
            the disk does not take, no H.264 encoder, or too little disk space.
    """
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"cannot write {str(path)!r}: the name must end in {', '.join(FORMATS)}")
    folder = path.parent
    if not os.path.isdir(folder):
        raise ValueError(f"cannot write {str(path)!r}: there is no folder {str(folder)!r}, create it first")
    if os.path.isdir(path):
        raise ValueError(f"cannot write {str(path)!r}: it is a folder")
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"cannot write {str(path)!r}: there is a device or a pipe of that name")
    if os.path.exists(path) and not os.access(path, os.W_OK):
        raise ValueError(f"cannot write {str(path)!r}: the file exists and is write-protected")
    try:
        # Permission bits do not tell about read-only mounts and quotas; making a file does. Under the longest name that
        # a run may need: a name that the disk does not take would otherwise be found when the frames are there.
        trial = _temporary_name(_frames_path(path))
        open(trial, "xb").close()
        trial.unlink()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"cannot write {str(path)!r}: no such file can be made in {str(folder)!r} ({reason})"
        ) from error
    try:
        av.codec.Codec(ENCODER, "w")
    except av.codec.codec.UnknownCodecError as error:
        raise ValueError(f"this PyAV has no {ENCODER} encoder: install the wheel with `pip install av`") from error
    needed = int(num_frames * height * width * _BYTES_PER_PIXEL) + 2**20
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ValueError(f"cannot write {str(path)!r}: about {needed >> 20} MiB are needed, {free >> 20} MiB are free")
    return path


def write_video(
    frames: torch.Tensor | np.ndarray, path: str | Path, fps: float, metadata: Mapping[str, Any] | None = None
) -> Path:
    """Write frames [F, H, W, 3] uint8 (H and W even) as H.264, yuv420p, BT.709.

    The file appears under its name only when it is whole. `metadata` goes in as a JSON comment (`ffprobe -show_format`,
    or `read_video`).

    Raises:
        ValueError: frames of another shape or dtype, an odd size, an unknown suffix, fps not above 0.
        VideoWriteError: encoding or writing failed; the message says where the frames were kept.
    """
    path, frames = Path(path), _checked_frames(frames)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"cannot write {str(path)!r}: the name must end in {', '.join(FORMATS)}")
    rate = Fraction(fps).limit_denominator(1001)
    if rate <= 0:
        raise ValueError(f"fps must be above 0, got {fps}")
    try:
        with _whole_or_absent(path) as temporary:
            _encode(frames, temporary, FORMATS[path.suffix.lower()], rate, metadata or {})
    except Exception as error:  # whatever it is, metadata that is no JSON included, the frames took long to make
        raise _keep_frames(frames, path, error) from error
    return path


def read_video(path: str | Path) -> tuple[torch.Tensor, float, dict[str, Any]]:
    """Frames [F, H, W, 3] uint8, frames a second, and the metadata `write_video` was given ({} for foreign files)."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames = [
            frame.to_ndarray(
                format="rgb24",
                src_colorspace=Colorspace.ITU709,
                src_color_range=ColorRange.MPEG,
                dst_color_range=ColorRange.JPEG,
            )
            for frame in container.decode(stream)
        ]
        fps = float(stream.average_rate)
        tags = {key.lower(): value for key, value in container.metadata.items()}
    try:
        metadata = json.loads(tags.get("comment", "{}"))
    except ValueError:
        metadata = {}
    return torch.from_numpy(np.stack(frames)), fps, metadata if isinstance(metadata, dict) else {}


def _checked_frames(frames: torch.Tensor | np.ndarray) -> np.ndarray:
    array = frames.cpu().numpy() if isinstance(frames, torch.Tensor) else frames
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[-1] != 3 or array.size == 0:
        raise ValueError(f"frames must be uint8 [F, H, W, 3], got {array.dtype} {array.shape}")
    if array.shape[1] % 2 or array.shape[2] % 2:
        raise ValueError(f"H.264 in yuv420p needs an even size, got {array.shape[2]}x{array.shape[1]}")
    return array


def _temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def _frames_path(path: Path) -> Path:
    """Where the frames are kept if the video cannot be written to `path`."""
    return path.with_name(f"{path.stem}.frames.npz")


@contextlib.contextmanager
def _whole_or_absent(path: Path) -> Iterator[Path]:
    """A name in the folder of `path`, renamed to it at the end; removed on any exception, Ctrl-C included."""
    temporary = _temporary_name(path)
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _encode(frames: np.ndarray, path: Path, container_format: str, rate: Fraction, metadata: Mapping[str, Any]) -> None:
    # A Python file instead of the name: FFmpeg loses an error of its own last flush, close() here does not.
    with open(path, "xb") as file, av.open(file, "w", format=container_format) as container:
        if metadata:
            container.metadata["comment"] = json.dumps(dict(metadata), ensure_ascii=False)
        # With x264's macroblock tree the same frames at 832x480 gave 3 different files in 12 tries.
        stream = container.add_stream(ENCODER, rate=rate, options={"crf": CRF, "x264-params": "mbtree=0"})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        context = stream.codec_context
        context.color_primaries = context.color_trc = context.colorspace = _BT709
        context.color_range = ColorRange.MPEG
        for array in frames:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(array), format="rgb24")
            # FFmpeg would convert with BT.601, and pure red then be 19 of 219 luma levels off.
            frame = frame.reformat(
                format="yuv420p",
                dst_colorspace=Colorspace.ITU709,
                src_color_range=ColorRange.JPEG,
                dst_color_range=ColorRange.MPEG,
            )
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def _is_full(error: BaseException | None) -> bool:
    """PyAV sometimes wraps what writing raised in an error of its own, with another number."""
    while error is not None:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False


def _keep_frames(frames: np.ndarray, path: Path, error: Exception) -> VideoWriteError:
    """Save the frames beside `path`, else in the system's folder for temporary files, and say so."""
    reason = "the disk is full" if _is_full(error) else str(error)
    name = _frames_path(path).name
    for folder in (path.parent, Path(tempfile.gettempdir())):
        try:
            with _whole_or_absent(folder / name) as temporary, open(temporary, "xb") as file:
                np.savez_compressed(file, frames=frames)
        except (OSError, ValueError):
            continue
        kept = folder / name
        message = f"could not write {path}: {reason}. The frames are kept in {kept} (numpy.load(...)['frames'])"
        return VideoWriteError(message, kept)
    return VideoWriteError(f"could not write {path}: {reason}. The frames could not be kept either", None)
