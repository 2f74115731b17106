"""Trains the embedded checkpoint: `python -m training.wan_tiny.train --out DIR`; see the README beside this file.

DIR becomes a checkpoint folder. While a stage runs it also holds that stage's state, from which `--resume` continues.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from telefuser.platforms import resolve_device
from training.wan_tiny import checkpoint_folder
from training.wan_tiny.dit_stage import DitStage
from training.wan_tiny.settings import FULL, SMOKE, Settings
from training.wan_tiny.stage_state import load_state, remove_state, save_state
from training.wan_tiny.vae_stage import VaeStage

LOG_EVERY = 50
PLAIN_LOG_SECONDS = 10
SAVE_SECONDS = 60
# A stage's end (weights, statistics, report) and a state's writing must fit between the last step and the limit.
STOP_BEFORE_LIMIT = 25

console = Console()


def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    started = time.monotonic()
    torch.set_float32_matmul_precision("high")
    settings = _settings(options)
    device = resolve_device(options.device)
    options.out.mkdir(parents=True, exist_ok=True)
    stages = ("vae", "dit") if options.stage == "all" else (options.stage,)
    for name in stages:
        weights = options.out / {"vae": checkpoint_folder.VAE, "dit": checkpoint_folder.DIT}[name]
        if options.resume and weights.exists() and load_state(options.out, name) is None:
            console.print(f"{name}: already trained")
            continue
        if not _run(name, settings, device, options, started):
            return


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="training.wan_tiny.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint and the resumable state")
    parser.add_argument("--stage", choices=("vae", "dit", "all"), default="all")
    parser.add_argument("--steps-vae", type=int)
    parser.add_argument("--steps-dit", type=int)
    parser.add_argument("--bank", type=int, help="clips encoded for the transformer's training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--resume", action="store_true", help="continue from the state in --out, if there is one")
    parser.add_argument("--time-limit", type=float, help="seconds after which to save and stop; continue with --resume")
    parser.add_argument("--compact", action="store_true", help="smaller state files (averages in bf16; not exact)")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="tiny models and four steps, to test the code")
    return parser.parse_args(arguments)


def _settings(options: argparse.Namespace) -> Settings:
    base = SMOKE if options.smoke else FULL
    vae = dataclasses.replace(base.vae, steps=options.steps_vae or base.vae.steps)
    dit = dataclasses.replace(
        base.dit, steps=options.steps_dit or base.dit.steps, bank_clips=options.bank or base.dit.bank_clips
    )
    return Settings(vae, dit)


def _run(name: str, settings: Settings, device: torch.device, options: argparse.Namespace, started: float) -> bool:
    """Train one stage to its end (True) or to the time limit (False)."""
    saved = load_state(options.out, name)
    if saved and not options.resume:
        raise SystemExit(f"{options.out} holds an unfinished {name} stage: pass --resume, or another --out")
    compile_model = not options.no_compile
    console.print(f"{name}: preparing on {device}")
    if name == "vae":
        stage = VaeStage(settings.vae, device, options.seed, compile_model)
    else:
        stage = DitStage(settings.dit, device, options.seed, compile_model, options.out)
    parameters = sum(p.numel() for p in stage.optimisation.parameters.values())
    console.print(f"{name}: {parameters / 1e6:.2f} M parameters, ready after {time.monotonic() - started:.0f} s")
    first = 0
    if saved:
        first, tensors = saved
        stage.optimisation.load_tensors(tensors)
        console.print(f"{name}: resumed at step {first} of {stage.total_steps}")
    done = _loop(stage, first, options, started)
    if done < stage.total_steps:
        save_state(options.out, name, done, stage.optimisation.tensors(), options.compact)
        console.print(f"{name}: stopped at step {done} of {stage.total_steps}, continue with --resume")
        return False
    console.print(f"{name}: {stage.finish(options.out)}")
    remove_state(options.out, name)
    console.print(f"{name}: finished after {time.monotonic() - started:.0f} s")
    return True


def _loop(stage: VaeStage | DitStage, first: int, options: argparse.Namespace, started: float) -> int:
    """Take steps from `first` until the stage's last one or the time limit; the number of steps done in all."""
    deadline = float("inf") if options.time_limit is None else started + options.time_limit - STOP_BEFORE_LIMIT
    saved_at = printed_at = clock = time.monotonic()
    logged = first
    with _progress_bar() as progress:
        task = progress.add_task(stage.name, total=stage.total_steps, completed=first, values="")
        for index in range(first, stage.total_steps):
            if time.monotonic() > deadline:
                return index
            metrics = stage.step(index)
            done = index + 1
            progress.update(task, completed=done)
            if done % LOG_EVERY == 0 or done == stage.total_steps:
                values = {key: float(value) for key, value in metrics.items()}  # waits for the device
                if values["loss"] != values["loss"]:
                    raise SystemExit(f"{stage.name}: the loss is NaN at step {done}; the last saved state is sound")
                now = time.monotonic()
                text = " ".join(f"{key} {value:.4g}" for key, value in values.items())
                text += f" {1000 * (now - clock) / (done - logged):.1f} ms/step"
                clock, logged = now, done
                progress.update(task, values=text)
                _record(options.out, stage.name, done, values, now - started)
                if not console.is_terminal and now - printed_at > PLAIN_LOG_SECONDS:
                    print(f"{stage.name} {done}/{stage.total_steps} {text} at {now - started:.0f} s", flush=True)
                    printed_at = now
                if now - saved_at > SAVE_SECONDS and done < stage.total_steps:
                    save_state(options.out, stage.name, done, stage.optimisation.tensors(), options.compact)
                    saved_at = clock = time.monotonic()
    return stage.total_steps


def _progress_bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    columns += (TimeRemainingColumn(), TextColumn("{task.fields[values]}"))
    return Progress(*columns, console=console, disable=not console.is_terminal)


def _record(folder: Path, stage: str, step: int, values: dict[str, float], seconds: float) -> None:
    line = {"stage": stage, "step": step, **values, "seconds": round(seconds, 1)}
    with (folder / "train-log.jsonl").open("a") as log:
        log.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
