import logging
import sys

import pytest
import torch

from telefuser import platforms
from telefuser.platforms import CpuPlatform, CudaPlatform, NPUPlatform, RocmPlatform, _resolve_current_platform
from tests.platforms.simulate import VISIBILITY, gpu_build, in_fresh_process, install_stubs, npu_build


def test_the_chosen_platform_is_one_object_for_the_whole_process():
    # S002, S003
    from telefuser.platforms import current_platform

    assert current_platform is platforms.current_platform
    assert isinstance(current_platform, platforms.BasePlatform)


def test_no_accelerator_gives_the_cpu(monkeypatch):
    # S017
    gpu_build(monkeypatch, vendor=None, count=0)
    assert type(_resolve_current_platform()) is CpuPlatform


@pytest.mark.parametrize(("vendor", "expected"), [("cuda", CudaPlatform), ("rocm", RocmPlatform)])
def test_gpu_builds_are_told_apart_by_their_version(monkeypatch, vendor, expected):
    # S009, S011, S013, S018, S019: torch.cuda answers on both
    gpu_build(monkeypatch, vendor)
    platform = _resolve_current_platform()
    assert type(platform) is expected
    assert platform.device_type == "cuda"
    assert not isinstance(platform, CudaPlatform) or vendor == "cuda"


@pytest.mark.parametrize("vendor", ["cuda", "rocm"])
def test_gpu_build_without_a_visible_gpu_gives_the_cpu(monkeypatch, vendor):
    # S010, S012
    gpu_build(monkeypatch, vendor, count=0)
    assert type(_resolve_current_platform()) is CpuPlatform
    npu_build(monkeypatch)
    assert type(_resolve_current_platform()) is NPUPlatform


def test_npu_needs_torch_npu_and_a_device(monkeypatch):
    # S014, S015
    gpu_build(monkeypatch, vendor=None, count=0)
    npu_build(monkeypatch, count=0)
    assert type(_resolve_current_platform()) is CpuPlatform
    assert "no Ascend NPU is visible" in NPUPlatform.unavailable_reason()
    npu_build(monkeypatch, count=2)
    assert type(_resolve_current_platform()) is NPUPlatform


def test_probes_run_in_order_and_stop_at_the_first_hit(monkeypatch):
    # S007, S008
    asked = []
    answers = {}
    for cls in (RocmPlatform, CudaPlatform, NPUPlatform):
        monkeypatch.setattr(
            cls,
            "unavailable_reason",
            classmethod(lambda c: asked.append(c.device_name) or answers.get(c.device_name, "absent")),
        )
    assert type(_resolve_current_platform()) is CpuPlatform
    assert asked == ["rocm", "cuda", "npu"]
    for name, cls, probes in (("npu", NPUPlatform, 3), ("cuda", CudaPlatform, 2), ("rocm", RocmPlatform, 1)):
        answers[name] = None
        asked.clear()
        assert type(_resolve_current_platform()) is cls
        assert asked == ["rocm", "cuda", "npu"][:probes]


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        ("raise ImportError('undefined symbol: aclrt')", "undefined symbol: aclrt"),
        ("raise OSError('libascendcl.so: cannot open shared object file')", "libascendcl.so"),
        ("raise RuntimeError('driver mismatch')", "driver mismatch"),
        ("import no_such_dependency", "no_such_dependency"),
        ("raise AttributeError('torch has no attribute x')", "AttributeError"),
    ],
)
def test_broken_torch_npu_only_makes_the_npu_unavailable(monkeypatch, tmp_path, failure, told):
    # S016
    gpu_build(monkeypatch, vendor=None, count=0)
    install_stubs(tmp_path, ["torch_npu"], failure)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    assert type(_resolve_current_platform()) is CpuPlatform
    reason = NPUPlatform.unavailable_reason()
    assert "cannot be imported" in reason
    assert told in reason


def test_missing_torch_npu_is_called_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    assert NPUPlatform.unavailable_reason() is not None
    monkeypatch.delitem(sys.modules, "torch_npu")
    assert NPUPlatform.unavailable_reason() == "torch_npu is not installed"


@pytest.mark.parametrize("value", ["", "-1"])
def test_hidden_gpu_stays_hidden_though_nvml_reports_it(monkeypatch, caplog, value):
    # B04: detection must not ask NVML; an empty value hides on purpose and needs no warning
    gpu_build(monkeypatch, "cuda", count=0)
    nvml = type(sys)("pynvml")
    nvml.nvmlInit = lambda: None
    nvml.nvmlDeviceGetCount = lambda: 2
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    with caplog.at_level(logging.WARNING):
        assert type(_resolve_current_platform()) is CpuPlatform
    assert caplog.records == []
    assert f'CUDA_VISIBLE_DEVICES="{value}"' in CudaPlatform.unavailable_reason()


@pytest.mark.gpu
@pytest.mark.parametrize("value", ["", "-1"])
def test_hidden_gpu_stays_hidden_on_a_real_host(value):
    # B04
    code = "from telefuser import platforms; print(platforms.current_platform.device_name)"
    assert in_fresh_process(code, CUDA_VISIBLE_DEVICES=value).strip() == "cpu"


def test_visibility_variables_that_leave_no_amd_gpu_are_named_once(monkeypatch, caplog):
    # B06
    gpu_build(monkeypatch, "rocm", count=0)
    for name in VISIBILITY[:3]:
        monkeypatch.setenv(name, "1")
    with caplog.at_level(logging.WARNING):
        assert type(_resolve_current_platform()) is CpuPlatform
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert [name for name in VISIBILITY[:3] if f'{name}="1"' not in message] == []
    assert "AMD" in message


def test_visibility_variables_on_a_build_without_gpu_support_are_nobodys_business(monkeypatch, caplog):
    gpu_build(monkeypatch, vendor=None, count=0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with caplog.at_level(logging.WARNING):
        _resolve_current_platform()
    assert caplog.records == []


def test_candidates_say_why_each_other_platform_was_not_chosen(monkeypatch):
    gpu_build(monkeypatch, "cuda")
    monkeypatch.setattr(platforms, "current_platform", CudaPlatform())
    rows = dict(platforms.candidates())
    assert list(rows) == ["rocm", "cuda", "npu", "cpu"]
    assert rows["cuda"] is None
    assert "not a ROCm build" in rows["rocm"]
    assert "torch_npu is not installed" in rows["npu"]
    assert rows["cpu"] == "cuda comes first"


def test_amd_gpu_of_a_known_capability_stays_an_amd_gpu(monkeypatch):
    # B12: the arch list of a HIP build holds gfx names, no sm_xx tag
    gpu_build(monkeypatch, "rocm", capability=(12, 0), gcn_arch="gfx1201")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["gfx1201"])
    platform = _resolve_current_platform()
    assert type(platform) is RocmPlatform
    assert (platform.device_type, platform.dist_backend) == ("cuda", "nccl")


@pytest.mark.parametrize("capability", [(9, 0), (9, 4), (12, 0)])
def test_amd_capability_is_never_an_nvidia_generation(monkeypatch, capability):
    # B02
    gpu_build(monkeypatch, "rocm", capability=capability)
    platform = _resolve_current_platform()
    assert platform.get_device_capability() == capability
    assert platform.cuda_arch() is None
    assert platform.rocm_arch() == "gfx942"
    assert platform.tf_kernel is None
