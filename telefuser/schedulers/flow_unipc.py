"""UniPC, second order, B(h) = exp(h) - 1, data prediction (Zhao et al. 2023, arXiv:2302.04867), on flow sigmas."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from telefuser.schedulers.flow_schedule import FlowScheduler, half_log_snr


class FlowUniPC(FlowScheduler):
    """Predictor of order 2 (1 in the first and the last step), corrector from the second step on.

    The linear table starts at sigma 0.999, as Wan's does, not at 1. Other arguments: see `FlowScheduler`.
    """

    # 0.999 rounded to float32, the value the published tables start from.
    sigma_max = 0.9990000128746033

    def __init__(self, num_inference_steps: int, shift: float = 1.0, *, sigmas: Sequence[float] | None = None):
        super().__init__(num_inference_steps, shift, sigmas=sigmas)
        self._lambda = [half_log_snr(s) for s in self._sigma]
        self._predictor = [self._predictor_at(i) for i in range(num_inference_steps)]
        self._corrector = [self._corrector_at(i) for i in range(num_inference_steps)]
        self._forget()

    def _order(self, i: int) -> int:
        return 1 if i in (0, self.num_inference_steps - 1) else 2

    def _base(self, i: int) -> tuple[float, float]:
        """First-order weights of (sample, x0) from sigma[i] to sigma[i + 1]; gain = alpha_next * (1 - exp(-h))."""
        sigma, sigma_next = self._sigma[i], self._sigma[i + 1]
        return sigma_next / sigma, (1 - sigma_next) - sigma_next * (1 - sigma) / sigma

    def _step_ratio(self, i: int) -> float:
        """(lambda[i-1] - lambda[i]) / h: where the previous x0 lies, in units of this step; negative."""
        return (self._lambda[i - 1] - self._lambda[i]) / (self._lambda[i + 1] - self._lambda[i])

    def _predictor_at(self, i: int) -> tuple[float, float, float]:
        """Weights of (sample, this x0, previous x0) in the prediction for sigma[i + 1]."""
        of_sample, gain = self._base(i)
        if self._order(i) == 1:
            return of_sample, gain, 0.0
        half = 0.5 * gain / self._step_ratio(i)
        return of_sample, gain - half, half

    def _corrector_at(self, i: int) -> tuple[float, float, float, float]:
        """Weights of (last sample, new x0, last x0, the x0 before) in the corrected sample at sigma[i]."""
        if i == 0:
            return 0.0, 0.0, 0.0, 0.0
        of_sample, gain = self._base(i - 1)
        if self._order(i - 1) == 1:
            return of_sample, 0.5 * gain, 0.5 * gain, 0.0
        ratio, rho_previous, rho_new = self._corrector_weights(i)
        of_before = gain * rho_previous / ratio
        return of_sample, gain * rho_new, gain - gain * rho_new - of_before, of_before

    def _corrector_weights(self, i: int) -> tuple[float, float, float]:
        """(r, rho_r, rho_1) with r the step ratio and the rhos from
        sum_j rho_j * r_j^(k-1) = k! * phi_(k+1)(-h) / B(h), k = 1, 2, r_j in (r, 1)."""
        step = self._lambda[i - 1] - self._lambda[i]  # -h
        b_h = math.expm1(step)
        phi_2 = b_h / step - 1
        phi_3 = phi_2 / step - 0.5
        b1, b2 = phi_2 / b_h, 2 * phi_3 / b_h
        ratio = self._step_ratio(i - 1)
        rho_previous = (b1 - b2) / (1 - ratio)
        return ratio, rho_previous, b1 - rho_previous

    def _forget(self) -> None:
        self._last_sample: torch.Tensor | None = None
        self._x0s: list[torch.Tensor] = []  # newest first, at most two

    def _step(self, velocity: torch.Tensor, index: int, sample: torch.Tensor) -> torch.Tensor:
        x0 = torch.sub(sample, velocity, alpha=self._sigma[index])
        earlier = [previous.to(sample.device) for previous in self._x0s]
        if self._last_sample is not None:
            terms = (self._last_sample.to(sample.device), x0, *earlier)
            sample = _weighted_sum(self._corrector[index], terms)
        result = _weighted_sum(self._predictor[index], (sample, x0, *earlier))
        self._last_sample, self._x0s = sample, [x0, *self._x0s[:1]]
        return result


def _weighted_sum(weights: tuple[float, ...], tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    total = weights[0] * tensors[0]
    for weight, tensor in zip(weights[1:], tensors[1:]):
        if weight != 0:
            total.add_(tensor, alpha=weight)
    return total
