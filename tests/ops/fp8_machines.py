"""NVIDIA GPUs of any generation whose tensors lie on the CPU, and a `torch._scaled_mm` as strict as theirs."""

import contextlib
import sys
import types

import pytest
import torch

from telefuser import platforms
from telefuser.ops.fp8_gemm import TABLE
from tests.ops.machines import use


@pytest.fixture(autouse=True)
def fresh_table():
    """Each test is like a new process: nothing probed, nothing warned about."""
    TABLE.forget()
    yield
    TABLE.forget()


class SimCuda(platforms.CudaPlatform):
    """No operator kernels (`op_keys`), so the quantiser is the native one."""

    device_type = "cpu"
    op_keys = ()

    def __init__(self, arch=(9, 0), tf_kernel=None):
        super().__init__()
        self.arch, self.extension = arch, tf_kernel

    def cuda_arch(self, device=None):
        return self.arch

    @property
    def tf_kernel(self):
        return self.extension

    @classmethod
    def default_device(cls):
        return torch.device("cpu")

    @classmethod
    def device_ctx(cls, device):
        return contextlib.nullcontext()

    @classmethod
    def empty_cache(cls):
        return None


def scaled_product(x, weight_t, x_scale, weight_scale, dtype, bias=None):
    """What every FP8 GEMM computes, in float64, with the layouts that they all ask for."""
    (rows, width), columns = x.shape, weight_t.shape[1]
    assert x.is_contiguous()
    assert weight_t.t().is_contiguous()
    assert x.dtype == weight_t.dtype
    assert width % 16 == 0 == columns % 16
    assert x_scale.shape == (rows, 1)
    assert x_scale.is_contiguous()
    assert x_scale.dtype == weight_scale.dtype == torch.float32
    assert bias is None or (bias.shape == (columns,) and bias.dtype == dtype)
    out = (x.double() * x_scale.double()) @ (weight_t.double() * weight_scale.double().view(1, -1))
    return (out if bias is None else out + bias.double()).to(dtype)


@pytest.fixture
def gpu(monkeypatch):
    """`gpu((9, 0))`: the platform, with `calls` of its products: (name, use_fast_accum)."""

    def install(arch=(9, 0), tf_kernel=None):
        platform = use(monkeypatch, SimCuda(arch, tf_kernel))
        platform.calls = []

        def scaled_mm(x, weight_t, scale_a, scale_b, bias=None, out_dtype=None, use_fast_accum=False):
            assert out_dtype is torch.bfloat16
            assert scale_b.shape == (1, weight_t.shape[1])
            assert scale_b.is_contiguous()
            assert x.shape[0] > 0
            platform.calls.append(("scaled_mm", use_fast_accum))
            return scaled_product(x, weight_t, scale_a, scale_b, out_dtype, bias)

        monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
        return platform

    return install


def extension(calls):
    """tf_kernel with the one function that the table uses."""

    def fp8_scaled_mm(mat_a, mat_b, scales_a, scales_b, out_dtype, bias=None):
        assert scales_b.shape == (mat_b.shape[1], 1)
        calls.append("tf_kernel")
        return scaled_product(mat_a, mat_b, scales_a, scales_b, out_dtype, bias)

    return types.SimpleNamespace(fp8_scaled_mm=fp8_scaled_mm)


VLLM = """
from tests.ops.fp8_machines import scaled_product
calls = []

def cutlass_scaled_mm(a, b, scale_a, scale_b, out_dtype, bias=None):
    calls.append("vllm")
    return scaled_product(a, b, scale_a, scale_b, out_dtype, bias)
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """`installed("tf_kernel", "")`: an importable package of that name; dots make sub-modules."""
    monkeypatch.syspath_prepend(str(tmp_path))
    roots = []

    def install(name, source=""):
        folder = tmp_path.joinpath(*name.split("."))
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(source)
        for parent in list(folder.relative_to(tmp_path).parents)[:-1]:
            (tmp_path / parent / "__init__.py").touch()
        roots.append(name.split(".")[0])

    yield install
    for module in list(sys.modules):
        if module.split(".")[0] in roots:
            del sys.modules[module]
