"""What every test shares: one hardware-skip hook, threads, Triton's interpreter without a GPU, NaN in `torch.empty`."""

import os

import pytest
import torch

HAS_CUDA_API = torch.cuda.is_available()

# xdist's workers share the processors. Threads beyond their number wait for each other in loops: on two busy cores the
# tests of the models then take over 4 minutes instead of 1.5. Child processes read the variable.
workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if workers > 1 and "OMP_NUM_THREADS" not in os.environ:
    threads = max((os.cpu_count() or 1) // workers, 1)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)

# Triton reads this when its library is imported and when a kernel is decorated, so set it before any test module loads.
if not HAS_CUDA_API:
    os.environ.setdefault("TRITON_INTERPRET", "1")


def _missing_hardware(marker: str) -> str | None:
    """Why tests with this marker cannot run here, or None when they can."""
    gpus = torch.cuda.device_count() if HAS_CUDA_API else 0
    is_hip = torch.version.hip is not None
    if marker == "gpu":
        return None if gpus and not is_hip else "needs an NVIDIA GPU, none is visible"
    if marker == "multi_gpu":
        return None if gpus >= 2 and not is_hip else f"needs two NVIDIA GPUs, {0 if is_hip else gpus} visible"
    if marker == "rocm":
        return None if gpus and is_hip else "needs an AMD GPU and a +rocm build of PyTorch"
    if marker == "npu":
        npu = getattr(torch, "npu", None)
        return None if npu is not None and npu.is_available() else "needs an Ascend NPU and torch_npu"
    return None


def pytest_collection_modifyitems(items):
    reasons = {marker: _missing_hardware(marker) for marker in ("gpu", "multi_gpu", "rocm", "npu")}
    for item in items:
        for marker, reason in reasons.items():
            if reason is not None and item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def seeded():
    """The same random inputs in every run: three draws far in an activation's tail can miss a limit by bad luck."""
    torch.manual_seed(0)


@pytest.fixture
def poison_empty(monkeypatch):
    """Fill what `torch.empty` and its relatives return with NaN: an element that a kernel never wrote then shows."""

    def poisoned(allocate):
        def wrapper(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            if tensor.is_floating_point() or tensor.is_complex():
                with torch.no_grad():
                    tensor.fill_(float("nan"))
            return tensor

        return wrapper

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, poisoned(getattr(torch.Tensor, name)))
