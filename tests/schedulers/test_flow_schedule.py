"""Tables and trajectories of the flow solvers against the official ones, and their limits."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from telefuser.schedulers import SCHEDULERS, FlowDPM, FlowEuler, FlowUniPC, make_scheduler
from tests.golden import golden_dir

GOLDEN = golden_dir()
needs_golden = pytest.mark.skipif(GOLDEN is None, reason="golden reference folder is absent")


def golden_scheduler(solver: str, steps: int, shift: float, sigmas: torch.Tensor):
    """Our scheduler for a stored run; diffusers' own tables follow other conventions and go in as explicit sigmas."""
    explicit = sigmas[:-1].tolist()
    return {
        "unipc": lambda: FlowUniPC(steps, shift),
        "dpmpp": lambda: FlowDPM(steps, shift),
        "euler_float_t": lambda: FlowEuler(steps, shift),
        "euler_int_t": lambda: FlowEuler(steps, shift, integer_timesteps=True),
        "diffusers_unipc": lambda: FlowUniPC(steps, sigmas=explicit),
        "diffusers_flowmatch_euler": lambda: FlowEuler(steps, sigmas=explicit),
    }[solver]()


@needs_golden
@pytest.mark.parametrize(
    "solver", ["unipc", "dpmpp", "euler_float_t", "euler_int_t", "diffusers_unipc", "diffusers_flowmatch_euler"]
)
def test_tables_and_trajectories_equal_the_official_ones(solver):
    stored = load_file(GOLDEN / "wan" / "schedulers.safetensors")
    runs = [r for r in json.loads((GOLDEN / "wan" / "schedulers.json").read_text())["runs"] if r["solver"] == solver]
    assert len(runs) >= 12
    for run in runs:
        name = f"{solver}.n{run['steps']}.s{run['shift']:g}"
        sigmas, timesteps, samples, outputs = (
            stored[f"{name}.{part}"] for part in ("sigmas", "timesteps", "samples", "model_outputs")
        )
        scheduler = golden_scheduler(solver, run["steps"], run["shift"], sigmas)
        assert scheduler.timesteps.dtype == timesteps.dtype, name
        assert torch.equal(scheduler.timesteps, timesteps), name
        torch.testing.assert_close(scheduler.sigmas, sigmas, atol=1e-7, rtol=0)
        sample = samples[0]
        for i in range(run["steps"]):
            sample = scheduler.step(outputs[i], i, sample)
            torch.testing.assert_close(
                sample, samples[i + 1], atol=5e-6, rtol=0, msg=lambda m, n=name, i=i: f"{n} step {i}: {m}"
            )


def linear_flow(x: torch.Tensor, sigma: float) -> torch.Tensor:
    """Velocity of the flow whose data is N(0, 0.5^2), known in closed form: x is N(0, (1-sigma)^2/4 + sigma^2)."""
    variance = (1 - sigma) ** 2 * 0.25 + sigma**2
    return x * (sigma - (1 - sigma) * 0.25) / variance


@pytest.mark.parametrize(("name", "order"), [("euler", 1), ("dpm++", 2), ("unipc", 2)])
def test_error_falls_with_the_order_of_the_solver(name, order):
    """An exact trajectory scales by the ratio of standard deviations; here from sigma 0.9 to 0."""
    errors = []
    for steps in (32, 64):
        sigmas = [0.9 * (1 - i / steps) for i in range(steps)]
        scheduler = SCHEDULERS[name](steps, sigmas=sigmas)
        x = torch.ones(1, dtype=torch.float32)
        for i in range(steps):
            x = scheduler.step(linear_flow(x, sigmas[i]), i, x)
        exact = 0.5 / math.sqrt(0.1**2 * 0.25 + 0.9**2)
        errors.append(abs(x.item() - exact))
    # The first-order last step costs the multistep solvers a little: 2^1.5 is asked of order 2.
    assert errors[0] / errors[1] > 2 ** (0.75 * order)
    assert errors[1] < {1: 2e-2, 2: 2e-3}[order]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_one_step_goes_from_pure_noise_to_the_predicted_data(name):
    """B122: no division by zero at one step."""
    scheduler = make_scheduler(name, 1, 5.0)
    noise, velocity = torch.randn(2, 4, 4), torch.randn(2, 4, 4)
    assert scheduler.sigmas[0] == pytest.approx(1.0, abs=2.1e-4)
    assert scheduler.sigmas[1] == 0
    result = scheduler.step(velocity, 0, noise)
    torch.testing.assert_close(result, noise - scheduler.sigmas[0] * velocity, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("steps", [0, -1, 2.0, True])
def test_step_counts_below_one_are_refused(name, steps):
    """B122."""
    with pytest.raises(ValueError, match="at least 1"):
        make_scheduler(name, steps, 5.0)


@pytest.mark.parametrize("shift", [0.0, -1.0, math.nan, math.inf])
def test_shifts_that_are_no_positive_number_are_refused(shift):
    with pytest.raises(ValueError, match="shift"):
        make_scheduler("unipc", 4, shift)


def test_a_shift_that_makes_noise_levels_coincide_is_refused():
    with pytest.raises(ValueError, match="a shift nearer to 1"):
        make_scheduler("dpm++", 50, 1e9)


def test_unknown_names_list_the_choices():
    with pytest.raises(ValueError, match=r"'heun'.*unipc, dpm\+\+, euler"):
        make_scheduler("heun", 4, 5.0)


def test_explicit_sigmas_must_match_the_steps_and_fall():
    with pytest.raises(ValueError, match="3 sigmas for 4 steps"):
        FlowEuler(4, sigmas=[0.9, 0.5, 0.1])
    for wrong in ([0.9, 0.9], [0.5, 0.0], [1.5, 0.5], [0.5, math.nan]):
        with pytest.raises(ValueError, match="fall strictly"):
            FlowUniPC(2, sigmas=wrong)


def test_repeated_timesteps_still_take_every_step():
    """100 steps with shift 12: the first two integer timesteps are both 999, the steps are not the same."""
    scheduler = FlowUniPC(100, 12.0)
    assert scheduler.timesteps[0] == scheduler.timesteps[1] == 999
    x0 = torch.full((3,), 0.25)
    x = torch.randn(3)
    for i in range(100):
        x = scheduler.step((x - x0) / scheduler.sigmas[i], i, x)
    torch.testing.assert_close(x, x0, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_state_stays_float32_under_half_precision_models(name):
    scheduler = make_scheduler(name, 6, 3.0)
    exact = make_scheduler(name, 6, 3.0)
    x = y = torch.randn(5)
    for i in range(6):
        velocity = (0.8 * x).to(torch.bfloat16)
        x = scheduler.step(velocity, i, x)
        y = exact.step(velocity.float(), i, y)
        assert x.dtype == torch.float32
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_second_run_does_not_remember_the_first(name):
    scheduler = make_scheduler(name, 5, 3.0)

    def run(x):
        for i in range(5):
            x = scheduler.step(torch.sin(3 * x), i, x)
        return x

    noise = torch.randn(7)
    first = run(noise)
    run(noise + 1)
    scheduler.step(noise, 0, noise)  # a run broken off after its first step
    assert torch.equal(run(noise), first)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_steps_out_of_order_and_foreign_shapes_are_refused(name):
    scheduler = make_scheduler(name, 3, 3.0)
    x = torch.randn(2, 3)
    with pytest.raises(ValueError, match="step 1 of 3"):
        scheduler.step(x, 1, x)
    scheduler.step(x, 0, x)
    with pytest.raises(ValueError, match="step 2 of 3"):
        scheduler.step(x, 2, x)
    with pytest.raises(ValueError, match="shape"):
        scheduler.step(x[:, :2], 1, x)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCHEDULERS)
def test_steps_on_a_gpu_do_not_synchronise(name):
    """B114's rule for the solvers: coefficients are floats, nothing is read back."""
    scheduler = make_scheduler(name, 4, 3.0)
    x = torch.randn(8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for i in range(4):
            x = scheduler.step(0.5 * x, i, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(x).all()
