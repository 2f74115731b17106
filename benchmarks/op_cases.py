"""What `benchmarks.ops` measures: one registered row an operator, with its inputs, rivals and exact formula."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec

import torch
import torch.nn.functional as F

from telefuser.ops import (
    LayerNorm,
    RMSNorm,
    add_gated,
    add_layer_norm_modulate,
    apply_rotary_emb,
    layer_norm_modulate,
    modulate,
    rms_norm_rotary,
)
from telefuser.ops.activations import GELUTanh, gelu_tanh, silu_and_mul
from telefuser.ops.fp8_quantization import quantize_rows
from telefuser.platforms import current_platform

EPS = 1e-6
BF16, FP32 = torch.bfloat16, torch.float32


@dataclass
class Case:
    """One operator on one shape.

    tensors: the large inputs, with one row a token.  others: small inputs.  ours, rivals: functions of both.
    exact: the same in the dtype of its input; it is given float64 rows.  kernel: its table of launch settings.
    Where ours gives FP8, its last two results are values and scales, and exact what the two stand for.
    """

    tensors: tuple[torch.Tensor, ...]
    others: tuple
    ours: Callable
    exact: Callable
    rivals: dict[str, Callable] = field(default_factory=dict)
    kernel: str | None = None

    def call(self, function: Callable) -> tuple[torch.Tensor, ...]:
        out = function(*self.tensors, *self.others)
        return out if isinstance(out, tuple) else (out,)

    def bytes(self) -> int:
        """The least that must move: every input read once, every result written once."""
        results = self.call(self.ours)
        return sum(t.numel() * t.element_size() for t in (*self.tensors, *self.others, *results))


SHAPES = ((32760, 1536), (32760, 5120), (75600, 5120))
# Wan's feed-forward widths
FFN_SHAPES = ((32760, 8960), (32760, 13824))
OPS: dict[str, Callable[[int, int, torch.device], Case]] = {}
SHAPES_OF: dict[str, tuple[tuple[int, int], ...]] = {}


def op(name: str, shapes: tuple[tuple[int, int], ...] = SHAPES) -> Callable:
    """Register what makes a Case of `rows`, `width` and a device, and the shapes to measure it on."""

    def register(make: Callable) -> Callable:
        OPS[name], SHAPES_OF[name] = make, shapes
        return make

    return register


def to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales of each row in plain PyTorch: the rivals' quantisation."""
    fp8 = current_platform.fp8_dtype
    scale = (x.abs().amax(-1, keepdim=True).float() / torch.finfo(fp8).max).clamp_min(1e-12)
    return (x.float() / scale).to(fp8), scale


def randn(*shape: int, device: torch.device, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=torch.float32).to(dtype)


def _modulated(x, scale, shift, weight=None, bias=None):
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS) * (1 + scale) + shift


@op("rms_norm")
def _rms_norm(rows, width, device):
    x, weight = randn(1, rows, width, device=device, dtype=BF16), randn(width, device=device, dtype=BF16)
    norm = RMSNorm(width, eps=EPS, device=device, dtype=BF16).requires_grad_(False)
    norm.weight.copy_(weight)
    rivals = {"F.rms_norm": lambda x, w: F.rms_norm(x, (width,), w, EPS)}
    if device.type != "cpu" and find_spec("quack"):
        rivals["quack"] = _quack
    if device.type != "cpu" and find_spec("liger_kernel"):
        rivals["Liger"] = _liger
    return Case((x,), (weight,), lambda x, w: norm(x), rivals["F.rms_norm"], rivals, kernel="rms_norm")


def _quack(x, weight):
    from quack import rmsnorm

    return rmsnorm(x[0], weight, eps=EPS)


def _liger(x, weight):
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x, weight, EPS)


@op("layer_norm")
def _layer_norm(rows, width, device):
    x = randn(1, rows, width, device=device, dtype=BF16)
    weight, bias = randn(2, width, device=device, dtype=BF16)
    norm = LayerNorm(width, eps=EPS, device=device, dtype=BF16).requires_grad_(False)
    norm.weight.copy_(weight)
    norm.bias.copy_(bias)
    rival = lambda x, w, b: F.layer_norm(x, (width,), w, b, EPS)  # noqa: E731
    rivals = {"F.layer_norm": rival}
    if device.type != "cpu" and find_spec("liger_kernel"):
        rivals["Liger"] = _liger_layer_norm
    if device.type != "cpu" and find_spec("quack"):
        rivals["quack"] = _quack_layer_norm
    return Case((x,), (weight, bias), lambda x, w, b: norm(x), rival, rivals, kernel="norm")


def _liger_layer_norm(x, weight, bias):
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return LigerLayerNormFunction.apply(x, weight, bias, EPS)


def _quack_layer_norm(x, weight, bias):
    # It has no bias, which spares it a read that the cache serves, and wants its weight in float32.
    from quack.rmsnorm import layernorm_fwd

    return layernorm_fwd(x[0], weight.float(), eps=EPS)


def _layer_norm_modulate(rows, width, device, dtype):
    x = randn(1, rows, width, device=device, dtype=dtype)
    vectors = randn(1, 1, 6, width, device=device).unbind(2)[:2]
    norm = LayerNorm(width, eps=EPS, elementwise_affine=False)
    rivals = {
        "eager": lambda x, a, b: _modulated(x.float(), a, b).to(BF16),
        "two kernels": lambda x, a, b: modulate(norm(x), b, a).to(BF16),
    }
    ours = lambda x, a, b: layer_norm_modulate(x, b, a, eps=EPS, out_dtype=BF16)  # noqa: E731
    return Case((x,), vectors, ours, _modulated, rivals, kernel="norm")


@op("layer_norm_modulate bf16")
def _layer_norm_modulate_bf16(rows, width, device):
    return _layer_norm_modulate(rows, width, device, BF16)


@op("layer_norm_modulate fp32 to bf16")
def _layer_norm_modulate_fp32(rows, width, device):
    return _layer_norm_modulate(rows, width, device, FP32)


def _add_norm(rows, width, device, stream):
    x, y = randn(1, rows, width, device=device, dtype=stream), randn(1, rows, width, device=device, dtype=BF16)
    vectors = randn(1, 1, 6, width, device=device).unbind(2)[:3]

    def exact(x, y, gate, scale, shift):
        total = x + gate * y
        # The norm sees the sum as it is stored.
        return total, _modulated(total.to(stream).to(total.dtype), scale, shift)

    def eager(x, y, gate, scale, shift):
        total = torch.addcmul(x.float(), y, gate).to(x.dtype)
        return total, _modulated(total.float(), scale, shift).to(BF16)

    def ours(x, y, gate, scale, shift):
        return add_layer_norm_modulate(x, y, gate, shift, scale, eps=EPS, out_dtype=BF16)

    return Case((x, y), vectors, ours, exact, {"eager": eager}, kernel="add_norm")


@op("add_layer_norm_modulate bf16")
def _add_norm_bf16(rows, width, device):
    return _add_norm(rows, width, device, BF16)


@op("add_layer_norm_modulate fp32 stream")
def _add_norm_fp32(rows, width, device):
    return _add_norm(rows, width, device, FP32)


@op("add_gated fp32 stream")
def _add_gated(rows, width, device):
    x, y = randn(1, rows, width, device=device), randn(1, rows, width, device=device, dtype=BF16)
    gate = randn(1, 1, width, device=device)
    return Case((x, y), (gate,), add_gated, torch.addcmul, {"eager": torch.addcmul}, kernel="add_norm")


def _rotary_inputs(rows, width, device):
    head = 128 if width % 128 == 0 else width // 2
    angles = torch.rand(rows, head // 2, device=device) * 6
    return width // head, (angles.cos(), angles.sin())


def _turned(x, cos, sin):
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2)


@op("apply_rotary_emb")
def _rotary(rows, width, device):
    heads, (cos, sin) = _rotary_inputs(rows, width, device)
    x = randn(1, rows, heads, width // heads, device=device, dtype=BF16)
    ours = lambda x, cos, sin: apply_rotary_emb(x, (cos, sin))  # noqa: E731
    eager = lambda x, cos, sin: _turned(x.float(), cos, sin).to(x.dtype)  # noqa: E731
    return Case((x,), (cos, sin), ours, _turned, {"eager": eager}, kernel="rotary")


@op("rms_norm_rotary q and k")
def _norm_rotary(rows, width, device):
    heads, (cos, sin) = _rotary_inputs(rows, width, device)
    q, k, _ = randn(1, rows, 3, width, device=device, dtype=BF16).unbind(2)
    weights = tuple(randn(2, width, device=device))

    def one(x, weight, cos, sin):
        h = F.rms_norm(x, (width,), weight.to(x.dtype), EPS)
        return _turned(h.unflatten(-1, (heads, -1)), cos, sin)

    def exact(q, k, q_weight, k_weight, cos, sin):
        return one(q, q_weight, cos, sin), one(k, k_weight, cos, sin)

    def eager(q, k, *others):
        return tuple(out.to(BF16) for out in exact(q.float(), k.float(), *others))

    def ours(q, k, q_weight, k_weight, cos, sin):
        return rms_norm_rotary(q, k, q_weight, k_weight, (cos, sin), heads, EPS)

    return Case((q, k), (*weights, cos, sin), ours, exact, {"eager": eager}, kernel="norm_rotary")


@op("gelu_tanh")
def _gelu(rows, width, device):
    x = randn(1, rows, width, device=device, dtype=BF16)
    rival = lambda x: F.gelu(x, approximate="tanh")  # noqa: E731
    return Case((x,), (), GELUTanh(), rival, {"F.gelu": rival}, kernel="gelu")


def _gated(x):
    gate, hidden = x.chunk(2, -1)
    return F.silu(gate) * hidden


@op("silu_and_mul")
def _silu_and_mul(rows, width, device):
    x = randn(1, rows, 2 * width, device=device, dtype=BF16)
    rivals = {"eager": _gated}
    if device.type != "cpu" and find_spec("liger_kernel"):
        rivals["Liger"] = _liger_swiglu
    return Case((x,), (), silu_and_mul, _gated, rivals)


def _liger_swiglu(x):
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(*x.chunk(2, -1))


@op("layer_norm_modulate fp32 to fp8")
def _layer_norm_modulate_fp8(rows, width, device):
    case = _layer_norm_modulate(rows, width, device, FP32)
    case.rivals = {"eager": lambda x, a, b: to_fp8(_modulated(x.float(), a, b))}
    case.ours = lambda x, a, b: layer_norm_modulate(x, b, a, eps=EPS, out_dtype=current_platform.fp8_dtype)
    case.kernel = "norm_fp8"
    return case


@op("add_layer_norm_modulate fp32 stream to fp8")
def _add_norm_fp8(rows, width, device):
    case = _add_norm(rows, width, device, FP32)

    def eager(x, y, gate, scale, shift):
        total = torch.addcmul(x.float(), y, gate).to(x.dtype)
        return total, *to_fp8(_modulated(total.float(), scale, shift))

    def ours(x, y, gate, scale, shift):
        total, rows = add_layer_norm_modulate(x, y, gate, shift, scale, eps=EPS, out_dtype=current_platform.fp8_dtype)
        return total, *rows

    case.ours, case.rivals, case.kernel = ours, {"eager": eager}, "add_norm_fp8"
    return case


@op("gelu_tanh to fp8", SHAPES + FFN_SHAPES)
def _gelu_fp8(rows, width, device):
    x = randn(1, rows, width, device=device, dtype=BF16)
    exact = lambda x: F.gelu(x, approximate="tanh")  # noqa: E731
    ours = lambda x: gelu_tanh(x, current_platform.fp8_dtype)  # noqa: E731
    return Case((x,), (), ours, exact, {"eager": lambda x: to_fp8(exact(x.float()))}, kernel="quantize_activated")


@op("silu_and_mul to fp8")
def _silu_and_mul_fp8(rows, width, device):
    x = randn(1, rows, 2 * width, device=device, dtype=BF16)
    ours = lambda x: silu_and_mul(x, current_platform.fp8_dtype)  # noqa: E731
    return Case((x,), (), ours, _gated, {"eager": lambda x: to_fp8(_gated(x.float()))}, kernel="quantize_activated")


@op("quantize_rows fp8", SHAPES + FFN_SHAPES)
def _quantize(rows, width, device):
    x = randn(1, rows, width, device=device, dtype=BF16)
    ours = lambda x: quantize_rows(x, current_platform.fp8_dtype)  # noqa: E731
    return Case((x,), (), ours, lambda x: x, {"eager": to_fp8}, kernel="quantize")
