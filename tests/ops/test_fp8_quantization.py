"""The formula of row-wise FP8 quantisation, and when its kernel may run."""

import pytest
import torch

import telefuser.kernel.triton as kernels
from telefuser import platforms
from telefuser.ops import fp8_quantization
from telefuser.ops.fp8_quantization import (
    FP8_DTYPES,
    dequantize_rows,
    hardware_dtype,
    quantize_rows,
    quantize_weight,
    row_chunks,
)
from tests.ops.machines import on_cpu, use
from tests.platforms.simulate import gpu_build

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Half a step of a format with 3 or 2 bits behind the leading one.
HALF_STEP = {E4M3: 2**-4, torch.float8_e4m3fnuz: 2**-4, E5M2: 2**-3, torch.float8_e5m2fnuz: 2**-3}


@pytest.mark.parametrize("dtype", FP8_DTYPES)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_value_is_within_half_a_step(dtype, given):
    x = (torch.randn(7, 100) * 3).to(given)
    q, scale = quantize_rows(x, dtype)
    assert (q.dtype, scale.dtype, scale.shape) == (dtype, torch.float32, (7, 1))
    wide = x.double()
    assert torch.allclose(scale.double() * torch.finfo(dtype).max, wide.abs().amax(-1, keepdim=True), rtol=1e-6)
    # Below the smallest normal number the steps stop shrinking.
    floor = torch.finfo(dtype).smallest_normal * scale.double()
    error = (q.double() * scale.double() - wide).abs()
    assert (error <= HALF_STEP[dtype] * torch.maximum(wide.abs(), floor) * (1 + 1e-6)).all()


def test_one_row_does_not_disturb_another():
    # B80
    x = torch.randn(4, 64)
    alone = quantize_rows(x, E4M3)
    x[3] *= 1e6
    q, scale = quantize_rows(x, E4M3)
    assert torch.equal(q[:3].float(), alone[0][:3].float())
    assert torch.equal(scale[:3], alone[1][:3])


def test_zeros_and_the_smallest_numbers_never_give_nan():
    x = torch.stack([torch.zeros(32), torch.full((32,), 1e-45), torch.full((32,), 3e38), torch.randn(32)])
    for dtype in FP8_DTYPES:
        q, scale = quantize_rows(x, dtype)
        assert q.float().isfinite().all()
        assert scale.isfinite().all()
        assert (q[0].float() == 0).all()


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)])
def test_empty_tensors(shape):
    q, scale = quantize_rows(torch.empty(shape), E4M3)
    assert q.shape == shape
    assert scale.shape == (*shape[:-1], 1)


def test_weight_in_pieces_equals_the_whole(monkeypatch):
    weight = torch.randn(37, 20)
    whole = quantize_rows(weight, E4M3)
    monkeypatch.setattr(fp8_quantization, "_CHUNK", 100)
    assert [s.stop - s.start for s in row_chunks(weight, 100)] == [5] * 7 + [2]
    q, scale = quantize_weight(weight, E4M3)
    assert torch.equal(q.view(torch.uint8), whole[0].view(torch.uint8))
    assert torch.equal(scale, whole[1])


def test_dequantisation_rounds_once():
    q, scale = quantize_rows(torch.randn(5, 64), E4M3)
    assert torch.equal(dequantize_rows(q, scale, torch.bfloat16), (q.double() * scale.double()).float().bfloat16())


def test_weight_on_meta_stays_on_meta():
    q, scale = quantize_weight(torch.empty(6, 4, device="meta"), E4M3)
    assert (q.device.type, q.dtype, scale.shape) == ("meta", E4M3, (6, 1))


class Recorder:
    def __init__(self, monkeypatch):
        self.calls = 0
        monkeypatch.setattr(kernels, "per_token_quant_fp8", self)

    def __call__(self, x, dtype):
        self.calls += 1
        return fp8_quantization.quantize_rows_native(x, dtype)


@pytest.mark.parametrize(
    ("arch", "launches"), [((8, 0), 0), ((8, 6), 0), ((8, 9), 1), ((9, 0), 1), ((10, 0), 1), ((12, 0), 1)]
)
def test_kernel_is_launched_where_triton_compiles_its_type(arch, launches, monkeypatch):
    # B82
    pytest.importorskip("triton", reason="without Triton no kernel is launched anywhere")
    platform = use(monkeypatch, on_cpu(platforms.CudaPlatform))
    monkeypatch.setattr(platform, "cuda_arch", lambda device=None: arch, raising=False)
    recorder, x = Recorder(monkeypatch), torch.randn(3, 32)
    _, scale = quantize_rows(x, E4M3)
    assert recorder.calls == launches
    assert torch.equal(scale, fp8_quantization.quantize_rows_native(x, E4M3)[1])
    # e5m2 and the other vendor's variants are never products of this hardware.
    quantize_rows(x, E5M2)
    quantize_rows(x, torch.float8_e4m3fnuz)
    assert recorder.calls == launches


def test_format_follows_the_hardware(monkeypatch):
    # B94: MI300 computes the fnuz variants only
    assert [hardware_dtype(dtype) for dtype in FP8_DTYPES] == list(FP8_DTYPES)
    gpu_build(monkeypatch, "rocm", capability=(9, 4))
    use(monkeypatch, platforms.RocmPlatform())
    fnuz = [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
    assert [hardware_dtype(dtype) for dtype in FP8_DTYPES] == fnuz + fnuz
    gpu_build(monkeypatch, "rocm", capability=(12, 0), gcn_arch="gfx1201")
    use(monkeypatch, platforms.RocmPlatform())
    assert hardware_dtype(E4M3) is E4M3
