"""A Wan pipeline whose transformer is in FP8: which layers, from which files, in how much memory, and how close."""

import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from telefuser.core import checkpoint
from telefuser.core.config import ParallelConfig, QuantConfig, QuantType
from telefuser.core.model_loading import load_model
from telefuser.core.wan_component import Component
from telefuser.models.wan_video_dit import WAN_DIT_SIZES, WanModel
from telefuser.ops.fp8_quantization import FP8_DTYPES, quantize_weight
from telefuser.ops.quantized_linear import LinearFP8, replace_linear_layers
from telefuser.pipelines import placement, wan_quantization
from telefuser.pipelines.wan_video import WanPipeline, _weight_bytes
from tests.pipelines.conftest import DIT, write_checkpoint
from tests.tolerances import rel_error

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture(scope="module")
def quantised(tiny_folder):
    return WanPipeline.from_pretrained(tiny_folder, device="cpu", quantize="fp8")


def fp8_names(model):
    """By the state dict, which keeps the names of layers that were merged."""
    return {key.removesuffix(".weight") for key, tensor in model.state_dict().items() if tensor.dtype in FP8_DTYPES}


def velocity(model):
    generator = torch.Generator().manual_seed(3)
    latents, text = torch.randn(1, 16, 2, 4, 6, generator=generator), torch.randn(1, 7, 32, generator=generator)
    with torch.no_grad():
        return model(latents, torch.tensor([500.0]), text)


def test_the_blocks_are_quantised_and_the_rest_is_not(quantised, tiny_folder):
    # B88: the flag does something, and the bytes say so
    wide = WanPipeline.from_pretrained(tiny_folder, device="cpu").dit
    names = fp8_names(quantised.dit)
    assert names == {name for name, module in wide.named_modules() if type(module) is nn.Linear and "blocks" in name}
    assert len(names) == 2 * 10
    # Exactly what quantising the loaded model gives.
    replace_linear_layers(wide, include="blocks")
    ours, theirs = quantised.dit.state_dict(), wide.state_dict()
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert ours[key].dtype is tensor.dtype
        assert torch.equal(ours[key].view(torch.uint8), tensor.view(torch.uint8)), key
    # One product makes q, k and v.
    assert {type(block.self_attn.qkv) for block in quantised.dit.blocks} == {LinearFP8}
    wide.merge_projections()
    assert torch.equal(velocity(quantised.dit), velocity(wide))
    assert quantised.loaded_as["quantize"] == "fp8"


def test_the_prediction_stays_close(quantised, tiny_folder):
    # A random model: every layer is as sensitive as it can be. The weight alone is rounded on a CPU.
    wide = WanPipeline.from_pretrained(tiny_folder, device="cpu").dit
    assert 0 < rel_error(velocity(quantised.dit), velocity(wide)) < 0.05


def test_a_video_says_that_it_was_made_in_fp8(quantised):
    video = quantised("a red cat", seed=1, steps=1)
    assert video.settings["quantize"] == "fp8"
    assert video.frames.float().std() > 10


def test_the_choice_of_layers_is_the_users(tiny_folder):
    config = QuantConfig(enabled=True, quantize_modules=("ffn",), skip_modules=("blocks.1",))
    dit = WanPipeline.from_pretrained(tiny_folder, device="cpu", quantize=config).dit
    assert fp8_names(dit) == {"blocks.0.ffn.0", "blocks.0.ffn.2"}
    assert WanPipeline.from_pretrained(tiny_folder, device="cpu", quantize=QuantConfig()).loaded_as["quantize"] is None


@pytest.mark.parametrize("quantize", ["int4", "", 8, QuantType.NVFP4, QuantConfig(quant_type=QuantType.INT8)])
def test_other_formats_are_refused_before_the_checkpoint_is_opened(quantize, monkeypatch):
    monkeypatch.setattr(checkpoint, "inspect", lambda path: pytest.fail("the checkpoint was opened"))
    with pytest.raises(ValueError, match=r"quantize .*choose 'fp8'"):
        WanPipeline.from_pretrained("tiny", device="cpu", quantize=quantize)


def test_a_list_that_names_no_layer_is_a_warning(tiny_folder, caplog):
    # B88
    config = QuantConfig(enabled=True, quantize_modules=("no_such_layer",))
    with caplog.at_level(logging.WARNING, "telefuser"):
        pipeline = WanPipeline.from_pretrained(tiny_folder, device="cpu", quantize=config)
    assert "no linear layer of this WanModel was quantised" in caplog.text
    assert pipeline.loaded_as["quantize"] is None


# Checkpoints that are in FP8 already


def store_in_fp8(folder, kind, layers):
    state = load_file(folder / "diffusion_pytorch_model.safetensors")
    for name in layers:
        values, scale = quantize_weight(state[f"{name}.weight"], kind)
        state |= {f"{name}.weight": values, f"{name}.scale_weight": scale[:, 0].clone()}
    state["scaled_fp8"] = torch.empty(0, dtype=kind)
    save_file(state, folder / "diffusion_pytorch_model.safetensors")
    return state


@pytest.mark.parametrize("kind", [E4M3, E5M2])
def test_a_checkpoint_in_fp8_stays_so_without_being_asked(kind, tmp_path):
    folder = write_checkpoint(tmp_path / "wan")
    layers = ["blocks.0.ffn.0", "blocks.1.self_attn.q", "text_embedding.2", "time_embedding.0"]
    state = store_in_fp8(folder, kind, layers)
    pipeline = WanPipeline.from_pretrained(folder, device="cpu")
    # The time layers compute in float32.
    assert fp8_names(pipeline.dit) == set(layers[:3])
    for name in layers[:3]:
        # One of q, k and v alone is not merged with what is wide.
        layer = pipeline.dit.get_submodule(name)
        assert layer.weight.dtype is kind
        assert torch.equal(layer.weight.float(), state[f"{name}.weight"].float())
        assert torch.equal(layer.weight_scale[:, 0], state[f"{name}.scale_weight"])
    assert pipeline.dit.time_embedding[0].weight.dtype is torch.float32
    assert pipeline.loaded_as["quantize"] == "fp8"
    assert velocity(pipeline.dit).isfinite().all()
    both = WanPipeline.from_pretrained(folder, device="cpu", quantize="fp8").dit
    assert len(fp8_names(both)) == 2 * 10 + 1
    assert both.blocks[0].ffn[0].weight.dtype is kind
    assert both.blocks[0].ffn[2].weight.dtype is E4M3


def test_a_saved_state_dict_is_a_checkpoint(quantised, tmp_path):
    # B86: its layers are the official ones, whatever is merged in memory
    folder, state = write_checkpoint(tmp_path / "wan"), quantised.dit.state_dict()
    save_file(state, folder / "diffusion_pytorch_model.safetensors")
    again = WanPipeline.from_pretrained(folder, device="cpu").dit
    assert all(torch.equal(state[key].view(torch.uint8), t.view(torch.uint8)) for key, t in again.state_dict().items())
    assert again.blocks[1].self_attn.qkv is not None
    assert torch.equal(velocity(again), velocity(quantised.dit))


def test_a_checkpoint_in_fp8_is_not_spread_before_it_is_read(tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path / "wan")
    store_in_fp8(folder, E4M3, ["blocks.0.ffn.0"])
    monkeypatch.setattr(Component, "load", lambda *args, **options: pytest.fail("weights were read"))
    spread = ParallelConfig(sp_ulysses_degree=2, enable_fsdp=True)
    with pytest.raises(ValueError, match=r"safetensors: holds FP8 weights .1 layers., and enable_fsdp"):
        WanPipeline.from_pretrained(folder, device="cpu", parallel=spread)


# Memory


def published(size, dtype=torch.bfloat16, quantize="fp8"):
    part = SimpleNamespace(fp8_layers={}, config=WAN_DIT_SIZES[size])
    return wan_quantization.loaded_bytes(part, wan_quantization.resolve_quantize(quantize), dtype) / 2**30


def test_the_14b_model_fits_a_card_of_24_gib():
    # On the meta device: sizes only.
    assert published("T2V-14B") <= 15.5
    assert published("T2V-14B") == pytest.approx(13.9, abs=0.1)
    assert published("T2V-14B", quantize=None) == pytest.approx(27.0, abs=0.1)
    assert published("T2V-1.3B") < 0.56 * published("T2V-1.3B", quantize=None)


def test_the_size_told_before_loading_is_the_size_loaded(quantised, tiny_folder):
    found = checkpoint.inspect(tiny_folder)
    for dtype in (torch.float32, torch.bfloat16):
        for quantize in (None, "fp8"):
            pipeline = WanPipeline.from_pretrained(tiny_folder, device="cpu", dtype=dtype, quantize=quantize)
            config = wan_quantization.resolve_quantize(quantize)
            loaded = placement.weight_bytes(pipeline.dit)
            assert wan_quantization.loaded_bytes(found.dit, config, dtype) == loaded
            parts = [placement.weight_bytes(part) for part in (pipeline.text_encoder, pipeline.vae)]
            assert _weight_bytes(found, dtype, config) == pytest.approx(loaded + sum(parts), rel=0.01)


def test_description_of_a_model(quantised):
    assert wan_quantization.describe(quantised.dit) == "20 of 26 linear layers in FP8"
    assert wan_quantization.describe(WanModel.from_config(DIT)) is None


MEASURE = """
import re, sys, torch
from telefuser.core.model_loading import load_model
from telefuser.ops.fp8_quantization import quantize_weight
from telefuser.ops.quantized_linear import replace_linear_layers

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

def build(layers=24, width=2048):
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(layers)])
    replace_linear_layers(model)
    return model

load_model(lambda: build(1, 4), [sys.argv[2]], dtype=torch.bfloat16, quantize=quantize_weight)
before = peak()
model = load_model(build, [sys.argv[1]], dtype=torch.bfloat16, quantize=quantize_weight)
print(peak() - before, sum(p.nbytes for p in model.parameters()) / 2**20)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak memory from /proc")
def test_the_host_never_holds_a_wide_copy(tmp_path):
    save_file({f"{i}.weight": torch.ones(2048, 2048) for i in range(24)}, tmp_path / "big.safetensors")
    save_file({"0.weight": torch.ones(4, 4)}, tmp_path / "small.safetensors")
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "big.safetensors"), str(tmp_path / "small.safetensors")]
    # Blocks from a megabyte on are given back when they are freed: with glibc's moving limit it was chance how many
    # holes were left, 242 MiB once in many runs.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    grown, size = (float(word) for word in result.stdout.split())
    assert size == pytest.approx(96, abs=0.4)
    # Beside the model a mapping, 80 MiB when five tensors of 16 MiB were read through it, and temporaries with the
    # holes that they leave in the heap. A copy in bfloat16 would take 192 MiB and the mapping, in float32 384.
    assert grown < size + 80 + 64, f"{grown:.0f} MiB"


@pytest.mark.gpu
def test_a_gpu_run_in_fp8_resident_and_offloaded(tiny_folder):
    given = {"device": "cuda", "dtype": "bf16", "quantize": "fp8"}
    resident, offloaded = (WanPipeline.from_pretrained(tiny_folder, **given, offload=o) for o in (False, True))
    assert next(resident.dit.blocks.parameters()).is_cuda
    assert not next(offloaded.dit.blocks.parameters()).is_cuda
    videos = [pipeline("a red cat", seed=5).frames.float() for pipeline in (resident, offloaded)]
    assert rel_error(*videos) < 1e-3
    for name, layer in resident.dit.named_modules():
        if isinstance(layer, LinearFP8):
            # The formula has one result on every device.
            twin = offloaded.dit.get_submodule(name)
            assert torch.equal(layer.weight.cpu().view(torch.uint8), twin.weight.view(torch.uint8)), name


@pytest.mark.gpu
def test_the_gpu_holds_one_wide_layer_at_a_time(tmp_path):
    save_file({f"{i}.weight": torch.ones(4096, 4096).bfloat16() for i in range(6)}, tmp_path / "big.safetensors")

    def build():
        model = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(6)])
        replace_linear_layers(model)
        return model

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    files = [tmp_path / "big.safetensors"]
    model = load_model(build, files, dtype=torch.bfloat16, device="cuda", quantize=quantize_weight)
    size = sum(parameter.nbytes for parameter in model.parameters())
    # The layer as stored and the temporaries of a piece of it.
    assert torch.cuda.max_memory_allocated() - before <= size + 4096 * 4096 * 2 + 24 * 2**20
