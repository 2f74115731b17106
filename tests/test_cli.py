"""The `telefuser` command from outside: exit codes, what is printed where, and what is left on the disk."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from telefuser import __version__
from telefuser.cli import app
from telefuser.models.wan_video_vae import WanVideoVAE
from telefuser.ops.attention import block_sparse
from telefuser.pipelines import video_file, wan_video
from telefuser.pipelines.video_file import read_video
from tests.pipelines.conftest import write_checkpoint

PROMPT = "a red circle moving right"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("wan_random_tiny")))


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def telefuser(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(result, *parts, code=1):
    """One clear line on stderr, no traceback, the exit code."""
    assert result.exit_code == code, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    for part in parts:
        assert str(part) in lines[0], lines[0]


def test_version_and_help_come_without_torch():
    code = "import sys, telefuser.cli; sys.argv[1:] = ['generate', '--help']; telefuser.cli.main()"
    watched = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); {code}"
    done = subprocess.run([sys.executable, "-c", watched], capture_output=True, text=True, check=True)
    assert "--guidance" in done.stdout
    assert done.stdout.strip().endswith("False")
    assert telefuser("--version").output == f"telefuser {__version__}\n"


def test_generate_makes_the_video_that_was_asked_for(model, here):
    options = ["--size", "64x32", "--frames", 9, "--steps", 3, "--guidance", 2, "--shift", 4, "--seed", 7]
    options += [
        "--scheduler",
        "euler",
        "--negative",
        "blurry",
        "--device",
        "cpu",
        "--dtype",
        "fp32",
        "--attention",
        "sdpa",
    ]
    result = telefuser("generate", PROMPT, "-o", "out.mp4", "--model", model, *options)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "cpu" in lines[0]
    assert "float32" in lines[0]
    assert "TORCH_SDPA" in lines[1]
    assert "64x32, 9 frames" in lines[2]
    assert "seed 7" in lines[2]
    assert [line.split()[0] for line in lines[3:-1]] == ["load", "text", "denoise", "decode", "write"]
    assert all(" s " in line and "GiB" in line for line in lines[3:-1])
    assert lines[-1] == "out.mp4"
    assert "\x1b" not in result.output
    frames, fps, settings = read_video("out.mp4")
    assert (tuple(frames.shape), fps) == ((9, 32, 64, 3), 8.0)
    expected = {"prompt": PROMPT, "negative_prompt": "blurry", "seed": 7, "steps": 3, "guidance": 2.0, "shift": 4.0}
    assert settings.items() >= (expected | {"scheduler": "euler", "width": 64, "height": 32}).items()
    assert os.listdir(here) == ["out.mp4"]


def test_sparse_attention_is_reported_and_stands_in_the_metadata(model, here):
    size = ["--size", "256x128", "--frames", 21, "--steps", 4, "--seed", 1, "--model", model]
    radial = ["--attention", "radial", "--decay", 0.3, "--dense-steps", 2, "--dense-layers", 1]
    result = telefuser("generate", PROMPT, "-o", "radial.mp4", *size, *radial)
    assert result.exit_code == 0, result.output
    line = result.stdout.splitlines()[1]
    assert line.startswith("attention RADIAL_ATTN (decay 0.3, blocks of 128) by TORCH_BLOCKED: ")
    assert "dense: steps 1 to 2 of 4, layer 1 of 2" in line
    frames, _, settings = read_video("radial.mp4")
    expected = {"attention": "radial_attn", "decay": 0.3, "dense_steps": 2, "dense_layers": 1}
    assert settings.items() >= expected.items()
    local = ["--attention", "local", "--local-window", "1,2,3"]
    assert telefuser("generate", PROMPT, "-o", "local.mp4", *size, *local).exit_code == 0
    other, _, settings = read_video("local.mp4")
    assert (settings["attention"], settings["local_window"]) == ("local_sparse_attn", [1, 2, 3])
    assert not torch.equal(other, frames)


def test_a_run_that_will_never_be_sparse_warns_in_one_line(model, here):
    block_sparse.TABLE.forget()
    (here / "list.txt").write_text("a red circle\na blue circle\n")
    options = ["--attention", "radial", "--steps", 2, "--dense-steps", 2, "--size", "128x128", "--frames", 21]
    result = telefuser("generate", "--prompts", "list.txt", "--model", model, *options)
    block_sparse.TABLE.forget()
    warnings = [line for line in result.stderr.splitlines() if "sparse" in line]
    assert len(warnings) == 1
    assert "dense_timesteps is 2 and the run has 2 steps, so nothing will be sparse" in warnings[0]


def test_quiet_prints_the_path_only_and_a_drawn_seed_repeats_the_video(model, here):
    first = telefuser("generate", PROMPT, "--model", model, "--quiet")
    assert first.output == "a-red-circle-moving-right.mp4\n"
    frames, _, settings = read_video("a-red-circle-moving-right.mp4")
    again = telefuser("generate", PROMPT, "--model", model, "-q", "--seed", settings["seed"])
    # The first file is not overwritten.
    assert again.output == "a-red-circle-moving-right-2.mp4\n"
    assert torch.equal(read_video("a-red-circle-moving-right-2.mp4")[0], frames)


def test_quantize_is_done_and_said(model, here):
    # B88
    result = telefuser("generate", PROMPT, "-o", "out.mp4", "--model", model, "--device", "cpu", "--quantize", "fp8")
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.stdout.splitlines() if "FP8" in line]
    assert line.startswith("  20 of 26 linear layers in FP8, DiT 0.2 MiB")
    assert "NATIVE" in line
    assert read_video("out.mp4")[2]["quantize"] == "fp8"


# Bad input never yields a wrong video silently, and is refused before weights are loaded.


@pytest.fixture
def nothing_loaded(monkeypatch):
    def loaded(*arguments, **settings):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(wan_video.WanPipeline, "from_pretrained", loaded)


@pytest.mark.parametrize(
    ("size", "part"),
    [
        ("833x481", "832x480"),
        ("832*481", "832x480"),
        ("8x8", "16x16"),
        ("0x0", "16x16"),
        ("832", "WIDTHxHEIGHT"),
        ("wide", "WIDTHxHEIGHT"),
        ("160000x160000", "smaller size"),
        ("-16x16", "WIDTHxHEIGHT"),
    ],
)
def test_wrong_sizes(model, here, nothing_loaded, size, part):
    # B120
    refused(telefuser("generate", PROMPT, "--model", model, f"--size={size}"), part)
    assert os.listdir(here) == []


def test_a_path_that_the_output_cannot_spell_is_escaped_and_the_run_goes_on(model, here):
    (here / "list.txt").write_text("a red \u00e9\na \u7ea2 cat\n", encoding="utf-8")
    command = [sys.executable, "-m", "telefuser", "generate", "--prompts", "list.txt", "--model", model]
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "001-a-red-\\xe9.mp4" in done.stdout
    assert sorted(os.listdir(here)) == ["001-a-red-\u00e9.mp4", "002-a-\u7ea2-cat.mp4", "list.txt"]


@pytest.mark.parametrize("size", ["48*32", "48x32", "32x48"])
def test_both_size_spellings_are_width_first(model, here, size):
    # B120
    assert telefuser("generate", PROMPT, "-o", "a.mp4", "--model", model, "--size", size).exit_code == 0
    width, height = (int(edge) for edge in size.replace("*", "x").split("x"))
    assert read_video("a.mp4")[0].shape[1:3] == (height, width)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--frames", 6], ["6 frames", "4n + 1", "nearest is 5"]),
        (["--frames", 0], ["0 frames"]),
        (["--steps", 0], ["steps", "at least 1"]),
        (["--guidance", "nan"], ["guidance", "finite"]),
        (["--shift", 0], ["shift", "above 0"]),
        (["--seed", 2**64], ["seed", "2**63 - 1"]),
        (["--scheduler", "ddim"], ["'ddim'", "unipc"]),
        (["--attention", "magic"], ["'magic'", "TORCH_SDPA"]),
        (["--decay", 0.2], ["decay 0.2", "AUTO", "radial"]),
        (["--attention", "radial", "--decay", 0], ["decay", "above 0", "0.2 to 1.0"]),
        (["--attention", "radial", "--dense-steps", -1], ["dense_steps", "at least 0", "-1"]),
        (["--attention", "local", "--local-window", "2x6x6"], ["'2x6x6'", "2,6,6"]),
        (["--dtype", "int4"], ["'int4'", "bf16"]),
        (["--device", "cuda:99"], ["cuda:99", "not here", "cpu"]),
        (["--device", "quantum"], ["quantum", "not here"]),
        (["-o", "no/such/folder/a.mp4"], ["no/such/folder", "create it"]),
        (["-o", "a.gif"], ["a.gif", ".mp4"]),
        (["--model", "no-such-model"], ["no-such-model", "no such folder"]),
    ],
)
def test_wrong_options(model, here, nothing_loaded, options, parts):
    refused(telefuser("generate", PROMPT, "--model", model, *options), *parts)
    assert os.listdir(here) == []


def test_another_format_than_fp8(model, here, nothing_loaded):
    refused(telefuser("generate", PROMPT, "--model", model, "--quantize", "int4"), "'int4'", "'fp8'")


@pytest.mark.parametrize(
    ("options", "part"),
    [(("--fsdp",), "start it with torchrun"), (("--ring-degree", "2"), "must multiply to 1"),
     (("--cfg-degree", "0"), "at least 1")],
)  # fmt: skip
def test_shares_of_a_lone_process(model, here, nothing_loaded, options, part):
    refused(telefuser("generate", PROMPT, "--model", model, *options), part)


def test_empty_prompt(model, here, nothing_loaded):
    refused(telefuser("generate", "  ", "--model", model), "empty")


def test_an_existing_file_is_not_overwritten_unless_asked(model, here):
    (here / "a.mp4").write_text("precious")
    refused(telefuser("generate", PROMPT, "-o", "a.mp4", "--model", model), "a.mp4 exists", "--overwrite")
    assert (here / "a.mp4").read_text() == "precious"
    assert telefuser("generate", PROMPT, "-o", "a.mp4", "--model", model, "--overwrite").exit_code == 0
    assert len(read_video("a.mp4")[0]) == 5


@pytest.mark.parametrize(
    "arguments", [["generate"], ["generate", PROMPT, "--steps", "many"], ["generate", "--nonsense"], ["draw"]]
)
def test_usage_errors_have_code_2(arguments):
    result = telefuser(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


@pytest.mark.parametrize("where", [0, -1])
def test_nan_weights(tmp_path, here, where):
    folder = tmp_path / "wan"
    folder.mkdir()
    write_checkpoint(folder, seed=1)
    file = folder / "diffusion_pytorch_model.safetensors"
    state = {key: tensor.clone() for key, tensor in load_file(file).items()}
    state["blocks.1.ffn.0.weight"].view(-1)[where] = torch.nan
    save_file(state, file)
    refused(telefuser("generate", PROMPT, "-o", "a.mp4", "--model", folder), file, "'blocks.1.ffn.0.weight' holds NaN")
    assert not (here / "a.mp4").exists()


def test_long_prompt_is_counted_and_warned_of_once(model, here):
    result = telefuser("generate", "red " * 600, "-o", "a.mp4", "--model", model)
    assert result.exit_code == 0
    warnings = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1
    assert "601" in warnings[0]


def test_unexpected_errors_name_their_type_and_debug_shows_the_place(model, here, monkeypatch):
    def broken(*arguments, **settings):
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(wan_video, "denoise", broken)
    refused(telefuser("generate", PROMPT, "--model", model), "ZeroDivisionError: by zero", "--debug")
    shown = telefuser("generate", PROMPT, "--model", model, "--debug")
    assert shown.exit_code == 1
    assert "Traceback" in shown.stderr
    assert "in broken" in shown.stderr


# Nothing that took long to compute is lost.


def test_out_of_memory_while_decoding_keeps_the_latents(model, here, monkeypatch):
    # B116
    def out_of_memory(*arguments, **settings):
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    monkeypatch.setattr(WanVideoVAE, "decode_chunks", out_of_memory)
    monkeypatch.setattr(WanVideoVAE, "decode", out_of_memory)
    result = telefuser("generate", PROMPT, "-o", "a.mp4", "--model", model)
    assert result.exit_code == 1
    kept = [name for name in os.listdir(here) if name.endswith(".safetensors")]
    assert len(kept) == 1
    error = result.stderr.splitlines()[-1]
    assert "smaller size" in error
    assert kept[0] in error
    assert load_file(here / kept[0])["latents"].shape == (16, 2, 4, 6)
    assert "a.mp4" not in os.listdir(here)


def test_full_disk_keeps_the_frames(model, here, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(video_file, "_encode", full)
    refused(telefuser("generate", PROMPT, "-o", "a.mp4", "--model", model), "disk is full", "a.frames.npz")
    assert os.listdir(here) == ["a.frames.npz"]


# Several prompts.


def test_prompts_file_makes_numbered_videos(model, here):
    (here / "list.txt").write_text("# colours\na red circle\n\n  a blue circle  \n", encoding="utf-8")
    result = telefuser("generate", "--prompts", "list.txt", "-o", "clips/", "--model", model, "--seed", 3)
    assert result.exit_code == 0, result.output
    assert sorted(os.listdir(here / "clips")) == ["001-a-red-circle.mp4", "002-a-blue-circle.mp4"]
    assert read_video(here / "clips" / "002-a-blue-circle.mp4")[2]["prompt"] == "a blue circle"
    assert "2 of 2: a blue circle (seed 3)" in result.stdout


def test_one_failing_prompt_does_not_stop_the_others(model, here, monkeypatch):
    (here / "list.txt").write_text("a red circle\na blue circle\na dog\n")
    decode = wan_video.decode_or_keep

    def fails_for_blue(vae, latents, settings, *rest):
        if "blue" in settings["prompt"]:
            raise RuntimeError("no blue today")
        return decode(vae, latents, settings, *rest)

    monkeypatch.setattr(wan_video, "decode_or_keep", fails_for_blue)
    result = telefuser("generate", "--prompts", "list.txt", "-o", "out.mp4", "--model", model, "-q")
    assert result.exit_code == 1
    assert result.stdout.split() == ["out-001.mp4", "out-003.mp4"]
    assert "error: prompt 2 ('a blue circle'): no blue today" in result.stderr
    assert "1 of the prompts failed" in result.stderr


def test_prompt_and_prompts_file_exclude_each_other(here):
    (here / "list.txt").write_text("a dog")
    assert telefuser("generate", PROMPT, "--prompts", "list.txt").exit_code == 2


# B134: signals, in one process.


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("during", ["step 2", "save"])
def test_signals_end_the_run_and_leave_no_half_file(model, here, monkeypatch, number, code, during):
    if during == "save":
        encode = video_file._encode

        def interrupted(frames, path, *rest):
            encode(frames, path, *rest)
            assert path.stat().st_size > 0
            os.kill(os.getpid(), number)
            time.sleep(5)

        monkeypatch.setattr(video_file, "_encode", interrupted)
    else:
        denoise = wan_video.denoise

        def interrupted(*arguments, **options):
            def step(i, total, latents):
                if i == 2:
                    os.kill(os.getpid(), number)
                    time.sleep(5)

            return denoise(*arguments[:-1], step, **options)

        monkeypatch.setattr(wan_video, "denoise", interrupted)
    start = time.monotonic()
    result = telefuser("generate", PROMPT, "-o", "a.mp4", "--model", model)
    assert time.monotonic() - start < 5
    assert result.exit_code == code
    assert "no unfinished file is left" in result.stderr
    assert "Traceback" not in result.output
    assert os.listdir(here) == []


@pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
def test_a_real_process_ends_on_sigterm(model, here):
    # B134
    command = [
        sys.executable,
        "-m",
        "telefuser",
        "generate",
        PROMPT,
        "-o",
        "a.mp4",
        "--model",
        model,
        "--steps",
        "100000",
    ]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        for line in process.stdout:
            if line.startswith("  text"):
                break
        process.terminate()
        _, error = process.communicate(timeout=10)
    assert process.returncode == 143
    assert error.strip() == "terminated; no unfinished file is left"
    assert os.listdir(here) == []


def test_signal_handlers_are_put_back(model, here):
    before = signal.getsignal(signal.SIGTERM)
    telefuser("check", model)
    assert signal.getsignal(signal.SIGTERM) is before


# The other commands.


def test_check_of_a_good_folder(model):
    result = telefuser("check", model)
    assert result.exit_code == 0
    assert "official layout" in result.stdout
    assert "ready to use" in result.stdout
    found = json.loads(telefuser("check", model, "--json").stdout)
    assert (found["layout"], found["problems"]) == ("official", [])
    assert found["components"]["dit"]["config"]["dim"] == 48


def test_check_of_a_bad_folder_says_what_is_wrong(tmp_path):
    folder = write_checkpoint(tmp_path)
    file = folder / "Wan2.1_VAE.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    result = telefuser("check", folder)
    assert result.exit_code == 1
    assert f"problem: {file}: truncated" in result.stdout
    assert "ready to use" not in result.stdout
    as_json = telefuser("check", folder, "--json")
    assert as_json.exit_code == 1
    assert len(json.loads(as_json.stdout)["problems"]) == 1


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        ({"window_size": [3, 3]}, "config.json of the dit: window_size"),
        ({"vae": {"dim": 4, "colour": 1}}, "config.json of the vae: unknown VAE settings"),
        ({"defaults": {"height": 33}}, "'defaults' of config.json: size 832x33"),
        ({"defaults": {"fps": "fast"}}, "'defaults' of config.json: fps"),
        (None, "not a tokenizer"),
    ],
)
def test_check_finds_what_only_a_run_would_have(tmp_path, here, overrides, part):
    folder = write_checkpoint(tmp_path / "wan")
    if overrides is None:
        (folder / "google" / "tiny" / "tokenizer.json").write_text("{}")
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | overrides))
    result = telefuser("check", folder)
    assert result.exit_code == 1
    assert part in result.stdout
    assert "ready" not in result.stdout
    with pytest.raises(ValueError, match=re.escape(part)):
        wan_video.WanPipeline.from_pretrained(folder, device="cpu")


def test_check_of_no_checkpoint_at_all(tmp_path):
    refused(telefuser("check", tmp_path), "no Wan checkpoint")


def test_info_as_json():
    found = json.loads(telefuser("info", "--json").stdout)
    assert found["versions"]["telefuser"] == __version__
    assert found["attention"]["TORCH_SDPA"] is None
