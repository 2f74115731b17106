import pytest
import torch

from telefuser import platforms
from telefuser.platforms import CpuPlatform, CudaPlatform, NPUPlatform, RocmPlatform, platform_of, resolve_device
from tests.platforms.simulate import gpu_build


@pytest.fixture
def two_gpus(monkeypatch):
    gpu_build(monkeypatch, "cuda", count=2)
    monkeypatch.setattr(platforms, "current_platform", CudaPlatform())


@pytest.fixture
def cpu_host(monkeypatch):
    gpu_build(monkeypatch, vendor=None, count=0)
    monkeypatch.setattr(platforms, "current_platform", CpuPlatform())


@pytest.mark.usefixtures("cpu_host")
@pytest.mark.parametrize(
    "device", ["npu:0", "npu", "cuda", "cuda:0", "cuda:99", torch.device("cuda:1"), "xpu", "rocm", 0]
)
def test_a_named_device_that_is_absent_is_an_error_and_no_change_to_the_cpu(device):
    # B08
    with pytest.raises(ValueError, match=r"Available: auto, cpu$") as error:
        resolve_device(device)
    assert repr(device) in str(error.value)


@pytest.mark.usefixtures("cpu_host")
def test_the_reason_of_the_absent_platform_is_told():
    with pytest.raises(ValueError, match="torch_npu is not installed"):
        resolve_device("npu:0")
    with pytest.raises(ValueError, match="built without CUDA"):
        resolve_device("cuda")


@pytest.mark.usefixtures("two_gpus")
def test_devices_of_a_host_with_two_gpus():
    # S005
    assert resolve_device() == resolve_device("auto") == resolve_device("cuda") == torch.device("cuda:0")
    assert resolve_device("cuda:1") == resolve_device(torch.device("cuda", 1)) == torch.device("cuda:1")
    assert resolve_device("cpu") == resolve_device("cpu:0") == torch.device("cpu")
    for device in ("cuda:2", "cuda:99"):
        with pytest.raises(ValueError, match="Available: auto, cpu, cuda:0, cuda:1") as error:
            resolve_device(device)
        assert device in str(error.value)
    with pytest.raises(ValueError, match="npu"):
        resolve_device("npu")


@pytest.mark.usefixtures("two_gpus")
def test_default_device_is_the_current_one_once_the_gpu_is_in_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda:1")


def test_auto_on_a_cpu_host(cpu_host):
    assert resolve_device("auto") == resolve_device(None) == torch.device("cpu")


@pytest.mark.usefixtures("two_gpus")
def test_the_cpu_of_a_gpu_host_has_its_own_platform():
    # S086
    assert type(platform_of(torch.device("cpu"))) is CpuPlatform
    assert platform_of("cuda:1") is platforms.current_platform


def test_matrix_of_facts():
    # S020-S022, S026, S027, S031, S032, S036, S037, S040, S041
    facts = {
        cls: (cls.device_name, cls.device_type, cls.device_control_env_var, cls.dispatch_key, cls.dist_backend)
        for cls in (CudaPlatform, RocmPlatform, NPUPlatform, CpuPlatform)
    }
    assert facts == {
        CudaPlatform: ("cuda", "cuda", "CUDA_VISIBLE_DEVICES", "CUDA", "nccl"),
        RocmPlatform: ("rocm", "cuda", "CUDA_VISIBLE_DEVICES", "CUDA", "nccl"),
        NPUPlatform: ("npu", "npu", "ASCEND_RT_VISIBLE_DEVICES", "PrivateUse1", "hccl"),
        CpuPlatform: ("cpu", "cpu", "CPU_VISIBLE_MEMORY_NODES", "CPU", "gloo"),
    }
    full = [cls.full_dist_backend for cls in facts]
    assert full == ["cuda:nccl", "cuda:nccl", "npu:hccl", "cpu:gloo"]
    keys = [cls.op_keys for cls in facts]
    assert keys == [("cuda",), ("rocm", "cuda"), ("npu",), ()]  # S028, S033, S038, S042, S069, S070


def test_capability_is_asked_once_a_device_and_kept(monkeypatch):
    # B10: lazily and cached
    gpu_build(monkeypatch, "cuda", count=2)
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: asked.append(device) or (8, device))
    platform = CudaPlatform()
    assert asked == []
    assert [platform.cuda_arch(d) for d in (0, "cuda:1", torch.device("cuda:1"), None, "cuda")] == [
        (8, 0),
        (8, 1),
        (8, 1),
        (8, 0),
        (8, 0),
    ]
    assert asked == [0, 1]
    assert platform.cuda_arch("cpu") is None


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        ("gfx942:sramecc+:xnack-", torch.float8_e4m3fnuz),
        ("gfx950", torch.float8_e4m3fn),
        ("gfx1201", torch.float8_e4m3fn),
    ],
)
def test_fp8_variant_follows_the_amd_chip(monkeypatch, arch, dtype):
    gpu_build(monkeypatch, "rocm", gcn_arch=arch)
    assert RocmPlatform().fp8_dtype is dtype
    assert RocmPlatform().fp8_unavailable_reason() is None


def test_fp8_products_need_ada_or_newer(monkeypatch):
    for capability, works in (((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)):
        gpu_build(monkeypatch, "cuda", capability=capability)
        reason = CudaPlatform().fp8_unavailable_reason()
        assert (reason is None) is works
        assert works or f"{capability[0]}.{capability[1]}" in reason
    gpu_build(monkeypatch, "rocm", gcn_arch="gfx1100")
    assert "gfx1100" in RocmPlatform().fp8_unavailable_reason()
    assert CpuPlatform().fp8_unavailable_reason()
    assert NPUPlatform().fp8_unavailable_reason()
