"""Attention behind one door; which backend computes it is a setting."""

from telefuser.ops.attention.attention_impl import attention
from telefuser.ops.attention.long_context import long_context_attention
from telefuser.ops.attention.sparse_attention import (
    MaskMap,
    SparseAttentionState,
    clear_radial_mask_cache,
    create_radial_mask_map,
    sparse_attention,
)

__all__ = [
    "MaskMap",
    "SparseAttentionState",
    "attention",
    "clear_radial_mask_cache",
    "create_radial_mask_map",
    "long_context_attention",
    "sparse_attention",
]
