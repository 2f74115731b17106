"""From what the VAE gives to the levels of a video file."""

from __future__ import annotations

import torch


class NonFiniteError(RuntimeError):
    """A model produced NaN or infinity."""


def to_uint8(video: torch.Tensor) -> torch.Tensor:
    """Pixels [3, F, H, W] in [-1, 1] to [F, H, W, 3] uint8, rounded to the nearest level (half to even).

    Raises NonFiniteError for NaN or infinity, which would become black or any other colour.
    """
    if not torch.isfinite(video.sum()) and not torch.isfinite(video).all():
        raise NonFiniteError("the VAE produced NaN or infinity: check the weights and the VAE's latents_mean and _std")
    return ((video + 1) * 127.5).round_().clamp_(0, 255).to(torch.uint8).permute(1, 2, 3, 0)
