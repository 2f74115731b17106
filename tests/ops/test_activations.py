import pytest
import torch
import torch.nn.functional as F
from torch import nn

import telefuser.kernel.triton as kernels
from telefuser.ops import activations
from telefuser.ops.activations import (
    ACT2CLS,
    GEGLU,
    GELU,
    ApproximateGELU,
    FP32SiLU,
    GELUTanh,
    LinearActivation,
    SwiGLU,
    gelu_and_mul,
    get_activation,
    silu_and_mul,
)
from telefuser.ops.quantized_rows import QuantizedRows
from telefuser.platforms import CudaPlatform, RocmPlatform
from tests.golden import golden_dir
from tests.kernel.interpreter import round_fp8_as_hardware_does
from tests.ops.machines import on_cpu, recording_tf_kernel, use
from tests.tolerances import assert_close

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def gelu(v):
    return 0.5 * v * (1 + torch.erf(v / 2**0.5))


def gelu_tanh(v):
    return 0.5 * v * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (v + 0.044715 * v**3)))


def quick_gelu(v):
    return v * torch.sigmoid(1.702 * v)


def silu(v):
    return v / (1 + torch.exp(-v))


# Each projection with the float64 formula of what follows it.
PROJECTIONS = {
    "GELU": (GELU, {}, gelu),
    "GELU tanh": (GELU, {"approximate": "tanh"}, gelu_tanh),
    "GEGLU": (GEGLU, {}, lambda v: v.chunk(2, -1)[0] * gelu(v.chunk(2, -1)[1])),
    "SwiGLU": (SwiGLU, {}, lambda v: v.chunk(2, -1)[0] * silu(v.chunk(2, -1)[1])),
    "ApproximateGELU": (ApproximateGELU, {}, quick_gelu),
    "LinearActivation": (LinearActivation, {}, silu),
    "LinearActivation mish": (LinearActivation, {"activation": "mish"}, lambda v: v * torch.tanh(F.softplus(v))),
}


@pytest.mark.parametrize("name", PROJECTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_projection_agrees_with_its_formula(name, dtype, interpreted_cuda, monkeypatch):
    # S130, S131, S133, S134, S135, S136, C09, and S273 for half precision
    make, options, formula = PROJECTIONS[name]
    module = make(dim_in=12, dim_out=20, **options).to(dtype).requires_grad_(False)
    x = torch.randn(2, 5, 12).to(dtype)
    # What the projection gives in this dtype is where the activation starts.
    wanted = formula(module.proj(x).double())
    for _ in range(2):
        out = module(x)
        assert out.shape == (2, 5, 20)
        assert out.dtype == dtype
        assert_close(out, wanted)
        monkeypatch.setattr(interpreted_cuda, "op_keys", ())


@pytest.mark.parametrize("make", [GELU, GEGLU, SwiGLU, ApproximateGELU, LinearActivation])
def test_projection_without_bias(make):
    # S137, S138
    assert list(make(4, 8).state_dict()) == ["proj.weight", "proj.bias"]
    assert list(make(4, 8, bias=False).state_dict()) == ["proj.weight"]


@pytest.mark.parametrize("name", ["GELU", "GEGLU", "SwiGLU", "ApproximateGELU", "LinearActivation"])
def test_projection_equals_diffusers(name):
    diffusers = pytest.importorskip("diffusers.models.activations")
    theirs = getattr(diffusers, name)(12, 20)
    ours = PROJECTIONS[name][0](12, 20)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 5, 12)
    assert_close(ours(x), theirs(x))


def test_gelu_knows_its_approximations():
    # S132
    assert GELU(4, 8).approximate == "none"
    with pytest.raises(ValueError, match="'sigmoid'; choose 'none' or 'tanh'"):
        GELU(4, 8, approximate="sigmoid")


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("silu", silu),
        ("swish", silu),
        ("SiLU", silu),
        ("gelu", gelu),
        ("mish", lambda v: v * torch.tanh(F.softplus(v))),
        ("relu", lambda v: v.clamp(min=0)),
    ],
)
def test_get_activation(name, formula):
    # S123, S124, S125
    module, x = get_activation(name), torch.randn(100, dtype=torch.float64) * 4
    assert isinstance(module, nn.Module)
    assert_close(module(x), formula(x))
    assert get_activation(name) is not module
    assert set(ACT2CLS) == {"swish", "silu", "mish", "gelu", "relu"}


@pytest.mark.parametrize("name", ["softsign", "", None, 3])
def test_get_activation_refuses_unknown_names(name):
    # S126
    with pytest.raises(ValueError, match=r"unknown activation .*; choose one of swish, silu, mish, gelu, relu"):
        get_activation(name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp32_silu(dtype, interpreted_cuda):
    # S127, S128, S129
    x = (torch.randn(3, 100) * 4).to(dtype)
    for out in (FP32SiLU()(x), FP32SiLU().forward_native(x)):
        assert out.dtype == dtype
        assert_close(out, silu(x.double()))


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_large_half_precision_values_stay_finite(interpreted_cuda):
    # B38
    x = torch.tensor([-6e4, -1e4, 0, 6e4], dtype=torch.float16)
    for out in (FP32SiLU()(x), FP32SiLU().forward_native(x)):
        assert torch.equal(out, torch.tensor([0, 0, 0, 6e4], dtype=torch.float16))
    tanh = GELU(1, 1, approximate="tanh", bias=False).half().requires_grad_(False)
    nn.init.ones_(tanh.proj.weight)
    # The cube overflows float16 from 41 on.
    assert torch.equal(tanh(x[:, None]), torch.tensor([0, 0, 0, 6e4], dtype=torch.float16)[:, None])


@pytest.mark.parametrize(("function", "formula"), [(silu_and_mul, silu), (gelu_and_mul, gelu)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_first_functions(function, formula, dtype, interpreted_cuda, monkeypatch):
    # C09: the opposite order of the modules
    x = torch.randn(2, 3, 40).to(dtype)
    gate, hidden = x.double().chunk(2, -1)
    for _ in range(2):
        assert_close(function(x), formula(gate) * hidden)
        monkeypatch.setattr(interpreted_cuda, "op_keys", ())
    with pytest.raises(ValueError, match=r"two halves; x has shape \(2, 3, 39\)"):
        function(x[..., 1:])


@pytest.mark.usefixtures("interpreted_cuda")
class TestTfKernel:
    """S139: the same result with the extension, which takes aligned half-precision rows only."""

    @pytest.mark.parametrize(("function", "name"), [(silu_and_mul, "silu_and_mul"), (gelu_and_mul, "gelu_and_mul")])
    @pytest.mark.parametrize("platform", [CudaPlatform, RocmPlatform])
    def test_is_used_where_it_fits(self, function, name, platform, monkeypatch):
        calls = []
        extension = recording_tf_kernel(calls) if platform is CudaPlatform else None
        use(monkeypatch, on_cpu(platform, tf_kernel=extension))
        formula = silu if name == "silu_and_mul" else gelu
        half = torch.randn(3, 32).bfloat16()
        unfit = [torch.randn(3, 32), torch.randn(3, 36).bfloat16(), torch.randn(3, 64).bfloat16()[:, ::2], half[:0]]
        for x in (half, *unfit):
            gate, hidden = x.double().chunk(2, -1)
            assert_close(function(x), formula(gate) * hidden)
        assert calls == ([name] if extension else [])

    def test_modules_with_the_gate_last_never_use_it(self, monkeypatch):
        calls = []
        use(monkeypatch, on_cpu(CudaPlatform, tf_kernel=recording_tf_kernel(calls)))
        for make in (GEGLU, SwiGLU):
            make(8, 16).bfloat16().requires_grad_(False)(torch.randn(2, 8).bfloat16())
        assert calls == []

    def test_a_build_without_the_function_takes_triton(self, monkeypatch):
        use(monkeypatch, on_cpu(CudaPlatform, tf_kernel=object()))
        x = torch.randn(3, 32).bfloat16()
        assert_close(silu_and_mul(x), silu(x[:, :16].double()) * x[:, 16:].double())


def test_kernels_are_really_launched(interpreted_cuda, monkeypatch):
    launched = []
    for name in ("activate", "activate_and_mul"):
        launch = getattr(kernels, name)
        monkeypatch.setattr(
            kernels, name, lambda *args, name=name, launch=launch: launched.append(name) or launch(*args)
        )
    x = torch.randn(2, 4)
    for module in (FP32SiLU(), GELU(4, 4), ApproximateGELU(4, 4), GEGLU(4, 4), SwiGLU(4, 4)):
        module.requires_grad_(False)(x)
    assert launched == ["activate"] * 3 + ["activate_and_mul"] * 2
    GEGLU(4, 4)(x).sum().backward()
    assert len(launched) == 5


def test_strided_and_empty_input(interpreted_cuda):
    # B26, B30
    x = torch.randn(2, 3, 8, 4).transpose(2, 3)
    assert torch.equal(silu_and_mul(x), silu_and_mul(x.contiguous()))
    assert torch.equal(FP32SiLU()(x), FP32SiLU()(x.contiguous()))
    for shape in ((0, 8), (2, 0, 8)):
        empty = torch.empty(shape, dtype=torch.float16)
        assert GEGLU(8, 6).half().requires_grad_(False)(empty).shape == (*shape[:-1], 6)
        assert FP32SiLU()(empty).dtype == torch.float16


@pytest.mark.skipif(golden_dir() is None, reason="the reference data (TELEFUSER_GOLDEN) is not here")
@pytest.mark.parametrize("interpreted", [False, True])
def test_agrees_with_the_official_activations(interpreted, request):
    from safetensors.torch import load_file

    if interpreted:
        request.getfixturevalue("interpreted_cuda")
    data = load_file(golden_dir() / "wan" / "ops.safetensors")
    x = data["act.x"][:, None]
    modules = {"act.gelu_erf": GELU(1, 1, bias=False), "act.gelu_tanh": GELU(1, 1, approximate="tanh", bias=False)}
    for name, module in modules.items():
        nn.init.ones_(module.proj.weight)
        torch.testing.assert_close(module.requires_grad_(False)(x)[:, 0], data[name], rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(FP32SiLU()(data["act.x"]), data["act.silu"], rtol=2e-6, atol=1e-6)
    assert_close(FP32SiLU()(data["act.x"].bfloat16()), data["act.silu.bf16"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("poison_empty")
def test_gelu_tanh_alone(dtype, interpreted_cuda, monkeypatch):
    # Contiguous input is one long row for the kernel; 5000 elements are two whole blocks of it and a part
    x = torch.cat((torch.randn(4990) * 3, torch.tensor([-1e4, 1e4] * 5))).view(2, 25, 100).to(dtype)
    wanted = F.gelu(x.double(), approximate="tanh")
    launched, launch = [], kernels.activate
    monkeypatch.setattr(kernels, "activate", lambda *args: launched.append(args[1]) or launch(*args))
    gelu = GELUTanh()
    for out in (gelu(x), gelu(x.transpose(1, 2)).transpose(1, 2), gelu.forward_native(x)):
        assert out.dtype == dtype
        assert_close(out, wanted)
    assert launched == ["gelu_tanh", "gelu_tanh"]
    assert gelu.state_dict() == {}


@pytest.mark.parametrize("on", ["native", "kernel"])
def test_fp8_rows_of_activations(on, request, monkeypatch):
    if on == "kernel":
        platform = request.getfixturevalue("interpreted_cuda")
        monkeypatch.setattr(type(platform), "fp8_unavailable_reason", lambda *_: None)
        round_fp8_as_hardware_does(monkeypatch)
    x = torch.randn(2, 7, 64)
    e4m3 = torch.float8_e4m3fn
    with torch.no_grad():
        pairs = [(activations.gelu_tanh(x, e4m3), activations.gelu_tanh(x)), (silu_and_mul(x, e4m3), silu_and_mul(x))]
        pairs.append((gelu_and_mul(x, e4m3), gelu_and_mul(x)))
    for got, wanted in pairs:
        assert isinstance(got, QuantizedRows)
        assert ((got.dequantize(torch.float32) - wanted).abs() <= wanted.abs() / 15 + got.scales / 400).all()
