"""Examples run on the embedded model; ROCm examples stay eager and mirror an H100 one (S075-S080)."""

import importlib
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def examples_on_path(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])


def test_text_to_video_example_writes_a_video(tmp_path):
    example = importlib.import_module("wan21_1_3b_text_to_video_h100")
    output = tmp_path / "out.mp4"
    small = {"height": 32, "width": 32, "num_frames": 5, "steps": 1, "guidance": 1.0}
    path = example.run("tiny", "a red circle moving right on a black background", str(output), device="cpu", **small)
    assert Path(path) == output
    assert output.stat().st_size > 500


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*_rocm.py")), ids=lambda path: path.name)
def test_rocm_example_is_eager_and_has_an_h100_twin(path):
    source = path.read_text()
    assert "compile" not in source
    assert (EXAMPLES / path.name.replace("_rocm", "_h100")).exists()
    assert f"from {path.stem.replace('_rocm', '_h100')} import" in source


def test_there_is_a_rocm_example_for_wan21_1_3b():
    assert list(EXAMPLES.glob("wan21_1_3b*_rocm.py"))
