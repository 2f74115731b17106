"""The embedded model in FP8: as right as it is in bfloat16, and close to it in every pixel."""

import pytest
import torch

from benchmarks import record
from telefuser.pipelines.wan_video import WanPipeline
from tests.ops.fp8_machines import fresh_table, gpu
from training.wan_tiny import compare as module
from training.wan_tiny.compare import compare, main, psnr
from training.wan_tiny.evaluate import Sampling, grid_cases

__all__ = ["fresh_table", "gpu"]


def test_psnr():
    black = torch.zeros(2, 3, 4, 4, 3, dtype=torch.uint8)
    other = black.clone()
    other[1] = 255
    assert psnr(black, other).tolist() == [pytest.approx(99), pytest.approx(0)]
    assert psnr(black, black + 16)[0] == pytest.approx(24.05, abs=0.01)


def small_grid():
    pipelines = [WanPipeline.from_pretrained("tiny", device="cpu", dtype="bf16", quantize=q) for q in (None, "fp8")]
    sampling = Sampling(*(pipelines[0].defaults[name] for name in ("steps", "guidance", "shift", "scheduler")))
    # Far apart in the grid: every shape, half of the motions, both backgrounds.
    return compare(*pipelines, grid_cases(1)[5::97], sampling)


def good(result):
    assert result["videos"] == 3
    assert result["right quantised"] >= result["right"] - 0.02
    assert result["right"] == 1.0
    assert result["PSNR mean"] >= 30
    # They are not the same weights.
    assert result["PSNR worst"] < 60


@pytest.mark.slow
def test_weights_in_fp8_keep_the_video():
    good(small_grid())


@pytest.mark.slow
def test_weights_and_activations_in_fp8_keep_the_video(gpu, monkeypatch):
    """The rounding of a GPU that multiplies FP8: both operands of every product."""
    platform = gpu()

    def scaled_mm(x, weight_t, scale_a, scale_b, bias=None, out_dtype=None, use_fast_accum=False):
        platform.calls.append("scaled_mm")
        out = (x.float() @ weight_t.float()) * scale_a * scale_b
        return (out if bias is None else out + bias).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    good(small_grid())
    assert len(platform.calls) > 20 * 8 * 8


def test_the_command_prints_and_records(tmp_path, monkeypatch, capsys):
    def few(wide, quantised, cases, sampling):
        assert (wide.loaded_as["quantize"], quantised.loaded_as["quantize"]) == (None, "fp8")
        assert len(cases) == 2
        return compare(wide, quantised, cases, Sampling(1, 1.0, 3.0, "euler"))

    monkeypatch.setattr(module, "compare", few)
    monkeypatch.setattr(record, "device_name", lambda: "test device")
    main(["--device", "cpu", "--sample", "2", "--record", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "2 videos on cpu in bf16" in printed
    assert "dB mean" in printed
    rows = (tmp_path / "test_device.csv").read_text().splitlines()
    assert len(rows) == 5
    assert "2 videos in bf16, fp8 by NATIVE" in rows[1]
