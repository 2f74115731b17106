import pytest
import torch
import torch.nn.functional as F
from torch import nn

import telefuser.kernel.triton as kernels
from telefuser.ops.base import CustomOp
from telefuser.ops.normalization import AdaLayerNormContinuous, LayerNorm, RMSNorm, fused_scale_shift, modulate
from telefuser.platforms import CudaPlatform, RocmPlatform
from tests.golden import golden_dir
from tests.ops.machines import on_cpu, recording_tf_kernel, use
from tests.ops.rounding import assert_rounded_once
from tests.tolerances import assert_close

HALF = [torch.bfloat16, torch.float16]
NORMS = [RMSNorm, LayerNorm]


def formula(norm, x):
    """What the module computes, in float64."""
    x = x.double()
    if isinstance(norm, LayerNorm):
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    x = x if norm.weight is None else x * norm.weight.double()
    return x if norm.bias is None else x + norm.bias.double()


def filled(norm):
    """The module with weights around one and biases around zero, without gradients."""
    for name, parameter in norm.named_parameters():
        nn.init.normal_(parameter, mean=1.0 if "weight" in name else 0.0, std=0.3)
    return norm.requires_grad_(False)


@pytest.mark.parametrize("make", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF])
def test_agrees_with_the_float64_formula(make, dtype):
    # S163, S168, S170, S175
    for options in ({}, {"bias": True}, {"bias": False}, {"elementwise_affine": False}):
        for shape in ((3, 100), (2, 5, 100), (2, 3, 4, 100)):
            norm = filled(make(100, **options))
            x = (torch.randn(shape) * 2 + 0.5).to(dtype)
            out = norm(x)
            assert out.dtype == dtype
            assert_close(out, formula(norm, x))


@pytest.mark.parametrize("make", NORMS)
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_is_rounded_once(make, dtype):
    # B22, B40: within one step of float64, whatever the dtype of the weights
    for weights in (torch.float32, dtype):
        norm = filled(make(1536, eps=1e-6)).to(weights)
        x = torch.randn(64, 1536).to(dtype)
        assert_rounded_once(norm(x), formula(norm, x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = norm(x)
        # B24: autocast does not widen the result either
        assert out.dtype == dtype
        assert_rounded_once(out, formula(norm, x))


def test_defaults():
    # S160, S161, S162, S170, S171, C17
    rms, layer = RMSNorm(8), LayerNorm(8)
    assert (rms.eps, layer.eps) == (1e-5, 1e-6)
    assert list(rms.state_dict()) == ["weight"]
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert isinstance(rms, CustomOp)
    assert isinstance(layer, CustomOp)
    assert torch.equal(rms.weight, torch.ones(8))
    assert torch.equal(layer.bias, torch.zeros(8))
    assert list(RMSNorm(8, bias=True).state_dict()) == ["weight", "bias"]
    assert LayerNorm(8, device="meta", dtype=torch.bfloat16).weight.dtype == torch.bfloat16


@pytest.mark.parametrize("make", NORMS)
def test_without_affine_there_are_no_parameters(make):
    # S167, S174, B20
    norm = make(64, elementwise_affine=False)
    assert norm.state_dict() == {}
    x = torch.randn(2, 5, 64)
    assert (norm(x) - formula(norm, x)).abs().max() <= 2e-6
    assert_close(norm(x.bfloat16()), formula(norm, x.bfloat16()))


def test_layer_norm_is_pytorchs_in_float32():
    # S173
    norm, x = filled(LayerNorm(48)), torch.randn(2, 5, 48)
    assert torch.equal(norm(x), F.layer_norm(x, (48,), norm.weight, norm.bias, 1e-6))


@pytest.mark.parametrize("make", NORMS)
def test_strided_and_empty_input(make):
    # S169, B26, B30
    norm = filled(make(16))
    q = torch.randn(2, 3, 3, 4, 16).unbind(2)[0]
    for x in (q, q.transpose(1, 2), torch.randn(2, 32)[:, ::2], torch.randn(1, 16).expand(5, -1)):
        before = x.clone()
        assert torch.equal(norm(x), norm(x.contiguous()))
        assert torch.equal(x, before)
    for shape in ((0, 16), (2, 0, 16)):
        assert norm(torch.empty(shape, dtype=torch.bfloat16)).shape == shape


def test_large_values():
    # B38
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(4, 1024, generator=generator) * 300).half()
    assert 3.0 < RMSNorm(1024)(x).abs().max() < 4.5
    x = torch.full((2, 64), 1e4).half()
    assert torch.equal(LayerNorm(64)(x), torch.zeros(2, 64).half())
    x = 1e4 + torch.randn(4, 1024, generator=generator)
    assert (LayerNorm(1024)(x).double() - formula(LayerNorm(1024), x)).abs().max() <= 2e-3


@pytest.mark.parametrize("make", NORMS)
def test_wrong_input_is_refused(make, interpreted_cuda):
    norm = make(8).requires_grad_(False)
    for forward in (norm.forward_native, norm.forward_cuda):
        # A last dimension of 1 would broadcast against the weight.
        with pytest.raises(ValueError, match=r"over 8 elements got a tensor of shape \(2, 1\)"):
            forward(torch.randn(2, 1))
    with pytest.raises(ValueError, match=r"floating-point tensor, got torch\.int64"):
        norm(torch.ones(2, 8, dtype=torch.int64))


@pytest.mark.parametrize("make", NORMS)
def test_norms_refuse_a_width_and_an_eps_without_meaning(make):
    for eps in (-1e-6, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"{make.__name__} got eps {eps}"):
            make(8, eps=eps)
    for dim in (0, -8):
        with pytest.raises(ValueError, match=f"{make.__name__} got dim {dim}"):
            make(dim)
    x = torch.tensor([[3.0, -3.0]])
    assert torch.equal(make(2, eps=0.0)(x), torch.tensor([[1.0, -1.0]]))


def test_mixed_devices_give_pytorchs_error():
    # B16
    with pytest.raises(RuntimeError, match="device"):
        RMSNorm(8, device="meta").forward_native(torch.randn(2, 8))


@pytest.mark.parametrize("make", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.usefixtures("poison_empty")
def test_kernel_agrees_with_native(make, dtype, interpreted_cuda):
    # S165, S172, S177, B22
    for options in ({}, {"bias": False}, {"elementwise_affine": False}):
        norm = filled(make(100, eps=1e-6, **options))
        x = torch.randn(2, 3, 100).to(dtype)
        assert_close(norm(x), norm.forward_native(x))
        if dtype in HALF:
            assert_rounded_once(norm(x), norm.forward_native(x))


@pytest.mark.parametrize(("make", "launcher"), [(RMSNorm, "rms_norm"), (LayerNorm, "layer_norm")])
def test_kernel_is_really_launched(make, launcher, interpreted_cuda, monkeypatch):
    # S102, S172
    launched, launch = [], getattr(kernels, launcher)
    monkeypatch.setattr(kernels, launcher, lambda *args: launched.append(launcher) or launch(*args))
    norm, x = make(8).requires_grad_(False), torch.randn(2, 8)
    norm(x)
    assert launched == [launcher]
    norm(x.double())
    norm.requires_grad_(True)(x)
    assert launched == [launcher]


@pytest.mark.usefixtures("interpreted_cuda")
class TestTfKernel:
    """S164, S176, C04: the extension first, where it has a form for the input."""

    def calls(self, monkeypatch, norm, x, platform=CudaPlatform):
        calls = []
        use(monkeypatch, on_cpu(platform, tf_kernel=recording_tf_kernel(calls)))
        assert_close(norm.requires_grad_(False)(x), formula(norm, x))
        return calls

    @pytest.mark.parametrize("dtype", HALF)
    def test_half_precision_with_a_weight_of_the_same_dtype(self, dtype, monkeypatch):
        assert self.calls(monkeypatch, filled(RMSNorm(8)).to(dtype), torch.randn(2, 3, 8).to(dtype)) == ["rmsnorm"]

    @pytest.mark.parametrize(
        ("norm", "x"),
        [
            (RMSNorm(8), torch.randn(2, 8)),
            (RMSNorm(8), torch.randn(2, 8).bfloat16()),
            (RMSNorm(8, bias=True, dtype=torch.bfloat16), torch.randn(2, 8).bfloat16()),
            (RMSNorm(8, elementwise_affine=False), torch.randn(2, 8).bfloat16()),
            (RMSNorm(8, dtype=torch.bfloat16), torch.randn(2, 16).bfloat16()[:, ::2]),
            (RMSNorm(8, dtype=torch.bfloat16), torch.randn(2, 3, 2, 8).bfloat16().transpose(1, 2)),
            (LayerNorm(8, dtype=torch.bfloat16), torch.randn(2, 8).bfloat16()),
        ],
        ids=["float32", "other weight", "bias", "no weight", "strided", "transposed", "LayerNorm"],
    )
    def test_everything_else_takes_triton(self, norm, x, monkeypatch):
        assert self.calls(monkeypatch, norm, x) == []

    def test_a_build_without_the_function_takes_triton(self, monkeypatch):
        use(monkeypatch, on_cpu(CudaPlatform, tf_kernel=object()))
        norm, x = RMSNorm(8, dtype=torch.bfloat16).requires_grad_(False), torch.randn(2, 8).bfloat16()
        assert_close(norm(x), formula(norm, x))

    def test_rocm_never_asks_for_it(self, monkeypatch):
        # S034, S072
        platform = use(monkeypatch, on_cpu(RocmPlatform))
        assert platform.tf_kernel is None
        assert RocmPlatform().tf_kernel is None
        norm, x = RMSNorm(8, dtype=torch.bfloat16).requires_grad_(False), torch.randn(2, 8).bfloat16()
        assert_close(norm(x), formula(norm, x))


@pytest.mark.parametrize("make", NORMS)
def test_gradients_pass_through(make, interpreted_cuda):
    # On a GPU platform too: training runs these operators.
    norm = make(6, bias=True).double()
    x = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(norm, (x,))
    norm.float()(x.float()).sum().backward()
    assert norm.weight.grad.abs().sum() > 0


# Modulation


def modulated(x, shift, scale):
    return x.double() * (1 + scale.double()) + shift.double()


SHAPES = [(3, 8), (3, 1, 8), (3, 5, 8), (1, 1, 8), (1, 8), (8,), (1, 5, 8), (3, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF])
def test_modulate_takes_every_shape_on_every_path(shape, dtype, interpreted_cuda, monkeypatch):
    # S183, S184, S186, S188, S189
    x, shift, scale = torch.randn(3, 5, 8).to(dtype), torch.randn(shape), torch.randn(shape)
    wide = [t.unsqueeze(1) if t.dim() == 2 else t for t in (shift, scale)]
    outs = [modulate(x, shift, scale), modulate(x, shift.to(dtype), scale.to(dtype))]
    monkeypatch.setattr(interpreted_cuda, "op_keys", ())
    outs.append(modulate(x, shift, scale))
    for out, given in zip(outs, (wide, [t.to(dtype) for t in wide], wide)):
        assert out.dtype == dtype
        assert_close(out, modulated(x, *given))
    assert_close(fused_scale_shift(x, scale, shift), modulated(x, *wide))
    assert_close(fused_scale_shift(x, scale, shift, 0.0), wide[1].double() * x.double() + wide[0].double())


def test_modulate_with_as_many_tokens_as_batch_items():
    # S186, C06
    x, shift, scale = torch.randn(4, 4, 8), torch.randn(4, 8), torch.randn(4, 8)
    assert_close(modulate(x, shift, scale), modulated(x, shift[:, None], scale[:, None]))


def test_modulate_of_two_and_four_dimensions():
    x, shift, scale = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
    assert_close(modulate(x, shift, scale), modulated(x, shift, scale))
    x, scale = torch.randn(2, 3, 4, 8), torch.randn(2, 8)
    assert_close(modulate(x, scale, scale), modulated(x, scale[:, None, None], scale[:, None, None]))


def test_modulate_takes_chunks_of_one_projection(interpreted_cuda):
    # S187, B30
    chunks = torch.randn(2, 48).chunk(6, dim=1)
    x = torch.randn(2, 8, 5).transpose(1, 2)
    out = modulate(x, chunks[0], chunks[1])
    assert_close(out, modulated(x, chunks[0][:, None], chunks[1][:, None]))
    assert torch.equal(out, modulate(x.contiguous(), chunks[0].contiguous(), chunks[1].contiguous()))


def test_modulate_of_nothing():
    # B26
    assert modulate(torch.empty(2, 0, 8).half(), torch.ones(2, 8), torch.ones(2, 8)).dtype == torch.float16


@pytest.mark.parametrize("shape", [(5, 8), (3, 7), (3, 4, 8), (2, 3, 5, 8), (7,)], ids=str)
def test_modulate_refuses_what_does_not_fit(shape):
    # Plain PyTorch would let some of these line up by accident or grow the result.
    with pytest.raises(ValueError, match=r"scale of shape .* does not fit x of shape \(3, 5, 8\)"):
        modulate(torch.randn(3, 5, 8), torch.randn(3, 8), torch.randn(shape))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool])
@pytest.mark.parametrize("name", ["scale", "shift"])
def test_modulation_by_other_numbers_than_floating_point_is_refused(name, dtype):
    x, good = torch.randn(3, 5, 8), torch.randn(3, 8)
    vectors = {"scale": good, "shift": good, name: torch.ones(3, 8, dtype=dtype)}
    for op in (modulate, fused_scale_shift):
        with pytest.raises(ValueError, match=f"{name} must hold real floating-point numbers, not {dtype}"):
            op(x, **vectors)


def test_modulate_launches_the_fused_kernel(interpreted_cuda, monkeypatch):
    # S185
    launched, launch = [], kernels.fused_scale_shift
    monkeypatch.setattr(kernels, "fused_scale_shift", lambda *args: launched.append(1) or launch(*args))
    x = torch.randn(2, 3, 8)
    modulate(x, x, x)
    assert launched == [1]


# Adaptive layer norm


@pytest.mark.parametrize("norm_type", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_adaptive_norm_equals_diffusers(norm_type, affine, bias):
    # S178, S179, S180, S181, S182
    diffusers = pytest.importorskip("diffusers.models.normalization")
    options = {"elementwise_affine": affine, "bias": bias, "norm_type": norm_type}
    theirs = diffusers.AdaLayerNormContinuous(64, 32, **options)
    ours = AdaLayerNormContinuous(64, 32, **options)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    x, cond = torch.randn(2, 7, 64), torch.randn(2, 32)
    assert_close(ours(x, cond), theirs(x, cond), "matmul")


@pytest.mark.parametrize("norm_type", ["layer_norm", "rms_norm"])
def test_adaptive_norm_of_half_precision_is_rounded_once(norm_type, interpreted_cuda):
    # B40
    ada = AdaLayerNormContinuous(64, 32, norm_type=norm_type).requires_grad_(False)
    wide = AdaLayerNormContinuous(64, 32, norm_type=norm_type).double().requires_grad_(False)
    wide.load_state_dict(ada.state_dict())
    x, cond = torch.randn(2, 7, 64).bfloat16(), torch.randn(2, 32)
    out = ada(x, cond)
    assert out.dtype == torch.bfloat16
    assert_rounded_once(out, wide(x.double(), cond.double()))


def test_adaptive_norm_takes_half_precision_weights():
    ada = AdaLayerNormContinuous(64, 32).bfloat16()
    assert ada(torch.randn(2, 7, 64).bfloat16(), torch.randn(2, 32)).isfinite().all()


def test_adaptive_norm_conditioned_per_token():
    ada = AdaLayerNormContinuous(16, 8).requires_grad_(False)
    x, cond = torch.randn(2, 5, 16), torch.randn(2, 5, 8)
    each = torch.cat([ada(x[:, i : i + 1], cond[:, i]) for i in range(5)], dim=1)
    assert_close(ada(x, cond), each, "matmul")


def test_adaptive_norm_refuses_an_unknown_norm():
    # S180, B40
    with pytest.raises(ValueError, match="'batch_norm'; choose one of layer_norm, rms_norm"):
        AdaLayerNormContinuous(8, 8, norm_type="batch_norm")


# Reference data


@pytest.mark.skipif(golden_dir() is None, reason="the reference data (TELEFUSER_GOLDEN) is not here")
@pytest.mark.parametrize("interpreted", [False, True])
def test_agrees_with_the_official_norms(interpreted, request):
    from safetensors.torch import load_file

    if interpreted:
        request.getfixturevalue("interpreted_cuda")
    data = load_file(golden_dir() / "wan" / "ops.safetensors")
    weights = {"weight": data["weight"], "bias": data["bias"]}
    rms, plain = RMSNorm(64, eps=1e-6), LayerNorm(64, elementwise_affine=False)
    affine, clip = LayerNorm(64), LayerNorm(64, eps=1e-5)
    rms.load_state_dict({"weight": data["weight"]})
    affine.load_state_dict(weights)
    clip.load_state_dict(weights)
    modules = {"wan_rms": rms, "wan_ln": plain, "wan_ln_affine": affine, "clip_ln": clip, "t5_ln": rms}
    for scale in ("unit", "tiny", "large"):
        x = data[f"{scale}.x"]
        for name, module in modules.items():
            out = module.requires_grad_(False)(x)
            torch.testing.assert_close(out, data[f"{scale}.{name}"], rtol=2e-6, atol=2e-6)
            assert_close(out, data[f"{scale}.{name}"])
        half = data[f"{scale}.wan_ln.x_bf16"]
        assert_rounded_once(plain(x.bfloat16()), half)
