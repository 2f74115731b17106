"""Weight files read header first: safetensors and zip `.pth`, their tensors memory-mapped and handed out one by one.

Used by core/checkpoint.py and core/model_loading.py. Nothing here knows what model a file belongs to.
"""

import json
import pickle
import re
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
FLOATING = ("float64", "float32", "float16", "bfloat16")
_BITS = {"float64": 64, "float32": 32, "float16": 16, "bfloat16": 16, "int64": 64, "int32": 32, "int16": 16}

# The format's own limit. A first word above it is text or another format read as a length.
_MAX_HEADER_BYTES = 100_000_000
# A mapping is dropped and made anew after this much was read through it: pages read through a mapping count as this
# process's memory until then, so a 28 GB file would otherwise show up a second time beside its copy.
_REMAP_BYTES = 64 * 2**20
_SAMPLE_ELEMENTS = 512
# The tag spelled out: a safetensors header of 15392 bytes begins with " <" as well, its length.
_WEB_PAGE = re.compile(rb"\s*<(!doctype|!--|html|head|body|\?xml)", re.IGNORECASE)
_SHARD_NAME = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})(?P<suffix>\.\w+)$")


class CheckpointError(ValueError):
    """A checkpoint cannot be used. The message names the file, the key where one is at fault, and the way out."""


@dataclass(frozen=True)
class TensorEntry:
    """What a header says about one tensor; `dtype` is torch's name for it without the `torch.`."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the data in the file."""
        return prod(self.shape) * _BITS.get(self.dtype, 8) // 8


class WeightSet:
    """The tensors of one model, spread over one or more files. Construction reads headers only.

    Raises CheckpointError for a file that is truncated, is no weight file, or would have to run code to be read.
    """

    def __init__(self, files: Iterable[Path]):
        self.files = tuple(Path(file) for file in files)
        self.entries: dict[str, TensorEntry] = {}
        # FP8 weight -> key and header of its scale; filled by core/fp8_layout.py, which takes them out of `entries`.
        self.scales: dict[str, tuple[str, TensorEntry]] = {}
        for file in self.files:
            for key, entry in read_header(file).items():
                if key in self.entries:
                    raise CheckpointError(
                        f"{file}: key '{key}' is also in {self.entries[key].file.name}. "
                        "Keep the files of one checkpoint only in this folder."
                    )
                self.entries[key] = entry

    @property
    def where(self) -> str:
        """The files, short enough for a message."""
        more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        return f"{self.files[0]}{more}"

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (key, mapped CPU tensor). Drop each tensor before asking for the next, or its mapping stays."""
        for file in self.files:
            read, budget = _reader(file), _REMAP_BYTES
            for key, entry in self.entries.items():
                if entry.file != file:
                    continue
                if budget < 0:
                    read, budget = _reader(file), _REMAP_BYTES
                yield key, read(key)
                budget -= entry.num_bytes

    def read_scales(self) -> dict[str, torch.Tensor]:
        """FP8 weight -> its scale, float32 [1, 1] or [rows, 1]. 0.1 MB a block of the 14B model.

        Raises CheckpointError for one that is NaN or infinite.
        """
        found = {}
        for file in self.files:
            read = _reader(file)
            for weight, (key, entry) in self.scales.items():
                if entry.file == file:
                    found[weight] = read(key).to(torch.float32, copy=True).view(-1, 1)
                    if not torch.isfinite(found[weight]).all():
                        raise CheckpointError(
                            f"{file}: '{key}' holds NaN or infinity. The file is damaged: download it again."
                        )
        return found

    def non_finite_sample(self) -> tuple[str, Path] | None:
        """The first floating tensor with NaN or infinity among its first 512 values: one page read a tensor."""
        for file in self.files:
            read = _reader(file)
            for key, entry in self.entries.items():
                if entry.file == file and (entry.dtype in FLOATING or key in self.scales):
                    head = read(key).flatten()[:_SAMPLE_ELEMENTS]
                    if not torch.isfinite(head.float() if key in self.scales else head).all():
                        return key, file
        return None


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Keys, shapes and dtypes of a `.safetensors` file or a zip `.pth`/`.pt`/`.bin`, without reading tensor data."""
    _check_is_weight_file(file)
    if file.suffix == ".safetensors":
        return _read_safetensors_header(file)
    return {
        key: TensorEntry(file, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for key, tensor in _load_pth(file).items()
    }


def shard_files(folder: Path, names: Iterable[str]) -> tuple[Path, ...]:
    """The files that make up one model: all shards named by an index file, or by `-00001-of-00003` in the names.

    names: candidates in `folder`, one model's. Raises CheckpointError that names each missing shard.
    """
    names = sorted(names)
    indexes = [name for name in names if name.endswith(".index.json")]
    weights = [name for name in names if not name.endswith(".json")]
    if indexes:
        wanted = _index_shards(folder / indexes[0])
    else:
        wanted = set(weights)
        for name in weights:
            if match := _SHARD_NAME.match(name):
                stem, total, suffix = match["stem"], match["total"], match["suffix"]
                wanted |= {f"{stem}-{i:05d}-of-{total}{suffix}" for i in range(1, int(total) + 1)}
    if missing := sorted(name for name in wanted if not (folder / name).is_file()):
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(wanted)} weight files are missing: {brief(missing)}. "
            "Download them again; the others can stay."
        )
    return tuple(folder / name for name in sorted(wanted))


def read_json(file: Path) -> dict:
    """A JSON object from a file, or a CheckpointError that says why it is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{file}: not readable as JSON ({error}). Download the file again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: holds a JSON {type(content).__name__}, an object is needed.")
    return content


def _reader(file: Path) -> Callable[[str], torch.Tensor]:
    """Maps the file; the function returned gives views into the mapping, which dies with the function and its views."""
    if file.suffix == ".safetensors":
        try:
            return safe_open(str(file), framework="pt", device="cpu").get_tensor
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: cannot be opened ({error}). Download the file again.") from error
    return _load_pth(file).__getitem__


def _check_is_weight_file(file: Path) -> None:
    try:
        with file.open("rb") as stream:
            head = stream.read(64)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror}).") from error
    if not head:
        raise CheckpointError(f"{file}: the file is empty. Download it again.")
    if head.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{file}: a Git LFS pointer, not the weights. Run `git lfs pull` in that folder.")
    if head.startswith(b"GGUF"):
        raise CheckpointError(f"{file}: GGUF-quantised weights. Use the bf16, fp16 or fp32 safetensors instead.")
    if _WEB_PAGE.match(head):
        raise CheckpointError(f"{file}: a web page, not weights. Download the file itself, logged in where needed.")


def _read_safetensors_header(file: Path) -> dict[str, TensorEntry]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        first = stream.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if not 2 <= length <= _MAX_HEADER_BYTES:
            raise CheckpointError(f"{file}: not a safetensors file (header length {length}). Download it again.")
        text = stream.read(length)
    if len(text) < length:
        raise CheckpointError(f"{file}: truncated inside its header ({size} bytes). Download it again.")
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries, end = {}, 0
        for key, value in header.items():
            dtype = SAFETENSORS_DTYPES.get(value["dtype"], value["dtype"].lower())
            entries[key] = TensorEntry(file, tuple(value["shape"]), dtype)
            begin, stop = value["data_offsets"]
            if dtype in _BITS and stop - begin != entries[key].num_bytes:
                raise CheckpointError(
                    f"{file}: '{key}' is {entries[key].shape} {dtype} but owns {stop - begin} bytes. Download it again."
                )
            end = max(end, stop)
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file}: not a safetensors file ({error}). Download it again.") from error
    if size != 8 + length + end:
        what = "truncated" if size < 8 + length + end else "longer than its header says"
        raise CheckpointError(
            f"{file}: {what}: {size} bytes on disk, {8 + length + end} by its header. Download it again."
        )
    return entries


def _load_pth(file: Path) -> dict[str, torch.Tensor]:
    if not zipfile.is_zipfile(file):
        with file.open("rb") as stream:
            magic = stream.read(2)
        if magic == b"PK":
            raise CheckpointError(f"{file}: truncated (the zip directory at its end is missing). Download it again.")
        if magic[:1] == b"\x80":
            raise CheckpointError(
                f"{file}: a plain pickle (torch.save before 1.6), which cannot be mapped or checked before it runs. "
                "Convert it to safetensors where you trust it."
            )
        raise CheckpointError(f"{file}: not a PyTorch file. Download it again.")
    try:
        content = torch.load(str(file), map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{file}: {_refused_pickle(str(error))}") from error
    except Exception as error:  # a damaged pickle raises whatever its bytes happen to call for
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"{file}: not readable as a PyTorch state dict ({reason}). Download it again.") from error
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        found = type(content).__name__
        if isinstance(content, dict):
            found = "dict with " + brief(sorted(str(k) for k, v in content.items() if not isinstance(v, torch.Tensor)))
        raise CheckpointError(
            f"{file}: a flat dict of tensors is needed, this is a {found}. Save the model's state dict by itself."
        )
    for key, tensor in content.items():
        if not isinstance(key, str):
            raise CheckpointError(f"{file}: key {key!r} is no name. Save the model's state dict by itself.")
        if odd := _odd_kind(tensor):
            raise CheckpointError(
                f"{file}: '{key}' is a {odd} tensor. Save it as an ordinary one in bf16, fp16 or fp32."
            )
    return content


def _odd_kind(tensor: torch.Tensor) -> str | None:
    """What keeps a tensor from being read like any other, None where nothing does."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        return "nested" if tensor.is_nested else f"sparse ({tensor.layout})"
    return "quantised" if tensor.is_quantized else "meta (it has no data)" if tensor.is_meta else None


def _refused_pickle(reason: str) -> str:
    named = re.search(r"GLOBAL ([\w.]+)", reason)
    what = f"loading would run code ('{named[1]}')" if named else "loading would run code or the pickle is damaged"
    return f"{what}, so it is refused. Convert it to safetensors where you trust it, or download the official file."


def _index_shards(index: Path) -> set[str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no 'weight_map'. Download the file again.")
    names = {str(name) for name in weight_map.values()}
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{index}: names a file outside its folder ('{name}'), which is refused.")
    return names


def brief(names: list[str], limit: int = 3) -> str:
    """The first `limit` names and how many more there are, for a message."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
