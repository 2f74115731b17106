"""Other people's machines: what PyTorch reports there, put in place of what it reports here."""

import os
import subprocess
import sys
import types
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
VISIBILITY = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
CUDA_ONLY_PACKAGES = (
    "tf_kernel",
    "flash_attn",
    "flash_attn_interface",
    "sageattention",
    "spas_sage_attn",
    "block_sparse_attn",
    "flashinfer",
    "vllm",
)


def gpu_build(patch, vendor, count=1, capability=(9, 0), gcn_arch="gfx942:sramecc+:xnack-"):
    """PyTorch as built for `vendor` ("cuda" or "rocm") with `count` visible GPUs. `patch` is a pytest MonkeyPatch."""
    for name in VISIBILITY:
        patch.delenv(name, raising=False)
    properties = types.SimpleNamespace(
        name="simulated", total_memory=2**34, gcnArchName=gcn_arch, multi_processor_count=8
    )
    patch.setattr(torch.version, "cuda", "13.0" if vendor == "cuda" else None)
    patch.setattr(torch.version, "hip", "7.2.0" if vendor == "rocm" else None)
    patch.setattr(torch.cuda, "is_available", lambda: count > 0)
    patch.setattr(torch.cuda, "device_count", lambda: count)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "is_initialized", lambda: False)
    patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    patch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    patch.setattr(torch.cuda, "get_device_name", lambda device=None: "simulated")


def npu_build(patch, count=1):
    """`torch_npu` installed, with `count` visible devices."""
    for name in VISIBILITY:
        patch.delenv(name, raising=False)
    npu = types.ModuleType("torch.npu")
    npu.is_available = lambda: count > 0
    npu.device_count = lambda: count
    npu.current_device = lambda: 0
    npu.is_initialized = lambda: False
    npu.get_device_name = lambda device=None: "Ascend910B"
    patch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
    patch.setattr(torch, "npu", npu, raising=False)


def in_fresh_process(code, path=(), **env):
    """Run `code` in a new interpreter that imports from `path` first, and return what it printed on both streams."""
    clean = {name: value for name, value in os.environ.items() if name not in VISIBILITY}
    paths = [*map(str, path), str(ROOT)]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "PYTHONPATH": os.pathsep.join(paths), **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def install_stubs(folder, names, body=""):
    """Importable packages of these names in `folder`, as if somebody had installed them."""
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(body)
    return folder
