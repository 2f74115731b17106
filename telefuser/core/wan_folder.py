"""Where the parts of a Wan2.1 checkpoint lie in a folder of the official or the diffusers layout."""

import re
from pathlib import Path

from telefuser.core.weight_files import CheckpointError, brief, read_json, shard_files

COMPONENTS = ("dit", "vae", "text_encoder")
# (folder within the checkpoint, start of the file names)
_PLACES = {
    "official": {
        "dit": ("", "diffusion_pytorch_model"),
        "vae": ("", "Wan2.1_VAE"),
        "text_encoder": ("", "models_t5_"),
    },
    "diffusers": {
        "dit": ("transformer", "diffusion_pytorch_model"),
        "vae": ("vae", "diffusion_pytorch_model"),
        "text_encoder": ("text_encoder", ("model", "pytorch_model")),
    },
}
_CONFIGS = {"dit": "transformer/config.json", "vae": "vae/config.json", "text_encoder": "text_encoder/config.json"}
# The first that is there wins: a safetensors file can be judged and mapped without unpickling anything.
_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")
_VARIANT = re.compile(r"\.(fp16|bf16|fp32|non_ema)[.-]")
_OTHER_PIPELINES = {
    "WanImageToVideoPipeline": "image-to-video",
    "WanVideoToVideoPipeline": "video-to-video",
    "WanVACEPipeline": "VACE",
    "WanAnimatePipeline": "animation",
}


def find_layout(folder: Path) -> str:
    """`official` or `diffusers`. Raises CheckpointError that says what was found where it is neither."""
    names = sorted(entry.name for entry in folder.iterdir())
    if "model_index.json" in names:
        return "diffusers"
    if {"high_noise_model", "low_noise_model"} & set(names):
        raise CheckpointError(f"{folder}: a Wan2.2 A14B checkpoint (two experts); Wan2.1 is needed.")
    if (folder.parent / "model_index.json").is_file():
        raise CheckpointError(f"{folder}: one part of a diffusers checkpoint. Give the whole one, {folder.parent}.")
    if any(name == "config.json" or name.startswith(("diffusion_pytorch_model", "Wan2.1_VAE")) for name in names):
        return "official"
    inside = [
        name for name in names if any((folder / name / mark).is_file() for mark in ("config.json", "model_index.json"))
    ]
    hint = f" Did you mean {folder / inside[0]}?" if inside else ""
    raise CheckpointError(
        f"{folder}: no Wan checkpoint: neither config.json and diffusion_pytorch_model*.safetensors (official layout) "
        f"nor model_index.json (diffusers layout). It holds {brief(names) or 'nothing'}.{hint}"
    )


def check_pipeline_class(folder: Path) -> None:
    """Raises CheckpointError when a diffusers folder's model_index.json is not that of Wan2.1 text-to-video."""
    index = read_json(folder / "model_index.json")
    name = index.get("_class_name")
    if name != "WanPipeline":
        known = isinstance(name, str) and name in _OTHER_PIPELINES
        kind = f"{_OTHER_PIPELINES[name]} ({name})" if known else f"'{name}'"
        raise CheckpointError(f"{folder / 'model_index.json'}: {kind}; Wan2.1 text-to-video (WanPipeline) is needed.")
    second = index.get("transformer_2")
    if any(second) if isinstance(second, list) else second:
        raise CheckpointError(f"{folder / 'model_index.json'}: Wan2.2 with two transformers; Wan2.1 is needed.")


def find_weights(folder: Path, layout: str, component: str) -> tuple[Path, ...]:
    """All weight files of one component. Raises CheckpointError that says what was looked for and what is missing."""
    place, start = _PLACES[layout][component]
    where = folder / place
    names = [entry.name for entry in where.iterdir() if entry.name.startswith(start)] if where.is_dir() else []
    # `model.fp16.safetensors` beside `model.safetensors` is the same model again.
    names = [name for name in names if not _VARIANT.search(name)] or names
    for suffix in _SUFFIXES:
        if chosen := [name for name in names if name.endswith(suffix) or name.endswith(f"{suffix}.index.json")]:
            return shard_files(where, chosen)
    wanted = " or ".join(f"{name}*.safetensors" for name in ((start,) if isinstance(start, str) else start))
    raise CheckpointError(
        f"{where}: no {component} weights ({wanted}).{_why_missing(folder, names)} Download the whole checkpoint."
    )


def dit_folder(layout: str) -> str:
    """Where the transformer lies within a checkpoint folder; "" is the folder itself."""
    return _PLACES[layout]["dit"][0]


def find_config(folder: Path, layout: str, component: str) -> Path | None:
    """The config.json that speaks of this component, if there is one; the official layout has a single one for all."""
    file = folder / ("config.json" if layout == "official" else _CONFIGS[component])
    return file if file.is_file() else None


def find_tokenizer(folder: Path, layout: str) -> Path:
    """tokenizer.json. Raises CheckpointError when it is absent."""
    places = (
        sorted(folder.glob("google/*/tokenizer.json"))
        if layout == "official"
        else [folder / "tokenizer/tokenizer.json"]
    )
    places = [place for place in places if place.is_file()]
    if not places:
        wanted = "google/umt5-xxl/tokenizer.json" if layout == "official" else "tokenizer/tokenizer.json"
        raise CheckpointError(
            f"{folder / wanted}: missing. It is part of every Wan2.1 download; a spiece.model will not do."
        )
    return next((place for place in places if place.parent.name == "umt5-xxl"), places[0])


def is_complete(folder: Path) -> bool:
    """Whether every file a text-to-video run needs is there; nothing is opened but index files."""
    try:
        layout = find_layout(folder)
        for component in COMPONENTS:
            find_weights(folder, layout, component)
            if layout == "diffusers" and find_config(folder, layout, component) is None:
                return False
        find_tokenizer(folder, layout)
    except CheckpointError:
        return False
    return True


def _why_missing(folder: Path, names: list[str]) -> str:
    if (folder / "Wan2.2_VAE.pth").exists():
        return " This folder holds a Wan2.2 VAE; Wan2.1 is needed."
    if gguf := next(folder.glob("*.gguf"), None):
        return f" {gguf.name} is GGUF-quantised, which is not read."
    return f" Found {brief(sorted(names))}." if names else ""
