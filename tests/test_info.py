import io
import json

import pytest
import torch
from rich.console import Console

from telefuser import info, platforms
from telefuser.core.config import AttnImplType
from telefuser.ops.attention import backends
from telefuser.platforms import CpuPlatform, CudaPlatform, RocmPlatform
from tests.platforms.simulate import gpu_build


def shown(facts, width=80):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(info.render(facts))
    return console.export_text()


@pytest.fixture
def gpu_host(monkeypatch):
    def make(vendor, platform, **machine):
        gpu_build(monkeypatch, vendor, **machine)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * 2**30, 2**34))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
        monkeypatch.setattr(platforms, "current_platform", platform())

    return make


def test_facts_survive_json():
    facts = info.collect()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["versions"]["torch"] == torch.__version__


def test_every_candidate_and_every_backend_has_a_verdict(monkeypatch):
    gpu_build(monkeypatch, vendor=None, count=0)
    monkeypatch.setattr(platforms, "current_platform", CpuPlatform())
    facts = info.collect()
    verdicts = {row["name"]: row["rejected_because"] for row in facts["candidates"]}
    assert list(verdicts) == ["rocm", "cuda", "npu", "cpu"]
    assert verdicts.pop("cpu") is None
    assert all(verdicts.values())
    assert set(facts["attention"]) == set(AttnImplType.__members__) - {"AUTO"}
    usable = [name for name, reason in facts["attention"].items() if reason is None and name != "TRITON_INT8"]
    assert usable == ["TORCH_SDPA", "RADIAL_ATTN", "LOCAL_SPARSE_ATTN"]  # S058
    assert facts["sparse_attention"].pop("TORCH_BLOCKED") is None
    assert all(facts["sparse_attention"].values())
    assert facts["fp8"]["fp8_linear"].startswith("NATIVE: stored in FP8")
    assert "TORCH_SCALED_MM: a CPU has no FP8 matrix unit" in facts["fp8"]["fp8_linear"]


def test_devices_of_a_gpu_host_come_before_its_cpu(gpu_host):
    gpu_host("cuda", CudaPlatform, count=2, capability=(9, 0))
    facts = info.collect()
    assert [row["device"] for row in facts["devices"]] == ["cuda:0", "cuda:1", "cpu"]
    assert facts["devices"][0] | {"name": ""} == {
        "device": "cuda:0",
        "name": "",
        "arch": "sm_90",
        "total_memory": 2**34,
        "free_memory": 3 * 2**30,
    }
    assert facts["platform"]["operators"] == ["forward_cuda", "forward_native"]
    assert "computes FP8" in facts["fp8"]["hardware"]
    assert facts["fp8"]["fp8_linear"].startswith("TORCH_SCALED_MM: torch._scaled_mm with a scale a row (TF_KERNEL: ")
    text = shown(facts)
    assert "sm_90" in text
    assert "3.0 of 16.0 GiB free" in text


def test_what_auto_tries_on_hopper_is_told_in_its_order(gpu_host, monkeypatch):
    gpu_host("cuda", CudaPlatform, capability=(9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    backends.TABLE.forget()
    facts = info.collect()
    auto, page = facts["attention_auto"], shown(facts, width=1000)
    backends.TABLE.forget()
    tried = ("FLASH_ATTN_4: package", "FLASH_ATTN_3: package", "FLASH_ATTN_2: package")
    assert auto.startswith("AUTO: TORCH_CUDNN, TORCH_SDPA where it does not take the inputs (FLASH_ATTN_4: package")
    places = [auto.index(name) for name in tried]
    assert places == sorted(places)
    assert "TORCH_CUDNN, TORCH_SDPA where it does not take the inputs (FLASH_ATTN_4: " in page


def test_amd_host_is_described_by_its_own_architecture(gpu_host):
    gpu_host("rocm", RocmPlatform, capability=(9, 4))
    facts = info.collect()
    assert facts["devices"][0]["arch"] == "gfx942"
    assert "fnuz" in facts["fp8"]["hardware"]
    assert facts["fp8"]["fp8_linear"].startswith("TORCH_SCALED_MM")
    usable = [name for name, reason in facts["attention"].items() if reason is None and name != "TRITON_INT8"]
    assert usable == ["TORCH_SDPA", "RADIAL_ATTN", "LOCAL_SPARSE_ATTN"]  # S055


def test_a_device_that_refuses_to_answer_does_not_hide_the_rest(gpu_host, monkeypatch):
    def refuse(*_):
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy\nCUDA kernel errors might be reported later")

    gpu_host("cuda", CudaPlatform)
    monkeypatch.setattr(torch.cuda, "mem_get_info", refuse)
    facts = info.collect()
    assert facts["devices"][0]["error"] == "CUDA error: all CUDA-capable devices are busy"
    assert facts["devices"][1]["device"] == "cpu"
    assert "busy" in shown(facts)


def test_page_fits_80_columns_and_says_everything():
    facts = info.collect()
    text = shown(facts)
    assert max(map(len, text.splitlines())) <= 80
    flat = " ".join(text.split())
    for name, reason in facts["attention"].items():
        assert name in flat
        assert (reason or "available").split()[0] in flat
    for row in facts["candidates"]:
        assert (row["rejected_because"] or "chosen") in flat
    assert facts["fp8"]["fp8_linear"] in flat
    assert torch.__version__ in flat


@pytest.mark.parametrize(("number", "version"), [(91900, "9.19.0"), (90501, "9.5.1"), (8907, "8.9.7"), (None, None)])
def test_cudnn_version_is_spelled_out(monkeypatch, number, version):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: number)
    assert info._cudnn_version() == version


@pytest.mark.gpu
def test_real_gpu_is_described():
    device = info.collect()["devices"][0]
    assert device["arch"] == "sm_{}{}".format(*torch.cuda.get_device_capability(0))
    assert 0 < device["free_memory"] <= device["total_memory"]
