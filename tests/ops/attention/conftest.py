"""Stand-ins for what is not here: an NVIDIA GPU of any generation, and the vendor packages."""

import contextlib
import sys
import textwrap

import pytest
import torch

from telefuser import platforms
from telefuser.ops.attention.backends import TABLE


@pytest.fixture(autouse=True)
def fresh_table():
    """Each test is like a new process: nothing probed, nothing warned about."""
    TABLE.forget()
    yield
    TABLE.forget()


@pytest.fixture
def sim_gpu(monkeypatch):
    """`sim_gpu((9, 0))`: an NVIDIA platform of that capability whose tensors lie on the CPU, so that stubs can run."""

    class SimCuda(platforms.CudaPlatform):
        device_type = "cpu"
        op_keys = ()

        def __init__(self, arch):
            super().__init__()
            self.arch = arch

        def cuda_arch(self, device=None):
            return self.arch

        @property
        def tf_kernel(self):
            import tf_kernel

            return tf_kernel

        @classmethod
        def device_ctx(cls, device):
            return contextlib.nullcontext()

    def install(arch):
        platform = SimCuda(arch)
        monkeypatch.setattr(platforms, "current_platform", platform)
        return platform

    return install


@pytest.fixture
def triton_gpu(sim_gpu, monkeypatch):
    """A GPU whose kernels run through Triton's interpreter, which needs the tensors on the CPU."""
    if torch.cuda.is_available():
        pytest.skip("Triton compiles for the GPU here and takes no CPU tensors; test_gpu.py has these checks")
    pytest.importorskip("triton", reason="Triton is not installed")
    from tests.kernel.interpreter import multiply_bfloat16_as_hardware_does, round_bfloat16_as_hardware_does

    multiply_bfloat16_as_hardware_does(monkeypatch)
    round_bfloat16_as_hardware_does(monkeypatch)

    def install(arch):
        platform = sim_gpu(arch)
        platform.op_keys = ("cuda",)
        return platform

    return install


# What the stubs compute with: exact attention in the packages' own layout, and a record of every call.
_PRELUDE = """
import torch
calls = []

def attend(q, k, v, scale, causal=False):
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1).float()
"""


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """`stub("flash_attn", source)`: an importable package of that name; dots make sub-packages. Returns nothing."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names = []

    def install(name, source=""):
        folder = tmp_path.joinpath(*name.split("."))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text(_PRELUDE + textwrap.dedent(source))
        names.append(name.split(".")[0])

    yield install
    for loaded in list(sys.modules):
        if loaded.split(".")[0] in names:
            del sys.modules[loaded]


# The signatures of flash-attn 2.8, FlashAttention 3 and flash-attn-4 4.0.0b36, and of sageattention 2.2 and 1.0.6.
FLASH_2 = """
def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                    alibi_slopes=None, deterministic=False, return_attn_probs=False):
    calls.append(dict(q=q, k=k, v=v, softmax_scale=softmax_scale, causal=causal))
    out, lse = attend(q, k, v, softmax_scale, causal)
    return (out.to(q.dtype), lse, None) if return_attn_probs else out.to(q.dtype)
"""
FLASH_3 = """
def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
                    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None,
                    deterministic=False, sm_margin=0, return_attn_probs=False):
    calls.append(dict(q=q, k=k, v=v, softmax_scale=softmax_scale, causal=causal))
    out, lse = attend(q, k, v, softmax_scale, causal)
    return (out.to(q.dtype), lse) if return_attn_probs else out.to(q.dtype)
"""
FLASH_4 = """
def flash_attn_func(q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False,
                    window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
                    deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None,
                    aux_scalars=None, block_sparse_tensors=None, block_sparse_tensors_bwd=None, return_lse=False,
                    gather_bwd_recompute_p=False, gather_bwd_token_chunk=None):
    calls.append(dict(q=q, k=k, v=v, softmax_scale=softmax_scale, causal=causal))
    out, lse = attend(q, k, v, softmax_scale, causal)
    return out.to(q.dtype), lse if return_lse else None
"""
SAGE_2 = """
SM80_ENABLED = SM89_ENABLED = SM90_ENABLED = True

def _sage(name):
    def function(q, k, v, tensor_layout="HND", is_causal=False, qk_quant_gran="per_thread", sm_scale=None,
                 smooth_k=True, return_lse=False, **kwargs):
        calls.append(dict(name=name, q=q, k=k, v=v, sm_scale=sm_scale, qk_quant_gran=qk_quant_gran, extra=kwargs))
        assert tensor_layout == "NHD"
        assert q.shape[-1] in (64, 128)
        out, lse = attend(q, k, v, sm_scale, is_causal)
        return (out.to(q.dtype), lse) if return_lse else out.to(q.dtype)
    return function

sageattn_qk_int8_pv_fp16_cuda = _sage("fp16_cuda")
sageattn_qk_int8_pv_fp16_triton = _sage("fp16_triton")
sageattn_qk_int8_pv_fp8_cuda = _sage("fp8_cuda")
sageattn_qk_int8_pv_fp8_cuda_sm90 = _sage("fp8_cuda_sm90")
"""
SAGE_1 = """
def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, smooth_k=True, **kwargs):
    calls.append(dict(name="v1", q=q, k=k, v=v, sm_scale=sm_scale, extra=kwargs))
    assert tensor_layout == "NHD"
    assert q.shape[-1] in (64, 96, 128)
    k -= k.mean(dim=1, keepdim=True)
    return attend(q, k, v, sm_scale, is_causal)[0].to(q.dtype)
"""
SPARGE = """
def spas_sage2_attn_meansim_topk_cuda(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
                                      smooth_k=True, simthreshd1=-0.1, cdfthreshd=None, topk=0.35, pvthreshd=50,
                                      attention_sink=False, tensor_layout="HND", output_dtype=torch.float16,
                                      return_sparsity=False, return_lse=False):
    calls.append(dict(q=q, k=k, v=v, scale=scale))
    assert tensor_layout == "HND" and q.size(-2) >= 128 and q.size(-1) in (64, 128)
    out = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale)[0]
    return out.transpose(1, 2).to(output_dtype)
"""
ALL_STUBS = {
    "flash_attn": FLASH_2,
    "flash_attn.cute": FLASH_4,
    "flash_attn_interface": FLASH_3,
    "sageattention": SAGE_2,
    "spas_sage_attn": SPARGE,
}
