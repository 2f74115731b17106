import dataclasses
import inspect

import pytest
import torch

from telefuser.core.config import (
    AttentionConfig,
    AttnImplType,
    CompileConfig,
    ParallelConfig,
    QuantConfig,
    QuantKernelBackend,
    QuantType,
    SparseAttentionConfig,
)


def test_backend_names_are_the_specified_ones_and_auto():
    # S230-S235
    assert list(AttnImplType.__members__) == [
        "TORCH_SDPA",
        "TORCH_CUDNN",
        "SAGE_ATTN_2_8_8",
        "SAGE_ATTN_2_8_16",
        "SAGE_ATTN_2_8_8_SM90",
        "SPARGE_ATTN",
        "FLASH_ATTN_2",
        "FLASH_ATTN_3",
        "FLASH_ATTN_4",
        "RADIAL_ATTN",
        "LOCAL_SPARSE_ATTN",
        "AUTO",
        "TRITON_INT8",
    ]


@pytest.mark.parametrize("member", AttnImplType)
def test_every_backend_parses_from_its_own_name_in_any_case(member):
    for name in (member.name, member.name.lower(), member.name.replace("_", "-").title(), member):
        assert AttnImplType.parse(name) is member


def test_short_backend_names():
    assert AttnImplType.parse("sdpa") is AttnImplType.TORCH_SDPA
    assert AttnImplType.parse(" cuDNN ") is AttnImplType.TORCH_CUDNN
    assert AttnImplType.parse("fa3") is AttnImplType.FLASH_ATTN_3
    assert AttnImplType.parse("radial") is AttnImplType.RADIAL_ATTN
    assert AttnImplType.parse("local") is AttnImplType.LOCAL_SPARSE_ATTN


@pytest.mark.parametrize("name", ["", "flash", "FLASH_ATTN_5", 3, None])
def test_unknown_backend_name_lists_the_choices(name):
    with pytest.raises(ValueError, match="AUTO") as error:
        AttnImplType.parse(name)
    assert repr(name) in str(error.value)
    assert "TORCH_SDPA" in str(error.value)


def test_dense_config_takes_the_backend_positionally():
    config = AttentionConfig.dense_attention(AttnImplType.FLASH_ATTN_2)  # S218
    assert config.attn_impl is AttnImplType.FLASH_ATTN_2
    assert not config.is_sparse()
    assert config.should_use_dense(10_000, 10_000)
    assert AttentionConfig.dense_attention() == config
    assert AttentionConfig().attn_impl is AttnImplType.AUTO


def test_radial_config_is_dense_for_the_early_steps_and_first_layers():
    config = AttentionConfig.radial_attention(dense_timesteps=40)  # S220, S255
    assert (config.attn_impl, config.sparse_config.sparse_impl) == (AttnImplType.RADIAL_ATTN, AttnImplType.RADIAL_ATTN)
    assert config.is_sparse()
    # S256: the first N steps, N of them
    assert [config.should_use_dense(step, 5) for step in (0, 39, 40, 41)] == [True, True, False, False]
    layered = AttentionConfig.radial_attention(dense_timesteps=0, dense_layers=2)
    assert [layered.should_use_dense(7, layer) for layer in (0, 1, 2)] == [True, True, False]
    # S257
    defaults = AttentionConfig.radial_attention().sparse_config
    assert (defaults.dense_timesteps, defaults.decay_factor) == (40, 1.0)


def test_local_sparse_config():
    config = AttentionConfig.local_sparse_attention(dense_timesteps=1, local_window_size=3, is_causal=True)
    assert config.sparse_config.sparse_impl is AttnImplType.LOCAL_SPARSE_ATTN
    assert (config.sparse_config.local_window_size, config.is_causal) == (3, True)
    window = AttentionConfig.local_sparse_attention(local_window_size=[2, 6, 0]).sparse_config.local_window_size
    assert window == (2, 6, 0)


def test_sparse_backend_without_details_gets_the_defaults():
    assert AttentionConfig(AttnImplType.RADIAL_ATTN) == AttentionConfig.radial_attention()
    plain = SparseAttentionConfig()
    AttentionConfig(AttnImplType.RADIAL_ATTN, sparse_config=plain)
    assert plain.sparse_impl is None, "the caller's object must not change"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        # a string for the enum names the choices
        (lambda: AttentionConfig(attn_impl="FLASH_ATTN_2"), ["'FLASH_ATTN_2'", "AttnImplType", "TORCH_SDPA"]),
        (lambda: AttentionConfig(AttnImplType.FLASH_ATTN_2, SparseAttentionConfig()), ["FLASH_ATTN_2", "radial"]),
        (lambda: AttentionConfig(AttnImplType.RADIAL_ATTN, sparse_config={}), ["SparseAttentionConfig"]),
        (
            lambda: AttentionConfig(
                AttnImplType.RADIAL_ATTN, SparseAttentionConfig(sparse_impl=AttnImplType.LOCAL_SPARSE_ATTN)
            ),
            ["RADIAL_ATTN", "LOCAL_SPARSE_ATTN", "disagree"],
        ),
        (lambda: AttentionConfig.dense_attention(AttnImplType.RADIAL_ATTN), ["RADIAL_ATTN", "dense"]),
        (lambda: AttentionConfig(scale=float("nan")), ["nan", "above 0"]),
        (lambda: AttentionConfig(scale="0.1"), ["'0.1'"]),
        (lambda: AttentionConfig(dropout=1.0), ["1.0", "below 1"]),
        (lambda: AttentionConfig(dropout=-0.1), ["-0.1"]),
        (lambda: AttentionConfig(strict=1), ["strict", "True or False"]),
        # B72
        (lambda: SparseAttentionConfig(block_size=96), ["96", "64 or 128"]),
        (lambda: SparseAttentionConfig(block_size=0), ["0", "64 or 128"]),
        (lambda: SparseAttentionConfig(decay_factor=0), ["decay_factor", "above 0"]),
        (lambda: SparseAttentionConfig(local_window_size=0), ["local_window_size", "at least 1"]),
        (lambda: SparseAttentionConfig(local_window_size=(1, 2)), ["(1, 2)", "frames, rows, columns"]),
        (lambda: SparseAttentionConfig(local_window_size=(1, 2, -1)), ["(1, 2, -1)", "at least 0"]),
        (lambda: SparseAttentionConfig(dense_timesteps=-1), ["-1", "at least 0"]),
        (lambda: SparseAttentionConfig(dense_layers=True), ["True", "whole number"]),
        (lambda: SparseAttentionConfig(sparse_impl=AttnImplType.FLASH_ATTN_3), ["FLASH_ATTN_3", "RADIAL_ATTN"]),
        (lambda: QuantConfig(quant_type="fp8"), ["'fp8'", "FP8", "NVFP4"]),
        (lambda: QuantConfig(kernel_backend=QuantType.FP8), ["QuantKernelBackend", "TF_KERNEL"]),
        (lambda: QuantConfig(weight_block_size=(128, 0)), ["(128, 0)", "(128, 128)"]),
        (lambda: QuantConfig(skip_modules="head"), ["'head'", "tuple"]),
        (lambda: QuantConfig(group_size=0), ["group_size", "at least 1"]),
        (lambda: CompileConfig(mode="fast"), ["'fast'", "max-autotune"]),
        (lambda: CompileConfig(mode="max-autotune", max_autotune=True), ["exclude", "max_autotune"]),
        (lambda: CompileConfig(backend="eager", triton_cudagraphs=True), ["triton_cudagraphs", "inductor"]),
        (lambda: CompileConfig(dynamic="yes"), ["dynamic", "'yes'"]),
        (lambda: ParallelConfig(sp_ulysses_degree=0), ["sp_ulysses_degree", "at least 1"]),
        (lambda: ParallelConfig(cfg_degree=3, device_ids=[0, 1, 2]), ["cfg_degree", "1 or 2"]),
        (lambda: ParallelConfig(device_ids=[0, 0], tp_degree=2), ["[0, 0]", "once"]),
        (lambda: ParallelConfig(device_ids="01", tp_degree=2), ["'01'", "[0, 1]"]),
        (lambda: ParallelConfig(device_ids=[]), ["[]"]),
    ],
)
def test_wrong_values_are_refused_where_they_are_written(make, words):
    with pytest.raises(ValueError, match=r".") as error:
        make()
    assert [word for word in words if word not in str(error.value)] == []


def test_parallel_degrees_multiply_to_the_devices():
    # S261, S268
    assert ParallelConfig(device_ids=[0, 1, 2, 3], sp_ulysses_degree=4).world_size == 4
    assert ParallelConfig(device_ids=(4, 5, 6, 7), cfg_degree=2, sp_ring_degree=2).device_ids == [4, 5, 6, 7]
    assert ParallelConfig(tp_degree=8).world_size == 8
    assert ParallelConfig().world_size == 1
    with pytest.raises(ValueError, match=r"cfg_degree=2 x sp_ulysses_degree=4 need 8 device\(s\) but 4"):
        ParallelConfig(device_ids=[0, 1, 2, 3], cfg_degree=2, sp_ulysses_degree=4)
    with pytest.raises(ValueError, match="sp_ulysses_degree=4"):
        ParallelConfig(device_ids=[0, 1, 2, 3])


def test_parallel_config_is_held_against_a_given_device_count():
    config = ParallelConfig(sp_ulysses_degree=4)
    config.validate()
    config.validate(4)
    # Callers of validate() catch RuntimeError.
    with pytest.raises(RuntimeError, match="but 3 are given"):
        config.validate(3)


def test_compile_kwargs_are_taken_by_torch_compile():
    for config in (
        CompileConfig(backend="eager", fullgraph=True),
        CompileConfig(mode="max-autotune-no-cudagraphs", dynamic=False),
        CompileConfig(coordinate_descent_tuning=True, epilogue_fusion=False, triton_cudagraphs=True, max_autotune=True),
    ):
        torch.compile(torch.nn.Identity(), **config.get_compile_kwargs())
    assert CompileConfig().get_compile_kwargs() == {"backend": "inductor", "fullgraph": False, "dynamic": None}
    assert CompileConfig(triton_cudagraphs=True).get_compile_kwargs()["options"] == {"triton.cudagraphs": True}


def test_quant_config_defaults_skip_the_layers_that_set_the_precision():
    config = QuantConfig(weight_block_size=[128, 128], quantize_modules=["ffn"])
    assert (config.weight_block_size, config.quantize_modules) == ((128, 128), ("ffn",))
    assert config.skip_modules == ("head", "time_embedding", "time_projection", "patch_embedding")
    assert config.kernel_backend is QuantKernelBackend.AUTO


def test_a_checked_config_cannot_be_changed_into_a_wrong_one():
    config = AttentionConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.attn_impl = "FLASH_ATTN_2"
    with pytest.raises(ValueError, match="attn_impl"):
        dataclasses.replace(config, attn_impl="FLASH_ATTN_2")


@pytest.mark.parametrize(
    ("config", "signature"),
    [
        (AttentionConfig, "attn_impl sparse_config scale dropout is_causal"),
        (
            SparseAttentionConfig,
            "sparse_impl dense_timesteps dense_layers decay_factor local_window_size block_size use_sage_attention",
        ),
        (
            ParallelConfig,
            "device_ids dp_degree cfg_degree sp_ulysses_degree sp_ring_degree pp_degree tp_degree enable_fsdp timeout "
            "queue_with_cpu worker_intra_op_threads",
        ),
    ],
)
def test_positional_order_is_the_one_callers_use(config, signature):
    names = signature.split()
    assert list(inspect.signature(config).parameters)[: len(names)] == names
