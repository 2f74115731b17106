"""The runner itself, on a reference folder that each test makes: what it accepts, what it must not let through."""

import json

import pytest
import torch
from safetensors.torch import save_file

from telefuser.models.wan_video_dit import WanModel
from tests.golden.__main__ import main
from tests.golden.case import max_rel, max_ulps, rel_l2

CLASS_ARGS = {
    "model_type": "t2v",
    "dim": 24,
    "in_dim": 4,
    "ffn_dim": 32,
    "out_dim": 4,
    "text_dim": 8,
    "freq_dim": 16,
    "num_heads": 2,
    "num_layers": 1,
    "text_len": 6,
}


@pytest.fixture
def write_dit_file(tmp_path):
    """Writes a "WanModel forward" file of one padded run; `damage` is added to the stored output."""

    def write(name="dit", damage=0.0, **config):
        torch.manual_seed(0)
        model = WanModel.from_config(CLASS_ARGS)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
            parameter.data = parameter.data.bfloat16().float()
        x, context = torch.randn(4, 2, 4, 2), torch.randn(3, 8)
        with torch.no_grad():
            out = model(x[None], torch.tensor([[0.0, 0.0, 700.0, 700.0]]), [context])[0]
        io = {
            "run0.in.x0": x,
            "run0.in.context0": context,
            "run0.in.t": torch.tensor([[0.0, 0.0, 700.0, 700.0, 0.0]]),
            "run0.out0": (out + damage).contiguous(),
            "run0.mid.tokens": torch.cat((model.patch_embedding(x[None]).detach(), torch.zeros(1, 1, 24)), dim=1),
        }
        runs = [{"latents": [[2, 4, 2]], "context_lens": [3], "seq_len": 5, "tokens": [4]}]
        record = {"kind": "WanModel forward", "class_args": CLASS_ARGS, "runs": runs, **config}
        save_file(io, tmp_path / f"{name}.io.safetensors")
        save_file({k: v.bfloat16() for k, v in model.state_dict().items()}, tmp_path / f"{name}.weights.safetensors")
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
        return tmp_path

    return write


def test_right_file_passes_in_both_dtypes_and_is_recorded(write_dit_file, tmp_path, capsys):
    record = tmp_path / "record.out"
    assert main([str(write_dit_file()), "--json", str(record)]) == 0
    printed = capsys.readouterr().out
    for words in ("float32 run0 out0 ", "float32 run0 out0 mid.tokens", "bfloat16 run0 out0 rel_l2", "0 missed"):
        assert words in printed
    rows = json.loads(record.read_text())["rows"]
    assert len(rows) == 3
    assert all(row["pass"] and row["error"] <= row["limit"] for row in rows)


def test_dtype_option_restricts_the_runs(write_dit_file, capsys):
    assert main([str(write_dit_file()), "--dtype", "bfloat16"]) == 0
    assert "float32 run0" not in capsys.readouterr().out


@pytest.mark.parametrize("damage", [2e-5, float("nan")])
def test_wrong_output_is_a_miss_and_a_failing_exit_code(write_dit_file, capsys, damage):
    assert main([str(write_dit_file(damage=damage)), "--dtype", "float32"]) == 1
    assert "MISS" in capsys.readouterr().out


def test_broken_file_fails_and_does_not_hide_the_others(write_dit_file, capsys):
    folder = write_dit_file("b")
    (folder / "a.json").write_text(json.dumps({"kind": "WanModel forward", "class_args": CLASS_ARGS, "runs": []}))
    (folder / "c.json").write_text("{")
    assert main([str(folder), "--json", str(folder / "record.out")]) == 1
    printed = capsys.readouterr().out
    rows = json.loads((folder / "record.out").read_text())["rows"]
    assert [row["error"] for row in rows if not row["pass"]] == [None, None]
    assert "No such file" in printed
    assert "JSONDecodeError" in printed
    assert "float32 run0 out0" in printed


@pytest.mark.parametrize(
    "record",
    [
        None,
        {"kind": "CLIP vision tower (official VisionTransformer), penultimate block"},
        {"kind": "Wan2.2 VAE encode/decode"},
        {"kind": "SageAttention INT8 quantisation"},
        {"kind": "WanModel forward", "class_args": {"model_type": "i2v"}},
        {"kind": "something new"},
        {"no": "kind"},
    ],
)
def test_nothing_checked_is_a_failing_exit_code(tmp_path, capsys, record):
    if record is not None:
        (tmp_path / "file.json").write_text(json.dumps(record))
    assert main([str(tmp_path)]) == 1
    assert record is None or "skipped: " in capsys.readouterr().out


def test_missing_folder_is_a_usage_error(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path / "absent")])
    assert stop.value.code == 2
    assert "absent" in capsys.readouterr().err


def test_measures():
    one = torch.tensor([1.0, -1.0, 0.0, 2.0]).bfloat16()
    assert max_ulps(one, torch.tensor([1.0 + 2**-7, -1.0, -0.0, 2.0]).bfloat16()) == 1
    assert max_ulps(one, -one) == 2 * 0x4000
    assert max_ulps(one, one / 0) != max_ulps(one, one / 0)
    assert rel_l2(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    # An element of zero is judged by the size of the others, one above the RMS by its own.
    assert max_rel(torch.tensor([0.1, 2.0]), torch.tensor([0.0, 2.0])) == pytest.approx(0.1 / 2**0.5)
    assert max_rel(torch.tensor([0.0, 2.2]), torch.tensor([0.0, 2.0])) == pytest.approx(0.1)
