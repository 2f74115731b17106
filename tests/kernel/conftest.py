"""Kernel tests run on the GPU where there is one, else through Triton's interpreter on CPU tensors."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from telefuser.kernel.triton import launch
from tests.kernel.interpreter import round_bfloat16_as_hardware_does


@pytest.fixture(autouse=True)
def hardware_rounding(monkeypatch):
    round_bfloat16_as_hardware_does(monkeypatch)


@pytest.fixture(autouse=True)
def no_replays():
    """Tests change launch settings, which a launch that was kept would not see."""
    launch._REPLAYS.clear()


@pytest.fixture
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
