"""Which FP8 product runs, what it is given, and that all of them and the native form agree."""

import logging
import sys

import pytest
import torch
import torch.nn.functional as F

from telefuser import platforms
from telefuser.core.config import QuantKernelBackend
from telefuser.ops import fp8_gemm, fp8_quantization
from telefuser.ops.fp8_gemm import TABLE, choose, describe_choice, fp8_linear, native_linear
from telefuser.ops.fp8_quantization import dequantize_rows, quantize_rows, quantize_weight
from tests.ops.fp8_machines import VLLM, extension, fresh_table, gpu, installed
from tests.ops.machines import use
from tests.platforms.simulate import gpu_build
from tests.tolerances import assert_close, rel_error, tolerance

__all__ = ["fresh_table", "gpu", "installed"]
E4M3 = torch.float8_e4m3fn
NATIVE, SCALED_MM = QuantKernelBackend.NATIVE, QuantKernelBackend.TORCH_SCALED_MM
CPU = torch.device("cpu")


def layer(rows=48, columns=64, dtype=torch.float8_e4m3fn, bias_dtype=torch.float32):
    return (*quantize_weight(torch.randn(rows, columns), dtype), torch.randn(rows, dtype=bias_dtype))


def exact(x, weight, scale, bias=None):
    """The product with the dequantised weight in float64."""
    out = x.double() @ (weight.double() * scale.double()).t()
    return out if bias is None else out + bias.double()


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# The native form


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", fp8_quantization.FP8_DTYPES)
def test_native_agrees_with_float64(dtype, kind):
    for bias in (True, False):
        weight, scale, b = layer(31, 45, kind)
        x, b = torch.randn(2, 5, 45).to(dtype), b if bias else None
        out = native_linear(x, weight, scale, b)
        assert (out.dtype, out.shape) == (dtype, (2, 5, 31))
        # float64 too takes the weight from a float32 product.
        assert_close(out, exact(x, weight, scale, b), "matmul", torch.float32 if dtype is torch.float64 else dtype)


def test_native_multiplies_the_weight_in_pieces(monkeypatch):
    weight, scale, bias = layer(37, 20)
    x, widest = torch.randn(3, 20), []
    whole = native_linear(x, weight, scale, bias)
    monkeypatch.setattr(fp8_gemm, "_CHUNK", 100)
    monkeypatch.setattr(
        fp8_gemm, "dequantize_rows", lambda q, *rest: widest.append(q.numel()) or dequantize_rows(q, *rest)
    )
    assert_close(native_linear(x, weight, scale, bias), whole)
    assert max(widest) == 100
    assert sum(widest) == weight.numel()


# The choice


def test_a_cpu_multiplies_in_the_dtype_of_the_input(caplog):
    # S201, S215, and nobody is warned of what a CPU is
    weight, scale, bias = layer()
    x = torch.randn(3, 64)
    assert choose(CPU, weight)[0].impl is NATIVE
    assert torch.equal(fp8_linear(x, weight, scale, bias), native_linear(x, weight, scale, bias))
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    ("arch", "impl"),
    [((7, 5), NATIVE), ((8, 0), NATIVE), ((8, 6), NATIVE), ((8, 9), SCALED_MM), ((9, 0), SCALED_MM)]
    + [((10, 0), SCALED_MM), ((12, 0), SCALED_MM)],
)
def test_capability_decides(arch, impl, gpu, monkeypatch, caplog):
    gpu(arch)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.8.0"))
    weight, *_ = layer()
    for _ in range(3):
        assert choose(CPU, weight)[0].impl is impl
    assert len(warnings(caplog)) == (impl is NATIVE)
    if impl is NATIVE:
        assert "8.9" in warnings(caplog)[0]
    assert describe_choice().startswith(impl.name)


def test_old_pytorch_scales_rows_on_hopper_only(gpu, monkeypatch):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.7.1+cu128"))
    weight, *_ = layer()
    for arch, impl in (((8, 9), NATIVE), ((9, 0), SCALED_MM), ((12, 0), NATIVE)):
        gpu(arch)
        assert choose(CPU, weight)[0].impl is impl
    assert "2.8" in describe_choice()


def test_tf_kernel_first_then_vllm_then_pytorch(gpu, installed):
    # S199, S200, S201, S191: each with what it takes, and the same numbers
    weight, scale, bias = layer(bias_dtype=torch.bfloat16)
    x = torch.randn(2, 5, 64).bfloat16()
    wanted = exact(x, weight, scale, bias)
    calls = []

    platform = gpu((9, 0))
    out = fp8_linear(x, weight, scale, bias)
    assert platform.calls == [("scaled_mm", True)]
    assert_close(out, wanted, "fp8_linear")

    installed("vllm._custom_ops", VLLM)
    TABLE.forget()
    assert torch.equal(fp8_linear(x, weight, scale, bias), out)
    assert sys.modules["vllm._custom_ops"].calls == ["vllm"]

    installed("tf_kernel")
    TABLE.forget()
    gpu((9, 0), tf_kernel=extension(calls))
    assert torch.equal(fp8_linear(x, weight, scale, bias), out)
    assert calls == ["tf_kernel"]
    assert describe_choice().startswith("TF_KERNEL: tf_kernel.fp8_scaled_mm. NATIVE where a size is no multiple of 16")


def test_fast_accumulation_is_for_hopper(gpu, monkeypatch):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.8.0"))
    for arch, fast in (((8, 9), False), ((9, 0), True), ((10, 0), False)):
        platform = gpu(arch)
        weight, scale, _ = layer()
        fp8_linear(torch.randn(4, 64).bfloat16(), weight, scale)
        assert platform.calls == [("scaled_mm", fast)]


@pytest.mark.parametrize(("rows", "columns"), [(48, 60), (31, 64), (31, 45)])
def test_sizes_that_are_no_multiple_of_16_go_native(rows, columns, gpu, caplog):
    platform = gpu()
    weight, scale, bias = layer(rows, columns)
    x = torch.randn(3, columns)
    for _ in range(2):
        assert torch.equal(fp8_linear(x, weight, scale, bias), native_linear(x, weight, scale, bias))
    assert platform.calls == []
    (text,) = warnings(caplog)
    assert "multiples of 16" in text
    assert f"{rows} rows of {columns}" in text


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fnuz])
def test_another_format_than_the_hardware_multiplies_goes_native(dtype, gpu):
    # B94: operands never mix formats
    platform = gpu()
    weight, scale, bias = layer(dtype=dtype)
    x = torch.randn(3, 64)
    assert torch.equal(fp8_linear(x, weight, scale, bias), native_linear(x, weight, scale, bias))
    assert platform.calls == []


def test_a_shape_that_pytorch_refuses_costs_the_others_nothing(gpu, monkeypatch, caplog):
    # cuBLAS has no FP8 kernel for some numbers of rows, and says so only when it is called.
    platform = gpu()
    multiply, asked = torch._scaled_mm, []

    def refuses_odd_rows(x, *rest, **options):
        asked.append(len(x))
        if len(x) % 2:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        return multiply(x, *rest, **options)

    monkeypatch.setattr(torch, "_scaled_mm", refuses_odd_rows)
    weight, scale, bias = layer(bias_dtype=torch.bfloat16)
    for rows in (4, 5, 7, 5, 6):
        x = torch.randn(rows, 64).bfloat16()
        assert_close(fp8_linear(x, weight, scale, bias), exact(x, weight, scale, bias), "fp8_linear")
    assert asked == [4, 5, 7, 6]
    assert len(platform.calls) == 2
    left_out = [text for text in warnings(caplog) if "TORCH_SCALED_MM is left out for" in text]
    assert ["5 rows of 64 to 48 with bias" in left_out[0], "7 rows" in left_out[1], len(left_out)] == [True, True, 2]


@pytest.fixture
def with_kernels(gpu, interpreted_cuda, monkeypatch):
    """`gpu` of a machine that takes the package's Triton kernels, through the interpreter; `launched` counts them."""
    import telefuser.kernel.triton as kernels
    from tests.kernel.interpreter import round_fp8_as_hardware_does

    round_fp8_as_hardware_does(monkeypatch)
    launch = kernels.scaled_mm_fp8

    def install(arch=(9, 0)):
        platform = gpu(arch)
        platform.op_keys, platform.launched = ("cuda",), []

        def record(x, x_scale, weight, weight_scale, bias, dtype):
            platform.launched.append((x.dtype, weight.dtype, dtype))
            return launch(x, x_scale, weight, weight_scale, bias, dtype)

        monkeypatch.setattr(kernels, "scaled_mm_fp8", record)
        return platform

    return install


@pytest.mark.parametrize(("rows", "columns"), [(48, 60), (31, 64), (31, 45)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_awkward_sizes_take_the_triton_kernel(rows, columns, dtype, with_kernels, caplog):
    # B84
    platform = with_kernels()
    weight, scale, bias = layer(rows, columns)
    x = torch.randn(2, 3, columns).to(dtype)
    x[1, 0] = 0
    out = fp8_linear(x, weight, scale, bias)
    assert platform.launched == [(E4M3, E4M3, dtype)]
    assert platform.calls == []
    assert_close(out, exact(x, weight, scale, bias), "fp8_linear")
    assert torch.equal(out[1, 0], bias.to(dtype))
    assert warnings(caplog) == []
    fp8_linear(torch.randn(3, 64).to(dtype), *layer()[:2])
    assert len(platform.calls) == len(platform.launched) == 1


def test_an_e5m2_weight_meets_e4m3_rows(with_kernels):
    platform = with_kernels()
    weight, scale, bias = layer(dtype=torch.float8_e5m2)
    x = torch.randn(8, 64).bfloat16()
    out = fp8_linear(x, weight, scale, bias)
    assert platform.launched == [(E4M3, torch.float8_e5m2, torch.bfloat16)]
    # Against the dequantised weight the rounding of e4m3 is all that is left.
    assert_close(out, exact(x, weight, scale, bias), "fp8_linear")
    rows = quantize_rows(x, torch.float8_e5m2)
    out = fp8_gemm.fp8_gemm(*rows, weight, scale, bias, torch.bfloat16)
    assert_close(out, exact(dequantize_rows(*rows, torch.float64), weight, scale, bias), "matmul")


def test_triton_where_pytorch_is_too_old(with_kernels, monkeypatch):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.7.1+cu128"))
    with_kernels((8, 9))
    assert choose(CPU, layer()[0])[0].impl is QuantKernelBackend.TRITON
    assert describe_choice().startswith(
        "TRITON: a Triton kernel, for any sizes and for e5m2 (TF_KERNEL: package tf_kernel"
    )
    assert "TORCH_SCALED_MM: PyTorch 2.7.1+cu128 scales rows on compute capability 9.x only" in describe_choice()
    with_kernels((9, 0))
    assert "TRITON where a size is no multiple of 16" in describe_choice()
    with_kernels((8, 6))
    assert choose(CPU, layer()[0])[0].impl is NATIVE


def test_no_triton_kernel_below_its_capability_or_without_triton(with_kernels, monkeypatch):
    # B82
    with_kernels((8, 0))
    weight, scale, bias = layer(31, 45)
    x = torch.randn(3, 45)
    assert torch.equal(fp8_linear(x, weight, scale, bias), native_linear(x, weight, scale, bias))
    monkeypatch.setattr(fp8_gemm.kernel, "HAS_TRITON", False)
    platform = with_kernels((9, 0))
    assert torch.equal(fp8_linear(x, weight, scale, bias), native_linear(x, weight, scale, bias))
    assert "NATIVE where a size is no multiple of 16" in describe_choice()
    assert platform.launched == []


def test_amd_multiplies_its_own_variant_and_loads_nothing_of_cuda(monkeypatch, installed):
    # B94, B02, S202: gfx942 reports capability (9, 4) and must not be taken for Hopper
    installed("vllm._custom_ops", VLLM)
    installed("tf_kernel")
    gpu_build(monkeypatch, "rocm", capability=(9, 4))
    use(monkeypatch, platforms.RocmPlatform())
    device = torch.device("cuda", 0)
    weight, *_ = layer(dtype=torch.float8_e4m3fnuz)
    assert choose(device, weight)[0].impl is SCALED_MM
    assert choose(device, layer()[0])[0].impl is NATIVE
    assert describe_choice().startswith("TORCH_SCALED_MM")
    gpu_build(monkeypatch, "rocm", capability=(11, 0), gcn_arch="gfx1100")
    use(monkeypatch, platforms.RocmPlatform())
    assert choose(device, layer()[0])[0].impl is NATIVE
    assert not {"vllm", "tf_kernel"} & set(sys.modules)


def test_a_package_that_fails_is_left_out(gpu, installed, caplog):
    def broken(*_):
        raise RuntimeError("no kernel image is available\nfor this device")

    installed("tf_kernel")
    platform = gpu()
    platform.extension = extension([])
    platform.extension.fp8_scaled_mm = broken
    weight, scale, _ = layer()
    x = torch.randn(3, 64)
    for _ in range(2):
        assert_close(fp8_linear(x, weight, scale), exact(x, weight, scale), "fp8_linear")
    assert [name for name, _ in platform.calls] == ["scaled_mm"] * 2
    (text,) = warnings(caplog)
    assert "no kernel image is available" in text


# Numbers of the FP8 path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16, None])
def test_fp8_product_of_every_dtype(dtype, bias_dtype, gpu):
    # B90
    platform = gpu()
    weight, scale, bias = layer(96, 128, bias_dtype=bias_dtype or torch.float32)
    bias = bias if bias_dtype else None
    x = torch.randn(5, 128).to(dtype)
    out = fp8_linear(x, weight, scale, bias)
    assert out.dtype == dtype
    assert len(platform.calls) == 1
    assert_close(out, exact(x, weight, scale, bias), "fp8_linear")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zero_rows_are_exactly_the_bias(dtype, gpu):
    gpu()
    weight, scale, bias = layer()
    x = torch.randn(4, 64).to(dtype)
    x[2] = 0
    assert torch.equal(fp8_linear(x, weight, scale, bias)[2], bias.to(dtype))
    assert torch.equal(fp8_linear(x, weight, scale)[2], torch.zeros(48, dtype=dtype))


def test_an_outlier_row_leaves_the_others_alone(gpu):
    # B80
    platform = gpu()
    weight, scale, bias = layer(96, 256)
    x = torch.randn(64, 256)
    alone = fp8_linear(x, weight, scale, bias)
    for factor in (1e3, 1e6):
        y = x.clone()
        y[3] *= factor
        out = fp8_linear(y, weight, scale, bias)
        others = torch.arange(64) != 3
        assert torch.equal(out[others], alone[others])
        assert rel_error(out[3], exact(y, weight, scale, bias)[3]) <= tolerance("fp8_linear", torch.float32)
    assert len(platform.calls) == 3


def test_strided_and_deep_inputs(gpu):
    platform = gpu()
    weight, scale, bias = layer()
    x = torch.randn(2, 64, 3, 5).permute(0, 3, 2, 1)
    out = fp8_linear(x, weight, scale, bias)
    assert out.shape == (2, 5, 3, 48)
    assert torch.equal(out, fp8_linear(x.contiguous(), weight, scale, bias))
    assert torch.equal(out[1, 2, 0], fp8_linear(x[1, 2, 0], weight, scale, bias))
    assert len(platform.calls) == 3


def test_a_product_of_values_that_are_fp8_already(gpu):
    platform = gpu()
    weight, scale, bias = layer()
    x = torch.randn(2, 3, 64).bfloat16()
    q, x_scale = quantize_rows(x, weight.dtype)
    out = fp8_gemm.fp8_gemm(q, x_scale, weight, scale, bias, torch.bfloat16)
    assert torch.equal(out, fp8_linear(x, weight, scale, bias))
    assert len(platform.calls) == 2
    use_native = fp8_gemm.fp8_gemm(q[:, :0], x_scale[:, :0], weight, scale, bias, torch.bfloat16)
    assert use_native.shape == (2, 0, 48)


def test_gradients_take_the_native_form(gpu):
    platform = gpu()
    weight, scale, bias = layer()
    x = torch.randn(3, 64, requires_grad=True)
    fp8_linear(x, weight, scale, bias).square().sum().backward()
    wanted = x.detach().clone().requires_grad_()
    F.linear(wanted, dequantize_rows(weight, scale, torch.float32), bias).square().sum().backward()
    assert_close(x.grad, wanted.grad)
    assert platform.calls == []


@pytest.mark.parametrize("where", ["x", "weight"])
def test_tensors_on_different_devices_give_the_error_of_pytorch(where, gpu):
    # B16
    platform = gpu()
    weight, scale, _ = layer()
    x = torch.randn(3, 64)
    x, weight = (x.to("meta"), weight) if where == "x" else (x, weight.to("meta"))
    with pytest.raises((RuntimeError, NotImplementedError)):
        fp8_linear(x, weight, scale).sum().item()
    assert platform.calls == []
