"""FP8 weights with scales in the layouts people publish: which tensor scales which, and what stands beside them.

The value of a weight is always `X.weight` * scale. The scale is `X.weight_scale` (this project, vLLM and others) or
`X.scale_weight` (ComfyUI), one number or one an output channel. Used by core/wan_component.py.
"""

from telefuser.core.weight_files import FLOATING, CheckpointError, TensorEntry, WeightSet

FP8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
_SCALES = ("weight_scale", "scale_weight")
# Scales for a static quantisation of activations, which are quantised by their own values here, and marks that say
# what the dtypes say.
_BESIDE = ("scale_input", "input_scale", "scaled_fp8", "comfy_quant")


def separate_scales(weights: WeightSet) -> None:
    """Moves the scales of FP8 weights from `weights.entries` to `weights.scales`, and drops what stands beside them.

    A second call changes nothing.

    Raises CheckpointError for an FP8 tensor without a scale, whose values cannot be known, and for a scale of another
    shape than one number or one a row.
    """
    entries = weights.entries
    for key, entry in list(entries.items()):
        if entry.dtype not in FP8 or key in weights.scales or _leaf(key) == "scaled_fp8":
            continue
        stem = key.removesuffix("weight")
        scale = next((stem + name for name in _SCALES if stem + name in entries), None) if stem != key else None
        if scale is None:
            raise CheckpointError(
                f"{entry.file}: '{key}' is {entry.dtype} without a scale ('{_SCALES[0]}' or '{_SCALES[1]}' beside it), "
                "so its values cannot be restored. Use FP8 weights that carry scales, or the bf16, fp16 or fp32 "
                "weights with --quantize fp8."
            )
        _check(key, entry, scale, entries[scale])
        weights.scales[key] = (scale, entries.pop(scale))
    if weights.scales:
        for key in [key for key in entries if _leaf(key) in _BESIDE]:
            del entries[key]


def _check(key: str, entry: TensorEntry, scale: str, found: TensorEntry) -> None:
    rows = entry.shape[0] if entry.shape else 1
    if found.shape not in ((), (1,), (1, 1), (rows,), (rows, 1)) or found.dtype not in FLOATING:
        raise CheckpointError(
            f"{found.file}: '{scale}' is {found.dtype} of shape {found.shape} for '{key}' of shape {entry.shape}; "
            f"one number or one a row ({rows}) is read. Use the bf16, fp16 or fp32 weights."
        )


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]
