"""Names and versions that the specification fixes: code written for them imports and subclasses them unchanged."""

import importlib
import re
from pathlib import Path

import pytest

from telefuser.ops import CustomOp
from telefuser.ops.normalization import LayerNorm, RMSNorm

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
NAMES = [
    # S006, S024, S025
    (
        "telefuser.platforms",
        "current_platform _resolve_current_platform BasePlatform CudaPlatform RocmPlatform NPUPlatform CpuPlatform",
    ),
    # S098
    ("telefuser.ops", "CustomOp CustomOpFunction"),
    # S116, S122
    ("telefuser.ops.activations", "get_activation FP32SiLU GELU GEGLU SwiGLU ApproximateGELU"),
    # S117, S140
    ("telefuser.ops.ffn", "FeedForward"),
    # S093, S118, S190
    ("telefuser.ops.normalization", "RMSNorm LayerNorm AdaLayerNormContinuous modulate"),
    # S094, S121
    ("telefuser.ops.rotary", "apply_rotary_emb"),
    # S119, S191, S204, S210, S214
    (
        "telefuser.ops.quantized_linear",
        "LinearFP8 replace_linear_layers convert_params_to_buffers convert_params_to_buffer",
    ),
    # S095, S120, S216, S222
    ("telefuser.ops.attention", "attention long_context_attention SparseAttentionState MaskMap"),
    # S226
    ("telefuser.ops.attention.attention_impl", "attention"),
    # S227, S228, S229
    ("telefuser.ops.attention.radial_attention_core", "radial_block_mask"),
    ("telefuser.ops.attention.local_sparse_attn", "local_block_mask"),
    ("telefuser.ops.attention.sparse_attention", "sparse_attention"),
    # S259
    ("telefuser.distributed", "create_device_mesh_from_config"),
    # S217, S260
    ("telefuser.core.config", "AttentionConfig AttnImplType ParallelConfig"),
]


@pytest.mark.parametrize(("module", "names"), NAMES, ids=[module for module, _ in NAMES])
def test_the_module_offers_the_names(module, names):
    loaded = importlib.import_module(module)
    assert [name for name in names.split() if not hasattr(loaded, name)] == []


def test_kernels_offer_the_names():
    # S096, S097
    pytest.importorskip("triton")
    kernels = importlib.import_module("telefuser.kernel.triton")
    assert callable(kernels.apply_rotary_embedding)
    assert callable(kernels.fused_scale_shift)


def test_norms_are_custom_operators_with_both_forms():
    # S099, S100
    for norm in (RMSNorm, LayerNorm):
        assert issubclass(norm, CustomOp)
        assert {"forward_native", "forward_cuda"} <= set(vars(norm))


def test_python_3_10_to_3_13_and_torch_2_6_are_admitted():
    # S059, S060
    text = PYPROJECT.read_text(encoding="utf-8")
    assert 'requires-python = ">=3.10,<3.14"' in text
    assert re.search(r'^ +"torch>=2\.6",$', text, re.MULTILINE)
