"""The streaming safetensors writer against the safetensors library's reader."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from telefuser.core.weight_files import WeightSet
from telefuser.core.weight_writer import WeightWriter

STATE = {
    "odd.weight": torch.randn(3, 7).to(torch.float8_e4m3fn),
    "odd.weight_scale": torch.randn(3, 1),
    "half": torch.randn(5).half(),
    "α": torch.tensor(2.5, dtype=torch.float64),
    "transposed": torch.randn(4, 6).bfloat16().T,
    "empty": torch.empty(0, 4),
    "bytes": torch.arange(7, dtype=torch.uint8),
}
LAYOUT = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in STATE.items()}


def test_what_is_written_in_any_order_is_read_back(tmp_path):
    file = tmp_path / "a.safetensors"
    with WeightWriter(file, LAYOUT, {"format": "pt", "made": "hier"}) as writer:
        sizes = [writer.write(key, STATE[key]) for key in reversed(STATE)]
    assert sizes == [tensor.nbytes for tensor in reversed(STATE.values())]
    read = load_file(file)
    assert read.keys() == STATE.keys()
    for key, tensor in STATE.items():
        assert read[key].dtype is tensor.dtype
        assert read[key].shape == tensor.shape
        assert read[key].contiguous().flatten().view(torch.uint8).equal(tensor.contiguous().flatten().view(torch.uint8))
        # Wide ones stand at multiples of their size whatever stands before them.
        assert read[key].data_ptr() % tensor.element_size() == 0
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "made": "hier"}
    assert WeightSet([file]).entries.keys() == STATE.keys()


def test_a_file_that_would_lie_is_not_finished(tmp_path):
    layout = {"a": (torch.float32, (2,)), "b": (torch.float32, (3,))}
    with pytest.raises(ValueError, match=r"1 tensors were not written: b"), WeightWriter(tmp_path / "1", layout) as w:
        w.write("a", torch.ones(2))
    with WeightWriter(tmp_path / "2", {"a": layout["a"]}) as writer:
        with pytest.raises(ValueError, match=r"'a' is torch.float32 \(3,\), not as announced"):
            writer.write("a", torch.ones(3))
        with pytest.raises(ValueError, match="'c' is"):
            writer.write("c", torch.ones(3))
        writer.write("a", torch.ones(2))
        with pytest.raises(ValueError, match="written already"):
            writer.write("a", torch.ones(2))
    with pytest.raises(FileExistsError):
        WeightWriter(tmp_path / "2", layout)
    with pytest.raises(ValueError, match="complex64"):
        WeightWriter(tmp_path / "3", {"a": (torch.complex64, (1,))})
