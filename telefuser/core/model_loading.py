"""Filling a model from weight files: built without memory for its parameters, then filled one by one, cast on the way.

Peak host memory is one copy of the model, plus the largest tensor and a small mapping.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from telefuser.core.fp8_layout import separate_scales
from telefuser.core.weight_files import FLOATING, CheckpointError, WeightSet, brief

KeyTranslation = Callable[[str], str | None]
# weight [N, K], FP8 dtype -> FP8 values [N, K], scale [N, 1] float32
Quantizer = Callable[[torch.Tensor, torch.dtype], tuple[torch.Tensor, torch.Tensor]]
# Bits of a byte without its sign from which on it is NaN or infinity. The fnuz kinds have a single NaN, -0.
_FP8_NON_FINITE = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}


@contextlib.contextmanager
def meta_parameters() -> Iterator[None]:
    """Within it, modules get their parameters on the meta device while buffers and plain tensors stay real.

    `with torch.device("meta")` would take non-persistent buffers along (rotary tables, latent statistics), and no
    checkpoint holds those. Random initialisers are skipped for meta parameters.
    """

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(on_meta)
    try:
        with _NoRandomInit():
            yield
    finally:
        handle.remove()


class _NoRandomInit(TorchFunctionMode):
    """Leaves meta tensors alone: their `normal_` would import torch's compiler first, 2 to 5 seconds for nothing."""

    _NAMES = frozenset({"normal_", "uniform_", "trunc_normal_", "kaiming_uniform_", "xavier_uniform_"})

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensor = args[0] if args else kwargs.get("tensor")
        if getattr(func, "__name__", "") in self._NAMES and isinstance(tensor, torch.Tensor) and tensor.is_meta:
            return tensor
        return func(*args, **kwargs)


def load_model(
    build: Callable[[], nn.Module],
    files: WeightSet | Iterable[Path],
    *,
    dtype: torch.dtype | None,
    fp32_fragments: Iterable[str] = (),
    device: torch.device | str = "cpu",
    key_map: KeyTranslation | None = None,
    quantize: Quantizer | None = None,
) -> nn.Module:
    """Builds a model and fills every parameter from weight files; returns it in eval mode, without gradients.

    build: makes the model; runs inside `meta_parameters`.
    files: a WeightSet or the paths of all files of this one model.
    dtype: what parameters are cast to; None keeps each as stored.
    fp32_fragments: a parameter whose name contains one of these becomes float32 whatever `dtype` says.
    key_map: translates a key of the files to the model's; None for a key means that it is not expected.
    quantize: fills a parameter `X.weight` that the model has in FP8, and its `X.weight_scale`, from a weight of another
        dtype: as stored, on `device`, one layer at a time. FP8 weights with scales in the files are taken as they are
        there, and multiplied out where the model has a wide parameter.

    Raises CheckpointError when keys or shapes differ in any way (before data is read), for a dtype that holds no plain
    numbers, and for NaN or infinity in a tensor, each with file and key. A model is never filled in part.
    """
    weights = files if isinstance(files, WeightSet) else WeightSet(files)
    separate_scales(weights)
    with meta_parameters():
        model = build()
    targets = dict(model.named_parameters(remove_duplicate=False)) | _persistent_buffers(model)
    fp8 = {name: target.dtype for name, target in targets.items() if _is_fp8(target)}
    expected = {name: tuple(target.shape) for name, target in targets.items()}
    for name in fp8:
        # Comes with its weight.
        expected.pop(_scale_name(name), None)
    names = match_keys(weights, expected, key_map)
    fragments, scales = tuple(fp32_fragments), weights.read_scales()
    for key, tensor in weights.tensors():
        name = names.get(key)
        if name is None:
            continue
        source = _Source(key, weights.entries[key].file, scales.get(key))
        if name in fp8:
            values, scale = _materialise_fp8(tensor, fp8[name], device, source, quantize)
            _assign(model, name, values)
            _assign(model, _scale_name(name), scale)
            continue
        wanted = torch.float32 if any(part in name for part in fragments) else dtype or source.dtype_of(tensor)
        _assign(model, name, _materialise(tensor, wanted, device, source))
    for name, buffer in list(model.named_buffers()):
        if buffer.is_meta:
            raise RuntimeError(f"{type(model).__name__} built buffer '{name}' on the meta device; give it data")
        _assign(model, name, buffer.to(device))
    return model.eval().requires_grad_(False)


def match_keys(
    weights: WeightSet,
    expected: dict[str, tuple[int, ...]],
    key_map: KeyTranslation | None,
    back: KeyTranslation | None = None,
) -> dict[str, str]:
    """file key -> model key for every expected tensor; CheckpointError for the first way in which the two differ.

    back: translates a model's key to the files' spelling, for the message about missing ones.
    """
    names, unexpected, taken = {}, [], set()
    for key in weights.entries:
        name = key_map(key) if key_map else key
        if name not in expected:
            unexpected.append(key)
        elif name in taken:
            raise CheckpointError(f"{weights.entries[key].file}: '{key}' comes under two spellings. Keep one of them.")
        else:
            names[key] = name
            taken.add(name)
    missing = sorted(back(name) or name if back else name for name in set(expected) - taken)
    if missing or unexpected:
        found = [f"{len(missing)} of {len(expected)} keys are missing ({brief(missing)})"] if missing else []
        found += [f"{len(unexpected)} keys are not expected ({brief(unexpected)})"] if unexpected else []
        raise CheckpointError(f"{weights.where}: {' and '.join(found)}. Use the files of one whole checkpoint.")
    for key, name in names.items():
        entry = weights.entries[key]
        if entry.shape != expected[name]:
            raise CheckpointError(
                f"{entry.file}: '{key}' has shape {entry.shape}, the model needs {expected[name]}. "
                "Use the config.json that belongs to these weights."
            )
        if entry.dtype not in FLOATING and key not in weights.scales:
            raise CheckpointError(
                f"{entry.file}: '{key}' is {entry.dtype}: quantised. Use the bf16, fp16 or fp32 weights."
            )
    return names


class _Source(NamedTuple):
    """Where a tensor comes from; `scale` [1, 1] or [rows, 1] float32 where it is FP8."""

    key: str
    file: Path
    scale: torch.Tensor | None = None

    def dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        """The dtype of its values: what was quantised is worth bfloat16."""
        return tensor.dtype if self.scale is None else torch.bfloat16

    def damaged(self) -> CheckpointError:
        return CheckpointError(
            f"{self.file}: '{self.key}' holds NaN or infinity. The file is damaged: download it again."
        )


def _materialise(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device | str, source: _Source) -> torch.Tensor:
    # An accelerator gets the stored bytes and casts them itself; on the CPU, `copy` keeps the mapping from living on.
    on_cpu = torch.device(device).type == "cpu"
    if source.scale is not None:
        values = tensor.to(device).float()
        result = (values * source.scale.to(device).view(-1, *(1,) * (values.dim() - 1))).to(dtype)
    else:
        result = tensor.to(dtype, copy=True) if on_cpu else tensor.to(device).to(dtype)
    # A sum is one pass without a temporary, and NaN or infinity always survive in it. The exact test, one byte an
    # element, follows where the sum of finite values left the dtype's range.
    if not torch.isfinite(result.sum()) and not torch.isfinite(result).all():
        if torch.isfinite(tensor.float() if source.scale is not None else tensor).all():
            raise CheckpointError(
                f"{source.file}: '{source.key}' holds values beyond {dtype}. Load it as bfloat16 or float32."
            )
        raise source.damaged()
    return result


def _materialise_fp8(
    tensor: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device | str,
    source: _Source,
    quantize: Quantizer | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values and float32 scale [rows, 1] on `device`. No more than this one layer is wide at a time."""
    if source.scale is not None and tensor.dtype is dtype:
        values = tensor.to(device, copy=True)
        bits = values.view(torch.uint8)
        limit = _FP8_NON_FINITE.get(dtype)
        if ((bits & 0x7F) >= limit if limit else bits == 0x80).any():
            raise source.damaged()
        return values, source.scale.to(device).expand(len(values), 1).contiguous()
    if quantize is None:
        raise ValueError(f"the model has '{source.key}' in FP8 and the file in {tensor.dtype}: give `quantize`")
    # From the stored values, not from those cast to the run's dtype: a converted file then equals any run.
    # On the CPU straight from the mapping: a copy of each layer would leave holes in the heap, half the model's size.
    wide = tensor.to(device) if source.scale is None else _materialise(tensor, torch.float32, device, source)
    values, scale = quantize(wide, dtype)
    # The largest value of a row is in its scale, NaN and infinity too.
    if not torch.isfinite(scale).all():
        raise source.damaged()
    return values, scale


def _is_fp8(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1


def _scale_name(name: str) -> str:
    return f"{name}_scale"


def _persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    stored = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in stored}


def _assign(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._parameters:
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[leaf] = tensor
