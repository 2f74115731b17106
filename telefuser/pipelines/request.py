"""What a user asks for, checked once: the pipeline and the command line both call `validate_request`, before weights
are loaded, so that a wrong number costs a second and not a run.
"""

from __future__ import annotations

import math
import re
import secrets
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from telefuser.pipelines.prompt import clean_text
from telefuser.schedulers import SCHEDULERS, make_scheduler

# The VAE shrinks an edge 8 times and the transformer takes patches of 2 x 2 latents; time shrinks 4 times.
SIZE_MULTIPLE = 16
FRAME_MULTIPLE = 4
MAX_SEED = 2**63 - 1
# Hundreds are useful; the schedule alone of a mistyped billion would take minutes and gigabytes.
MAX_STEPS = 100_000
# Far above any use. A mistyped 1e30 still gives finite latents, and a video of clipped colours.
MAX_GUIDANCE = 1000.0
# Players and containers take no other rate; a video of 0.001 frames a second is a typing error.
MIN_FPS, MAX_FPS = 0.1, 1000.0
# A run starts from pure noise, noise level 1. Told a lower one, the model leaves the rest of the noise in the video.
MIN_FIRST_SIGMA = 0.9

_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}


@dataclass(frozen=True)
class GenerationRequest:
    """A checked request: one entry of `prompts`, `negative_prompts` and `seeds` a video, the rest shared."""

    prompts: tuple[str, ...]
    negative_prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    height: int
    width: int
    num_frames: int
    steps: int
    guidance: float
    shift: float
    scheduler: str
    fps: float

    @property
    def num_pixels(self) -> int:
        """Of all frames of one video."""
        return self.width * self.height * self.num_frames

    def latent_shape(self, channels: int) -> tuple[int, int, int, int]:
        """[channels, frames, height, width] of one video's latents."""
        return channels, (self.num_frames - 1) // FRAME_MULTIPLE + 1, self.height // 8, self.width // 8


def parse_size(text: str) -> tuple[int, int]:
    """(width, height) of a size such as "832x480" or "832*480": width first. ValueError for anything else."""
    match = re.fullmatch(r"\s*(\d+)\s*[x*×]\s*(\d+)\s*", text, flags=re.IGNORECASE)
    if match is None:
        raise ValueError(f"size {text!r} is not WIDTHxHEIGHT, for example 832x480")
    return int(match[1]), int(match[2])


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A dtype by its name or short name ("bf16", "fp16", "fp32"); None stays None. ValueError for other dtypes."""
    if dtype is None or dtype in _DTYPES.values():
        return dtype
    if isinstance(dtype, str) and dtype.lower().removeprefix("torch.") in _DTYPES:
        return _DTYPES[dtype.lower().removeprefix("torch.")]
    raise ValueError(f"dtype {dtype!r} is not one of {', '.join(_DTYPES)}")


def resolve_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """`parse_dtype`, where None is bfloat16, on the CPU float32: few CPUs multiply bfloat16 faster."""
    return parse_dtype(dtype) or (torch.float32 if device.type == "cpu" else torch.bfloat16)


def validate_request(
    defaults: Mapping[str, Any],
    prompt: str | Sequence[str],
    negative_prompt: str | Sequence[str] | None = None,
    *,
    height: int | None = None,
    width: int | None = None,
    num_frames: int | None = None,
    steps: int | None = None,
    guidance: float | None = None,
    shift: float | None = None,
    seed: int | Sequence[int | None] | None = None,
    scheduler: str | None = None,
) -> GenerationRequest:
    """Check a request and fill what it leaves open from the checkpoint's `defaults` (keys as the parameters here, and
    `fps`, which only a checkpoint decides: its model learnt motion at that rate).

    Args:
        prompt: one prompt or a non-empty list of them; none may be blank.
        negative_prompt: one for all, or a list with one a prompt; may be empty.
        height, width: multiples of 16.
        num_frames: 4n + 1.
        steps: 1 to 100000.
        guidance: 0 to 1000; 1 turns guidance off.
        shift: finite, above 0, and such that the noise levels fall from about 1 to 0 in float32 too.
        seed: 0 to 2**63 - 1 for all prompts, or a list with one a prompt. None and -1 draw one a prompt.
        scheduler: a key of `telefuser.schedulers.SCHEDULERS`.

    Raises:
        ValueError: naming the value, the limit and the nearest legal value.
    """

    def chosen(name: str, value: Any) -> Any:
        return defaults[name] if value is None else value

    prompts = _prompts(prompt)
    height, width = _size(chosen("height", height), chosen("width", width))
    scheduler = chosen("scheduler", scheduler)
    if not isinstance(scheduler, str) or scheduler not in SCHEDULERS:
        raise ValueError(f"unknown scheduler {scheduler!r}: choose one of {', '.join(SCHEDULERS)}")
    steps = _integer("steps", chosen("steps", steps), 1, MAX_STEPS)
    shift = _number("shift", chosen("shift", shift), positive=True)
    _check_schedule(scheduler, steps, shift)
    return GenerationRequest(
        prompts=prompts,
        negative_prompts=_negative_prompts(chosen("negative_prompt", negative_prompt), len(prompts)),
        seeds=_seeds(seed, len(prompts)),
        height=height,
        width=width,
        num_frames=_num_frames(chosen("num_frames", num_frames)),
        steps=steps,
        guidance=_guidance(chosen("guidance", guidance)),
        shift=shift,
        scheduler=scheduler,
        fps=_fps(defaults["fps"]),
    )


def _prompts(prompt: str | Sequence[str]) -> tuple[str, ...]:
    prompts = _each("prompt", prompt, str)
    if not prompts:
        raise ValueError("the list of prompts is empty: give at least one prompt")
    for i, text in enumerate(prompts):
        if not isinstance(text, str):
            raise ValueError(f"prompt {i + 1} is a {type(text).__name__}, not a string")
        _check_unicode(f"prompt {i + 1}", text)
        if not _is_visible(text):
            raise ValueError(f"prompt {i + 1} of {len(prompts)} is empty: say what the video should show")
    return prompts


def _negative_prompts(negative_prompt: str | Sequence[str], count: int) -> tuple[str, ...]:
    if isinstance(negative_prompt, str):
        _check_unicode("the negative prompt", negative_prompt)
        return (negative_prompt,) * count
    negatives = _each("negative prompt", negative_prompt, str)
    if len(negatives) != count:
        raise ValueError(
            f"{len(negatives)} negative prompts for {count} prompts: give one for all (a string) or one each"
        )
    for text in negatives:
        if not isinstance(text, str):
            raise ValueError(f"a negative prompt is a {type(text).__name__}, not a string")
        _check_unicode("a negative prompt", text)
    return negatives


def _check_unicode(name: str, text: str) -> None:
    """A video's metadata is UTF-8, and only after the run would half a character be found not to be."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} is not valid Unicode at character {error.start + 1} ({text[error.start]!a}): "
            "type it in a UTF-8 terminal, or set PYTHONUTF8=1"
        ) from error


def _is_visible(text: str) -> bool:
    """Whether anything is left once white space, control and zero-width characters are gone: they prompt nothing."""
    return any(unicodedata.category(character)[0] not in "CZ" for character in clean_text(text))


def _size(height: int, width: int) -> tuple[int, int]:
    height, width = _integer("height", height), _integer("width", width)
    nearest = tuple(max((edge + SIZE_MULTIPLE // 2) // SIZE_MULTIPLE, 1) * SIZE_MULTIPLE for edge in (width, height))
    if (width, height) != nearest:
        raise ValueError(
            f"size {width}x{height} (width x height): both must be positive multiples of {SIZE_MULTIPLE}, "
            f"the nearest such size is {nearest[0]}x{nearest[1]}"
        )
    return height, width


def _num_frames(num_frames: int) -> int:
    num_frames = _integer("number of frames", num_frames)
    nearest = max(num_frames // FRAME_MULTIPLE, 0) * FRAME_MULTIPLE + 1
    if num_frames != nearest:
        raise ValueError(f"{num_frames} frames: the number must be 4n + 1, the nearest is {nearest}")
    return num_frames


def _check_schedule(scheduler: str, steps: int, shift: float) -> None:
    first = make_scheduler(scheduler, steps, shift).sigmas[0].item()
    if first < MIN_FIRST_SIGMA:
        raise ValueError(
            f"shift {shift:g} starts {scheduler} at noise level {first:.2g} instead of about 1, and the video "
            "would stay noise: use a larger shift, 1 to 12 is usual"
        )


def _guidance(guidance: Any) -> float:
    guidance = _number("guidance", guidance, positive=False)
    if guidance > MAX_GUIDANCE:
        raise ValueError(f"guidance must be at most {MAX_GUIDANCE:g}, got {guidance:g}: 1 to 10 is usual")
    return guidance


def _fps(fps: Any) -> float:
    fps = _number("fps", fps, positive=True)
    if not MIN_FPS <= fps <= MAX_FPS:
        raise ValueError(
            f"fps must be from {MIN_FPS:g} to {MAX_FPS:g}, got {fps:g}: correct the checkpoint's config.json"
        )
    return fps


def _seeds(seed: int | Sequence[int | None] | None, count: int) -> tuple[int, ...]:
    given = (seed,) * count if seed is None or isinstance(seed, int) else _each("seed", seed, int)
    if len(given) != count:
        raise ValueError(f"{len(given)} seeds for {count} prompts: give one for all or one each")
    return tuple(_seed(value) for value in given)


def _seed(value: int | None) -> int:
    if value is None or value == -1:
        return secrets.randbelow(2**32)
    value = _integer("seed", value)
    if not 0 <= value <= MAX_SEED:
        raise ValueError(f"seed {value} is outside 0 to {MAX_SEED} (2**63 - 1); -1 draws one")
    return value


def _each(name: str, value: Any, single: type) -> tuple:
    """A tuple of one value or of a list of them."""
    if isinstance(value, single):
        return (value,)
    if isinstance(value, list | tuple):
        return tuple(value)
    raise ValueError(f"{name} must be a {single.__name__} or a list of them, got {value!r}")


def _integer(name: str, value: Any, minimum: int | None = None, maximum: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if minimum is not None and value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    if maximum is not None and value > maximum:
        raise ValueError(f"{name} must be at most {maximum}, got {value}")
    return value


def _number(name: str, value: Any, positive: bool) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    if value < 0 or (positive and value == 0):
        raise ValueError(f"{name} must be {'above 0' if positive else 'at least 0'}, got {value}")
    return float(value)
