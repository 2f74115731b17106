"""`telefuser convert`: the folder computes what quantising while loading computes, and nothing half-made is left."""

import io
import json
import os
import shutil
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from telefuser import convert
from telefuser.core import checkpoint, wan_keys
from telefuser.core.weight_files import CheckpointError
from telefuser.core.weight_writer import WeightWriter
from telefuser.pipelines.wan_video import WanPipeline
from telefuser.run_report import RunReport
from tests.pipelines.conftest import VAE, tiny_folder, write_checkpoint
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


def write_diffusers(folder, source):
    """The official folder spelled the other way, the transformer in two shards with their index."""
    maps = {
        "transformer": ("diffusion_pytorch_model", wan_keys.dit_key_map()),
        "vae": ("Wan2.1_VAE", wan_keys.vae_key_map(num_res_blocks=VAE["num_res_blocks"])),
        "text_encoder": ("models_t5_tiny", wan_keys.text_encoder_key_map()),
    }
    for part, (name, keys) in maps.items():
        state = load_file(source / f"{name}.safetensors")
        state = {keys.to_diffusers(key): tensor for key, tensor in state.items()}
        (folder / part).mkdir(parents=True)
        if part != "transformer":
            file = "model" if part == "text_encoder" else "diffusion_pytorch_model"
            save_file(state, folder / part / f"{file}.safetensors")
            continue
        halves, shards = (sorted(state)[::2], sorted(state)[1::2]), {}
        for i, half in enumerate(halves, 1):
            shard = f"diffusion_pytorch_model-{i:05d}-of-00002.safetensors"
            save_file({key: state[key] for key in half}, folder / part / shard)
            shards |= dict.fromkeys(half, shard)
        index = folder / part / "diffusion_pytorch_model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": shards}))
    configs = {
        "transformer": {
            "num_attention_heads": 2, "attention_head_dim": 24, "in_channels": 16, "out_channels": 16, "ffn_dim": 64,
            "text_dim": 32, "freq_dim": 32, "num_layers": 2,
        },
        "vae": {**{key: value for key, value in VAE.items() if key != "dim"}, "base_dim": VAE["dim"]},
        "text_encoder": {
            "model_type": "umt5", "vocab_size": 32, "d_model": 32, "d_ff": 64, "num_heads": 2, "d_kv": 16,
            "num_layers": 2,
        },
    }  # fmt: skip
    for part, config in configs.items():
        (folder / part / "config.json").write_text(json.dumps(config))
    shutil.copytree(source / "google" / "tiny", folder / "tokenizer")
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text("{}")
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline"}))
    (folder / "LICENSE.txt").write_text("free")
    return folder


def test_the_diffusers_layout_keeps_its_names_and_needs_no_shards(tiny_folder, tmp_path):
    source, target = write_diffusers(tmp_path / "diffusers", tiny_folder), tmp_path / "fp8"
    assert checkpoint.inspect(source).problems == ()
    assert telefuser("convert", source, target).exit_code == 0
    names = {str(file.relative_to(target)) for file in target.rglob("*") if file.is_file()}
    assert names == {
        *("transformer/config.json", "transformer/diffusion_pytorch_model.safetensors", "model_index.json"),
        *("vae/config.json", "vae/diffusion_pytorch_model.safetensors", "tokenizer/tokenizer.json"),
        *("text_encoder/config.json", "text_encoder/model.safetensors", "scheduler/scheduler_config.json"),
        "LICENSE.txt",
    }
    made = load_file(target / "transformer" / "diffusion_pytorch_model.safetensors")
    assert made["blocks.1.attn2.to_out.0.weight"].dtype is torch.float8_e4m3fn
    assert made["blocks.1.attn2.to_out.0.weight_scale"].shape == (48, 1)
    assert json.loads((target / "transformer" / "config.json").read_text())["quantization_config"]
    found = checkpoint.inspect(target)
    assert found.problems == ()
    assert (found.layout, len(found.dit.fp8_layers)) == ("diffusers", 20)
    ours = WanPipeline.from_pretrained(target, device="cpu").dit
    theirs = WanPipeline.from_pretrained(tiny_folder, device="cpu", quantize="fp8").dit
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name


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
