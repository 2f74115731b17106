"""The training in miniature: both stages, a resumed run that equals an unbroken one, a checkpoint that generates."""

import json

import pytest
import torch
from safetensors.torch import load_file

from telefuser.pipelines.wan_video import WanPipeline
from training.wan_tiny import train
from training.wan_tiny.evaluate import Case, Sampling, generate, grid_cases, summarise
from training.wan_tiny.export import export
from training.wan_tiny.judge import judge
from training.wan_tiny.optimisation import learning_rate
from training.wan_tiny.stage_state import load_state, save_state

SMOKE = ["--smoke", "--device", "cpu", "--no-compile"]
WEIGHTS = ("Wan2.1_VAE.safetensors", "diffusion_pytorch_model.safetensors", "models_t5_tiny.safetensors")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    train.main([*SMOKE, "--out", str(folder)])
    return folder


def test_a_finished_folder_is_a_checkpoint_without_leftovers(trained):
    names = {path.name for path in trained.rglob("*") if path.is_file()}
    assert names == {*WEIGHTS, "config.json", "tokenizer.json", "train-log.jsonl"}
    config = json.loads((trained / "config.json").read_text())
    assert {"vae", "text_encoder", "defaults"} < config.keys()
    assert min(config["vae"]["latents_std"]) > 0


def test_a_run_stopped_and_resumed_gives_the_same_weights(trained, tmp_path, monkeypatch, capsys):
    """Both stages are cut after each two steps; nothing but the files carries over."""
    allowed = 2

    def cut(stage, first, options, started):
        last = min(first + allowed, stage.total_steps)
        for index in range(first, last):
            stage.step(index)
        return last

    monkeypatch.setattr(train, "_loop", cut)
    arguments = [*SMOKE, "--out", str(tmp_path)]
    train.main(arguments)
    assert "stopped at step 2 of 4" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--resume"):
        train.main(arguments)
    for _ in range(2):
        train.main([*arguments, "--resume"])
    for name in WEIGHTS:
        expected, actual = load_file(trained / name), load_file(tmp_path / name)
        assert all(torch.equal(expected[key], actual[key]) for key in expected), name


def test_the_time_limit_saves_and_stops(tmp_path, capsys):
    train.main([*SMOKE, "--out", str(tmp_path), "--stage", "vae", "--time-limit", "0"])
    assert "vae: stopped at step 0 of 4, continue with --resume" in capsys.readouterr().out
    assert load_state(tmp_path, "vae")[0] == 0
    train.main([*SMOKE, "--out", str(tmp_path), "--stage", "vae", "--resume"])
    assert load_state(tmp_path, "vae") is None


def test_the_exported_checkpoint_generates_what_the_evaluation_judges(trained, tmp_path):
    size = export(trained, tmp_path / "embedded")
    assert size < 2**20
    pipeline = WanPipeline.from_pretrained(tmp_path / "embedded", device="cpu")
    cases = [Case("a red circle moving right on a black background", 5), Case("a blue box grows", 6)]
    frames = generate(pipeline, cases, Sampling(2, 2.0, 3.0, "euler"))
    for case, batched in zip(cases, frames):
        alone = pipeline(case.prompt, seed=case.seed, steps=2, guidance=2.0, shift=3.0, scheduler="euler").frames
        assert (alone.int() - batched.int()).abs().max() <= 1
    summary = summarise(cases, judge(frames))
    assert summary["videos"] == 2
    assert summary["right"] == 0  # four steps of training teach nothing
    json.dumps(summary)


def test_an_unfinished_folder_is_not_exported(tmp_path):
    with pytest.raises(ValueError, match=r"lacks Wan2.1_VAE.safetensors"):
        export(tmp_path, tmp_path / "embedded")


def test_the_transformer_needs_a_trained_autoencoder(tmp_path):
    with pytest.raises(ValueError, match="--stage vae first"):
        train.main([*SMOKE, "--out", str(tmp_path), "--stage", "dit"])


def test_state_travels_in_small_parts_and_replaces_the_one_before(tmp_path, monkeypatch):
    monkeypatch.setattr("training.wan_tiny.stage_state.PART_BYTES", 1000)
    tensors = {f"{kind}.{i}": torch.randn(100) for kind in ("weight", "ema") for i in range(5)}
    save_state(tmp_path, "dit", 7, tensors)
    assert len(list(tmp_path.glob("dit-state-*.safetensors"))) == 5
    step, loaded = load_state(tmp_path, "dit")
    assert step == 7
    assert all(torch.equal(tensors[name], loaded[name]) for name in tensors)
    save_state(tmp_path, "dit", 8, tensors, compact=True)
    assert len(list(tmp_path.glob("dit-state-*.safetensors"))) == 4
    _, loaded = load_state(tmp_path, "dit")
    assert loaded["ema.0"].dtype == torch.bfloat16
    assert torch.equal(loaded["weight.0"], tensors["weight.0"])


def test_the_learning_rate_rises_then_falls_to_a_hundredth():
    rates = [learning_rate(step, 1.0, 10, 110) for step in range(111)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[10] == 1.0
    assert rates[60] == pytest.approx(0.505)
    assert rates[110] == pytest.approx(0.01)


def test_the_grid_of_cases_has_a_seed_for_each_video():
    cases = grid_cases(2)
    assert len(cases) == len({case.seed for case in cases}) == 432
    assert cases[2].prompt == cases[3].prompt
