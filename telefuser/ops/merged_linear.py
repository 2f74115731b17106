"""Several `LinearFP8` that take the same input as one, whose state dict stays theirs. `WanModel` calls it.

One product in place of several, which quantises its input once.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from telefuser.ops.fp8_quantization import FP8_DTYPES
from telefuser.ops.quantized_linear import LinearFP8

_STORED = ("weight", "weight_scale", "bias")


def merge_linears(layers: Sequence[LinearFP8]) -> LinearFP8:
    """One layer that gives what `layers` give on the same input, side by side in the last dimension.

    Rows of a weight have scales of their own, so every value is that of its layer alone. The layers stay as they are:
    weights exist twice until the caller drops them. Where some have a bias, the others get one of zeros.
    Raises ValueError for no layer, one that is no LinearFP8, or layers of different in_features, FP8 dtype or device.
    """
    layers = list(layers)
    if not layers or not all(isinstance(layer, LinearFP8) for layer in layers):
        found = ", ".join(type(layer).__name__ for layer in layers) or "none"
        raise ValueError(f"merge_linears joins one LinearFP8 or more, got {found}; call replace_linear_layers first")
    first = layers[0]
    for layer in layers:
        kind = (layer.in_features, layer.weight.dtype, layer.weight.device)
        if kind != (first.in_features, first.weight.dtype, first.weight.device):
            raise ValueError(
                f"merge_linears joins layers that take the same input in the same way; got {first.in_features} "
                f"features, {first.weight.dtype} on {first.weight.device} beside {kind[0]}, {kind[1]} on {kind[2]}"
            )
    with torch.no_grad():
        weight = _joined([layer.weight for layer in layers])
        scale, bias = torch.cat([layer.weight_scale for layer in layers]), None
        if any(layer.bias is not None for layer in layers):
            wide = next(layer.bias for layer in layers if layer.bias is not None)
            zeros = [wide.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers]
            bias = torch.cat(zeros)
    merged = LinearFP8.from_quantized(weight, scale, bias, first.compute_dtype).train(first.training)
    merged.num_parts = sum(layer.num_parts for layer in layers)
    return merged


def merge_children(parent: nn.Module, names: Sequence[str], merged: str) -> None:
    """Replace the LinearFP8s `names` of `parent` by the one that `merge_linears` makes of them, as its child `merged`.

    State dicts keep the keys of the single layers, written and read. The old weights are freed. ValueError as for
    `merge_linears`, and where only some have a bias.
    """
    layers = [getattr(parent, name) for name in names]
    if len({getattr(layer, "bias", None) is None for layer in layers}) > 1:
        raise ValueError(f"{', '.join(names)}: some have a bias and some have none; merge_children joins layers alike")
    setattr(parent, merged, merge_linears(layers))
    parts = {name: layer.out_features for name, layer in zip(names, layers)}
    for name in names:
        delattr(parent, name)
    parent.register_state_dict_post_hook(functools.partial(_split_keys, merged, parts))
    parent.register_load_state_dict_pre_hook(functools.partial(_join_keys, merged, parts))


def _split_keys(merged: str, parts: dict[str, int], module: nn.Module, state: dict, prefix: str, *rest: Any) -> None:
    """A state dict with a merged layer becomes one with its parts, as views of it."""
    for kind in _STORED:
        tensor = state.pop(f"{prefix}{merged}.{kind}", None)
        if tensor is not None:
            state.update({f"{prefix}{name}.{kind}": t for name, t in zip(parts, tensor.split(list(parts.values())))})


def _join_keys(merged: str, parts: dict[str, int], module: nn.Module, state: dict, prefix: str, *rest: Any) -> None:
    """And back: each part loads its keys as the layer that it was, so that errors and missing keys are said of it."""
    layer = getattr(module, merged)
    # Around the memory of `layer`: what they copy in arrives there, and no second weight exists.
    views = dict(zip(parts, _split(layer, list(parts.values()))))
    for name, view in views.items():
        part = f"{prefix}{name}."
        view._load_from_state_dict(state, part, *rest)
        for key in [key for key in state if key.startswith(part)]:
            del state[key]
    # For PyTorch, which loads `layer` next and misses nothing. With assign=True the views hold what was given.
    for kind in _STORED:
        tensor = getattr(layer, kind)
        if tensor is not None:
            given = [getattr(view, kind) for view in views.values()]
            state[f"{prefix}{merged}.{kind}"] = _joined(given) if rest[0].get("assign_to_params_buffers") else tensor


def _split(layer: LinearFP8, sizes: list[int]) -> list[LinearFP8]:
    """`layer` as layers of so many rows, which share its memory."""
    tensors = layer.weight, layer.weight_scale, layer.bias
    weights, scales, biases = (None if t is None else t.detach().split(sizes) for t in tensors)
    biases = [None] * len(sizes) if biases is None else biases
    given = zip(weights, scales, biases)
    return [LinearFP8.from_quantized(weight, scale, bias, layer.compute_dtype) for weight, scale, bias in given]


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensors one after another; torch.cat has no FP8 form on some devices, bytes it joins everywhere."""
    dtype = parts[0].dtype
    if dtype not in FP8_DTYPES or any(part.dtype is not dtype for part in parts):
        return torch.cat(list(parts))
    return torch.cat([part.view(torch.uint8) for part in parts]).view(dtype)
