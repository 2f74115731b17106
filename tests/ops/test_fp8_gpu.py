"""FP8 linear layers on an NVIDIA GPU: the product that the table chooses, at real and at awkward sizes."""

import pytest
import torch
from torch import nn

from telefuser import platforms
from telefuser.core.config import QuantKernelBackend
from telefuser.ops.fp8_gemm import ORDER, TABLE, Product, choose, native_linear
from telefuser.ops.fp8_quantization import quantize_rows, quantize_rows_native
from telefuser.ops.quantized_linear import LinearFP8, convert_params_to_buffers, replace_linear_layers
from tests.tolerances import assert_close, rel_error, tolerance

pytestmark = pytest.mark.gpu
E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def no_grad():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def multiplies_fp8():
    return platforms.current_platform.fp8_unavailable_reason() is None


@pytest.fixture
def fp8_hardware():
    if not multiplies_fp8():
        pytest.skip("this GPU does not multiply FP8")


def layer(columns, rows, bias=True, dtype=torch.bfloat16):
    linear = nn.Linear(columns, rows, bias=bias, device="cuda", dtype=dtype)
    return linear, LinearFP8(linear)


def test_sample_of_the_specification():
    # S195, S196, C10: the layer was made on the CPU and follows its first input
    linear = nn.Linear(1024, 4096)
    fp8_linear = LinearFP8(linear, data_type=E4M3)
    x = torch.randn(2, 256, 1024, device="cuda")
    out = fp8_linear(x)
    assert (out.device, out.dtype, out.shape) == (x.device, torch.float32, (2, 256, 4096))
    assert fp8_linear.weight.device == x.device
    assert_close(out, linear.to("cuda")(x), "fp8_linear")


@pytest.mark.parametrize("rows", [1, 2, 7, 17, 255, 257, 8352])
@pytest.mark.parametrize("bias", [False, True])
def test_every_number_of_tokens(rows, bias):
    # B84
    linear, fp8 = layer(4096, 1536, bias)
    x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
    out = fp8(x)
    assert_close(out, linear(x), "fp8_linear")
    for row in {0, rows // 2, rows - 1}:
        # A row's result does not depend on its company beyond the order of the sum.
        assert_close(out[row], fp8(x[row : row + 1])[0], "matmul")


@pytest.mark.parametrize(("columns", "rows"), [(1536, 1536), (1536, 8960), (8960, 1536), (100, 63), (5120, 13824)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_model_sizes_and_dtypes(columns, rows, dtype):
    # B90: sizes that are no multiple of 16 go native
    linear, fp8 = layer(columns, rows, dtype=dtype)
    x = torch.randn(2, 3, 170, columns, device="cuda", dtype=dtype)
    x[0, 0, 3] *= 1000
    x[0, 0, 5] = 0
    out, wanted = fp8(x), linear(x)
    assert out.dtype == dtype
    assert torch.equal(out[0, 0, 5], linear.bias)
    assert_close(out[1], wanted[1], "fp8_linear")
    assert rel_error(out[0, 0, 3], wanted[0, 0, 3]) <= 1.25 * tolerance("fp8_linear", dtype)
    with torch.autocast("cuda", torch.bfloat16):
        assert fp8(x).dtype is torch.bfloat16


@pytest.mark.usefixtures("fp8_hardware")
def test_every_product_here_agrees_with_the_native_form():
    # S199, S200, S201
    _, fp8 = layer(512, 256)
    x = torch.randn(100, 512, device="cuda", dtype=torch.bfloat16)
    q, scale = quantize_rows(x, E4M3)
    wanted = native_linear(q.float() * scale, fp8.weight, fp8.weight_scale, fp8.bias)
    ran = []
    for impl in ORDER:
        entry = TABLE.probe(impl, x.device)
        if not isinstance(entry, str):
            product = Product(q, scale, fp8.weight, fp8.weight_scale, fp8.bias, torch.bfloat16)
            assert_close(TABLE.record(impl).run(entry, product), wanted, "matmul")
            ran.append(impl)
    assert QuantKernelBackend.TORCH_SCALED_MM in ran
    assert choose(x.device, fp8.weight)[0].impl in ran


@pytest.mark.usefixtures("fp8_hardware")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [1536, 5120, 13824])
def test_quantiser_kernel_equals_the_formula(dtype, width):
    x = (torch.randn(3, 50, width, device="cuda") * 3).to(dtype)
    x[1, 3] = 0
    (q, scale), (wanted, wanted_scale) = quantize_rows(x, E4M3), quantize_rows_native(x, E4M3)
    assert torch.equal(scale, wanted_scale)
    assert torch.equal(q.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.usefixtures("fp8_hardware")
def test_no_call_waits_for_the_device():
    # B114
    _, fp8 = layer(512, 256)
    x = torch.randn(100, 512, device="cuda", dtype=torch.bfloat16)
    fp8(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        fp8(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_captured_in_a_graph():
    # B112: another number of tokens than the warm-up had
    _, fp8 = layer(512, 256)
    x = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16)
    fp8(torch.randn(8, 512, device="cuda", dtype=torch.bfloat16))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fp8(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    assert_close(out, fp8(x), "matmul")


def test_inputs_on_the_cpu():
    # B16
    linear = nn.Linear(64, 32)
    x = torch.randn(5, 64)
    assert_close(LinearFP8(linear)(x), linear(x), "fp8_linear")
    with pytest.raises(RuntimeError, match="device"):
        LinearFP8(linear).to("cuda")(x)


def test_model_moved_and_cast_after_quantisation():
    # S211, S213
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    x = torch.randn(8, 256)
    wanted = model(x)
    replace_linear_layers(model)
    model = convert_params_to_buffers(model.to("cuda", torch.bfloat16))
    assert model[0].weight_scale.dtype is torch.float32
    assert rel_error(model(x.to("cuda", torch.bfloat16)), wanted) <= 0.07  # two layers deep


def test_memory_halves():
    # S203
    model = nn.Sequential(*[nn.Linear(4096, 4096, bias=False, device="cuda", dtype=torch.bfloat16) for _ in range(4)])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    report = replace_linear_layers(model)
    assert before - torch.cuda.memory_allocated() == pytest.approx(report.bytes_saved, rel=0.01)
    one_layer = 4096 * 4096 * 2
    assert torch.cuda.max_memory_allocated() - before <= one_layer


@pytest.mark.usefixtures("fp8_hardware")
def test_compiled_layer():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to("cuda", torch.bfloat16)
    replace_linear_layers(model)
    x = torch.randn(100, 256, device="cuda", dtype=torch.bfloat16)
    out = torch.compile(model, fullgraph=True)(x)
    # The fused GELU is not rounded to bfloat16 before FP8, so 3 % of its values fall one FP8 step (6 %) aside.
    assert rel_error(out, model(x)) <= 0.03


@pytest.mark.usefixtures("fp8_hardware")
@pytest.mark.parametrize(("columns", "rows"), [(100, 63), (1537, 1536), (5120, 5119), (8960, 1536)])
@pytest.mark.parametrize("kind", [E4M3, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_triton_kernel_at_any_size(columns, rows, kind, dtype):
    # B84: many tiles, few rows, a last tile that is not full
    record = TABLE.record(QuantKernelBackend.TRITON)
    entry = TABLE.probe(QuantKernelBackend.TRITON, torch.device("cuda", 0))
    assert not isinstance(entry, str), entry
    fp8 = LinearFP8(nn.Linear(columns, rows, device="cuda", dtype=dtype), kind)
    for tokens in (1, 17, 64, 65, 2001):
        q, scale = quantize_rows(torch.randn(tokens, columns, device="cuda", dtype=dtype), E4M3)
        out = record.run(entry, Product(q, scale, fp8.weight, fp8.weight_scale, fp8.bias, dtype))
        wanted = native_linear(q.float() * scale, fp8.weight, fp8.weight_scale, fp8.bias)
        assert out.dtype is dtype
        # The tensor cores of Hopper keep 14 bits of the sum.
        assert_close(out, wanted, "matmul", torch.bfloat16)


@pytest.mark.usefixtures("fp8_hardware")
def test_odd_sizes_and_e5m2_are_multiplied_in_fp8():
    for columns, rows, kind in ((100, 63, E4M3), (512, 256, torch.float8_e5m2)):
        linear = nn.Linear(columns, rows, device="cuda", dtype=torch.bfloat16)
        fp8 = LinearFP8(linear, kind)
        assert choose(torch.device("cuda", 0), fp8.weight)[0].impl is QuantKernelBackend.TRITON
        x = torch.randn(300, columns, device="cuda", dtype=torch.bfloat16)
        x[7] = 0
        out = fp8(x)
        assert_close(out, linear(x), "fp8_linear" if kind is E4M3 else "fp8_linear_e5m2")
        assert torch.equal(out[7], linear.bias)
