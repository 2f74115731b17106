"""Judges what a checkpoint generates, prompt by prompt: `python -m training.wan_tiny.evaluate [--model tiny|DIR]`.

Generates the grid of 216 prompts, with the noise, solver and defaults of the command line but many videos at a time,
and prints the share with every attribute right and how clean the outlines are. `--sweep` compares sampling settings.
"""

import argparse
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks import record
from telefuser.pipelines.decode import to_uint8
from telefuser.pipelines.denoise import denoise
from telefuser.pipelines.prompt import encode_rows
from telefuser.pipelines.wan_video import WanPipeline, make_noise
from telefuser.schedulers import make_scheduler
from training.wan_tiny.judge import ATTRIBUTE_NAMES, Verdict, judge
from training.wan_tiny.prompts import (
    BACKGROUNDS,
    COLOURS,
    MOTIONS,
    SHAPES,
    canonical,
    grid,
    parse,
    reword,
)

WORDS = (COLOURS, SHAPES, MOTIONS, BACKGROUNDS)
SWEEP_GUIDANCE = (1.0, 2.0, 3.0, 4.0, 5.0)
SWEEP_STEPS = (12, 20, 30)
SWEEP_SCHEDULERS = ("euler", "unipc")
# Denoising is cheap in memory; decoding holds every full-size feature map of its batch at once.
DENOISE_BATCH = 108
DECODE_BATCH = 12
MAX_KEPT = 24

console = Console()


@dataclass(frozen=True)
class Case:
    """One video to make: the prompt and the seed that `telefuser generate --seed` would be given."""

    prompt: str
    seed: int


@dataclass(frozen=True)
class Sampling:
    steps: int
    guidance: float
    shift: float
    scheduler: str

    def __str__(self) -> str:
        return f"{self.scheduler}, {self.steps} steps, guidance {self.guidance:g}, shift {self.shift:g}"


def grid_cases(seeds: int, wording: str = "plain") -> list[Case]:
    """The whole grid `seeds` times; every video has a seed of its own, so that no lucky noise serves all prompts."""
    rng = random.Random(0)
    cases = []
    for index, attributes in enumerate(grid()):
        for k in range(seeds):
            prompt = canonical(attributes) if wording == "plain" else reword(attributes, rng)
            cases.append(Case(prompt, index * seeds + k))
    return cases


def asked(cases: list[Case]) -> torch.Tensor:
    """What the prompts ask for, [V, 4] long; -1 where a prompt does not say."""
    rows = [[-1 if value is None else value for value in parse(case.prompt)] for case in cases]
    return torch.tensor(rows)


@torch.no_grad()
def generate(pipeline: WanPipeline, cases: list[Case], sampling: Sampling) -> torch.Tensor:
    """Frames [V, F, H, W, 3] uint8 on the pipeline's device: what the pipeline makes of each case alone, in batches."""
    return torch.cat(
        [_generate(pipeline, cases[i : i + DENOISE_BATCH], sampling) for i in range(0, len(cases), DENOISE_BATCH)]
    )


def _generate(pipeline: WanPipeline, cases: list[Case], sampling: Sampling) -> torch.Tensor:
    defaults, device, vae = pipeline.defaults, pipeline.device, pipeline.vae
    frames = 1 + (defaults["num_frames"] - 1) // vae.temporal_factor
    sides = (defaults["height"] // vae.spatial_factor, defaults["width"] // vae.spatial_factor)
    noise = torch.stack([make_noise(case.seed, (vae.z_dim, frames, *sides)) for case in cases]).to(device)
    rows = {text: _encode(pipeline, text) for text in {case.prompt for case in cases}}
    context = pipeline.dit.prepare_context([rows[case.prompt] for case in cases])
    negative = None
    if sampling.guidance != 1:
        negative = pipeline.dit.prepare_context([_encode(pipeline, defaults["negative_prompt"])] * len(cases))
    scheduler = make_scheduler(sampling.scheduler, sampling.steps, sampling.shift)
    latents = denoise(pipeline.dit, scheduler, noise, context, negative, sampling.guidance)
    videos = [vae.decode(part, streaming=device.type == "cpu") for part in latents.split(DECODE_BATCH)]
    return torch.stack([to_uint8(video) for part in videos for video in part])


def _encode(pipeline: WanPipeline, text: str) -> torch.Tensor:
    return encode_rows(pipeline.text_encoder, pipeline.tokenizer, [text])[0]


def summarise(cases: list[Case], verdict: Verdict) -> dict[str, Any]:
    """Shares and the wrong cases, ready for JSON."""
    wanted = asked(cases).to(verdict.seen.device)
    right = verdict.right(wanted)
    wrong = [
        {
            "prompt": cases[i].prompt,
            "seed": cases[i].seed,
            "seen": _words(verdict.seen[i].tolist()),
            "iou": round(float(verdict.iou[i].mean()), 3),
        }
        for i in (~right.all(1)).nonzero().flatten().tolist()
    ]
    return {
        "videos": len(cases),
        "right": float(right.all(1).float().mean()),
        "by_attribute": dict(zip(ATTRIBUTE_NAMES, right.float().mean(0).tolist())),
        "iou": float(verdict.iou.mean()),
        "iou_worst_tenth": float(verdict.iou.mean(1).sort().values[: max(1, len(cases) // 10)].mean()),
        "confusions": _confusions(wanted, verdict.seen),
        "wrong": wrong,
    }


def _words(indices: list[int]) -> dict[str, str]:
    return {
        name: words[index] if index >= 0 else "unclear" for name, words, index in zip(ATTRIBUTE_NAMES, WORDS, indices)
    }


def _confusions(wanted: torch.Tensor, seen: torch.Tensor) -> dict[str, int]:
    """How often one attribute was taken for another, e.g. "yellow -> orange": 3; the most frequent first."""
    counts: Counter[str] = Counter()
    for row_wanted, row_seen in zip(wanted.tolist(), seen.tolist()):
        for words, a, b in zip(WORDS, row_wanted, row_seen):
            if a >= 0 and a != b:
                counts[f"{words[a]} -> {words[b] if b >= 0 else 'unclear'}"] += 1
    return dict(counts.most_common())


def evaluate(pipeline: WanPipeline, cases: list[Case], sampling: Sampling) -> tuple[dict[str, Any], torch.Tensor]:
    """Generate, judge and summarise; also the frames."""
    start = time.monotonic()
    frames = generate(pipeline, cases, sampling)
    result = summarise(cases, judge(frames))
    settings = {"sampling": vars(sampling), "seconds": round(time.monotonic() - start, 1)}
    return {**settings, **result}, frames


def sweep(pipeline: WanPipeline, cases: list[Case], base: Sampling) -> list[dict[str, Any]]:
    """`evaluate` for every guidance, number of steps and scheduler of the sweep; a line each as it comes."""
    results = []
    for scheduler in SWEEP_SCHEDULERS:
        for steps in SWEEP_STEPS:
            for guidance in SWEEP_GUIDANCE:
                sampling = replace(base, scheduler=scheduler, steps=steps, guidance=guidance)
                result, _ = evaluate(pipeline, cases, sampling)
                results.append(result)
                print(f"{sampling}: {_line(result)}", flush=True)
    return results


def _line(result: dict[str, Any]) -> str:
    return (
        f"{100 * result['right']:.1f} % right, IoU {result['iou']:.3f} "
        f"(worst tenth {result['iou_worst_tenth']:.3f}), {result['seconds']} s"
    )


def _show(result: dict[str, Any]) -> None:
    table = Table("attribute", "right")
    for name, share in result["by_attribute"].items():
        table.add_row(name, f"{100 * share:.1f} %")
    table.add_row("all", f"{100 * result['right']:.1f} %")
    console.print(table)
    for confusion, count in result["confusions"].items():
        console.print(f"  {confusion}: {count}")
    console.print(f"{result['videos']} videos: {_line(result)}")


def _save_frames(path: Path, cases: list[Case], frames: torch.Tensor, result: dict[str, Any]) -> None:
    """The first videos and the wrong ones, as arrays `frames` [N, F, H, W, 3] and `names` [N]."""
    wrong = {(case["prompt"], case["seed"]) for case in result["wrong"]}
    spread = [round(i * (len(cases) - 1) / (MAX_KEPT - 1)) for i in range(MAX_KEPT)]
    bad = [i for i, case in enumerate(cases) if (case.prompt, case.seed) in wrong][:MAX_KEPT]
    kept = list(dict.fromkeys(spread + bad))
    names = [f"{cases[i].prompt} ({cases[i].seed})" for i in kept]
    np.savez_compressed(path, frames=frames[kept].cpu().numpy(), names=np.array(names))


def _record(result: dict[str, Any], device_type: str, sampling: Sampling, folder: Path) -> Path:
    case = f"{result['videos']} videos on {device_type}, {sampling}"
    values = {"every attribute right": result["right"], "mean IoU": result["iou"]}
    rows = [{"case": case, "metric": name, "value": f"{value:.4f}", "unit": ""} for name, value in values.items()]
    return record.append("wan_tiny adherence", rows, folder)


def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    pipeline = WanPipeline.from_pretrained(options.model, device=options.device, dtype=options.dtype)
    cases = grid_cases(options.seeds, options.wording)
    if options.sample:
        cases = random.Random(options.sample).sample(cases, min(options.sample, len(cases)))
    fields = {name: getattr(options, name) for name in ("steps", "guidance", "shift", "scheduler")}
    sampling = Sampling(**{k: pipeline.defaults[k] if value is None else value for k, value in fields.items()})
    if options.sweep:
        report: Any = sweep(pipeline, cases, sampling)
    else:
        console.print(f"{len(cases)} videos on {pipeline.device}: {sampling}")
        report, frames = evaluate(pipeline, cases, sampling)
        _show(report)
        if options.save_frames:
            _save_frames(options.save_frames, cases, frames, report)
        if options.record:
            print(_record(report, str(pipeline.device.type), sampling, options.record))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="training.wan_tiny.evaluate", description=__doc__)
    parser.add_argument("--model", default="tiny", help="tiny, or a checkpoint folder")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", help="of the transformer and text encoder; default as for generate")
    parser.add_argument("--seeds", type=int, default=2, help="videos a prompt")
    parser.add_argument("--sample", type=int, help="judge only this many videos of the grid, drawn once and for all")
    parser.add_argument("--wording", choices=("plain", "varied"), default="plain")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--guidance", type=float)
    parser.add_argument("--shift", type=float)
    parser.add_argument("--scheduler")
    parser.add_argument("--sweep", action="store_true", help="compare guidance, steps and schedulers instead")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument(
        "--record",
        type=Path,
        nargs="?",
        const=record.RESULTS,
        metavar="FOLDER",
        help="append the result to the benchmarks' table, or to one in this folder",
    )
    parser.add_argument("--save-frames", type=Path, help="write some videos and the wrong ones here (.npz)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
