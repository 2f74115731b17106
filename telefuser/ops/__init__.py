"""Operators, in plain PyTorch and as kernels; `base.py` has the rule of choice. Models take operators from here."""

from telefuser.ops.base import CustomOp, CustomOpFunction, register_custom_op
from telefuser.ops.normalization import AdaLayerNormContinuous, LayerNorm, RMSNorm, fused_scale_shift, modulate
from telefuser.ops.rotary import apply_rotary_emb

__all__ = [
    "AdaLayerNormContinuous",
    "CustomOp",
    "CustomOpFunction",
    "LayerNorm",
    "RMSNorm",
    "apply_rotary_emb",
    "fused_scale_shift",
    "modulate",
    "register_custom_op",
]
