"""Platforms in place of the real one; those of `on_cpu` take CPU tensors for their own and run kernels interpreted."""

import os
import types

import pytest

from telefuser import platforms


def use(monkeypatch, platform):
    """Make `platform` the current one for this test."""
    monkeypatch.setattr(platforms, "current_platform", platform)
    return platform


def on_cpu(kind, tf_kernel=None):
    """A platform of this kind whose devices are called "cpu"; `tf_kernel` stands for the extension."""
    return type(kind.__name__, (kind,), {"device_type": "cpu", "tf_kernel": tf_kernel})()


def recording_tf_kernel(calls):
    """An extension whose functions compute in float32 and note their names in `calls`."""
    import torch.nn.functional as F

    def rmsnorm(x, weight, eps):
        calls.append("rmsnorm")
        assert x.dim() == 2
        return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)

    def gated(name, activation):
        def function(x):
            calls.append(name)
            gate, hidden = x.float().chunk(2, -1)
            return (activation(gate) * hidden).to(x.dtype)

        return function

    return types.SimpleNamespace(
        rmsnorm=rmsnorm, silu_and_mul=gated("silu_and_mul", F.silu), gelu_and_mul=gated("gelu_and_mul", F.gelu)
    )


@pytest.fixture
def interpreted_cuda(monkeypatch):
    """NVIDIA's choice of implementation, on CPU tensors, through Triton's interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled for the GPU here, which test_gpu.py covers")
    from tests.kernel.interpreter import round_bfloat16_as_hardware_does

    round_bfloat16_as_hardware_does(monkeypatch)
    return use(monkeypatch, on_cpu(platforms.CudaPlatform))
