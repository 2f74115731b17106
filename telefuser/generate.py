"""`telefuser generate`: check all that can be checked, load the model, make and save one video a prompt."""

import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from telefuser import platforms
from telefuser.core import checkpoint
from telefuser.core.checkpoint import Checkpoint
from telefuser.core.config import AttnImplType
from telefuser.distributed import Job, choose_parallel_config, numbers_of_first, require_same
from telefuser.ops import fp8_gemm
from telefuser.pipelines import wan_quantization
from telefuser.pipelines.attention_choice import Run, describe_attention, settle_attention
from telefuser.pipelines.parallel import describe
from telefuser.pipelines.placement import require_memory, weight_bytes
from telefuser.pipelines.request import GenerationRequest, resolve_dtype, validate_request
from telefuser.pipelines.video_file import check_output
from telefuser.pipelines.wan_video import Stage, WanPipeline
from telefuser.run_report import RunReport, VideoWatch, amount

logger = logging.getLogger(__name__)

_SLUG_LENGTH = 40


def run(
    prompts: Sequence[str],
    settings: dict[str, Any],
    *,
    report: RunReport,
    model: str = "tiny",
    output: str | None = None,
    overwrite: bool = False,
    device: str = "auto",
    dtype: str | None = None,
    attention: str = "auto",
    sparse: dict[str, Any] | None = None,
    offload: bool | None = None,
    quantize: str | None = None,
    degrees: Mapping[str, int | None] | None = None,
    fsdp: bool = False,
) -> list[str]:
    """Makes the videos; returns one line for each prompt that failed, after the others were made all the same.

    settings: keyword arguments of `validate_request` (negative_prompt, height, width, num_frames, ...).
    output: a file, a folder, or a pattern; see `output_paths`.
    sparse: keyword arguments of `settle_attention` (decay, dense_steps, dense_layers, local_window).
    degrees, fsdp: how the processes that torchrun started share the work: cfg_degree, ulysses_degree and ring_degree of
        `choose_parallel_config`. The first process alone reports and writes, and the first failure ends all.

    Raises ValueError before weights are loaded for anything that is wrong with the request, the output, the device or
    the checkpoint.
    """
    with Job(device) as job:
        models = {"model": model, "dtype": dtype, "attention": attention, "offload": offload, "quantize": quantize}
        shares = {**(degrees or {}), "enable_fsdp": fsdp}
        if not job.is_first:
            report = RunReport(Console(quiet=True), quiet=True)
        return _run(job, prompts, settings, report, output, overwrite, shares, sparse or {}, **models)


def _run(
    job: Job,
    prompts: Sequence[str],
    settings: dict[str, Any],
    report: RunReport,
    output: str | None,
    overwrite: bool,
    shares: dict[str, Any],
    sparse: dict[str, Any],
    *,
    model: str,
    dtype: str | None,
    attention: str,
    offload: bool | None,
    quantize: str | None,
) -> list[str]:
    device = job.device
    choices = (list(prompts), settings, shares, sparse, model, dtype, attention, offload, quantize)
    require_same(repr(choices), "command", device.type if job.size > 1 else None)
    if job.size == 1 and shares["enable_fsdp"]:
        raise ValueError("--fsdp spreads the weights over several processes, this is one: start it with torchrun")
    attention, dtype = AttnImplType.parse(attention), resolve_dtype(dtype, device)
    wan_quantization.resolve_quantize(quantize)
    # Before a hub download as well; how much disk space is needed is known only after it.
    if job.is_first:
        for path in output_paths(output, prompts, [0] * len(prompts), overwrite):
            check_output(path)
    found = checkpoint.inspect(model).require_usable()
    request = validate_request(found.defaults, list(prompts), **settings)
    require_memory(
        device, request.width, request.height, request.num_frames, found.dit.config["dim"], found.vae.config["dim"]
    )
    config = settle_attention(attention, **sparse, steps=request.steps)
    heads, guided = found.dit.config["num_heads"], request.guidance != 1
    parallel = choose_parallel_config(job.size, heads, guided, allow_ring=not config.is_sparse(), **shares)
    if job.size > 1:
        request = replace(request, seeds=numbers_of_first(request.seeds, device.type))
    paths: list[Path | None] = [None] * len(prompts)
    if job.is_first:
        paths = output_paths(output, prompts, request.seeds, overwrite)
        for path in paths:
            check_output(path, request.num_frames * len(paths), request.height, request.width)
    sizes = (found.dit.config[name] for name in ("dim", "num_heads", "num_layers", "patch_size"))
    attention_line = describe_attention(config, Run.of(request, *sizes), device, dtype)
    report.line(_model_line(found, device, dtype))
    report.line(f"attention {attention_line}")
    if job.size > 1:
        report.line(describe(parallel))
    report.line(_request_line(request, found))
    start = time.perf_counter()
    pipeline = WanPipeline.from_pretrained(
        model,
        device=device,
        dtype=dtype,
        attention=attention,
        offload=offload,
        quantize=quantize,
        parallel=parallel if job.size > 1 else None,
    )
    report.stage(_stage("load", start, pipeline))
    if in_fp8 := wan_quantization.describe(pipeline.dit):
        # Why it is no other product is what `telefuser info` is for.
        product = fp8_gemm.describe_choice(device).partition(" (")[0]
        report.line(f"  {in_fp8}, DiT {amount(weight_bytes(pipeline.dit))}, {product}")
    if pipeline.loaded_as["offload"]:
        report.line("  each model is on the device only during its stage")
    return _make_all(pipeline, request, paths, report, sparse)


def read_prompts(file: Path) -> list[str]:
    """One prompt a line of a UTF-8 file; blank lines and lines that start with # are skipped.

    Raises ValueError when the file cannot be read or holds no prompt.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise ValueError(f"prompts file {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"prompts file {file} is not UTF-8 text (byte {error.start}): save it as UTF-8") from error
    prompts = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not prompts:
        raise ValueError(f"prompts file {file} holds no prompt: write one a line")
    return prompts


def output_paths(output: str | None, prompts: Sequence[str], seeds: Sequence[int], overwrite: bool) -> list[Path]:
    """One file a prompt, none of which exists unless `overwrite`.

    output: None (named after the prompt, in the working folder), a folder (the same in there; made if the name ends in
    a separator), a file, or a name with {n}, {prompt} or {seed} in it. Several prompts are numbered in any case; a name
    made from the prompt gets a free number rather than an error.

    Raises ValueError for a file that exists, naming it and the way out.
    """
    # os.path, whose questions have an answer for every string: a name too long for the disk is no folder either.
    output = None if output is None else os.path.expanduser(output)
    names_itself = output is None or output.endswith(("/", "\\")) or os.path.isdir(output or ".")
    if names_itself:
        folder = Path(output or ".")
        try:
            folder.mkdir(exist_ok=True)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"cannot make the folder {str(folder)!r} ({reason})") from error
        pattern = str(folder / ("{n}-{prompt}.mp4" if len(prompts) > 1 else "{prompt}.mp4"))
    else:
        pattern = str(Path(output))
        if len(prompts) > 1 and "{n}" not in pattern:
            file = Path(pattern)
            pattern = str(file.with_name(f"{file.stem}-{{n}}{file.suffix}"))
    width = max(3, len(str(len(prompts))))
    paths = []
    for number, (prompt, seed) in enumerate(zip(prompts, seeds), start=1):
        name = pattern.replace("{n}", f"{number:0{width}d}").replace("{seed}", str(seed))
        path = Path(name.replace("{prompt}", slug(prompt)))
        if os.path.exists(path) and not overwrite and names_itself:
            path = _free(path)
        elif os.path.isfile(path) and not overwrite:
            raise ValueError(f"{path} exists: choose another name with -o, or give --overwrite")
        paths.append(path)
    return paths


def slug(prompt: str) -> str:
    """The prompt as part of a file name: letters and digits of any script, joined by `-`, at most 40 characters."""
    words = re.findall(r"[^\W_]+", prompt.lower())
    name = ""
    for word in words:
        if len(name) + len(word) >= _SLUG_LENGTH and name:
            break
        name = f"{name}-{word}" if name else word[:_SLUG_LENGTH]
    return name or "video"


def _free(path: Path) -> Path:
    number = 2
    while (other := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    return other


def _make_all(
    pipeline: WanPipeline,
    request: GenerationRequest,
    paths: list[Path | None],
    report: RunReport,
    sparse: dict[str, Any],
) -> list[str]:
    failures = []
    for i, path in enumerate(paths):
        if len(paths) > 1:
            report.line(f"{i + 1} of {len(paths)}: {request.prompts[i]} (seed {request.seeds[i]})")
        try:
            _make(pipeline, request, i, path, report, sparse)
        except Exception as error:
            # A process that goes on alone would wait for the others in the next video for ever.
            if len(paths) == 1 or pipeline.device_mesh is not None:
                raise
            failures.append(f"prompt {i + 1} ({request.prompts[i]!r}): {' '.join(str(error).split())}")
            logger.error("%s", failures[-1], exc_info=error)
    return failures


def _make(
    pipeline: WanPipeline,
    request: GenerationRequest,
    i: int,
    path: Path | None,
    report: RunReport,
    sparse: dict[str, Any],
) -> None:
    with VideoWatch(report) as watch:
        video = pipeline(
            request.prompts[i],
            request.negative_prompts[i],
            height=request.height,
            width=request.width,
            num_frames=request.num_frames,
            steps=request.steps,
            guidance=request.guidance,
            shift=request.shift,
            seed=request.seeds[i],
            scheduler=request.scheduler,
            **sparse,
            callback=watch.step,
            on_stage=watch.stage,
        )
        if path is None:
            return
        start = time.perf_counter()
        video.save(path)
        watch.stage(_stage("write", start, pipeline))
    report.result(path)


def _stage(name: str, start: float, pipeline: WanPipeline) -> Stage:
    peak = platforms.platform_of(pipeline.device).max_memory_allocated(pipeline.device)
    return Stage(name, time.perf_counter() - start, peak)


def _model_line(found: Checkpoint, device: torch.device, dtype: torch.dtype) -> str:
    name = platforms.platform_of(device).get_device_name(device)
    return f"{found.source}: {found.name}, {found.layout} layout, on {device} ({name}) in {str(dtype)[6:]}"


def _request_line(request: GenerationRequest, found: Checkpoint) -> str:
    seed = f"seed {request.seeds[0]}" if len(request.seeds) == 1 else f"{len(request.seeds)} prompts"
    seconds = request.num_frames / found.defaults["fps"]
    return (
        f"{request.width}x{request.height}, {request.num_frames} frames ({seconds:.1f} s), {request.steps} steps "
        f"({request.scheduler}), guidance {request.guidance:g}, shift {request.shift:g}, {seed}"
    )
