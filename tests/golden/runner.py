"""Which adapter checks a reference file: the one whose words stand in the file's "kind"."""

import importlib
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.golden.case import Case, NotCheckedError, Row

DTYPES = (torch.float32, torch.bfloat16)

# First match wins. An adapter is the module tests.golden.<name>; a reason stands where this version has no such part.
KINDS = (
    ("WanModel forward", "dit"),
    ("Wan2.1 VAE", "vae"),
    ("UMT5 encoder", "text_encoder"),
    ("rope tables", "rope"),
    ("single operations", "operations"),
    ("flow schedulers", "schedulers"),
    ("whole t2v loop", "pipeline"),
    ("radial", "radial"),
)
OUTSIDE = (
    ("whole i2v loop", "image-to-video is not part of this version"),
    ("CLIP", "the image encoder belongs to image-to-video, which is not part of this version"),
    ("Wan2.2 VAE", "the Wan 2.2 VAE is not part of this version"),
    ("SageAttention", "quantised attention is a third-party backend, not code of this project"),
)


def find(folder: Path) -> list[Path]:
    """Every JSON under `folder`, in a fixed order."""
    return sorted(folder.rglob("*.json"))


def check_file(path: Path, device: torch.device, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Iterator[Row]:
    """Yield the rows of one file.

    Raises:
        NotCheckedError: the file is no reference file or of a kind outside this version.
    """
    case = Case.read(path, device, dtypes)
    # The mask file states its origin only.
    kind = str(case.config.get("kind") or case.config.get("source") or "") if isinstance(case.config, dict) else ""
    for words, reason in OUTSIDE:
        if words.lower() in kind.lower():
            raise NotCheckedError(reason)
    for words, adapter in KINDS:
        if words.lower() in kind.lower():
            yield from importlib.import_module(f"tests.golden.{adapter}").check(case)
            return
    raise NotCheckedError(f"unknown kind {kind!r}" if kind else "names no kind, so it is no reference file")


def exact_matmul() -> None:
    """Switch TF32 off (cuDNN's is on by default): it keeps 10 bits of a float32's 23 and misses every limit."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
