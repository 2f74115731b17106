"""The sigma and timestep tables that every flow-matching solver shares, and the bookkeeping of one run.

Flow matching (Lipman et al. 2022, arXiv:2210.02747): x_sigma = (1 - sigma) * x0 + sigma * noise, the model predicts
v = noise - x0, so x0 = x_sigma - sigma * v. In the DPM papers' terms alpha = 1 - sigma, lambda = log(alpha / sigma).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

NUM_TRAIN_TIMESTEPS = 1000


def shifted(sigma: float, shift: float) -> float:
    """Timestep shift of Esser et al. 2024 (arXiv:2403.03206, eq. 23): s * x / (1 + (s - 1) * x)."""
    # At sigma 1 a shift below 1e-16 is lost beside the 1; what is left of the denominator would be 0.
    return shift * sigma / (1 + (shift - 1) * sigma or shift)


def half_log_snr(sigma: float) -> float:
    """lambda = log((1 - sigma) / sigma), with its limits -inf at sigma 1 and +inf at sigma 0."""
    if sigma >= 1:
        return -math.inf
    return math.inf if sigma <= 0 else math.log((1 - sigma) / sigma)


class FlowScheduler(ABC):
    """Base of the solvers. A step is named by its index, never searched by its timestep: truncated timesteps repeat
    (UniPC with 100 steps and shift 12 has 999 twice), indices do not.

    Args:
        num_inference_steps: number of model calls, at least 1.
        shift: finite and positive; above 1 it spends more steps at high noise.
        sigmas: the noise levels of the steps, strictly falling, in (0, 1], without the final 0; replaces the shifted
            linear table (shift is then unused).

    Attributes:
        sigmas: [steps + 1] float32 on CPU, falling, the last one 0.
        timesteps: [steps], what the model is given. int64, sigma * 1000 truncated, unless a solver says otherwise.

    Raises:
        ValueError: for an argument outside the limits above.
    """

    sigma_max = 1.0

    def __init__(self, num_inference_steps: int, shift: float = 1.0, *, sigmas: Sequence[float] | None = None):
        if isinstance(num_inference_steps, bool) or not isinstance(num_inference_steps, int) or num_inference_steps < 1:
            raise ValueError(f"number of steps must be an integer of at least 1, got {num_inference_steps!r}")
        if not (math.isfinite(shift) and shift > 0):
            raise ValueError(f"shift must be a finite number above 0, got {shift!r}")
        self.num_inference_steps = num_inference_steps
        self.shift = float(shift)
        # float64 until the very end: the truncation to integer timesteps must see the untouched value.
        table = self._linear_table() if sigmas is None else [float(s) for s in sigmas]
        if len(table) != num_inference_steps:
            raise ValueError(f"{len(table)} sigmas for {num_inference_steps} steps: give one a step, not the final 0")
        self.sigmas = torch.tensor([*table, 0.0], dtype=torch.float64).to(torch.float32)
        self.timesteps = self._timesteps(torch.tensor(table, dtype=torch.float64) * NUM_TRAIN_TIMESTEPS)
        # Plain floats, so that step() needs neither a tensor operation on scalars nor a device synchronisation.
        self._sigma = self.sigmas.tolist()
        self._check_falling()
        self._next_index = 0

    def _linear_table(self) -> list[float]:
        # start + i * step, the association numpy's linspace has: (n - i) / n differs in the last bit, enough to move
        # 13 of 50 timesteps at shift 1 to the integer below.
        step = -self.sigma_max / self.num_inference_steps
        return [shifted(i * step + self.sigma_max, self.shift) for i in range(self.num_inference_steps)]

    def _timesteps(self, times: torch.Tensor) -> torch.Tensor:
        return times.to(torch.int64)

    def _check_falling(self) -> None:
        """Two equal levels would divide by zero inside the multistep solvers."""
        if self._sigma[0] > 1 or not all(a > b for a, b in zip(self._sigma, self._sigma[1:])):
            levels = ", ".join(f"{sigma:.7g}" for sigma in self._sigma[:3])
            raise ValueError(
                f"noise levels must fall strictly within (0, 1] in float32; {self.num_inference_steps} steps with "
                f"shift {self.shift:g} start with {levels}: use a shift nearer to 1 or fewer steps"
            )

    def step(self, model_output: torch.Tensor, index: int, sample: torch.Tensor) -> torch.Tensor:
        """One solver step.

        Args:
            model_output: the (guided) velocity at `sample` and `timesteps[index]`, floating, of the shape of `sample`.
            index: 0, 1, 2 ... in order; 0 begins a new run and forgets the last one.
            sample: the state before the step.

        Returns:
            float32 state at `sigmas[index + 1]`, on the device of `sample`.

        Raises:
            ValueError: index out of order or out of range, or shapes differ.
        """
        if index == 0:
            self._next_index = 0
            self._forget()
        if index != self._next_index or index >= self.num_inference_steps:
            raise ValueError(
                f"step {index} of {self.num_inference_steps} came where step {self._next_index} was due: "
                "steps go in order from 0"
            )
        if model_output.shape != sample.shape:
            raise ValueError(f"model output {tuple(model_output.shape)} is not of the shape {tuple(sample.shape)}")
        result = self._step(model_output.to(sample.device, torch.float32), index, sample.to(torch.float32))
        self._next_index = index + 1
        if self._next_index == self.num_inference_steps:
            self._forget()
        return result

    def _forget(self) -> None:  # noqa: B027 (a one-step solver has nothing to forget)
        """Drop what earlier steps left behind, so that no latents outlive a run."""

    @abstractmethod
    def _step(self, velocity: torch.Tensor, index: int, sample: torch.Tensor) -> torch.Tensor: ...
