"""Linear layers stored in FP8: `LinearFP8`, and the tools that bring a whole model to it in place.

Inference only: the weight is a constant. A gradient reaches the input and the bias, through the native form.
"""

import copy
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from telefuser.ops.fp8_gemm import fp8_gemm, fp8_linear, multiplies_fp8, rows_dtype
from telefuser.ops.fp8_quantization import FP8_DTYPES, dequantize_rows, hardware_dtype, quantize_weight
from telefuser.ops.quantized_rows import QuantizedRows

logger = logging.getLogger(__name__)

# What a Wan transformer keeps wide, as `skip` for `replace_linear_layers`: together 2 % of the weights, and
# every token passes through them. The time layers and the head compute in float32 by design.
WAN_HIGH_PRECISION = (
    "patch_embedding",
    "text_embedding",
    "time_embedding",
    "time_projection",
    "modulation",
    "head",
    "img_emb",
)
_WIDE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class LinearFP8(nn.Module):
    """A linear layer whose weight is FP8 with a float32 scale an output channel: y = x (weight * weight_scale)ᵀ + bias.

    State dict: `weight` [out, in] FP8, `weight_scale` [out, 1] float32, `bias` [out] or absent. `.to(dtype)`, `.half()`
    and the like change the bias only. Input [..., in] of any float dtype; the output has its dtype, or autocast's. What
    multiplies is chosen by `fp8_gemm`; where the machine multiplies FP8, every row of the input is quantised with a
    scale of its own. An input that comes as `QuantizedRows` is multiplied as it is; the output then has autocast's
    dtype, or the layer's `compute_dtype`. A layer on the CPU follows an input that is on an accelerator.

    original_linear: gives weight, bias and sizes, and is left as it is; on "meta" the layer is on "meta" too.
    data_type: torch.float8_e4m3fn, torch.float8_e5m2 or their fnuz variants. AMD's CDNA3 computes the latter only, so
    there the layer takes the variant that belongs to what is asked for.
    Raises ValueError for another `data_type`, and for a weight that is quantised, integer, NaN or infinite.
    """

    # How many layers it stands for, where `merge_linears` made it.
    num_parts = 1

    def __init__(self, original_linear: nn.Linear, data_type: torch.dtype = torch.float8_e4m3fn):
        super().__init__()
        _check_dtype("data_type", data_type)
        if not isinstance(original_linear, nn.Linear):
            raise ValueError(f"LinearFP8 is made from an nn.Linear, not from a {type(original_linear).__name__}")
        weight = original_linear.weight
        if weight.dtype not in _WIDE_DTYPES:
            raise ValueError(
                f"the weight is {weight.dtype}, whose scale is unknown; LinearFP8 quantises float16, bfloat16, float32 "
                "or float64, and LinearFP8.from_quantized takes FP8 weights with their scale"
            )
        quantized, scale = _quantize(weight, hardware_dtype(data_type))
        if not weight.is_meta and not torch.isfinite(scale).all():
            raise ValueError(
                f"{int((~torch.isfinite(scale)).sum())} of {len(scale)} rows of the weight hold NaN or infinity; "
                "the checkpoint is damaged, or a cast to float16 overflowed"
            )
        bias = original_linear.bias
        # Not the parameter itself: casting this layer would cast the original's bias.
        self._assemble(quantized, scale, None if bias is None else bias.detach(), weight.dtype)
        self.train(original_linear.training)

    @classmethod
    def from_quantized(
        cls,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> "LinearFP8":
        """A layer around an FP8 weight [out, in] as it is, with its scale [out, 1], [out] or a single number.

        dtype: the `compute_dtype` of a layer without bias.
        Raises ValueError for another dtype or shape, such as a scale a block.
        """
        _check_dtype("the weight", weight.dtype)
        if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
            found = tuple(weight.shape), None if bias is None else tuple(bias.shape)
            raise ValueError(f"weight and bias have shapes {found[0]} and {found[1]}; give [out, in] and [out] or None")
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._assemble(weight.contiguous(), _column(weight_scale, weight.shape[0]), bias, dtype)
        return layer

    def _assemble(
        self, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ):
        self.out_features, self.in_features = weight.shape
        self.weight = _constant(weight)
        self.weight_scale = _constant(weight_scale)
        self.register_parameter("bias", None if bias is None else _constant(bias))
        self._dtype = dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype that stands for the layer: of its bias, else of the weight it was made from; casts change it."""
        return self._dtype if self.bias is None else self.bias.dtype

    @property
    def rows_dtype(self) -> torch.dtype:
        """The FP8 dtype in which `QuantizedRows` are best handed in."""
        return rows_dtype(self.weight.dtype)

    def takes_rows(self, device: torch.device) -> bool:
        """Whether `QuantizedRows` on `device` are multiplied as they are; otherwise a wide input loses fewer digits."""
        return multiplies_fp8(device, self.weight.dtype, self.out_features, self.in_features)

    def forward(self, x: torch.Tensor | QuantizedRows) -> torch.Tensor:
        if isinstance(x, QuantizedRows):
            return self._multiply_rows(x)
        if x.dtype not in _WIDE_DTYPES or x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(
                f"LinearFP8 takes floating point [..., {self.in_features}], got {x.dtype} of shape {tuple(x.shape)}"
            )
        self._follow(x.device)
        dtype = _autocast_or(x.dtype, x.device.type)
        return fp8_linear(x.to(dtype), self.weight, self.weight_scale, self.bias)

    def _multiply_rows(self, x: QuantizedRows) -> torch.Tensor:
        values, scales = x
        fits = values.dtype in (self.rows_dtype, self.weight.dtype)
        if not fits or values.dim() == 0 or values.shape[-1] != self.in_features:
            raise ValueError(
                f"LinearFP8 takes quantised rows of {self.rows_dtype} [..., {self.in_features}], got "
                f"{values.dtype} of shape {tuple(values.shape)}"
            )
        if scales.shape != (*values.shape[:-1], 1) or scales.dtype is not torch.float32:
            raise ValueError(
                f"LinearFP8 takes one float32 scale a row, {(*values.shape[:-1], 1)}, got {scales.dtype} of shape "
                f"{tuple(scales.shape)}"
            )
        self._follow(values.device)
        dtype = _autocast_or(self.compute_dtype, values.device.type)
        return fp8_gemm(values, scales, self.weight, self.weight_scale, self.bias, dtype)

    def _follow(self, device: torch.device) -> None:
        if self.weight.device.type == "cpu" and device.type not in ("cpu", "meta"):
            with torch.inference_mode(False):
                self.to(device)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """weight * weight_scale [out, in] in `dtype`, for code that needs a weight of real numbers."""
        return dequantize_rows(self.weight.detach(), self.weight_scale.detach(), dtype)

    def extra_repr(self) -> str:
        kind = str(self.weight.dtype).removeprefix("torch.")
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, weight={kind}"

    def _apply(self, fn: Callable, recurse: bool = True) -> "LinearFP8":
        """Move as asked, but cast only the bias: `.to(bfloat16)` on a model must not undo the quantisation."""
        kept = (self.weight, self.weight_scale)

        def keep_dtype(tensor: torch.Tensor) -> torch.Tensor:
            if not any(tensor is t for t in kept):
                return fn(tensor)
            # An empty tensor tells what `fn` does to the dtype, without a wide copy of the weight.
            probe = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            return fn(tensor) if probe.dtype is tensor.dtype else tensor.to(probe.device)

        self._dtype = fn(torch.empty(0, dtype=self._dtype, device=self.weight.device)).dtype
        return super()._apply(keep_dtype, recurse)

    def __getstate__(self) -> dict[str, Any]:
        # pickle cannot bring back an FP8 storage (torch.save can); bytes it can.
        weight, slots = self.weight.detach(), self._slots_of_weight(self.__dict__)
        tensors = {**self.__dict__[slots], "weight": weight.view(torch.uint8)}
        return {**self.__dict__, slots: tensors, "_weight_dtype": weight.dtype}

    def __setstate__(self, state: dict[str, Any]):
        dtype, slots = state.pop("_weight_dtype"), self._slots_of_weight(state)
        weight = state[slots]["weight"].view(dtype)
        state[slots]["weight"] = _constant(weight) if slots == "_parameters" else weight
        super().__setstate__(state)

    @staticmethod
    def _slots_of_weight(state: dict[str, Any]) -> str:
        """`convert_params_to_buffers` can make a buffer of it."""
        return "_parameters" if "weight" in state["_parameters"] else "_buffers"

    def __deepcopy__(self, memo: dict) -> "LinearFP8":
        # Not by way of the bytes: layers that share a weight share it in the copy too.
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        """Another FP8 variant is converted; a weight without its scale is an error, never a cast."""
        weight, scale = state_dict.get(f"{prefix}weight"), state_dict.get(f"{prefix}weight_scale")
        if weight is not None and weight.dtype not in FP8_DTYPES:
            error_msgs.append(
                f"{prefix}weight is {weight.dtype} and this layer is stored in FP8; load the checkpoint into the "
                "unquantised model, then call replace_linear_layers"
            )
            return
        if weight is not None and scale is None:
            error_msgs.append(f"{prefix}weight is FP8 without {prefix}weight_scale; its values are unknown")
            return
        if weight is not None and weight.shape == self.weight.shape and _scales_rows(scale, self.out_features):
            scale = _column(scale, self.out_features)
            if weight.dtype is not self.weight.dtype and not weight.is_meta:
                weight, scale = quantize_weight(dequantize_rows(weight, scale, torch.float32), self.weight.dtype)
            state_dict[f"{prefix}weight"], state_dict[f"{prefix}weight_scale"] = weight.contiguous(), scale
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def _quantize(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    if not weight.is_meta:
        return quantize_weight(weight, dtype)
    # The 14B model's 400 layers would be quantised in 14,000 pieces of nothing, 2 s.
    scale = torch.empty(weight.shape[0], 1, dtype=torch.float32, device="meta")
    return torch.empty(weight.shape, dtype=dtype, device="meta"), scale


def _check_dtype(what: str, dtype: Any) -> None:
    if dtype not in FP8_DTYPES:
        raise ValueError(f"{what} is {dtype}; choose one of {', '.join(map(str, FP8_DTYPES))}")


def _scales_rows(scale: torch.Tensor, rows: int) -> bool:
    """By its shape: scales of blocks can be as many as rows."""
    return scale.numel() == 1 or scale.shape in ((rows,), (rows, 1))


def _column(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """A scale of shape [], [1], [out] or [out, 1] as [out, 1] float32."""
    if not _scales_rows(scale, rows):
        raise ValueError(f"weight_scale has shape {tuple(scale.shape)}; give one number a row ({rows}) or a single one")
    if scale.shape == (rows, 1) and scale.dtype is torch.float32:
        return scale
    return scale.reshape(-1, 1).float().expand(rows, 1).contiguous()


def _constant(tensor: torch.Tensor) -> nn.Parameter:
    """`tensor` itself where it is a parameter without gradient, so that tied layers share it; else one around it."""
    if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
        return tensor
    return nn.Parameter(tensor.detach(), requires_grad=False)


def _autocast_or(dtype: torch.dtype, device_type: str) -> torch.dtype:
    """The dtype of the result, by the rule of nn.Linear: autocast's where it is on, which leaves float64 alone."""
    if dtype is not torch.float64 and device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return dtype


@dataclass(frozen=True)
class QuantizationReport:
    """What `replace_linear_layers` did.

    replaced: names of the layers that are LinearFP8 now.  skipped: name -> reason, of the other linear layers.
    bytes_before, bytes_after: all parameters and buffers of the model, shared ones once.
    """

    replaced: tuple[str, ...]
    skipped: dict[str, str] = field(default_factory=dict)
    bytes_before: int = 0
    bytes_after: int = 0

    @property
    def bytes_saved(self) -> int:
        return self.bytes_before - self.bytes_after

    def __str__(self) -> str:
        before, after = (f"{size / 2**30:.2f}" for size in (self.bytes_before, self.bytes_after))
        return (
            f"{len(self.replaced)} linear layers to FP8, {len(self.skipped)} left as they are: "
            f"{before} -> {after} GiB of weights"
        )


def replace_linear_layers(
    model: nn.Module,
    quant_type: torch.dtype = torch.float8_e4m3fn,
    include: Iterable[str] | None = None,
    skip: Iterable[str] = (),
) -> QuantizationReport:
    """Replace every nn.Linear in `model` by a LinearFP8 of the same values, in place, at any depth.

    quant_type: the FP8 dtype, as `LinearFP8`'s data_type.
    include: parts of names; only layers whose dotted name contains one are replaced. None is every layer.
    skip: parts of names of layers to leave alone; `WAN_HIGH_PRECISION` is the list for Wan transformers.
    Subclasses of nn.Linear compute in a way of their own (float32 islands, the projection of nn.MultiheadAttention) and
    are left alone, as are layers that are LinearFP8 already. Layers that share a weight share the quantised one. Each
    layer's old weight is freed before the next one is quantised. Zero replaced layers are a warning.
    Raises ValueError where LinearFP8 does, with the name of the layer, and when `model` itself is the nn.Linear.
    """
    if type(model) is nn.Linear:
        raise ValueError("the model is itself an nn.Linear, which cannot be replaced in place; use LinearFP8(model)")
    _check_dtype("quant_type", quant_type)
    include, skip = _fragments("include", include), _fragments("skip", skip)
    before, skipped = _num_bytes(model), {}
    places = _places(model, include, skip, skipped)
    _replace(places, quant_type)
    done = tuple(name for place in places for _, _, name in place)
    report = QuantizationReport(done, skipped, before, _num_bytes(model))
    if done or any(reason == _ALREADY for reason in skipped.values()):
        logger.info("%s", report)
    else:
        why = f"its {len(skipped)} linear layers are left out" if skipped else "it has none"
        logger.warning("no linear layer of this %s was quantised: %s", type(model).__name__, why)
    return report


_ALREADY = "is FP8 already"
# Where a layer hangs: parent, attribute, dotted name.
_Place = tuple[nn.Module, str, str]


def _places(
    model: nn.Module, include: tuple[str, ...] | None, skip: tuple[str, ...], skipped: dict[str, str]
) -> list[list[_Place]]:
    """For each layer to replace all places where it hangs; what is left alone goes to `skipped` with the reason."""
    places: dict[int, list[_Place]] = {}
    for path, parent in model.named_modules():
        for attribute, child in parent._modules.items():
            if not isinstance(child, (nn.Linear, LinearFP8)):
                continue
            name = f"{path}.{attribute}" if path else attribute
            hit = next((part for part in skip if part in name), None)
            if isinstance(child, LinearFP8):
                skipped[name] = _ALREADY
            elif type(child) is not nn.Linear:
                skipped[name] = f"is a {type(child).__name__}"
            elif hit is not None:
                skipped[name] = f"skip names {hit!r}"
            elif include is not None and not any(part in name for part in include):
                skipped[name] = "include does not name it"
            else:
                places.setdefault(id(child), []).append((parent, attribute, name))
    return list(places.values())


def _replace(places: list[list[_Place]], quant_type: torch.dtype) -> None:
    # An id stands for one weight as long as some layer still holds it, which is until its count is down to zero.
    uses = Counter(id(getattr(parent, attribute).weight) for (parent, attribute, _), *_ in places)
    shared: dict[int, LinearFP8] = {}
    for place in places:
        parent, attribute, name = place[0]
        linear = getattr(parent, attribute)
        key, bias = id(linear.weight), linear.bias
        try:
            layer = shared.get(key) or LinearFP8(linear, quant_type)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if key in shared:
            bias = None if bias is None else bias.detach()
            layer = LinearFP8.from_quantized(layer.weight, layer.weight_scale, bias, layer.compute_dtype)
            layer.train(linear.training)
        uses[key] -= 1
        if uses[key]:
            shared[key] = layer
        else:
            shared.pop(key, None)
        for parent, attribute, _ in place:
            setattr(parent, attribute, layer)
        del linear


def _fragments(what: str, names: Iterable[str] | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    names = (names,) if isinstance(names, str) else tuple(names)
    if not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{what} is {names!r}; give parts of layer names such as ('head',)")
    return names


def _num_bytes(model: nn.Module) -> int:
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def convert_params_to_buffers(
    model: nn.Module, ignore_dtype: torch.dtype | tuple[torch.dtype, ...] = FP8_DTYPES
) -> nn.Module:
    """Make buffers of the parameters of `model`, but for those of `ignore_dtype` (default: any FP8); returns `model`.

    Buffers need no gradient bookkeeping. Storage, state-dict keys and the sharing of tied parameters stay as they are;
    a later `.to(device)` copies a buffer once for each place that holds it, so move the model first.
    """
    ignored = ignore_dtype if isinstance(ignore_dtype, tuple) else (ignore_dtype,)
    buffers: dict[int, tuple[nn.Parameter, torch.Tensor]] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or parameter.dtype in ignored:
                continue
            _, buffer = buffers.setdefault(id(parameter), (parameter, parameter.detach()))
            del module._parameters[name]
            module.register_buffer(name, buffer)
    return model


convert_params_to_buffer = convert_params_to_buffers
