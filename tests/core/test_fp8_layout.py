"""FP8 checkpoints in the published layouts: recognised, taken as they are or multiplied out, refused without scales."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from telefuser.core.checkpoint import CheckpointError, inspect
from telefuser.core.model_loading import load_model
from telefuser.models.wan_video_dit import WanModel
from telefuser.ops.fp8_quantization import quantize_weight
from telefuser.ops.quantized_linear import LinearFP8, replace_linear_layers
from tests.core.wan_folders import DIT, FILES, random_weights, write_official
from tests.tolerances import assert_close

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Two(nn.Module):
    def __init__(self, fp8: bool = True, dtype=E4M3):
        super().__init__()
        self.inner = nn.Linear(8, 6)
        self.outer = nn.Linear(6, 4)
        if fp8:
            replace_linear_layers(self, dtype, include="inner")

    def forward(self, x):
        return self.outer(self.inner(x))


def wide_state():
    torch.manual_seed(0)
    return Two(fp8=False).state_dict()


def published(layout, dtype=E4M3):
    """`inner` in FP8, scaled as `layout` says, and its true values."""
    state = wide_state()
    values, scale = quantize_weight(state["inner.weight"], dtype)
    if layout == "comfy":
        scale = scale.amax()
        values = (state["inner.weight"] / scale).to(dtype)
        state |= {"inner.scale_weight": scale, "inner.scale_input": torch.tensor(1.0)}
        state["scaled_fp8"] = torch.zeros(2, dtype=dtype)
    elif layout == "a tensor":
        values, scale = (state["inner.weight"] / scale.amax()).to(dtype), scale.amax()[None]
        state |= {"inner.weight_scale": scale, "inner.input_scale": torch.ones(())}
    else:
        state["inner.weight_scale"] = scale if layout == "a column" else scale[:, 0].clone()
    state["inner.weight"] = values
    return state, values.float() * scale.reshape(-1, 1)


@pytest.fixture
def write(tmp_path):
    def save(state, name="model.safetensors"):
        torch.save(state, tmp_path / name) if name.endswith("pth") else save_file(state, tmp_path / name)
        return [tmp_path / name]

    return save


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("layout", ["a column", "a row", "a tensor", "comfy"])
@pytest.mark.parametrize("name", ["model.safetensors", "model.pth"])
def test_published_layouts_are_taken_as_they_are(layout, dtype, name, write):
    state, wanted = published(layout, dtype)
    model = load_model(lambda: Two(dtype=dtype), write(state, name), dtype=torch.float32)
    assert model.inner.weight.dtype is dtype
    assert torch.equal(model.inner.weight.view(torch.uint8), state["inner.weight"].view(torch.uint8))
    assert (model.inner.weight_scale.shape, model.inner.weight_scale.dtype) == ((6, 1), torch.float32)
    assert torch.equal(model.inner.dequantize(), wanted)
    x = torch.randn(3, 8)
    assert_close(model.inner(x), nn.functional.linear(x, wanted, state["inner.bias"]), "matmul")


@pytest.mark.parametrize("layout", ["a column", "comfy"])
def test_a_wide_layer_gets_the_values_multiplied_out(layout, write):
    state, wanted = published(layout)
    model = load_model(lambda: Two(fp8=False), write(state), dtype=torch.bfloat16)
    assert torch.equal(model.inner.weight, wanted.bfloat16())
    # What was FP8 takes two bytes where the run names no dtype.
    assert load_model(lambda: Two(fp8=False), write(state), dtype=None).inner.weight.dtype is torch.bfloat16


def test_another_variant_is_converted(write):
    state, wanted = published("a column", E5M2)
    with pytest.raises(ValueError, match="float8_e5m2: give `quantize`"):
        load_model(Two, write(state), dtype=None)
    model = load_model(Two, write(state), dtype=None, quantize=quantize_weight)
    assert model.inner.weight.dtype is E4M3
    # Two bits of the mantissa fit into three, unless they go below the smallest number.
    assert_close(model.inner.dequantize(), wanted, "fp8_linear")


def test_wide_weights_are_quantised_while_loading(write):
    state = wide_state()
    model = load_model(Two, write(state), dtype=torch.bfloat16, quantize=quantize_weight)
    assert isinstance(model.inner, LinearFP8)
    # From the stored values, whatever the run's dtype.
    values, scale = quantize_weight(state["inner.weight"], E4M3)
    assert torch.equal(model.inner.weight.float(), values.float())
    assert torch.equal(model.inner.weight_scale, scale)
    assert model.inner.bias.dtype is model.outer.weight.dtype is torch.bfloat16
    assert not any(parameter.is_meta or parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(ValueError, match=r"'inner.weight' in FP8 and the file in torch.float32: give `quantize`"):
        load_model(Two, write(state), dtype=None)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda s: s.pop("inner.weight_scale"), "'inner.weight' is float8_e4m3fn without a scale"),
        (lambda s: s.update({"inner.bias": s["inner.bias"].to(E4M3)}), "'inner.bias' is float8_e4m3fn without a scale"),
        (lambda s: s.update({"inner.weight_scale": torch.ones(2, 3)}), r"\(2, 3\).*one a row \(6\)"),
        (lambda s: s.update({"inner.weight_scale": torch.ones(6, 1, dtype=torch.int32)}), "int32"),
        (lambda s: s["inner.weight_scale"][2].fill_(float("nan")), "'inner.weight_scale' holds NaN"),
        (lambda s: s["inner.weight"].view(torch.uint8)[1, 1].fill_(0xFF), "'inner.weight' holds NaN"),
        (lambda s: s.update({"outer.weight_scale": torch.ones(4, 1)}), r"not expected \(outer.weight_scale\)"),
    ],
)
@pytest.mark.parametrize("fp8", [True, False])
def test_what_has_no_meaning_is_refused(edit, message, fp8, write):
    state, _ = published("a column")
    edit(state)
    files = write(state)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(lambda: Two(fp8=fp8), files, dtype=torch.float32)
    assert str(files[0]) in str(caught.value)


# A whole folder


def quantised_folder(folder, rename=lambda key: key):
    """The official folder with every block linear and one fp32 layer in FP8, ComfyUI's names."""
    write_official(folder)
    state = random_weights("dit")
    for key in [k for k in state if state[k].ndim == 2 and k.endswith("weight")]:
        if key.startswith("blocks.") or key == "time_embedding.0.weight":
            scale = state[key].abs().amax() / 448
            state[key] = (state[key] / scale).to(E4M3)
            state[key.removesuffix("weight") + "scale_weight"] = scale
    state["scaled_fp8"] = torch.empty(0, dtype=E4M3)
    save_file({rename(key): tensor for key, tensor in state.items()}, folder / FILES["dit"])
    return folder, state


def test_a_folder_with_scales_is_usable(tmp_path):
    folder, state = quantised_folder(tmp_path / "wan")
    found = inspect(folder)
    assert found.problems == ()
    assert len(found.dit.fp8_layers) == 2 * 10 + 1
    assert found.dit.dtypes["float8_e4m3fn"] == 21
    # Scales are no parameters of the model.
    assert found.dit.num_parameters == sum(tensor.numel() for tensor in random_weights("dit").values())
    dit = found.dit.load(WanModel.from_config, dtype=torch.float32)
    scale = state["blocks.1.ffn.2.scale_weight"]
    assert torch.equal(dit.blocks[1].ffn[2].weight, state["blocks.1.ffn.2.weight"].float() * scale)
    save_file({key: t for key, t in state.items() if "scale_weight" not in key}, folder / FILES["dit"])
    (problem,) = inspect(folder).problems
    assert "without a scale" in problem
    assert "--quantize fp8" in problem


def test_the_text_encoder_may_come_in_fp8(tmp_path):
    folder = write_official(tmp_path / "wan")
    state = load_file(folder / FILES["text_encoder"])
    key = "blocks.0.ffn.fc1.weight"
    state[key], state["blocks.0.ffn.fc1.weight_scale"] = quantize_weight(state[key], E4M3)
    save_file(state, folder / FILES["text_encoder"])
    found = inspect(folder)
    assert found.problems == ()
    assert found.text_encoder.fp8_layers == {"blocks.0.ffn.fc1": "float8_e4m3fn"}


def test_nan_in_the_first_page_of_an_fp8_weight_is_found_before_loading(tmp_path):
    folder, state = quantised_folder(tmp_path / "wan")
    state["blocks.1.ffn.0.weight"].view(torch.uint8)[0, 3] = 0x7F
    save_file(state, folder / FILES["dit"])
    (problem,) = inspect(folder).problems
    assert "'blocks.1.ffn.0.weight' holds NaN" in problem
    assert json.loads((folder / "config.json").read_text())["dim"] == DIT["dim"]
