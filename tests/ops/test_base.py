"""Which implementation runs: the one rule, for modules and for functions."""

import logging
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from telefuser import kernel
from telefuser.ops import base
from telefuser.ops.base import CustomOp, CustomOpFunction, register_custom_op
from telefuser.platforms import CpuPlatform, CudaPlatform, NPUPlatform, RocmPlatform
from tests.ops.machines import on_cpu, use


class Recording(CustomOp):
    """Says which of its forms ran; the value is the input's."""

    def __init__(self, weight=None):
        super().__init__()
        self.ran = None
        self.weight = weight

    def forward_native(self, x, *others):
        self.ran = "native"
        return x.clone()


def recording(*keys, **parts):
    """A `Recording` with forms of its own for these keys."""

    def form(key):
        def forward(self, x, *others):
            self.ran = key
            return x.clone()

        return forward

    return type("Op", (Recording,), {f"forward_{key}": form(key) for key in keys})(**parts)


def function_recording(*keys):
    """A `CustomOpFunction` that returns the name of the implementation that ran."""
    return CustomOpFunction("op", *(((lambda *_, key=key: key) if key in ("native", *keys) else None) for key in ORDER))


ORDER = ("native", "cuda", "npu", "rocm")


def ran(op, *args, **kwargs):
    if isinstance(op, CustomOpFunction):
        return op(*args, **kwargs)
    op(*args, **kwargs)
    return op.ran


@pytest.fixture(autouse=True)
def triton_is_here(monkeypatch):
    monkeypatch.setattr(kernel, "HAS_TRITON", True)
    base._warn_of_missing_triton.cache_clear()


@pytest.mark.parametrize("make", [recording, function_recording])
@pytest.mark.parametrize(
    ("platform", "keys", "expected"),
    [
        (CudaPlatform, ("cuda", "rocm", "npu"), "cuda"),  # S028, S102
        (CudaPlatform, ("rocm", "npu"), "native"),
        (RocmPlatform, ("cuda", "rocm", "npu"), "rocm"),  # S069, C03
        (RocmPlatform, ("cuda", "npu"), "cuda"),  # S033, S070
        (RocmPlatform, ("npu",), "native"),  # S071
        (NPUPlatform, ("cuda", "rocm", "npu"), "npu"),  # S083
        (NPUPlatform, ("cuda", "rocm"), "native"),  # S038, B18
        (CpuPlatform, ("cuda", "rocm", "npu"), "native"),  # S042
    ],
)
def test_platform_chooses_the_form(make, platform, keys, expected, monkeypatch):
    # S004
    use(monkeypatch, on_cpu(platform))
    assert ran(make(*keys), torch.randn(2)) == expected


@pytest.mark.parametrize("platform", [CudaPlatform(), RocmPlatform(), NPUPlatform()])
def test_cpu_tensor_on_an_accelerator_host_is_native(platform, monkeypatch):
    # S086, S108, B16
    use(monkeypatch, platform)
    for make in (recording, function_recording):
        assert ran(make("cuda", "rocm", "npu"), torch.randn(2)) == "native"
        assert ran(make("cuda", "rocm", "npu"), torch.empty(2, device="meta")) == "native"


@pytest.mark.parametrize("platform", [CpuPlatform(), NPUPlatform()])
def test_cuda_form_never_stands_in_on_other_platforms(platform, monkeypatch):
    # B18
    class OnlyCuda(CustomOp):
        def forward_native(self, x):
            return x * 2

        def forward_cuda(self, x):
            raise AssertionError("forward_cuda ran")

    use(monkeypatch, platform)
    assert torch.equal(OnlyCuda()(torch.ones(2)), torch.full((2,), 2.0))


def test_mixed_devices_are_native(monkeypatch):
    # B16: PyTorch then raises its ordinary device-mismatch error
    use(monkeypatch, on_cpu(CudaPlatform))
    here, elsewhere = torch.randn(2), torch.empty(2, device="meta")
    for make in (recording, function_recording):
        assert ran(make("cuda"), here, here) == "cuda"
        assert ran(make("cuda"), here, elsewhere) == "native"
        assert ran(make("cuda"), here, (here, [elsewhere])) == "native"
    assert ran(recording("cuda", weight=nn.Parameter(here, requires_grad=False)), here) == "cuda"
    assert ran(recording("cuda", weight=nn.Parameter(elsewhere, requires_grad=False)), here) == "native"


def test_a_result_that_needs_a_gradient_is_native(monkeypatch):
    # A kernel would drop the gradient without a word.
    use(monkeypatch, on_cpu(CudaPlatform))
    x, weight = torch.randn(2), nn.Parameter(torch.randn(2))
    for make in (recording, function_recording):
        assert ran(make("cuda"), x.clone().requires_grad_()) == "native"
        assert ran(make("cuda"), x, (weight, 1)) == "native"
        with torch.no_grad():
            assert ran(make("cuda"), x.clone().requires_grad_()) == "cuda"
    assert ran(recording("cuda", weight=weight), x) == "native"
    with torch.inference_mode():
        assert ran(recording("cuda", weight=weight), x) == "cuda"


def test_tensor_subclasses_are_native(monkeypatch):
    from torch._subclasses import FakeTensorMode

    use(monkeypatch, on_cpu(CudaPlatform))
    with FakeTensorMode():
        assert ran(recording("cuda"), torch.randn(2)) == "native"


def test_dtypes_that_kernels_do_not_compute_in_are_native(monkeypatch):
    use(monkeypatch, on_cpu(CudaPlatform))
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert ran(recording("cuda"), torch.ones(2, dtype=dtype)) == "cuda"
    for dtype in (torch.float64, torch.int32, torch.float8_e4m3fn):
        assert ran(recording("cuda"), torch.ones(2).to(dtype)) == "native"
    op = recording("cuda")
    op.kernel_dtypes = None
    assert ran(op, torch.ones(2, dtype=torch.int32)) == "cuda"


def test_without_triton_gpus_run_native_with_one_warning(monkeypatch, caplog):
    # S071, B14
    monkeypatch.setattr(kernel, "HAS_TRITON", False)
    with caplog.at_level(logging.WARNING, logger="telefuser.ops.base"):
        for platform, expected in ((CudaPlatform, "native"), (RocmPlatform, "native"), (NPUPlatform, "npu")):
            use(monkeypatch, on_cpu(platform))
            assert [ran(recording("cuda", "npu"), torch.ones(2)) for _ in range(3)] == [expected] * 3
    assert [record.args for record in caplog.records] == [("cuda",), ("rocm",)]


def test_compiling_is_native_whatever_the_platform(monkeypatch):
    # S101
    use(monkeypatch, on_cpu(CudaPlatform))
    op, function = recording("cuda"), CustomOpFunction("op", lambda x: x + 1, cuda_impl=lambda x: x + 2)
    x = torch.ones(2)
    assert op(x) is not None
    assert op.ran == "cuda"
    torch.compile(op, backend="eager", fullgraph=True)(x)
    assert op.ran == "native"
    assert torch.equal(torch.compile(function, backend="eager", fullgraph=True)(x), x + 1)
    assert torch.equal(function(x), x + 2)


def test_kernels_run_with_the_device_of_their_tensors_current():
    # S271, B32
    entered = []

    class TwoDevices:
        def device_count(self):
            return 2

        def current_device(self):
            return 0

        @contextmanager
        def device_ctx(self, device):
            entered.append(device)
            yield

    for index, expected in ((0, []), (1, [torch.device("cuda", 1)])):
        assert base._launch(TwoDevices(), torch.device("cuda", index), lambda a, b: a + b, (1,), {"b": 2}) == 3
        assert entered == expected


def test_methods_of_the_base_class():
    # S100: forward_native is required; the others lead to it
    with pytest.raises(NotImplementedError, match="CustomOp must define forward_native"):
        CustomOp()(torch.ones(1))
    for key in ("cuda", "rocm", "npu"):
        op = recording()
        getattr(op, f"forward_{key}")(torch.ones(1))
        assert op.ran == "native"
        assert not op.defines(key)
        assert recording(key).defines(key)


def test_a_registered_operator_is_one_node():
    # S104
    @register_custom_op("test_of_base_double", fake_impl=torch.empty_like)
    def double(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy() * 2)

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    x = torch.randn(3)
    assert torch.equal(torch.compile(lambda x: double(x) + 1, backend=backend, fullgraph=True)(x), x * 2 + 1)
    targets = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert targets[0] is torch.ops.telefuser.test_of_base_double.default
