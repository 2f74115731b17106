"""The sampling loop: from noise to latents under classifier-free guidance."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from telefuser.distributed import get_group
from telefuser.distributed.comm import gather_results
from telefuser.schedulers import FlowScheduler

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from telefuser.ops.attention import SparseAttentionState


@torch.no_grad()
def denoise(
    model: Callable[..., torch.Tensor],
    scheduler: FlowScheduler,
    noise: torch.Tensor,
    context: Any,
    negative_context: Any,
    guidance: float,
    callback: Callable[[int, int, torch.Tensor], None] | None = None,
    *,
    device_mesh: DeviceMesh | None = None,
    sparse_state: SparseAttentionState | None = None,
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
        device_mesh: with a dimension `cfg` its two processes run one of the two passes each. All processes call this
            with the same arguments and get the same latents.
        sparse_state: told each step, counting from 0, and handed to the model as `sparse_state=`.

    Returns:
        float32 latents [B, C, F, H, W] on the device of `noise`.
    """
    latents = noise.to(torch.float32)
    timesteps = scheduler.timesteps.to(latents.device)
    total = scheduler.num_inference_steps
    contexts = [context] if guidance == 1 else [context, negative_context]
    group = get_group(device_mesh, "cfg")
    if sparse_state is not None:
        model = functools.partial(model, sparse_state=sparse_state)
    for i in range(total):
        if sparse_state is not None:
            sparse_state.update(numeral_timestep=i)
        timestep = timesteps[i].expand(latents.shape[0])
        velocity, *unconditional = _passes(model, latents, timestep, contexts, group)
        if unconditional:
            velocity = unconditional[0] + guidance * (velocity - unconditional[0])
        latents = scheduler.step(velocity, i, latents)
        if callback is not None:
            callback(i + 1, total, latents)
    return latents


def _passes(
    model: Callable[..., torch.Tensor],
    latents: torch.Tensor,
    timestep: torch.Tensor,
    contexts: list,
    group: ProcessGroup | None,
) -> list[torch.Tensor]:
    """The model's velocity for each context; the processes of `group` compute one each where there are two."""
    if group is None or len(contexts) == 1:
        return [model(latents, timestep, context) for context in contexts]
    return gather_results(model(latents, timestep, contexts[group.rank()]), group)
