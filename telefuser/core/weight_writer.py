"""A safetensors file written one tensor at a time, so that a model larger than memory can be converted."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import TracebackType

import torch

from telefuser.core.weight_files import SAFETENSORS_DTYPES

_NAMES = {getattr(torch, ours): theirs for theirs, ours in SAFETENSORS_DTYPES.items()}


class WeightWriter:
    """`with WeightWriter(file, layout) as w: w.write(key, tensor)` for every key, in any order.

    layout: key -> (dtype, shape), known before the first tensor is: the format has its header in front.
    metadata: strings for the header.  Raises FileExistsError for a file that exists, ValueError for a dtype that the
    format has no name for, a tensor that is not as announced, one too many, and at the end for one too few.
    """

    def __init__(
        self,
        file: Path,
        layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        metadata: Mapping[str, str] | None = None,
    ):
        self.file = file
        self._layout = dict(layout)
        self._left = set(self._layout)
        header: dict[str, object] = {"__metadata__": dict(metadata or {})}
        self._offsets, end = {}, 0
        # Wide dtypes first, so that every tensor is aligned whatever the sizes of those before it.
        for key in sorted(self._layout, key=lambda name: -self._layout[name][0].itemsize):
            dtype, shape = self._layout[key]
            if dtype not in _NAMES:
                raise ValueError(f"{file}: '{key}' is {dtype}, which safetensors does not store")
            size = prod(shape) * dtype.itemsize
            header[key] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [end, end + size]}
            self._offsets[key], end = end, end + size
        text = json.dumps(header, ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._start = 8 + len(text)
        self._stream = file.open("xb")
        self._stream.write(struct.pack("<Q", len(text)) + text)
        self._stream.truncate(self._start + end)

    def write(self, key: str, tensor: torch.Tensor) -> int:
        """Puts a tensor in its place; returns its bytes."""
        if (tensor.dtype, tuple(tensor.shape)) != self._layout.get(key):
            raise ValueError(f"{self.file}: '{key}' is {tensor.dtype} {tuple(tensor.shape)}, not as announced")
        if key not in self._left:
            raise ValueError(f"{self.file}: '{key}' was written already")
        self._left.discard(key)
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        self._stream.seek(self._start + self._offsets[key])
        self._stream.write(memoryview(data.numpy()))
        return data.numel()

    def __enter__(self) -> WeightWriter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._stream:
            if error is None:
                if self._left:
                    raise ValueError(f"{self.file}: {len(self._left)} tensors were not written: {min(self._left)} ...")
                self._stream.flush()
                os.fsync(self._stream.fileno())
