"""Norms and activations against "single operations" files."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from telefuser.models.wan_video_vae_blocks import ChannelRMSNorm
from telefuser.ops.activations import get_activation
from telefuser.ops.normalization import LayerNorm, RMSNorm
from tests.golden.case import Case, Row, max_abs, max_rel, max_ulps

FP32_LIMIT = 2e-6
# The reference's T5 GELU is written out in elementary bfloat16 operations: 1 + tanh and the product round by 2^-8 each.
T5_GELU_BF16_LIMIT = 2**-7


def check(case: Case) -> Iterator[Row]:
    tensors = {key: value.to(case.device) for key, value in case.tensors().items()}
    for size in ("unit", "tiny", "large"):
        yield from _norms(case, tensors, size)
    yield from _activations(case, tensors)


def _norms(case: Case, tensors: dict[str, Tensor], size: str) -> Iterator[Row]:
    x, dim, eps = tensors[f"{size}.x"], case.config["dim"], case.config["eps"]
    rms = _filled(RMSNorm(dim, eps=eps["wan_rms"]), tensors)
    plain = LayerNorm(dim, eps=eps["wan_ln"], elementwise_affine=False)
    if torch.float32 in case.dtypes:
        norms = {
            "wan_rms": rms,
            "wan_ln": plain,
            "wan_ln_affine": _filled(LayerNorm(dim, eps=eps["wan_ln_affine"]), tensors),
            "t5_ln": _filled(RMSNorm(dim, eps=eps["t5_ln"]), tensors),
            "clip_ln": _filled(LayerNorm(dim, eps=eps["clip_ln"]), tensors),
        }
        for name, norm in norms.items():
            yield case.row(f"float32 {size}.{name}", max_rel(norm(x), tensors[f"{size}.{name}"]), FP32_LIMIT)
        channel_norm = ChannelRMSNorm(dim).to(case.device)
        channel_norm.load_state_dict({"gamma": tensors["weight"].view(channel_norm.gamma.shape)})
        ours = channel_norm(tensors[f"{size}.vae_rms.x"])
        yield case.row(f"float32 {size}.vae_rms", max_rel(ours, tensors[f"{size}.vae_rms"]), FP32_LIMIT)
    if torch.bfloat16 in case.dtypes:
        x = x.bfloat16()
        yield _ulps(case, f"{size}.wan_ln.x_bf16", plain(x), tensors)
        yield _ulps(case, f"{size}.wan_rms.x_bf16_w_f32", rms(x), tensors)
        rms.bfloat16()
        yield _ulps(case, f"{size}.wan_rms.x_bf16_w_bf16", rms(x), tensors)
        yield _ulps(case, f"{size}.t5_ln.x_bf16_w_bf16", rms(x), tensors)


def _activations(case: Case, tensors: dict[str, Tensor]) -> Iterator[Row]:
    functions = {
        "gelu_erf": get_activation("gelu"),
        "gelu_tanh": nn.GELU(approximate="tanh"),
        "silu": get_activation("silu"),
        "t5_gelu": nn.GELU(approximate="tanh"),
    }
    x = tensors["act.x"]
    for name, function in functions.items():
        if torch.float32 in case.dtypes:
            error = _gate_error(function(x), tensors[f"act.{name}"], x)
            yield case.row(f"float32 act.{name}", error, FP32_LIMIT)
        if torch.bfloat16 in case.dtypes and f"act.{name}.bf16" in tensors:
            ours, reference = function(x.bfloat16()), tensors[f"act.{name}.bf16"]
            if name == "t5_gelu":
                yield case.row(f"bfloat16 act.{name}", _gate_error(ours, reference, x), T5_GELU_BF16_LIMIT)
            else:
                # Below 1e-6 of x the tail is what is left of 1 - 1, in the reference as here.
                is_tail = (ours - reference).abs() <= 1e-6 * x.abs()
                yield _ulps(case, f"act.{name}.bf16", torch.where(is_tail, reference, ours), tensors)


def _gate_error(result: Tensor, reference: Tensor, x: Tensor) -> float:
    """Largest error of the gate in 0..1 that an activation multiplies x with; x = 0 gives 0 in any case."""
    divisor = torch.where(x == 0, 1, x)
    return max_abs(result / divisor, reference / divisor)


def _filled(norm: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    norm.load_state_dict({name: tensors[name].detach().clone() for name in norm.state_dict()})
    return norm.to(tensors["weight"].device).requires_grad_(False)


def _ulps(case: Case, name: str, ours: Tensor, tensors: dict[str, Tensor]) -> Row:
    return case.row(f"bfloat16 {name} ulps", max_ulps(ours, tensors[name].bfloat16()), 1)
