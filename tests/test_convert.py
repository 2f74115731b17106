"""`telefuser convert`: the folder computes what quantising while loading computes, and nothing half-made is left."""

import io
import json
import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from telefuser import convert
from telefuser.core import checkpoint
from telefuser.core.fp8_layout import separate_scales
from telefuser.core.wan_component import Component
from telefuser.core.wan_keys import dit_key_map
from telefuser.core.weight_files import CheckpointError, WeightSet
from telefuser.core.weight_writer import WeightWriter
from telefuser.models.wan_video_dit import WanModel
from telefuser.pipelines import wan_quantization
from telefuser.pipelines.wan_video import WanPipeline
from telefuser.run_report import RunReport
from tests.pipelines.conftest import DIT, tiny_folder, write_checkpoint
from tests.test_cli import refused, telefuser

__all__ = ["tiny_folder"]


@pytest.fixture(scope="module")
def converted(tiny_folder, tmp_path_factory):
    target = tmp_path_factory.mktemp("convert") / "wan-fp8"
    result = telefuser("convert", "--quantize", "fp8", tiny_folder, target)
    assert result.exit_code == 0, result.output
    return target, result


def test_the_folder_computes_to_the_bit_what_quantising_while_loading_does(tiny_folder, converted):
    target, _ = converted
    assert checkpoint.inspect(target).problems == ()
    for dtype in ("fp32", "bf16"):
        ours = WanPipeline.from_pretrained(target, device="cpu", dtype=dtype)
        theirs = WanPipeline.from_pretrained(tiny_folder, device="cpu", dtype=dtype, quantize="fp8")
        assert ours.loaded_as == theirs.loaded_as
        for (key, a), b in zip(ours.dit.state_dict().items(), theirs.dit.state_dict().values(), strict=True):
            assert a.dtype is b.dtype
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), key
        videos = [pipeline("a red cat", seed=4, steps=1).frames for pipeline in (ours, theirs)]
        assert torch.equal(*videos)


def test_what_the_folder_holds(tiny_folder, converted):
    target, result = converted
    source = load_file(tiny_folder / "diffusion_pytorch_model.safetensors")
    made = load_file(target / "diffusion_pytorch_model.safetensors")
    assert made["blocks.0.ffn.0.weight"].dtype is torch.float8_e4m3fn
    assert made["blocks.0.ffn.0.weight_scale"].shape == (64, 1)
    wide = [key for key, tensor in made.items() if tensor.dtype is not torch.float8_e4m3fn and "_scale" not in key]
    assert all(torch.equal(made[key], source[key]) for key in wide)
    assert len(made) == len(source) + 20
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (tiny_folder, target))
    note = after.pop("quantization_config")
    assert after == before
    assert (note["quant_method"], note["weight_dtype"]) == ("fp8", "float8_e4m3fn")
    names = {str(file.relative_to(target)) for file in target.rglob("*") if file.is_file()}
    assert names == {str(file.relative_to(tiny_folder)) for file in tiny_folder.rglob("*") if file.is_file()}
    assert os.listdir(target.parent) == ["wan-fp8"]
    lines = result.stdout.splitlines()
    assert "DiT 0.3 MiB -> 0.2 MiB" in lines[0]
    assert lines[-1] == str(target)


def test_the_diffusers_layout_keeps_its_names(tiny_folder, tmp_path):
    """The official folder spelled the other way: VAE and text encoder are not read by what is tested here."""
    keys, folder = dit_key_map(), tmp_path / "transformer"
    folder.mkdir()
    state = load_file(tiny_folder / "diffusion_pytorch_model.safetensors")
    save_file({keys.to_diffusers(key): tensor for key, tensor in state.items()}, folder / "model.safetensors")
    weights = Component("dit", read(folder / "model.safetensors"), DIT, keys.to_official)
    layout = convert.fp8_layout(weights, wan_quantization.resolve_quantize("fp8"))
    key = "blocks.1.attn2.to_out.0.weight"
    assert layout[key] == (torch.float8_e4m3fn, (48, 48))
    assert layout[f"{key}_scale"] == (torch.float32, (48, 1))
    with WeightWriter(folder / "fp8.safetensors", layout) as writer:
        for name, tensor in convert._converted(weights, layout):
            writer.write(name, tensor)
    again = Component("dit", read(folder / "fp8.safetensors"), DIT, keys.to_official)
    assert len(again.fp8_layers) == 20
    build = wan_quantization.builder(again, None, torch.float32)
    ours = again.load(build, dtype=torch.float32, fp32_fragments=WanModel.FP32_PARAMETERS)
    theirs = WanPipeline.from_pretrained(tiny_folder, device="cpu", quantize="fp8").dit
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name


def read(file):
    weights = WeightSet([file])
    separate_scales(weights)
    return weights


# What is refused


def test_an_existing_folder_is_not_overwritten_unless_asked(tiny_folder, tmp_path):
    target = write_checkpoint(tmp_path / "taken", seed=9)
    before = (target / "config.json").read_bytes()
    refused(telefuser("convert", tiny_folder, target), target, "exists", "--force")
    assert (target / "config.json").read_bytes() == before
    result = telefuser("convert", tiny_folder, target, "--force", "--quiet")
    assert result.output.split() == [str(target)]
    assert "quantization_config" in json.loads((target / "config.json").read_text())
    assert os.listdir(tmp_path) == ["taken"]


def test_force_replaces_checkpoints_only(tiny_folder, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    (tmp_path / "file").write_text("")
    for target in ("home", "file"):
        refused(telefuser("convert", tiny_folder, tmp_path / target, "--force"), target, "no checkpoint folder")
    assert (tmp_path / "home" / "letter.txt").read_text() == "dear"
    (tmp_path / "empty").mkdir()
    assert telefuser("convert", tiny_folder, tmp_path / "empty").exit_code == 0


def test_wrong_places_and_sources(tiny_folder, converted, tmp_path, monkeypatch):
    for target in (tiny_folder, tiny_folder / "inside", tiny_folder.parent):
        refused(telefuser("convert", tiny_folder, target, "--force"), "choose another folder")
    refused(telefuser("convert", tiny_folder, tmp_path / "no" / "parent"), "there is no folder")
    refused(telefuser("convert", converted[0], tmp_path / "twice"), "in FP8 already", "20 layers")
    refused(telefuser("convert", tiny_folder, tmp_path / "x", "--quantize", "int4"), "'int4'", "'fp8'")
    refused(telefuser("convert", tmp_path / "nothing", tmp_path / "x"), "no such folder")
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    refused(telefuser("convert", tiny_folder, tmp_path / "x"), "MiB are needed, 1 MiB are free")
    assert os.listdir(tmp_path) == []


def test_damage_that_only_reading_finds(tmp_path):
    folder = write_checkpoint(tmp_path / "wan")
    state = load_file(folder / "diffusion_pytorch_model.safetensors")
    # Beyond the page that is looked at before.
    state["blocks.1.ffn.2.weight"][-1, -1] = float("nan")
    save_file(state, folder / "diffusion_pytorch_model.safetensors")
    refused(telefuser("convert", folder, tmp_path / "x"), "'blocks.1.ffn.2.weight' holds NaN")
    assert os.listdir(tmp_path) == ["wan"]


# What an end in the middle leaves


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_leave_no_half_folder(tiny_folder, tmp_path, monkeypatch, number, code, force):
    target, write = tmp_path / "x", WeightWriter.write
    if force:
        write_checkpoint(target, seed=9)

    def interrupted(writer, key, tensor):
        if key == "blocks.1.ffn.0.weight":
            assert len(os.listdir(tmp_path)) == 1 + force
            os.kill(os.getpid(), number)
            time.sleep(5)
        return write(writer, key, tensor)

    monkeypatch.setattr(WeightWriter, "write", interrupted)
    result = telefuser("convert", tiny_folder, target, *(["--force"] if force else []))
    assert result.exit_code == code
    assert "no unfinished file is left" in result.stderr
    assert os.listdir(tmp_path) == (["x"] if force else [])
    if force:
        assert "quantization_config" not in json.loads((target / "config.json").read_text())


def test_a_folder_that_cannot_take_its_name_leaves_the_old_one(tiny_folder, tmp_path, monkeypatch):
    target = write_checkpoint(tmp_path / "x", seed=9)
    before = (target / "config.json").read_bytes()
    rename = convert.Path.rename

    def fails(path, new):
        if path.name.endswith(".partial"):
            raise OSError(28, "No space left on device")
        return rename(path, new)

    monkeypatch.setattr(convert.Path, "rename", fails)
    result = telefuser("convert", tiny_folder, target, "--force")
    assert result.exit_code == 1
    assert (target / "config.json").read_bytes() == before
    assert os.listdir(tmp_path) == ["x"]


def test_progress_is_told_without_a_terminal_and_drawn_on_one(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("telefuser.run_report._SECONDS_BETWEEN_LINES", 0.0)
    result = telefuser("convert", tiny_folder, tmp_path / "x")
    assert sum(" of " in line and "MiB" in line for line in result.stdout.splitlines()) > 20
    console = Console(force_terminal=True, width=80, record=True, file=io.StringIO())
    convert.run(str(tiny_folder), tmp_path / "y", report=RunReport(console))
    assert "MiB" in console.export_text()


def test_a_source_in_fp8_is_no_source(converted, tmp_path):
    with pytest.raises(CheckpointError, match="in FP8 already"):
        convert.run(str(converted[0]), tmp_path / "x", report=RunReport(quiet=True))
