"""The int8 quantiser and the attention over its output, against the formula and stored results of SageAttention."""

import math
import sys

import pytest
import torch
from safetensors.torch import load_file

from telefuser.kernel.triton import int8_attention, per_block_quant_int8
from tests.golden import golden_dir
from tests.kernel.compiling import unable
from tests.kernel.interpreter import multiply_bfloat16_as_hardware_does
from tests.ops.attention.reference import reference
from tests.platforms.simulate import in_fresh_process
from tests.tolerances import assert_close, rel_error

pytestmark = pytest.mark.usefixtures("poison_empty")

LOG2_E = math.log2(math.e)


@pytest.fixture(autouse=True)
def bfloat16_products(device, monkeypatch):
    if device.type == "cpu":
        multiply_bfloat16_as_hardware_does(monkeypatch)


def formula(x, block, mean=None, factor=1.0):
    """Values and scales as the module text of `quantize_int8.py` has them; in float32, whose ties are the kernel's."""
    x = x if mean is None else x - mean
    x = x.float() * factor
    padded = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % block)).unflatten(2, (-1, block))
    scale = padded.abs().amax(dim=(-1, -2)) / torch.full((), 127.0, device=x.device)
    wide = scale.repeat_interleave(block, -1)[..., : x.shape[2], None]
    quotient = x / wide.masked_fill(wide == 0, 1)
    return (quotient + torch.where(quotient >= 0, 0.5, -0.5)).to(torch.int8), scale


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 63, 128, 333])
def test_values_and_scales_equal_the_formula(dtype, tokens, device):
    x = torch.randn(2, tokens, 3, 3, 40).unbind(2)[1].transpose(1, 2).to(device, dtype)
    mean = x.mean(dim=2, keepdim=True)
    for block, center, factor in ((128, None, -0.3), (64, mean, 1.0)):
        q, scale = per_block_quant_int8(x, block, center, factor)
        values, wanted_scale = formula(x, block, center, factor)
        assert torch.equal(scale, wanted_scale)
        assert torch.equal(q, values)


def test_a_block_of_zeros_and_a_large_one_do_not_touch_the_others(device):
    x = torch.randn(1, 2, 256, 64, device=device)
    before = per_block_quant_int8(x, 64)
    x[:, 0, 64:128], x[:, 1, :64] = 0, 1e6
    q, scale = per_block_quant_int8(x, 64)
    assert scale[0, 0, 1] == 0
    assert q[0, 0, 64:128].eq(0).all()
    assert q[0, 1, :64].eq(127).all()
    assert torch.equal(q[:, :, 128:], before[0][:, :, 128:])
    assert torch.equal(scale[:, :, 2:], before[1][:, :, 2:])


def run(q, k, v, scale, return_lse=True):
    """Attention of q, k, v [B, N, S, D] with smoothed keys; the log-sum-exp is that of the smoothed scores."""
    mean = k.mean(dim=2, keepdim=True)
    q8, q_scale = per_block_quant_int8(q, 128, factor=scale * LOG2_E)
    k8, k_scale = per_block_quant_int8(k, 64, mean)
    return *int8_attention(q8, k8, v, q_scale, k_scale, return_lse), (q8, q_scale, k8, k_scale)


def dequantised(x, scale, block):
    return x.double() * scale.double().repeat_interleave(block, -1)[..., : x.shape[2], None]


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (77, 130), (200, 64), (256, 333)])
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 64), (torch.float16, 128), (torch.bfloat16, 64)])
def test_equals_attention_over_the_dequantised_scores(dtype, head_dim, queries, keys, device):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, tokens, heads, head_dim, generator=generator).to(device, dtype).transpose(1, 2)
        for tokens, heads in ((queries, 4), (keys, 2), (keys, 2))
    )
    out, lse, (q8, q_scale, k8, k_scale) = run(q, k, v, head_dim**-0.5)
    wide_q, wide_k = dequantised(q8, q_scale, 128) / LOG2_E, dequantised(k8, k_scale, 64)
    expected, expected_lse = reference(wide_q, wide_k, v, scale=1.0, layout="BNSD")
    assert out.dtype is dtype
    assert out.transpose(1, 2).is_contiguous()
    assert_close(out, expected, "attention", dtype)
    assert_close(lse, expected_lse, "attention", torch.float32)
    exact = reference(q, k, v, layout="BNSD")[0]
    assert rel_error(out, exact) < 2e-2
    assert run(q, k, v, head_dim**-0.5, return_lse=False)[1] is None


def test_smoothing_keeps_keys_with_a_common_part_apart(device):
    q, k, v = (torch.randn(1, 2, 200, 64, device=device) for _ in range(3))
    k += 30 * torch.randn(1, 2, 1, 64, device=device)
    assert rel_error(run(q, k, v, 0.125)[0], reference(q, k, v, layout="BNSD")[0]) < 2e-2


def test_refuses_what_it_would_compute_wrongly(device):
    x = torch.randn(1, 1, 70, 64, device=device)
    for call, words in (
        (lambda: per_block_quant_int8(x.double(), 64), "float64"),
        (lambda: per_block_quant_int8(x, 96), "96"),
        (lambda: per_block_quant_int8(x, 64, x.mean(2)), r"give torch.float32 \(1, 1, 1, 64\)"),
        (lambda: int8_attention(x, x, x, x, x), "torch.float32"),
        (lambda: int8_attention(x.char(), x.char(), x, x, x), r"must be \(1, 1, 1\) and \(1, 1, 2\)"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


FOLDER = golden_dir()


@pytest.mark.skipif(FOLDER is None, reason="no reference folder: set TELEFUSER_GOLDEN or put it at ../shared/golden")
@pytest.mark.parametrize("case", ["c0", "c1"])
def test_equals_the_stored_quantisation_and_output(case, device):
    data = load_file(FOLDER / "sage" / "quant.safetensors", device=str(device))
    q, k, v, mean = (data[f"{case}.{name}"] for name in ("q", "k", "v", "km"))
    assert torch.equal(k.mean(dim=2, keepdim=True), mean)
    scale = q.shape[-1] ** -0.5
    out, _, quantised = run(q, k, v, scale)
    for got, name in zip(quantised, ("q_int8", "q_scale", "k_int8", "k_scale")):
        wanted = data[f"{case}.per_block.{name}"]
        if got.dtype is torch.int8:
            away = (got.int() - wanted.int()).abs()
            assert away.max() <= 1
            assert (away > 0).float().mean() < 1e-3
        else:
            assert torch.allclose(got, wanted, rtol=1e-6, atol=0)
    assert_close(out, data[f"{case}.per_block.dequant_out"], "attention", out.dtype)
    assert rel_error(out, data[f"{case}.exact_out"]) < 2e-2


COMPILE = """
from telefuser.kernel.triton.int8_attention import _int8_attention_kernel
from telefuser.kernel.triton.quantize_int8 import _per_block_quant_int8_kernel
from tests.kernel.compiling import compile_kernel

*target, tma = TARGET

def build(kernel, types, constants):
    print(compile_kernel(kernel, target, types, constants, num_warps=8 * 32 // target[2]).metadata.shared)

types = {"q": "*i8", "k": "*i8", "v": "*bf16", "out": "*bf16", "q_scale": "*fp32", "k_scale": "*fp32", "lse": "*fp32"}
if tma:
    types |= {"k": "tensordesc<i8[1,1,64,128]>", "v": "tensordesc<bf16[1,1,64,128]>"}
sizes = {"HEAD_DIM": 128, "ROWS": 128, "COLUMNS": 64, "TAIL": True, "TMA": tma, "STAGES": 3 if tma else 2}
build(_int8_attention_kernel, types, sizes)
types = {"x": "*bf16", "mean": "*bf16", "out": "*i8", "scales": "*fp32", "factor": "fp32"}
build(_per_block_quant_int8_kernel, types, {"BLOCK": 128, "WIDTH": 128})
"""
TARGETS = {
    "sm90": ("cuda", "90", 32, True, 227),
    "sm86": ("cuda", "86", 32, False, 99),
    "gfx942": ("hip", "gfx942", 64, False, 64),
    "gfx1201": ("hip", "gfx1201", 32, False, 64),
}


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compilers come with its Linux wheels")
@pytest.mark.parametrize("name", TARGETS)
def test_compiles_within_the_shared_memory_of_the_device(name, tmp_path):
    *target, kib = TARGETS[name]
    if (reason := unable(target[0], tma=target[3])) is not None:
        pytest.skip(reason)
    code = COMPILE.replace("TARGET", repr(tuple(target)))
    shared = in_fresh_process(code, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path)).split()
    assert len(shared) == 2
    assert max(map(int, shared)) <= kib * 1024
