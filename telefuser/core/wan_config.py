"""Values of a Wan2.1 config.json judged by themselves: kind and limits, before anything is computed from them.

Called by core/wan_component.py. Names are the official ones.
"""

import math
from pathlib import Path
from typing import Any

from telefuser.core.weight_files import CheckpointError

# The largest published are a vocabulary of 256384 and 40 layers; a number far above is damage, and lists of so many
# keys or tensors of such sizes would fill the memory before any other check ran.
_MAX_SIZE = 2**24
_MAX = {"num_layers": 1000, "num_res_blocks": 1000, "text_len": 8192}
_SIZES = (
    "dim", "in_dim", "ffn_dim", "out_dim", "text_dim", "freq_dim", "num_heads", "num_layers", "text_len",
    "z_dim", "num_res_blocks", "vocab", "dim_attn", "dim_ffn", "num_buckets",
)  # fmt: skip
_LISTS = ("patch_size", "dim_mult", "temperal_downsample", "latents_mean", "latents_std")


def check_values(file: Path, given: dict[str, Any]) -> None:
    """Raises CheckpointError for the first value of another kind or outside its limits; any may be absent."""
    for name, value in given.items():
        if wanted := _wanted(name, value):
            shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
            raise CheckpointError(f"{file}: '{name}' must be {wanted}, not {shown}. Download the file again.")


def _wanted(name: str, value: Any) -> str | None:
    """What the value should be; None where it is that, and for names that mean nothing here."""
    if name in _SIZES:
        limit = _MAX.get(name, _MAX_SIZE)
        return None if _is_size(value, limit) else f"a whole number from 1 to {limit}"
    if name == "eps":
        return None if _is_number(value) and 0 < value < 1 else "a number between 0 and 1"
    if name == "dropout":
        return None if _is_number(value) and 0 <= value <= 1 else "a number from 0 to 1"
    if name == "shared_pos":
        return None if isinstance(value, bool) else "true or false"
    if name in _LISTS:
        return _wanted_list(name, value)
    return None


def _wanted_list(name: str, value: Any) -> str | None:
    values = value if isinstance(value, list | tuple) else ()
    if name == "temperal_downsample":
        fits, wanted = all(isinstance(flag, bool) for flag in values), "true or false"
    elif name in ("patch_size", "dim_mult"):
        fits, wanted = all(_is_size(size, 1024) for size in values), "whole numbers from 1 to 1024"
    elif name == "latents_std":
        fits, wanted = all(_is_number(number) and number > 0 for number in values), "numbers above 0"
    else:
        fits, wanted = all(_is_number(number) for number in values), "finite numbers"
    return None if values and fits else f"a list of {wanted}"


def _is_size(value: Any, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= limit


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
