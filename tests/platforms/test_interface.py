import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed

from telefuser.platforms import PLATFORMS, BasePlatform, CpuPlatform, CudaPlatform, NPUPlatform, RocmPlatform
from telefuser.platforms.cuda import _import_tf_kernel
from tests.platforms.simulate import gpu_build, install_stubs

METHODS = {
    "empty_cache": (),
    "ipc_collect": (),
    "get_device_name": (),
    "default_device": (),
    "synchronize": (),
    "device_count": (),
    "is_accelerator_available": (),
    "current_device": (),
    "reset_peak_memory_stats": (),
    "max_memory_allocated": (),
    "get_device_properties": (),
    "set_device": ("cpu",),
    "device_ctx": ("cpu",),
    "get_device_capability": (),
    "get_device_total_memory": (),
    "get_device_free_memory": (),
    "init_cudnn_optimizations": (),
    "cuda_arch": (),
    "rocm_arch": (),
    "device_arch": (),
    "fp8_unavailable_reason": (),
    "unavailable_reason": (),
}


def public_methods(cls):
    return {name for name, _ in inspect.getmembers(cls, callable) if not name.startswith("_")}


def test_all_platforms_have_the_same_methods():
    # S088
    for cls in PLATFORMS:
        assert public_methods(cls) == public_methods(BasePlatform)
        assert set(METHODS) <= public_methods(cls)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_works_on_the_cpu(name):
    # S087
    getattr(CpuPlatform(), name)(*METHODS[name])


def test_methods_that_need_no_instance_work_on_the_class():
    assert CpuPlatform.device_count() == 1
    assert CpuPlatform.default_device() == torch.device("cpu")
    with CpuPlatform.device_ctx("cpu"):
        assert f"{CpuPlatform.device_type}:{CpuPlatform.current_device()}" == "cpu:0"


def test_making_a_platform_touches_no_device(monkeypatch):
    # S023
    def forbidden(*_):
        raise AssertionError("the device was asked")

    for name in ("get_device_properties", "get_device_capability", "current_device", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, forbidden)
    for cls in PLATFORMS:
        platform = cls()
        assert platform.device_name in repr(platform).lower()
        assert platform.op_keys == cls.op_keys


def test_peak_memory_of_the_cpu_rises_and_is_reset():
    # In a process of its own: here the heap holds freed pages that a block of any size may be made of.
    program = """
import torch
from telefuser.platforms import CpuPlatform
peak = CpuPlatform.max_memory_allocated
CpuPlatform.reset_peak_memory_stats()
before = peak()
block = torch.ones(256 * 2**20, dtype=torch.uint8)
held = peak()
del block
CpuPlatform.reset_peak_memory_stats()
print(before, held, peak())
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    before, held, after = map(int, done.stdout.split())
    assert held >= before + 240 * 2**20
    if sys.platform == "linux":
        assert after < before + 32 * 2**20


def test_cpu_memory_figures_are_consistent():
    free, total = CpuPlatform.get_device_free_memory(), CpuPlatform.get_device_total_memory()
    assert 0 < free <= total
    assert CpuPlatform.get_device_properties().total_memory == total


@pytest.mark.skipif(sys.platform != "linux", reason="control groups exist on Linux only")
def test_cpu_memory_respects_the_limit_of_a_container(monkeypatch, tmp_path):
    from telefuser.platforms import cpu

    for name, text in {
        "memory.max": "1073741824",
        "memory.current": "805306368",
        "memory.stat": "anon 7\ninactive_file 268435456",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(cpu, "_CGROUPS", ((tmp_path, "memory.max", "memory.current", "inactive_file"),))
    assert CpuPlatform.get_device_total_memory() == 2**30
    assert CpuPlatform.get_device_free_memory() == 2**29
    (tmp_path / "memory.max").write_text("max")
    assert CpuPlatform.get_device_total_memory() > 2**30


def test_free_gpu_memory_counts_the_unused_cache(monkeypatch):
    gpu_build(monkeypatch, "cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 70)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30)
    assert CudaPlatform.get_device_free_memory("cuda:0") == 140


@pytest.fixture
def fresh_tf_kernel(monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "tf_kernel", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    _import_tf_kernel.cache_clear()
    yield tmp_path
    _import_tf_kernel.cache_clear()


def test_tf_kernel_is_reached_on_cuda_only(fresh_tf_kernel):
    # S029, S034, S039, S043, S072
    install_stubs(fresh_tf_kernel, ["tf_kernel"], "answer = 42")
    for cls in (RocmPlatform, NPUPlatform, CpuPlatform):
        assert cls().tf_kernel is None
    assert "tf_kernel" not in sys.modules
    assert CudaPlatform().tf_kernel.answer == 42


def test_missing_tf_kernel_is_silent_and_a_broken_one_warns_once(fresh_tf_kernel, caplog):
    # S063
    assert CudaPlatform().tf_kernel is None
    assert caplog.records == []
    _import_tf_kernel.cache_clear()
    install_stubs(fresh_tf_kernel, ["tf_kernel"], "raise OSError('libcudart.so.12: cannot open shared object file')")
    assert [CudaPlatform().tf_kernel for _ in range(3)] == [None] * 3
    assert ["libcudart" in record.getMessage() for record in caplog.records] == [True]


def test_the_backend_name_starts_a_process_group(tmp_path):
    # S045
    torch.distributed.init_process_group(
        backend=CpuPlatform.dist_backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        value = torch.tensor([3.0])
        torch.distributed.all_reduce(value)
        assert value.item() == 3.0
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.gpu
def test_every_method_works_on_a_gpu():
    platform = CudaPlatform()
    device = platform.default_device()
    for name, args in METHODS.items():
        getattr(platform, name)(*(device for _ in args))
    assert 0 < platform.get_device_free_memory(device) <= platform.get_device_total_memory(device)
    platform.reset_peak_memory_stats(device)
    block = torch.ones(2**20, device=device)
    assert platform.max_memory_allocated(device) >= block.nbytes
    assert platform.cuda_arch(device) == torch.cuda.get_device_capability(device)
