"""The sampling loop: from noise to latents under classifier-free guidance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from telefuser.schedulers import FlowScheduler


@torch.no_grad()
def denoise(
    model: Callable[..., torch.Tensor],
    scheduler: FlowScheduler,
    noise: torch.Tensor,
    context: Any,
    negative_context: Any,
    guidance: float,
    callback: Callable[[int, int, torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Run every step of `scheduler`.

    Args:
        model: called as `model(x, timestep, context)` with x [B, C, F, H, W] and timestep [B]; returns the velocity.
        scheduler: gives the timesteps and takes the steps.
        noise: [B, C, F, H, W], the state at the first noise level.
        context: what the model takes as context (raw rows or prepared keys and values).
        negative_context: the same for the negative prompt; unused, and may be None, at guidance 1.
        guidance: g in uncond + g * (cond - uncond) (Ho and Salimans 2022, arXiv:2207.12598); at 1 the model runs once a
            step, else twice.
        callback: called as `callback(step, total, latents)` after each step, step counting from 1.

    Returns:
        float32 latents [B, C, F, H, W] on the device of `noise`.
    """
    latents = noise.to(torch.float32)
    timesteps = scheduler.timesteps.to(latents.device)
    total = scheduler.num_inference_steps
    for i in range(total):
        timestep = timesteps[i].expand(latents.shape[0])
        velocity = model(latents, timestep, context)
        if guidance != 1:
            unconditional = model(latents, timestep, negative_context)
            velocity = unconditional + guidance * (velocity - unconditional)
        latents = scheduler.step(velocity, i, latents)
        if callback is not None:
            callback(i + 1, total, latents)
    return latents
