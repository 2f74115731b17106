"""Flow solvers against "flow schedulers" files: tables, and trajectories fed with the stored model outputs."""

from collections.abc import Iterator

import torch

from telefuser.schedulers import FlowDPM, FlowEuler, FlowUniPC
from tests.golden.case import Case, NotCheckedError, Row

SOLVERS = {
    "unipc": FlowUniPC,
    "dpmpp": FlowDPM,
    "euler_float_t": FlowEuler,
    "euler_int_t": lambda steps, shift: FlowEuler(steps, shift, integer_timesteps=True),
}


def check(case: Case) -> Iterator[Row]:
    if torch.float32 not in case.dtypes:
        raise NotCheckedError("scheduler state is float32 only")
    tensors = case.tensors()
    for run in case.config["runs"]:
        if run["solver"] not in SOLVERS:  # diffusers' own tables, which no checkpoint of ours is sampled with
            continue
        steps, shift = run["steps"], run["shift"]
        name = f"{run['solver']}.n{steps}.s{shift:g}"
        scheduler = SOLVERS[run["solver"]](steps, shift)
        stored = {key: tensors[f"{name}.{key}"] for key in ("sigmas", "timesteps", "samples", "model_outputs")}
        timestep_limit = 0.0 if not stored["timesteps"].is_floating_point() else 1e-4  # one float32 step at 1000
        yield case.max_abs(f"{name} sigmas", scheduler.sigmas, stored["sigmas"], 1e-7)
        yield case.max_abs(f"{name} timesteps", scheduler.timesteps, stored["timesteps"], timestep_limit)
        sample = stored["samples"][0].to(case.device)
        trajectory = [sample]
        for index in range(steps):
            sample = scheduler.step(stored["model_outputs"][index].to(case.device), index, sample)
            trajectory.append(sample)
        yield case.max_abs(f"{name} samples", torch.stack(trajectory), stored["samples"], 5e-6)
