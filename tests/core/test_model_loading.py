"""Filling models: values, dtypes, strictness, and the memory it takes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from telefuser.core.model_loading import load_model, meta_parameters
from telefuser.core.weight_files import CheckpointError


class Small(nn.Module):
    """Has what our models have: parameters, a norm that stays float32, and a buffer that no file holds."""

    def __init__(self, width: int = 3):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("table", torch.arange(4.0), persistent=False)


STATE = {
    "linear.weight": torch.arange(9.0).reshape(3, 3) / 7,
    "linear.bias": torch.tensor([1.0, 2.0, 3.0]),
    "norm.weight": torch.tensor([0.1, 0.2, 0.3]),
    "norm.bias": torch.zeros(3),
}


def write(folder: Path, state: dict, name: str = "model.safetensors") -> Path:
    file = folder / name
    torch.save(state, file) if file.suffix == ".pth" else save_file(state, file)
    return file


def test_meta_parameters_leaves_buffers_real_and_ends_with_its_block():
    with meta_parameters():
        model = Small()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(model.table, torch.arange(4.0))
    assert not any(parameter.is_meta for parameter in Small().parameters())


def test_meta_parameters_skips_random_initialisers_without_torch_compile():
    code = """
import sys, torch
from telefuser.core.model_loading import meta_parameters
with meta_parameters():
    layer = torch.nn.Linear(3, 3)
    torch.nn.init.normal_(layer.weight, std=0.1)
    torch.nn.init.xavier_uniform_(tensor=layer.weight)
    real = torch.nn.init.normal_(torch.zeros(100))
print(layer.weight.is_meta, float(real.std()) > 0.1, "torch._dynamo" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["True", "True", "False"]


@pytest.mark.parametrize("name", ["model.safetensors", "model.pth"])
def test_values_are_cast_once_and_fp32_fragments_stay(tmp_path, name):
    file = write(tmp_path, STATE, name)
    model = load_model(Small, [file], dtype=torch.bfloat16, fp32_fragments=("norm",))
    assert torch.equal(model.linear.weight, STATE["linear.weight"].bfloat16())
    assert model.norm.weight.dtype == torch.float32
    assert torch.equal(model.norm.weight, STATE["norm.weight"])
    assert torch.equal(model.table, torch.arange(4.0))
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_no_dtype_keeps_what_is_stored(tmp_path):
    state = STATE | {"linear.weight": STATE["linear.weight"].half()}
    model = load_model(Small, [write(tmp_path, state)], dtype=None)
    assert (model.linear.weight.dtype, model.linear.bias.dtype) == (torch.float16, torch.float32)


def test_weights_do_not_hang_on_the_file(tmp_path):
    file = write(tmp_path, STATE)
    model = load_model(Small, [file], dtype=torch.float32)
    file.write_bytes(b"\xff" * file.stat().st_size)
    assert torch.equal(model.linear.weight, STATE["linear.weight"])


def test_key_map_translates(tmp_path):
    file = write(tmp_path, {f"other.{key}": tensor for key, tensor in STATE.items()})
    model = load_model(Small, [file], dtype=None, key_map=lambda key: key.removeprefix("other."))
    assert torch.equal(model.linear.bias, STATE["linear.bias"])


def changed(**edits):
    return {key: value for key, value in (STATE | edits).items() if value is not None}


@pytest.mark.parametrize(
    ("state", "parts"),
    [
        (changed(**{"norm.bias": None}), ["1 of 4 keys are missing (norm.bias)"]),
        (changed(**{"extra.weight": torch.zeros(1)}), ["1 keys are not expected (extra.weight)"]),
        (changed(**{"linear.weight": torch.zeros(3, 4)}), ["'linear.weight' has shape (3, 4)", "needs (3, 3)"]),
        (changed(**{"linear.weight": torch.zeros(3, 3, dtype=torch.int8)}), ["'linear.weight' is int8"]),
        (changed(**{"linear.weight": torch.full((3, 3), torch.nan)}), ["'linear.weight' holds NaN or infinity"]),
        (changed(**{"linear.bias": torch.tensor([0.0, torch.inf, 0.0])}), ["'linear.bias' holds NaN or infinity"]),
    ],
)
def test_what_does_not_fit_is_refused_with_file_and_key(tmp_path, state, parts):
    file = write(tmp_path, state)
    with pytest.raises(CheckpointError) as caught:
        load_model(Small, [file], dtype=torch.float32)
    for part in [str(file), *parts]:
        assert part in str(caught.value)


def test_values_beyond_float16_are_told_apart_from_damage(tmp_path):
    file = write(tmp_path, changed(**{"linear.bias": torch.tensor([0.0, 1e6, 0.0])}))
    with pytest.raises(CheckpointError, match=r"'linear.bias' holds values beyond torch.float16"):
        load_model(Small, [file], dtype=torch.float16)


def test_large_finite_values_are_not_taken_for_infinity(tmp_path):
    biggest = torch.full((3,), torch.finfo(torch.float32).max)
    model = load_model(Small, [write(tmp_path, changed(**{"linear.bias": biggest}))], dtype=torch.float32)
    assert torch.equal(model.linear.bias, biggest)


MEASURE = """
import re, sys, torch
from telefuser.core.model_loading import load_model

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

def build():
    return torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False) for _ in range(12)])

load_model(lambda: torch.nn.Linear(4, 4), [sys.argv[2]], dtype=torch.bfloat16)
before = peak()
model = load_model(build, [sys.argv[1]], dtype=getattr(torch, sys.argv[3]))
size = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
print((peak() - before), size)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak memory from /proc")
@pytest.mark.parametrize(("suffix", "dtype"), [("safetensors", "float32"), ("pth", "bfloat16")])
def test_peak_memory_is_about_one_copy(tmp_path, suffix, dtype):
    file = write(tmp_path, {f"{i}.weight": torch.ones(2048, 2048) for i in range(12)}, f"big.{suffix}")
    warm_up = write(tmp_path, {"weight": torch.ones(4, 4), "bias": torch.ones(4)}, f"small.{suffix}")
    command = [sys.executable, "-c", MEASURE, str(file), str(warm_up), dtype]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    grown, size = (float(word) for word in result.stdout.split())
    assert size == (192 if dtype == "float32" else 96)
    # A mapping of 64 MiB, read through for four tensors of 16 MiB, comes on top of the copy.
    assert grown < size + 96, f"{grown:.0f} MiB for a model of {size:.0f} MiB"
