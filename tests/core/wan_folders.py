"""Tiny Wan checkpoints on disk for tests: random weights with the official keys, made from the layout rules."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from telefuser.core.wan_layout import RULES

DIT = {
    "model_type": "t2v",
    "dim": 32,
    "in_dim": 16,
    "patch_size": [1, 2, 2],
    "text_dim": 24,
    "freq_dim": 16,
    "ffn_dim": 48,
    "out_dim": 16,
    "num_heads": 2,
    "num_layers": 2,
}
VAE = {
    "dim": 4,
    "z_dim": 16,
    "dim_mult": [1, 2, 2, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
}
TEXT_ENCODER = {
    "vocab": 40,
    "dim": 24,
    "dim_attn": 32,
    "dim_ffn": 20,
    "num_heads": 4,
    "num_layers": 2,
    "num_buckets": 8,
    "shared_pos": False,
}
CONFIGS = {"dit": DIT, "vae": VAE, "text_encoder": TEXT_ENCODER}
FILES = {
    "dit": "diffusion_pytorch_model.safetensors",
    "vae": "Wan2.1_VAE.safetensors",
    "text_encoder": "models_t5_tiny.safetensors",
}


def random_weights(component: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A full state dict of the tiny model in official keys."""
    generator = torch.Generator().manual_seed(seed)
    shapes = RULES[component].shapes(CONFIGS[component])
    return {
        key: (torch.randn(shape, generator=generator) / max(1, shape[-1]) ** 0.5).to(dtype)
        for key, shape in shapes.items()
    }


def write_official(folder: Path, **config_overrides) -> Path:
    """A complete folder in the official layout; keyword arguments go into config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(DIT | config_overrides))
    for component, name in FILES.items():
        save_file(random_weights(component), folder / name)
    (folder / "google" / "umt5-xxl").mkdir(parents=True, exist_ok=True)
    (folder / "google" / "umt5-xxl" / "tokenizer.json").write_text("{}")
    return folder
