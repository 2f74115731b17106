"""The sampling loop on small functions in the model's place; the whole loop with real models is in tests/golden."""

import pytest
import torch

from telefuser.pipelines.denoise import denoise
from telefuser.schedulers import SCHEDULERS, make_scheduler

NOISE = torch.randn(1, 4, 2, 3, 3, generator=torch.Generator().manual_seed(0))


class Recorder:
    """v = (x - target) / sigma, the exact velocity towards the target that the context names."""

    def __init__(self, sigmas: torch.Tensor):
        self.sigmas, self.calls = sigmas, []

    def __call__(self, x, timestep, context):
        self.calls.append((timestep.clone(), context, x.dtype))
        step = sum(1 for _, seen, _ in self.calls if seen == context) - 1
        return (x - context) / self.sigmas[step]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_without_guidance_the_model_runs_once_a_step(name):
    scheduler = make_scheduler(name, 5, 3.0)
    model = Recorder(scheduler.sigmas)
    latents = denoise(model, scheduler, NOISE, 0.25, None, 1.0)
    torch.testing.assert_close(latents, torch.full_like(NOISE, 0.25), atol=1e-5, rtol=0)
    assert [context for _, context, _ in model.calls] == [0.25] * 5
    for (timestep, _, dtype), expected in zip(model.calls, scheduler.timesteps):
        assert timestep.tolist() == [expected]
        assert dtype == torch.float32


@pytest.mark.parametrize("guidance", [0.0, 2.0, 5.0])
def test_guidance_extrapolates_from_the_unconditional_velocity(guidance):
    """Both velocities aim at a constant, so the guided one aims at uncond + g * (cond - uncond)."""
    scheduler = make_scheduler("euler", 4, 3.0)
    model = Recorder(scheduler.sigmas)
    latents = denoise(model, scheduler, NOISE, 0.5, 0.1, guidance)
    torch.testing.assert_close(latents, torch.full_like(NOISE, 0.1 + guidance * 0.4), atol=1e-5, rtol=0)
    assert [context for _, context, _ in model.calls] == [0.5, 0.1] * 4


def test_the_callback_sees_every_step_and_the_last_state_is_the_result():
    scheduler = make_scheduler("unipc", 3, 3.0)
    seen = []
    latents = denoise(
        Recorder(scheduler.sigmas), scheduler, NOISE, 0.5, None, 1.0, lambda *arguments: seen.append(arguments)
    )
    assert [(step, total) for step, total, _ in seen] == [(1, 3), (2, 3), (3, 3)]
    assert seen[-1][2] is latents


def test_latents_stay_float32_under_a_half_precision_model():
    scheduler = make_scheduler("dpm++", 4, 3.0)

    def model(x, timestep, context):
        assert x.dtype == torch.float32
        return (0.8 * x).to(torch.bfloat16)

    assert denoise(model, scheduler, NOISE.to(torch.bfloat16), None, None, 2.0).dtype == torch.float32


def test_a_batch_gets_one_timestep_a_sample():
    scheduler = make_scheduler("euler", 2, 3.0)
    shapes = []

    def model(x, timestep, context):
        shapes.append(tuple(timestep.shape))
        return x

    denoise(model, scheduler, NOISE.expand(3, -1, -1, -1, -1), None, None, 1.0)
    assert shapes == [(3,), (3,)]


def test_a_sparse_state_is_told_every_step_and_handed_to_the_model():
    class State:
        def update(self, numeral_timestep):
            self.step = numeral_timestep

    state, seen = State(), []

    def model(x, timestep, context, sparse_state):
        assert sparse_state is state
        seen.append((sparse_state.step, context))
        return x

    denoise(model, make_scheduler("euler", 3, 3.0), NOISE, "yes", "no", 2.0, sparse_state=state)
    assert seen == [(step, context) for step in range(3) for context in ("yes", "no")]
