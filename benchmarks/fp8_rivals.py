"""The FP8 rivals of `benchmarks.fp8`, each where its packages are installed: torchao's rows, alone and in diffusers."""

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import nn

HAS_TORCHAO = find_spec("torchao") is not None
HAS_DIFFUSERS = find_spec("diffusers") is not None


def torchao_compiled(model: nn.Module) -> Callable:
    """`model`, its linear layers quantised by torchao with a scale a row of weight and input, in place, compiled."""
    _quantize(model)
    return torch.compile(model, fullgraph=True)


def diffusers_forward(size: dict, latents: torch.Tensor, text: torch.Tensor, attention: str) -> Callable[[], object]:
    """One forward of diffusers' Wan transformer, random weights, blocks quantised by torchao and compiled.

    attention: ours by name; the same is asked of diffusers where it has it, its own choice stands otherwise.
    """
    from diffusers import WanTransformer3DModel

    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(latents.device):
            model = WanTransformer3DModel(
                num_attention_heads=size["num_heads"],
                attention_head_dim=size["dim"] // size["num_heads"],
                in_channels=latents.shape[1],
                out_channels=latents.shape[1],
                text_dim=text.shape[-1],
                freq_dim=256,
                ffn_dim=size["ffn_dim"],
                num_layers=size["num_layers"],
            )
    finally:
        torch.set_default_dtype(torch.float32)
    model.eval().requires_grad_(False)
    if (theirs := {"TORCH_CUDNN": "_native_cudnn", "TORCH_SDPA": "native"}.get(attention)) is not None:
        model.set_attention_backend(theirs)
    _quantize(model.blocks)
    model.compile_repeated_blocks(fullgraph=True)
    timestep = torch.tensor([500], device=latents.device)
    given = latents.bfloat16(), timestep, text.bfloat16()
    return lambda: model(*given, return_dict=False)


def _quantize(model: nn.Module) -> None:
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    quantize_(model, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()))
