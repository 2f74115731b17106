"""The operators on a real GPU: their kernels run, agree with the native forms, and bear what a model does to them."""

import pytest
import torch

import telefuser.kernel.triton as kernels
from telefuser import platforms
from telefuser.kernel.triton import launch
from telefuser.ops import (
    AdaLayerNormContinuous,
    LayerNorm,
    RMSNorm,
    add_gated,
    add_layer_norm_modulate,
    apply_rotary_emb,
    fused_scale_shift,
    layer_norm_modulate,
    modulate,
    rms_norm_rotary,
)
from telefuser.ops.activations import (
    GEGLU,
    GELU,
    ApproximateGELU,
    FP32SiLU,
    GELUTanh,
    SwiGLU,
    gelu_and_mul,
    gelu_tanh,
    silu_and_mul,
)
from telefuser.ops.ffn import linear_gelu_tanh
from telefuser.ops.fp8_quantization import quantize_rows
from telefuser.ops.quantized_rows import QuantizedRows
from tests.kernel.layouts import LAYOUTS, strided
from tests.ops.machines import use
from tests.ops.rounding import assert_rounded_once
from tests.platforms.simulate import in_fresh_process
from tests.tolerances import assert_close

pytestmark = pytest.mark.gpu
HALF = [torch.bfloat16, torch.float16]
LAUNCHERS = ("rms_norm", "layer_norm", "fused_scale_shift", "apply_rotary_embedding", "activate", "activate_and_mul")
LAUNCHERS += ("add_layer_norm", "add_gated", "rms_norm_rotary", "per_token_quant_fp8", "activate_quant_fp8")
LAUNCHERS += ("activate_and_mul_quant_fp8",)


class NativeOnly:
    """The CUDA platform without kernels."""

    op_keys = ()


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def launched(monkeypatch):
    """Names of the launchers that ran."""
    names = []
    for name in LAUNCHERS:
        launch = getattr(kernels, name)

        def record(*args, name=name, launch=launch, **options):
            names.append(name)
            return launch(*args, **options)

        monkeypatch.setattr(kernels, name, record)
    return names


def rotate(x):
    """Rotation of [B, S, H, D] by angles that depend on the shape only."""
    tokens, half = x.shape[1], x.shape[3] // 2
    angles = torch.arange(tokens * half, dtype=torch.float32, device=x.device).view(tokens, half) * 0.01
    return apply_rotary_emb(x, (angles.cos(), angles.sin()))


def operators(width, dtype, device="cuda"):
    """Each operator of one [..., width] tensor, with the launcher it must take."""
    torch.manual_seed(0)
    rms, layer = RMSNorm(width, eps=1e-6).to(device), LayerNorm(width).to(device, dtype)
    rms.weight.normal_(1, 0.3)
    layer.bias.normal_()
    row = torch.randn(2, 6 * width, device=device).chunk(6, dim=1)
    ops = {
        "RMSNorm": (rms, "rms_norm"),
        "RMSNorm plain": (RMSNorm(width, elementwise_affine=False), "rms_norm"),
        "LayerNorm": (layer, "layer_norm"),
        "LayerNorm plain": (LayerNorm(width, elementwise_affine=False), "layer_norm"),
        "modulate": (lambda x: modulate(x, row[0][: x.shape[0]], row[1][: x.shape[0]]), "fused_scale_shift"),
        "modulate tokens": (lambda x: fused_scale_shift(x, x, x, 0.5), "fused_scale_shift"),
        "FP32SiLU": (FP32SiLU(), "activate"),
        "GELUTanh": (GELUTanh(), "activate"),
        "LayerNorm modulated": (
            lambda x: layer_norm_modulate(x, row[0][: x.shape[0]], row[1][: x.shape[0]]),
            "layer_norm",
        ),
        "LayerNorm of a sum": (
            lambda x: add_layer_norm_modulate(x, x, *(r[: x.shape[0]] for r in row[:3]))[1],
            "add_layer_norm",
        ),
        "add_gated": (lambda x: add_gated(x, x, row[2][: x.shape[0]]), "add_gated"),
    }
    if width % 2 == 0:
        ops["apply_rotary_emb"] = (lambda x: rotate(x[:, :, None] if x.dim() == 3 else x), "apply_rotary_embedding")
        ops["silu_and_mul"] = (silu_and_mul, "activate_and_mul")
        ops["gelu_and_mul"] = (gelu_and_mul, "activate_and_mul")
    return ops


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("width", [1, 63, 100, 1128, 1536, 5120, 65537])
@pytest.mark.usefixtures("poison_empty")
def test_kernels_agree_with_native(width, dtype, launched, monkeypatch):
    # S028, S102, S165, S172, S177, S185, B22: same numbers, and the kernel really ran
    x = (torch.randn(2, 7, width, device="cuda") * 2 + 0.5).to(dtype)
    for name, (op, launcher) in operators(width, dtype).items():
        launched.clear()
        out = op(x)
        assert launched == [launcher], name
        with monkeypatch.context() as patch:
            use(patch, NativeOnly())
            native = op(x)
        assert launched == [launcher], name
        assert out.dtype == dtype
        # Widths of 1: a layer norm of a lone number is zero, so that only its bias remains.
        assert torch.equal(out, native) or width > 1 or "Layer" not in name
        if width > 1 or "Layer" not in name:
            assert_close(out, native)
        if dtype in HALF and width > 1:
            assert_rounded_once(out, native)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize(("heads", "width"), [(1, 2), (3, 42), (12, 128), (40, 128)])
@pytest.mark.usefixtures("poison_empty")
def test_norm_and_rotation_agree_with_native(heads, width, dtype, launched, monkeypatch):
    qkv = torch.randn(2, 7, 3, heads * width, device="cuda").to(dtype)
    weights = torch.randn(2, heads * width, device="cuda")
    angles = torch.rand(7, width // 2, device="cuda") * 6

    def run():
        return rms_norm_rotary(*qkv.unbind(2)[:2], *weights, (angles.cos(), angles.sin()), heads)

    outs = run()
    assert launched == ["rms_norm_rotary"]
    use(monkeypatch, NativeOnly())
    for out, native in zip(outs, run()):
        assert_close(out, native)
        if dtype in HALF:
            assert_rounded_once(out, native)


def quantised(width):
    """Each operator that hands on FP8 rows, of one [B, S, width] tensor, with the launcher it must take."""
    torch.manual_seed(0)
    fp8 = platforms.current_platform.fp8_dtype
    row = torch.randn(2, 6 * width, device="cuda").chunk(6, dim=1)
    ops = {
        "norm": (lambda x: layer_norm_modulate(x, row[0], row[1], out_dtype=fp8), "layer_norm"),
        "sum": (lambda x: add_layer_norm_modulate(x, x, *row[:3], out_dtype=fp8)[1], "add_layer_norm"),
        "gelu": (lambda x: gelu_tanh(x, fp8), "activate_quant_fp8"),
        "alone": (lambda x: QuantizedRows(*quantize_rows(x, fp8)), "per_token_quant_fp8"),
    }
    if width % 2 == 0:
        ops["gated"] = (lambda x: silu_and_mul(x, fp8), "activate_and_mul_quant_fp8")
    return ops


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("width", [1, 63, 100, 1128, 1536, 8960, 13824, 65536])
@pytest.mark.usefixtures("poison_empty")
def test_quantised_results_agree_with_native(width, dtype, launched, monkeypatch):
    x = (torch.randn(2, 7, width, device="cuda") * 2 + 0.5).to(dtype)
    x[0, 1] = 0
    x[1, 2, 0] = float("nan")
    for name, (op, launcher) in quantised(width).items():
        launched.clear()
        out = op(x)
        assert launched == [launcher], name
        with monkeypatch.context() as patch:
            use(patch, NativeOnly())
            native = op(x)
        assert torch.equal(out.scales.isnan(), native.scales.isnan())
        assert out.scales[1, 2].isnan()
        # Float32 arithmetic in another order moves a scale by its last digits and few values by a step of FP8.
        # A lone number may lie where GELU's own formula has no digits left.
        near = {"rtol": 2e-5 if width > 1 else 0.1, "atol": 1e-9 if width == 1 else 1e-30}
        torch.testing.assert_close(out.scales, native.scales, **near, equal_nan=True)
        got, wanted = out.values.float(), native.values.float()
        differing = (got != wanted) & ~(got.isnan() & wanted.isnan())
        assert differing.float().mean() < (0 if name == "alone" else 0.01) + 1e-9, name
        step = (wanted.abs() / 7).clamp_min(2.0**-9)
        assert ((got - wanted).abs() <= step)[differing].all(), name


def test_a_launch_is_kept_and_its_replay_is_the_same(launched):
    for width in (100, 1536):
        for name, (op, _) in {**operators(width, torch.bfloat16), **quantised(width)}.items():
            launch._REPLAYS.clear()
            first, second = torch.randn(2, 2, 7, width, device="cuda").bfloat16()
            wanted = op(second)
            launch._REPLAYS.clear()
            op(first)
            got = op(second)
            for a, b in zip(got, wanted) if isinstance(got, tuple) else ((got, wanted),):
                assert torch.equal(a.float(), b.float()), name
            # Another alignment or stride is another launch.
            shifted = torch.randn(2 * 7 * width + 1, device="cuda").bfloat16()[1:].view(2, 7, width)
            for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (op(shifted), op(shifted.clone())))):
                assert torch.equal(a.float(), b.float()), name


def test_projection_and_gelu_in_one_kernel():
    linear = torch.nn.Linear(192, 320).cuda().bfloat16()
    x = torch.randn(2, 7, 192, device="cuda").bfloat16()
    wanted = torch.nn.functional.gelu(
        x.double() @ linear.weight.double().t() + linear.bias.double(), approximate="tanh"
    )
    out = linear_gelu_tanh(x, linear)
    assert out.shape == (2, 7, 320)
    assert (out.double() - wanted).norm() / wanted.norm() < 2e-3
    for slice_of in (x[:, 1:6], x[:, :0], x.transpose(0, 1)):
        assert_close(linear_gelu_tanh(slice_of, linear), gelu_tanh(linear(slice_of)))
    wide = linear.float()
    assert_close(linear_gelu_tanh(x.float(), wide), gelu_tanh(wide(x.float())))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_input_equals_contiguous_input(layout, launched):
    # B30, S169
    for dtype in (torch.float32, torch.bfloat16):
        x = strided(layout, 128, dtype, "cuda")
        before = x.clone()
        for name, (op, launcher) in operators(128, dtype).items():
            launched.clear()
            assert torch.equal(op(x), op(x.contiguous())), name
            assert launched == [launcher] * 2
        assert torch.equal(x, before)


@pytest.mark.parametrize("module", [GELU, GEGLU, SwiGLU, ApproximateGELU])
def test_projections_agree_with_native(module, launched, monkeypatch):
    # S139
    for options in ({}, {"approximate": "tanh"}) if module is GELU else ({},):
        layer = module(64, 96, **options).cuda().bfloat16()
        x = torch.randn(2, 7, 64, device="cuda").bfloat16()
        out = layer(x)
        with monkeypatch.context() as patch:
            use(patch, NativeOnly())
            assert_rounded_once(out, layer(x))
    assert set(launched) <= {"activate", "activate_and_mul"}
    assert launched


def test_large_values(launched):
    # B38
    x = (torch.randn(4, 1024, device="cuda") * 300).half()
    assert 3.0 < RMSNorm(1024).cuda()(x).abs().max() < 5
    x = 1e4 + torch.randn(4, 1024, device="cuda")
    wide = x.double() - x.double().mean(-1, keepdim=True)
    wanted = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert (LayerNorm(1024).cuda()(x).double() - wanted).abs().max() <= 2e-3
    x = torch.tensor([-6e4, -1e4, 0, 6e4], dtype=torch.float16, device="cuda")
    assert torch.equal(FP32SiLU()(x), torch.tensor([0, 0, 0, 6e4], dtype=torch.float16, device="cuda"))
    assert launched == ["rms_norm", "layer_norm", "activate"]


def test_what_kernels_do_not_compute_is_native(launched):
    # S108, B16: CPU tensors on a CUDA host, float64, results with a gradient
    for dtype in (torch.float32, torch.bfloat16):
        for name, (op, _) in operators(64, dtype, device="cpu").items():
            assert op(torch.randn(2, 7, 64).to(dtype)).isfinite().all(), name
    RMSNorm(64).cuda()(torch.randn(2, 64, device="cuda", dtype=torch.float64))
    with torch.enable_grad():
        norm = RMSNorm(64).cuda()
        norm(torch.randn(2, 64, device="cuda")).sum().backward()
        assert norm.weight.grad is not None
    assert launched == []


def test_mixed_devices_give_pytorchs_error():
    # B16
    x = torch.randn(2, 3, 64)
    with pytest.raises(RuntimeError, match="device"):
        RMSNorm(64).cuda()(x)
    with pytest.raises(RuntimeError, match="device"):
        LayerNorm(64)(x.cuda())
    with pytest.raises(RuntimeError, match="device"):
        modulate(x.cuda(), torch.randn(2, 64), torch.randn(2, 64, device="cuda"))
    with pytest.raises(RuntimeError, match="device"):
        apply_rotary_emb(x[:, :, None].cuda(), (torch.randn(3, 32), torch.randn(3, 32)))


def test_autocast_keeps_half_precision(launched):
    # B24, B40
    x = torch.randn(2, 7, 64, device="cuda").bfloat16()
    with torch.autocast("cuda", torch.bfloat16):
        for op in (RMSNorm(64).cuda(), LayerNorm(64).cuda()):
            assert op(x).dtype == torch.bfloat16
        for kind in ("layer_norm", "rms_norm"):
            ada = AdaLayerNormContinuous(64, 32, norm_type=kind).cuda()
            assert ada(x, torch.randn(2, 32, device="cuda")).dtype == torch.bfloat16
    assert launched[:2] == ["rms_norm", "layer_norm"]


def test_empty_input(launched):
    # B26
    for name, (op, _) in operators(128, torch.bfloat16).items():
        assert op(torch.empty(2, 0, 128, device="cuda", dtype=torch.bfloat16)).numel() == 0, name


def test_no_operator_waits_for_the_gpu():
    # B114
    ops = operators(128, torch.bfloat16)
    x = torch.randn(2, 7, 128, device="cuda").bfloat16()
    for op, _ in ops.values():
        op(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for op, _ in ops.values():
            op(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


FIRST_CALL_IN_A_GRAPH = """
import torch
from tests.ops.test_gpu import operators

x = torch.randn(2, 7, 128, device="cuda").bfloat16()
other = torch.randn(1, 3, 128, device="cuda").bfloat16()
torch.cuda.synchronize()
with torch.no_grad():
    for name, (op, _) in operators(128, torch.bfloat16).items():
        if WARM:
            op(other)
            torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = op(x)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, op(x)), name
"""


@pytest.mark.parametrize("warm", [False, True], ids=["very first call", "after a call with other sizes"])
def test_first_call_may_be_captured(warm, tmp_path):
    # B112: fixed launch settings, nothing to tune or to wait for
    in_fresh_process(FIRST_CALL_IN_A_GRAPH.replace("WARM", str(warm)), TRITON_CACHE_DIR=str(tmp_path))


@pytest.fixture
def huge():
    """A bfloat16 [1, S, 1536] with more than 2^31 elements."""
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    x = torch.empty(1, 1398102, 1536, device="cuda", dtype=torch.bfloat16)
    assert x.numel() > 2**31
    yield x.normal_()
    del x
    torch.cuda.empty_cache()


def test_more_than_2_to_the_31_elements(huge):
    # B28, S272
    tokens = huge.shape[1]
    angles = torch.rand(tokens, 64, device="cuda")
    cos, sin = angles.cos(), angles.sin()
    for name, (op, _) in operators(1536, torch.bfloat16).items():
        if name == "apply_rotary_emb":
            continue
        out = op(huge)
        for rows in (slice(0, 3), slice(tokens // 2, tokens // 2 + 3), slice(tokens - 3, tokens)):
            assert torch.equal(out[:, rows], op(huge[:, rows])), name
        del out
    heads = huge.unflatten(-1, (12, 128))
    out = apply_rotary_emb(heads, (cos, sin))
    for rows in (slice(0, 3), slice(tokens // 2, tokens // 2 + 3), slice(tokens - 3, tokens)):
        assert torch.equal(out[:, rows], apply_rotary_emb(heads[:, rows], (cos[rows], sin[rows])))


def test_few_rows_far_apart(huge):
    # B28: the offset of a row passes 2^31 although the tensor is small
    for step in (2**30, 2**30 + 64):
        x = huge.view(-1).as_strided((1, 2, 1536), (0, step, 1), storage_offset=huge.numel() - step - 1536)
        for name, (op, _) in operators(1536, torch.bfloat16).items():
            assert torch.equal(op(x), op(x.contiguous())), name
    columns = huge.view(-1).as_strided((1, 3, 16), (0, 1, 140_000_000))
    for name, (op, _) in operators(16, torch.bfloat16).items():
        assert torch.equal(op(columns), op(columns.contiguous())), name


def milliseconds(function, x):
    """GPU time of one call, from a captured graph of ten, so that the host does not count."""
    function(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            function(x)
    times = []
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 10)
    return min(times)


def test_compiled_operators_keep_dtype_and_speed():
    # B34: no float64 scalar gets into the compiled code
    row = torch.randn(1, 2 * 3072, device="cuda").bfloat16()
    shift, scale = row.chunk(2, dim=1)
    gelu = ApproximateGELU(3072, 3072).cuda().bfloat16()
    ops = {
        "RMSNorm": RMSNorm(3072).cuda().bfloat16(),
        "modulate": lambda x: modulate(x, shift, scale),
        "ApproximateGELU": gelu,
    }
    x = torch.randn(1, 1024, 3072, device="cuda").bfloat16()
    for name, op in ops.items():
        compiled = torch.compile(op, fullgraph=True)
        out, eager = compiled(x), op(x)
        assert out.dtype == torch.bfloat16
        # A step of the projection's result is amplified where the activation falls, so that op is measured as a whole.
        if name == "ApproximateGELU":
            assert_close(out, eager, "matmul")
        else:
            assert_rounded_once(out, eager)
        assert milliseconds(compiled, x) <= 1.1 * milliseconds(op, x) + 0.001, name


def test_compiled_rotation_launches_its_kernel(launched):
    # S111
    x = torch.randn(1, 64, 4, 64, device="cuda").bfloat16()
    out = torch.compile(rotate, fullgraph=True)(x)
    assert launched == ["apply_rotary_embedding"]
    assert_rounded_once(out, rotate(x))


@pytest.mark.multi_gpu
def test_tensors_on_another_than_the_current_gpu(launched):
    # S271, B32
    torch.cuda.set_device(0)
    x = torch.randn(2, 7, 128, device="cuda:1").bfloat16()
    for name, (op, launcher) in operators(128, torch.bfloat16, device="cuda:1").items():
        launched.clear()
        out = op(x)
        assert launched == [launcher], name
        assert out.device == x.device
        assert torch.cuda.current_device() == 0
        assert out.isfinite().all()
