"""Euler's method on the flow's ordinary differential equation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from telefuser.schedulers.flow_schedule import NUM_TRAIN_TIMESTEPS, FlowScheduler


class FlowEuler(FlowScheduler):
    """x += (sigma[i+1] - sigma[i]) * v.

    Timesteps are float32 (not truncated) unless `integer_timesteps` is set. Other arguments: see `FlowScheduler`.
    """

    def __init__(
        self,
        num_inference_steps: int,
        shift: float = 1.0,
        *,
        sigmas: Sequence[float] | None = None,
        integer_timesteps: bool = False,
    ):
        self.integer_timesteps = integer_timesteps
        super().__init__(num_inference_steps, shift, sigmas=sigmas)

    def _timesteps(self, times: torch.Tensor) -> torch.Tensor:
        return super()._timesteps(times) if self.integer_timesteps else self.sigmas[:-1] * NUM_TRAIN_TIMESTEPS

    def _step(self, velocity: torch.Tensor, index: int, sample: torch.Tensor) -> torch.Tensor:
        return torch.add(sample, velocity, alpha=self._sigma[index + 1] - self._sigma[index])
