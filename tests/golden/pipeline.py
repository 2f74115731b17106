"""Guidance, solver and VAE decode together against "whole t2v loop" files, on the tiny models that they name."""

from collections.abc import Iterator

import torch
from torch import Tensor

from telefuser.pipelines.decode import decode_frames
from telefuser.pipelines.denoise import denoise
from telefuser.schedulers import make_scheduler
from tests.golden import dit, vae
from tests.golden.case import Case, NotCheckedError, Row

LIMIT = 1e-4


def check(case: Case) -> Iterator[Row]:
    if torch.float32 not in case.dtypes:
        raise NotCheckedError("the stored loop ran in float32 only")
    transformer = dit.build(case.sibling(case.config["dit"]))
    decoder = vae.build(case.sibling(case.config["vae"]))
    tensors = case.tensors()
    for index, run in enumerate(case.config["runs"]):
        stored = {
            key.removeprefix(f"run{index}."): value for key, value in tensors.items() if key.startswith(f"run{index}.")
        }
        yield from _loop(case, f"float32 run{index}", run, stored, transformer, decoder)


def _loop(case: Case, name: str, run: dict, stored: dict[str, Tensor], transformer, decoder) -> Iterator[Row]:
    scheduler = make_scheduler(run["solver"], run["steps"], run["shift"])
    yield case.max_abs(f"{name} sigmas", scheduler.sigmas, stored["sigmas"], 1e-7)
    yield case.max_abs(f"{name} timesteps", scheduler.timesteps, stored["timesteps"], 0.0)
    context, negative = (
        transformer.prepare_context([stored[key].to(case.device)]) for key in ("context", "context_null")
    )
    trajectory = [stored["latents"][:1]]
    latents = denoise(
        transformer,
        scheduler,
        stored["latents"][:1].to(case.device),
        context,
        negative,
        run["guide_scale"],
        callback=lambda step, total, state: trajectory.append(state.cpu()),
    )
    yield case.max_abs(f"{name} latents of every step", torch.cat(trajectory), stored["latents"], LIMIT)
    video = decoder.decode(latents)[0].cpu()
    yield case.max_abs(f"{name} video", video, stored["video"], LIMIT)
    frames = decode_frames(decoder, latents[0])  # [F, H, W, 3]
    yield case.max_abs(f"{name} video_uint8", frames.permute(3, 0, 1, 2), stored["video_uint8"], 1.0)
