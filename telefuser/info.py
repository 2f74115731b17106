"""What this machine offers TeleFuser, and why it does not offer the rest. `telefuser info` prints it."""

import os
import platform as host
from importlib import metadata
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from telefuser import __version__, platforms
from telefuser.core.config import AttnImplType
from telefuser.ops import fp8_gemm
from telefuser.ops.attention import backends, block_sparse
from telefuser.platforms import BasePlatform, CpuPlatform

# Distribution names, whether or not they share a module.
_LIBRARIES = ("numpy", "safetensors", "tokenizers", "huggingface_hub", "av")
_ACCELERATION = (
    "triton",
    "torch_npu",
    "tf-kernel",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "sageattention",
    "spas-sage-attn",
    "flashinfer-python",
)


def collect() -> dict[str, Any]:
    """Everything `render` shows, as plain JSON values; memory in bytes, a reason of None means available or chosen."""
    chosen = platforms.current_platform
    return {
        "versions": _versions(),
        "platform": {
            "name": chosen.device_name,
            "device_type": chosen.device_type,
            "dist_backend": chosen.dist_backend,
            "operators": [f"forward_{key}" for key in chosen.op_keys] + ["forward_native"],
        },
        "candidates": [{"name": name, "rejected_because": reason} for name, reason in platforms.candidates()],
        "devices": _devices(chosen),
        "attention": {impl.name: reason for impl, reason in backends.availability().items()},
        "attention_auto": backends.describe_choice(AttnImplType.AUTO),
        "sparse_attention": {impl.name: reason for impl, reason in block_sparse.availability().items()},
        "fp8": {"fp8_linear": fp8_gemm.describe_choice(), "hardware": _fp8_hardware(chosen)},
    }


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "telefuser": __version__,
        "python": host.python_version(),
        "system": f"{host.system()} {host.release()} {host.machine()}",
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda,
        "ROCm of torch": torch.version.hip,
        "cuDNN of torch": _cudnn_version(),
    }
    return found | {name: _package_version(name) for name in (*_LIBRARIES, *_ACCELERATION)}


def _package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cudnn_version() -> str | None:
    number = torch.backends.cudnn.version()
    if number is None:
        return None
    # 91900 is 9.19.0; up to version 8 the digits were 8.9.7 as 8907.
    major, rest = divmod(number, 10000) if number >= 90000 else divmod(number, 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _devices(chosen: BasePlatform) -> list[dict[str, Any]]:
    """One entry a visible device, the CPU last."""
    rows = []
    if chosen.device_type != "cpu":
        rows = [_device(chosen, f"{chosen.device_type}:{index}") for index in range(chosen.device_count())]
    cpu = _device(CpuPlatform(), "cpu")
    return rows + [cpu | {"cores": os.cpu_count(), "threads": torch.get_num_threads()}]


def _device(platform: BasePlatform, device: str) -> dict[str, Any]:
    try:
        return {
            "device": device,
            "name": platform.get_device_name(device),
            "arch": platform.device_arch(device),
            "total_memory": platform.get_device_total_memory(device),
            "free_memory": platform.get_device_free_memory(device),
        }
    except RuntimeError as error:
        # A device in exclusive use by another process is visible and still refuses questions.
        return {"device": device, "error": str(error).strip().splitlines()[0]}


def _fp8_hardware(chosen: BasePlatform) -> str:
    try:
        return chosen.fp8_unavailable_reason() or f"computes FP8 matrix products ({chosen.fp8_dtype})"
    except RuntimeError as error:
        return f"the device does not answer: {str(error).strip().splitlines()[0]}"


def render(info: dict[str, Any]) -> RenderableType:
    """`collect()`'s result for people, made to fit 80 columns."""
    chosen = info["platform"]
    title = Text.assemble(
        ("TeleFuser ", "bold"),
        (info["versions"]["telefuser"], "bold"),
        " on ",
        (chosen["name"].upper(), "bold green"),
        f"   tensors on {chosen['device_type']}, processes over {chosen['dist_backend']}",
    )
    operators = Text(f"Operators try {', then '.join(chosen['operators'])}.", style="dim")
    return Group(
        title,
        operators,
        *_section("Platforms, in the order of the search", _platform_rows(info["candidates"])),
        *_section("Devices", _device_rows(info["devices"])),
        *_section("Attention backends", _attention_rows(info["attention"], info["attention_auto"])),
        *_section("Executors of RADIAL_ATTN and LOCAL_SPARSE_ATTN, in order", _verdicts(info["sparse_attention"])),
        *_section("FP8", [(Text(name.replace("_", " ")), Text(text)) for name, text in info["fp8"].items()]),
        *_section("Versions", _version_rows(info["versions"])),
    )


def _section(title: str, rows: list[tuple[Text, Text]]) -> tuple[RenderableType, ...]:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(Text("  ") + name, text)
    return Text(f"\n{title}", style="bold cyan"), table


def _platform_rows(candidates: list[dict[str, Any]]) -> list[tuple[Text, Text]]:
    rows = []
    for candidate in candidates:
        reason = candidate["rejected_because"]
        rows.append((Text(candidate["name"], style="green" if reason is None else ""), _verdict("chosen", reason)))
    return rows


def _attention_rows(attention: dict[str, str | None], auto: str) -> list[tuple[Text, Text]]:
    # Usable ones first; sorting is stable, so the order of the enum stays within both groups.
    usable_first = dict(sorted(attention.items(), key=lambda item: item[1] is not None))
    return [(Text("AUTO"), Text(auto.removeprefix("AUTO: "))), *_verdicts(usable_first)]


def _verdicts(reasons: dict[str, str | None]) -> list[tuple[Text, Text]]:
    found = reasons.items()
    return [
        (Text(name, style="green" if reason is None else ""), _verdict("available", reason)) for name, reason in found
    ]


def _verdict(word: str, reason: str | None) -> Text:
    return Text(word, style="green") if reason is None else Text(reason, style="dim")


def _device_rows(devices: list[dict[str, Any]]) -> list[tuple[Text, Text]]:
    rows = []
    for row in devices:
        if "error" in row:
            rows.append((Text(row["device"]), Text(row["error"], style="red")))
            continue
        free, total = (f"{row[key] / 2**30:.1f}" for key in ("free_memory", "total_memory"))
        details = f"{row['name']} ({row['arch']}), {free} of {total} GiB free"
        if "cores" in row:
            details += f", PyTorch uses {row['threads']} of {row['cores']} cores"
        rows.append((Text(row["device"]), Text(details)))
    return rows


def _version_rows(versions: dict[str, str | None]) -> list[tuple[Text, Text]]:
    rows = [(Text(name), Text(version)) for name, version in versions.items() if version is not None]
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        rows.append((Text("not here", style="dim"), Text(", ".join(missing), style="dim")))
    return rows
