"""Which layers of a Wan transformer are in FP8, decided before its weights are read. Called by `WanPipeline`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from telefuser.core.config import QuantConfig, QuantType
from telefuser.core.model_loading import meta_parameters
from telefuser.core.wan_component import Component
from telefuser.models.wan_video_dit import WanModel
from telefuser.ops.quantized_linear import WAN_HIGH_PRECISION, LinearFP8, replace_linear_layers


def resolve_quantize(quantize: str | QuantType | QuantConfig | None) -> QuantConfig | None:
    """What a user gives as one kind of value; None is no quantisation.

    quantize: "fp8" or QuantType.FP8, a QuantConfig (its quantize_modules and skip_modules then say which layers), None.
    Raises ValueError for another name or type.
    """
    if quantize is None:
        return None
    if isinstance(quantize, QuantConfig):
        config = quantize
    elif quantize is QuantType.FP8 or (isinstance(quantize, str) and quantize.strip().lower() == "fp8"):
        config = QuantConfig(enabled=True, skip_modules=WAN_HIGH_PRECISION)
    else:
        shown = quantize.name if isinstance(quantize, QuantType) else repr(quantize)
        raise ValueError(f"quantize {shown} is unknown; choose 'fp8', or None for the weights as they are")
    if config.quant_type is not QuantType.FP8:
        raise ValueError(f"quantize {config.quant_type.name} is not part of this version; choose 'fp8'")
    return config if config.enabled else None


def builder(dit: Component, quantize: QuantConfig | None, dtype: torch.dtype) -> Callable[[dict], WanModel]:
    """`WanModel.from_config` with `LinearFP8` where weights are in FP8: in the files, or by `quantize` in this run.

    For `Component.load`, which fills the layers one by one. A layer of the files that computes in float32 by design
    stays wide. Zero layers that `quantize` replaces are a warning.
    """

    def build(config: dict) -> WanModel:
        model = WanModel.from_config(config)
        if not dit.fp8_layers and quantize is None:
            return model
        # On the meta device: tells layers without bias, and the report, the dtype that the rest has.
        model.to(dtype)
        for kind in sorted(set(dit.fp8_layers.values())):
            layers = [name for name, dtype in dit.fp8_layers.items() if dtype == kind]
            replace_linear_layers(model, getattr(torch, kind), include=layers)
        if quantize is not None:
            replace_linear_layers(model, include=quantize.quantize_modules, skip=quantize.skip_modules)
        return model

    return build


def loaded_bytes(dit: Component, quantize: QuantConfig | None, dtype: torch.dtype) -> int:
    """Bytes of the transformer once loaded, from its sizes alone."""
    with meta_parameters():
        model = builder(dit, quantize, dtype)(dit.config)
    return sum(
        parameter.numel() * (4 if _stays_float32(name) else parameter.dtype.itemsize)
        for name, parameter in model.to(dtype).named_parameters()
    )


def _stays_float32(name: str) -> bool:
    return any(part in name for part in WanModel.FP32_PARAMETERS)


def describe(model: nn.Module) -> str | None:
    """What the FP8 layers of a loaded model are to the others; None where it has none."""
    in_fp8 = sum(module.num_parts for module in model.modules() if isinstance(module, LinearFP8))
    wide = sum(isinstance(module, nn.Linear) for module in model.modules())
    return f"{in_fp8} of {in_fp8 + wide} linear layers in FP8" if in_fp8 else None
