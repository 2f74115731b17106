"""One reference file: its JSON, its tensors, how it is to be run, and the rows that come out."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


class NotCheckedError(Exception):
    """The file's kind is outside this version; the message is the reason."""


@dataclass(frozen=True)
class Row:
    """One comparison. A NaN error is a miss, since it is not at most the limit."""

    file: str
    check: str
    error: float
    limit: float
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.error <= self.limit


@dataclass(frozen=True)
class Case:
    """A JSON of the reference format and the device and dtypes to run it with."""

    path: Path
    config: dict
    device: torch.device
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def read(cls, path: Path, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> "Case":
        return cls(path, json.loads(path.read_text(encoding="utf-8")), device, dtypes)

    def sibling(self, name: str) -> "Case":
        """The case of the JSON called `name` in the same folder (a pipeline names its models so)."""
        return self.read(self.path.with_name(f"{name}.json"), self.device, self.dtypes)

    def tensors(self) -> dict[str, Tensor]:
        """The stored inputs and outputs, on the CPU."""
        io = self.path.with_suffix(".io.safetensors")
        return load_file(io if io.exists() else self.path.with_suffix(".safetensors"))

    def weights(self) -> dict[str, Tensor]:
        """The model's state dict in float32; the stored bfloat16 values are exact in both."""
        state = load_file(self.path.with_suffix(".weights.safetensors"))
        return {key: value.float() for key, value in state.items()}

    def load(self, model: torch.nn.Module) -> torch.nn.Module:
        """Fill `model` with the weights, every key matched, and put it on the device for inference."""
        model.load_state_dict(self.weights())
        return model.to(self.device).eval().requires_grad_(False)

    def row(self, check: str, error: float, limit: float) -> Row:
        return Row(self.path.stem, check, error, limit)

    def max_abs(self, check: str, result: Tensor, reference: Tensor, limit: float) -> Row:
        return self.row(check, max_abs(result, reference), limit)


def max_abs(result: Tensor, reference: Tensor) -> float:
    """Largest absolute difference in float64; shapes must match, NaN stays NaN."""
    result, reference = _pair(result, reference)
    return (result - reference).abs().max().item() if reference.numel() else 0.0


def max_rel(result: Tensor, reference: Tensor) -> float:
    """Largest difference of an element, relative to that element of the reference or, where smaller, to their RMS.

    A normalised element near zero is a difference of two equal numbers: its own size says nothing about its rounding.
    """
    result, reference = _pair(result, reference)
    scale = reference.abs().clamp_min(reference.square().mean().sqrt().item())
    return ((result - reference).abs() / scale).max().item()


def rel_l2(result: Tensor, reference: Tensor) -> float:
    result, reference = _pair(result, reference)
    return (torch.linalg.vector_norm(result - reference) / torch.linalg.vector_norm(reference)).item()


def max_ulps(result: Tensor, reference: Tensor) -> float:
    """Largest distance in representable bfloat16 values, NaN where an element is not finite."""
    if result.dtype != torch.bfloat16 or reference.dtype != torch.bfloat16:
        raise AssertionError(f"expected bfloat16 on both sides, got {result.dtype} and {reference.dtype}")
    if not (result.isfinite().all() and reference.isfinite().all()):
        return float("nan")
    places = []
    for tensor in (result, reference):
        bits = tensor.cpu().contiguous().view(torch.int16).to(torch.int32)
        # Sign and magnitude to one ordered scale, on which both zeros are 0.
        places.append(torch.where(bits < 0, -(bits & 0x7FFF), bits))
    if places[0].shape != places[1].shape:
        raise AssertionError(f"shapes differ: {tuple(result.shape)} against {tuple(reference.shape)}")
    return float((places[0] - places[1]).abs().max())


def _pair(result: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    if result.shape != reference.shape:
        raise AssertionError(f"shapes differ: {tuple(result.shape)} against {tuple(reference.shape)}")
    return result.detach().cpu().double(), reference.detach().cpu().double()
