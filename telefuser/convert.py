"""`telefuser convert`: a checkpoint folder with the transformer in FP8, made from one that is not."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from telefuser import __version__
from telefuser.core import checkpoint, wan_folder
from telefuser.core.checkpoint import Checkpoint, CheckpointError
from telefuser.core.config import QuantConfig
from telefuser.core.model_loading import meta_parameters
from telefuser.core.wan_component import Component
from telefuser.core.weight_files import read_json
from telefuser.core.weight_writer import WeightWriter
from telefuser.ops.fp8_quantization import quantize_weight
from telefuser.ops.quantized_linear import LinearFP8
from telefuser.pipelines import wan_quantization
from telefuser.run_report import BytesWatch, RunReport, amount

# The common variant, on AMD's CDNA3 too, which converts it while loading.
FP8 = torch.float8_e4m3fn
DIT_FILE = "diffusion_pytorch_model.safetensors"
_COPY_BYTES = 2**24


def run(
    source: str, target: str | Path, *, report: RunReport, quantize: str | QuantConfig = "fp8", force: bool = False
) -> Path:
    """Writes the checkpoint `source` to the folder `target`, layout and key names kept, and returns that folder.

    The linear layers that `WanPipeline.from_pretrained(source, quantize="fp8")` quantises become FP8 weights with a
    scale an output channel, to the same bits; all other tensors and files are copied. No more than one layer is in
    memory. The folder appears when it is whole: an interrupted run leaves nothing.

    Raises ValueError before anything is written for a target that exists (unless `force`, which replaces a checkpoint
    and nothing else), that lies in the source or around it, or too little disk space; CheckpointError for a source that
    cannot be used or is in FP8 already.
    """
    config = wan_quantization.resolve_quantize(quantize)
    if config is None:
        raise ValueError(f"quantize is {quantize!r}: nothing would be converted; choose 'fp8'")
    found = checkpoint.inspect(source).require_usable()
    if found.dit.fp8_layers:
        raise CheckpointError(
            f"{found.folder}: is in FP8 already ({len(found.dit.fp8_layers)} layers). Use it as it is."
        )
    # Before a long run, not after it.
    named = Path(os.path.expanduser(target))
    target = _check_target(named.resolve(), found.folder.resolve(), force)
    layout = fp8_layout(found.dit, config)
    copies = _files_to_copy(found)
    size = sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in layout.values())
    total = size + sum(file.stat().st_size for file in copies)
    free = shutil.disk_usage(target.parent).free
    if free < total + 2**24:
        raise ValueError(f"{target}: {total >> 20} MiB are needed, {free >> 20} MiB are free on that disk")
    sizes = f"DiT {amount(found.dit.num_bytes)} -> {amount(size)}"
    report.line(f"{found.source}: {found.name}, {found.layout} layout, {sizes}")
    with _appears_whole(target) as folder, BytesWatch(report, total) as watch:
        _write_config(found, config, folder)
        place = folder / wan_folder.dit_folder(found.layout)
        with WeightWriter(place / DIT_FILE, layout, {"format": "pt", "telefuser": __version__}) as writer:
            for key, tensor in _converted(found.dit, layout):
                watch.advance(writer.write(key, tensor))
        for file in copies:
            _copy(file, folder / file.relative_to(found.folder), watch)
    report.result(named)
    return named


def fp8_layout(dit: Component, quantize: QuantConfig) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Key -> (dtype, shape) of the transformer's file, in the spelling of the source's keys."""
    with meta_parameters():
        model = wan_quantization.builder(dit, quantize, torch.bfloat16)(dit.config)
    layers = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, LinearFP8)}
    layout = {}
    for key, entry in dit.weights.entries.items():
        if (dit.key_map(key) if dit.key_map else key) in layers:
            layout[key] = (FP8, entry.shape)
            layout[f"{key}_scale"] = (torch.float32, (entry.shape[0], 1))
        else:
            layout[key] = (getattr(torch, entry.dtype), entry.shape)
    return layout


def _converted(dit: Component, layout: dict) -> Iterator[tuple[str, torch.Tensor]]:
    for key, tensor in dit.weights.tensors():
        made = {key: tensor}
        if layout[key][0] is FP8:
            # NaN and infinity of a row are in its scale.
            made[key], made[f"{key}_scale"] = quantize_weight(tensor, FP8)
        if not all(torch.isfinite(part).all() for part in made.values() if part.dtype is not FP8):
            file = dit.weights.entries[key].file
            raise CheckpointError(f"{file}: '{key}' holds NaN or infinity. The file is damaged: download it again.")
        yield from made.items()


def _write_config(found: Checkpoint, quantize: QuantConfig, folder: Path) -> None:
    file = wan_folder.find_config(found.folder, found.layout, "dit")
    config = read_json(file) if file else {"model_type": "t2v", **found.dit.config}
    config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_dtype": str(FP8).removeprefix("torch."),
        "weight_scale": "float32, one an output channel: value = weight * weight_scale",
        "modules_to_not_convert": list(quantize.skip_modules),
    }
    place = folder / wan_folder.dit_folder(found.layout)
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _files_to_copy(found: Checkpoint) -> list[Path]:
    """All that a run reads beside the transformer, and the licence."""
    files = {*found.vae.files, *found.text_encoder.files}
    files |= {file for file in found.tokenizer.parent.iterdir() if file.is_file()}
    for part in (found.vae, found.text_encoder):
        names = {file.name for file in part.files}
        for index in part.files[0].parent.glob("*.index.json"):
            if set(read_json(index).get("weight_map", {}).values()) == names:
                files.add(index)
    if found.layout == "diffusers":
        files.add(found.folder / "model_index.json")
        files |= {found.folder / part / "config.json" for part in ("vae", "text_encoder")}
        files |= set((found.folder / "scheduler").glob("*.json"))
    return sorted({*files, *found.folder.glob("LICENSE*")})


def _check_target(target: Path, source: Path, force: bool) -> Path:
    if target == source or target.is_relative_to(source) or source.is_relative_to(target):
        raise ValueError(f"{target}: lies in the source {source} or around it; choose another folder")
    if not target.parent.is_dir():
        raise ValueError(f"{target}: there is no folder {target.parent}, create it first")
    if not os.access(target.parent, os.W_OK):
        raise ValueError(f"{target}: no permission to write in {target.parent}")
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return target
    if not force:
        raise ValueError(f"{target} exists: choose another folder, or give --force to replace it")
    try:
        if target.is_dir():
            wan_folder.find_layout(target)
            return target
    except CheckpointError:
        pass  # Said below, in the words of this command.
    raise ValueError(f"{target} is no checkpoint folder, which is all that --force replaces; choose another folder")


@contextlib.contextmanager
def _appears_whole(target: Path) -> Iterator[Path]:
    """A folder beside `target` that takes its name when the block ends well, and is removed when it does not."""
    token = secrets.token_hex(4)
    partial, old = (target.with_name(f".{target.name}.{token}.{end}") for end in ("partial", "old"))
    partial.mkdir()
    try:
        yield partial
        if target.exists():
            target.rename(old)
        partial.rename(target)
    finally:
        if old.exists() and not target.exists():
            old.rename(target)
        for rest in (old, partial):
            shutil.rmtree(rest, ignore_errors=True)


def _copy(file: Path, target: Path, watch: BytesWatch) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with file.open("rb") as source, target.open("xb") as sink:
        while block := source.read(_COPY_BYTES):
            sink.write(block)
            watch.advance(len(block))
