"""DPM-Solver++(2M), the midpoint multistep solver (Lu et al. 2022, arXiv:2211.01095, algorithm 2), on flow sigmas."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from telefuser.schedulers.flow_schedule import FlowScheduler, half_log_snr


class FlowDPM(FlowScheduler):
    """First order in the first and the last step, second order between. Arguments: see `FlowScheduler`."""

    def __init__(self, num_inference_steps: int, shift: float = 1.0, *, sigmas: Sequence[float] | None = None):
        super().__init__(num_inference_steps, shift, sigmas=sigmas)
        self._coefficients = [self._coefficients_at(i) for i in range(num_inference_steps)]
        self._previous_x0: torch.Tensor | None = None

    def _coefficients_at(self, i: int) -> tuple[float, float, float]:
        """Weights of (sample, this x0, previous x0) in the next sample."""
        sigma, sigma_next = self._sigma[i], self._sigma[i + 1]
        # alpha_next * (1 - exp(-h)) with exp(-h) = (sigma_next / alpha_next) * (alpha / sigma): without a logarithm
        # sigma 1 and 0 are exact.
        gain = (1 - sigma_next) - sigma_next * (1 - sigma) / sigma
        if i == 0 or sigma_next == 0:
            return sigma_next / sigma, gain, 0.0
        lam, lam_previous = half_log_snr(sigma), half_log_snr(self._sigma[i - 1])
        # Half the step ratio h / h_previous. After sigma 1, lambda_previous is -inf and the ratio is 0.
        half_ratio = 0.5 * (half_log_snr(sigma_next) - lam) / (lam - lam_previous)
        return sigma_next / sigma, gain * (1 + half_ratio), -gain * half_ratio

    def _forget(self) -> None:
        self._previous_x0 = None

    def _step(self, velocity: torch.Tensor, index: int, sample: torch.Tensor) -> torch.Tensor:
        x0 = torch.sub(sample, velocity, alpha=self._sigma[index])
        of_sample, of_x0, of_previous = self._coefficients[index]
        result = torch.add(of_sample * sample, x0, alpha=of_x0)
        if self._previous_x0 is not None and of_previous != 0:
            result.add_(self._previous_x0.to(sample.device), alpha=of_previous)
        self._previous_x0 = x0
        return result
