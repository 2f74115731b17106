"""Reads and writes the trained parts in the official Wan folder layout, the one that the package's loader knows."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

CONFIG = "config.json"
VAE = "Wan2.1_VAE.safetensors"
DIT = "diffusion_pytorch_model.safetensors"
TEXT_ENCODER = "models_t5_tiny.safetensors"
# Norms, biases and modulations: 2 % of the bytes in fp32, and bf16 would cost them most, being used with every token.
FP32_BELOW = 4096


def save_module(module: nn.Module, path: Path) -> None:
    """Write the weights in bfloat16, tensors of fewer than `FP32_BELOW` numbers in float32."""
    tensors = {}
    for name, tensor in module.state_dict().items():
        dtype = torch.float32 if tensor.numel() < FP32_BELOW else torch.bfloat16
        tensors[name] = tensor.detach().to("cpu", dtype).contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors writes 0600, which a package installed by root must not keep


@torch.no_grad()
def load_module(module: nn.Module, path: Path) -> None:
    """Read what `save_module` wrote into a module of any dtype; RuntimeError where the keys differ."""
    module.load_state_dict(load_file(path))


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    return json.loads(path.read_text()) if path.exists() else {}


def update_config(folder: Path, entries: dict[str, Any]) -> None:
    """Add `entries` to the folder's config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps({**read_config(folder), **entries}, indent=2) + "\n")
