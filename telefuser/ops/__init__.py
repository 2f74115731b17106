"""Operators, in plain PyTorch and as kernels; `base.py` has the rule of choice. Models take operators from here."""

from telefuser.ops.base import CustomOp, CustomOpFunction, register_custom_op
from telefuser.ops.normalization import AdaLayerNormContinuous, LayerNorm, RMSNorm, fused_scale_shift, modulate
from telefuser.ops.residual_norm import add_gated, add_layer_norm_modulate, layer_norm_modulate
from telefuser.ops.rotary import apply_rotary_emb, rms_norm_rotary

__all__ = [
    "AdaLayerNormContinuous",
    "CustomOp",
    "CustomOpFunction",
    "LayerNorm",
    "RMSNorm",
    "add_gated",
    "add_layer_norm_modulate",
    "apply_rotary_emb",
    "fused_scale_shift",
    "layer_norm_modulate",
    "modulate",
    "register_custom_op",
    "rms_norm_rotary",
]
