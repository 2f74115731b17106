"""The kernels' launchers, a module a family, each loaded on first use. Only `telefuser.ops` (and tests) call them."""

import importlib

_HOME = {
    "activate": "activation",
    "activate_and_mul": "activation",
    "activate_and_mul_quant_fp8": "quantize",
    "activate_quant_fp8": "quantize",
    "add_gated": "normalization",
    "add_layer_norm": "normalization",
    "apply_rotary_embedding": "rotary",
    "attend_listed_tiles": "block_sparse_attention",
    "attention_tiles": "block_sparse_attention",
    "fused_scale_shift": "modulate",
    "int8_attention": "int8_attention",
    "layer_norm": "normalization",
    "per_block_quant_int8": "quantize_int8",
    "per_token_quant_fp8": "quantize",
    "rms_norm": "normalization",
    "rms_norm_rotary": "norm_rotary",
    "scaled_mm_fp8": "fp8_gemm",
}

__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    launcher = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = launcher
    return launcher
