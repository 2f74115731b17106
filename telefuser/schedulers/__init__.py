"""Flow-matching solvers: which noise levels a run visits and how one step goes from a level to the next."""

from telefuser.schedulers.flow_dpm import FlowDPM
from telefuser.schedulers.flow_euler import FlowEuler
from telefuser.schedulers.flow_schedule import FlowScheduler
from telefuser.schedulers.flow_unipc import FlowUniPC

SCHEDULERS: dict[str, type[FlowScheduler]] = {"unipc": FlowUniPC, "dpm++": FlowDPM, "euler": FlowEuler}


def make_scheduler(name: str, num_inference_steps: int, shift: float) -> FlowScheduler:
    """The solver of that name. ValueError for an unknown name (it lists the choices) or an argument out of limits."""
    if name not in SCHEDULERS:
        raise ValueError(f"unknown scheduler {name!r}: choose one of {', '.join(SCHEDULERS)}")
    return SCHEDULERS[name](num_inference_steps, shift)


__all__ = ["SCHEDULERS", "FlowDPM", "FlowEuler", "FlowScheduler", "FlowUniPC", "make_scheduler"]
