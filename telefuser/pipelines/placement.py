"""Where the models of a pipeline live: on the device, or on the host and on the device only while their stage runs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch
from torch import nn

from telefuser import platforms

logger = logging.getLogger(__name__)

# What a run takes beside the weights, a pixel of the video: at 832x480 and 81 frames 8 GiB. The DiT's 32760 tokens need
# 2 GiB (1.3B) to 5 GiB (14B) of it, mostly for the feed-forward, the VAE's last stage about 4 GiB in float32.
WORKING_BYTES_PER_PIXEL = 8 * 2**30 / (832 * 480 * 81)


def fits(device: torch.device, num_bytes: int, num_pixels: int) -> bool:
    """Whether weights of that size can stay on `device` while a video of that many pixels is made.

    True on the CPU: there is no other place.
    """
    if device.type == "cpu":
        return True
    free = platforms.platform_of(device).get_device_free_memory(device)
    return num_bytes + num_pixels * WORKING_BYTES_PER_PIXEL <= free


def require_memory(device: torch.device, width: int, height: int, num_frames: int, dit_dim: int, vae_dim: int) -> None:
    """Raises ValueError for a video that this machine's memory cannot hold, before the system ends the process for it.

    A lower bound: the frames twice (chunks, and joined), and on the CPU also four float32 streams of the DiT's tokens
    and two of the VAE's last stage for a single frame. A device that runs out raises an error of its own.
    """
    needed = 2 * 3 * width * height * num_frames
    if device.type == "cpu":
        tokens = ((num_frames - 1) // 4 + 1) * (height // 16) * (width // 16)
        needed += 4 * max(4 * tokens * dit_dim, 2 * width * height * vae_dim)
    host = torch.device("cpu")
    total = platforms.platform_of(host).get_device_total_memory(host)
    if 0 < total < needed:
        raise ValueError(
            f"{width}x{height} and {num_frames} frames need at least {needed / 2**30:.0f} GiB of memory, this machine "
            f"has {total / 2**30:.0f} GiB: use a smaller size or fewer frames"
        )


def weight_bytes(module: nn.Module) -> int:
    """Bytes of the parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def make_room(encoder: nn.Module, device: torch.device, num_pixels: int) -> None:
    """Move the text encoder to the host for good where the rest of the run would not fit beside it."""
    if next(encoder.parameters()).device == device and not fits(device, 0, num_pixels):
        logger.info("device memory is short: the text encoder moves to the host")
        encoder.to("cpu")
        platforms.platform_of(device).empty_cache()


def text_device(encoder: nn.Module, device: torch.device) -> torch.device:
    """`device`, or the CPU with a warning where not even the text encoder alone fits.

    UMT5-XXL takes 11 GiB in bfloat16, and encoding a prompt once on the CPU costs seconds, not the run.
    """
    needed = weight_bytes(encoder)
    if device.type == "cpu" or next(encoder.parameters()).device == device:
        return device
    free = platforms.platform_of(device).get_device_free_memory(device)
    # A sixteenth more for its activations: 512 tokens are few.
    if needed + needed // 16 <= free:
        return device
    logger.warning(
        "the text encoder takes %.1f GiB and %s has %.1f GiB free: encoding the prompt on the CPU",
        needed / 2**30, device, free / 2**30,
    )  # fmt: skip
    return torch.device("cpu")


@contextlib.contextmanager
def on_device(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Within it, the parameters and buffers of `module` are on `device`; afterwards the original ones are back.

    The copies are dropped, not copied back: weights do not change while they serve. A tensor that is on `device`
    already stays, so for a resident module this does nothing.
    """
    originals = [
        (slots, name, tensor)
        for part in module.modules()
        for slots in (part._parameters, part._buffers)
        for name, tensor in slots.items()
        if tensor is not None and tensor.device != device
    ]
    copies: dict[int, torch.Tensor] = {}  # shared tensors stay shared
    try:
        for slots, name, tensor in originals:
            if id(tensor) not in copies:
                copy = tensor.detach().to(device)
                is_parameter = isinstance(tensor, nn.Parameter)
                copies[id(tensor)] = nn.Parameter(copy, tensor.requires_grad) if is_parameter else copy
            slots[name] = copies[id(tensor)]
        yield
    finally:
        copies.clear()
        for slots, name, tensor in originals:
            slots[name] = tensor
        if originals:
            # The next stage allocates other sizes; blocks cut for these weights would not serve it.
            platforms.platform_of(device).empty_cache()
