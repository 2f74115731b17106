import sys

import pytest
import torch

from telefuser.kernel.triton.fp8_gemm import FEW_ROWS, LARGE, SAFE, Tile, scaled_mm_fp8
from telefuser.ops.fp8_quantization import quantize_weight
from tests.kernel.compiling import unable
from tests.platforms.simulate import in_fresh_process
from tests.tolerances import assert_close

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# M, N, K: one element, odd ones, more than a tile each way, more tiles than a group, a K of several steps.
SIZES = [(1, 1, 1), (5, 63, 100), (65, 129, 45), (130, 257, 300), (1100, 16, 17), (7, 48, 640)]


@pytest.fixture(autouse=True)
def fp8_here(device):
    torch.manual_seed(0)
    if device.type != "cpu" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("Triton compiles e4m3 from compute capability 8.9 on")  # B82


def operands(m, n, k, device="cpu", kinds=(E4M3, E4M3)):
    x, x_scale = quantize_weight(torch.randn(m, k), kinds[0])
    weight, weight_scale = quantize_weight(torch.randn(n, k), kinds[1])
    return tuple(t.to(device) for t in (x, x_scale, weight, weight_scale))


def exact(x, x_scale, weight, weight_scale, bias=None):
    out = (x.double() * x_scale.double()) @ (weight.double() * weight_scale.double()).T
    return out if bias is None else out + bias.double()


@pytest.mark.usefixtures("poison_empty")
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_agrees_with_float64_at_any_size(size, dtype, device):
    given = operands(*size, device)
    for bias in (None, torch.randn(size[1], device=device, dtype=dtype)):
        out = scaled_mm_fp8(*given, bias, dtype)
        assert out.dtype is dtype
        # On Hopper the sum is kept in 14 bits.
        assert_close(out, exact(*given, bias), "matmul", torch.bfloat16 if device.type == "cuda" else dtype)


@pytest.mark.parametrize("kinds", [(E4M3, E5M2), (E5M2, E5M2), (E5M2, E4M3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_pair_of_formats(kinds, dtype, device):
    given = operands(33, 50, 100, device, kinds)
    assert_close(scaled_mm_fp8(*given, None, dtype), exact(*given), "matmul", torch.float16)


def test_the_bias_keeps_its_own_dtype_and_zero_rows_are_the_bias(device):
    x, x_scale, weight, weight_scale = operands(9, 40, 64, device)
    x[4] = torch.zeros(64, device=device).to(E4M3)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        bias = torch.randn(40, device=device, dtype=dtype)
        assert torch.equal(scaled_mm_fp8(x, x_scale, weight, weight_scale, bias, dtype)[4], bias)
    wide = torch.randn(40, device=device)
    assert torch.equal(scaled_mm_fp8(x, x_scale, weight, weight_scale, wide, torch.bfloat16)[4], wide.bfloat16())


def test_rows_do_not_depend_on_their_company(device):
    # B84: the M = 257 run's rows equal those of runs of their own
    x, x_scale, weight, weight_scale = operands(257, 48, 96, device)
    out = scaled_mm_fp8(x, x_scale, weight, weight_scale, None, torch.float32)
    for row in (0, 128, 256):
        alone = scaled_mm_fp8(x[row : row + 1], x_scale[row : row + 1], weight, weight_scale, None, torch.float32)
        assert_close(out[row], alone[0], "matmul")


def test_outlier_rows_and_nan_stay_in_their_rows(device):
    # B80
    x, x_scale, weight, weight_scale = operands(6, 32, 64, device)
    wanted = scaled_mm_fp8(x, x_scale, weight, weight_scale)
    x_scale[1] *= 1e6
    x_scale[2] = float("nan")
    out = scaled_mm_fp8(x, x_scale, weight, weight_scale)
    assert torch.equal(out[[0, 3, 4, 5]], wanted[[0, 3, 4, 5]])
    assert out[2].isnan().all()


def test_strided_scales_and_operands(device):
    x, x_scale, weight, weight_scale = operands(12, 40, 64, device)
    every_other = x[::2], x_scale[::2]
    assert torch.equal(
        scaled_mm_fp8(*every_other, weight, weight_scale), scaled_mm_fp8(x, x_scale, weight, weight_scale)[::2]
    )
    scales = x_scale.expand(-1, 3)[:, 1:2]
    assert torch.equal(scaled_mm_fp8(x, scales, weight, weight_scale), scaled_mm_fp8(x, x_scale, weight, weight_scale))
    wide = torch.randn(80, device=device)
    for bias in (wide[::2], wide[:1].expand(40)):
        given = x, x_scale, weight, weight_scale
        assert torch.equal(scaled_mm_fp8(*given, bias), scaled_mm_fp8(*given, bias.clone().contiguous()))


def test_empty(device):
    # B26
    for m, n, k in ((0, 8, 16), (8, 0, 16)):
        assert scaled_mm_fp8(*operands(m, n, k, device)).shape == (m, n)


def test_refuses_what_it_would_compute_wrongly(device):
    x, x_scale, weight, weight_scale = operands(4, 8, 16, device)
    with pytest.raises(ValueError, match=r"not torch.int8"):
        scaled_mm_fp8(x.view(torch.int8), x_scale, weight, weight_scale)
    with pytest.raises(ValueError, match=r"into torch.float64"):
        scaled_mm_fp8(x, x_scale, weight, weight_scale, None, torch.float64)
    with pytest.raises(ValueError, match=r"\(4, 16\) and \(8, 15\)"):
        scaled_mm_fp8(x, x_scale, weight[:, :15], weight_scale)
    with pytest.raises(ValueError, match=r"x_scale must be \[4, 1\] float32, got \(1, 1\)"):
        scaled_mm_fp8(x, x_scale[:1], weight, weight_scale)
    with pytest.raises(ValueError, match=r"bias must be \[8\]"):
        scaled_mm_fp8(x, x_scale, weight, weight_scale, torch.ones(4, device=device))


COMPILE = """
from telefuser.kernel.triton.fp8_gemm import _scaled_mm_fp8_kernel as kernel
from tests.kernel.compiling import compile_kernel

*target, kinds, tile = TARGET
for x, weight in kinds:
    for bias, even, out in ((None, True, "*bf16"), ("*bf16", False, "*fp32")):
        types = {"x": x, "weight": weight, "x_scale": "*fp32", "weight_scale": "*fp32", "bias": bias, "out": out}
        constants = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), tile)) | {"GROUP": 8, "EVEN_K": even}
        constants |= {"bias": None} if bias is None else {}
        aligned = ("x", "weight", "out", "K")
        built = compile_kernel(kernel, target, types, constants, aligned, num_warps=tile[4], num_stages=tile[3])
        print(built.metadata.shared, flush=True)
"""
_NVIDIA = [("*fp8e4nv", "*fp8e4nv"), ("*fp8e5", "*fp8e5"), ("*fp8e4nv", "*fp8e5")]


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compilers come with its Linux wheels")
@pytest.mark.parametrize(
    ("target", "limit"),
    [
        (("cuda", "90", 32, _NVIDIA, LARGE["sm90"]), 227),
        (("cuda", "89", 32, _NVIDIA[:1], LARGE["sm89"]), 99),
        (("hip", "gfx942", 64, [("*fp8e4b8", "*fp8e4b8")], SAFE), 64),
        (("hip", "gfx1201", 32, _NVIDIA[:1], FEW_ROWS), 64),
    ],
    ids=["sm90", "sm89", "gfx942", "gfx1201"],
)
def test_compiles_within_the_shared_memory_of(target, limit, tmp_path):
    if (reason := unable(target[0])) is not None:
        pytest.skip(reason)
    shared = in_fresh_process(
        COMPILE.replace("TARGET", repr(tuple(tuple(part) if isinstance(part, Tile) else part for part in target))),
        TRITON_INTERPRET="0",
        TRITON_CACHE_DIR=str(tmp_path),
    ).split()
    assert len(shared) == 2 * len(target[3])
    assert all(int(size) <= limit * 1024 for size in shared), shared
