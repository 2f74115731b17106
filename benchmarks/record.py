"""Appends measured rows to `benchmarks/results/<device>.csv`, each with versions and commit; every benchmark writes through here."""

import csv
import os
import platform
import re
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import torch

import telefuser
from telefuser.platforms import current_platform

RESULTS = Path(__file__).resolve().parent / "results"
COLUMNS = [
    "date",
    "device",
    "telefuser",
    "commit",
    "torch",
    "triton",
    "python",
    "benchmark",
    "case",
    "metric",
    "value",
    "unit",
    "note",
]


def commit() -> str:
    """Commit of the measured tree: TELEFUSER_COMMIT where the tree was copied without its history, otherwise git's answer ('+' = with changes)."""
    if "TELEFUSER_COMMIT" in os.environ:
        return os.environ["TELEFUSER_COMMIT"]
    here = Path(__file__).resolve().parent
    head = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True, check=False
    )
    if head.returncode:
        return "unknown"
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no"], cwd=here, capture_output=True, text=True, check=False
    )
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def device_name() -> str:
    name = current_platform.get_device_name()
    return name if current_platform.device_type != "cpu" else f"CPU {platform.machine()} {os.cpu_count()} cores"


def triton_version() -> str:
    from importlib import metadata

    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "none"


def append(benchmark: str, rows: list[dict], folder: Path = RESULTS) -> Path:
    """Append `rows` (keys case, metric, value, unit and optionally note) and return the file."""
    device = device_name()
    path = folder / f"{re.sub(r'[^a-z0-9]+', '_', device.lower()).strip('_')}.csv"
    folder.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists()
    common = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "device": device,
        "telefuser": telefuser.__version__,
        "commit": commit(),
        "torch": torch.__version__,
        "triton": triton_version(),
        "python": platform.python_version(),
        "benchmark": benchmark,
    }
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if fresh:
            writer.writeheader()
        for row in rows:
            writer.writerow({**common, "note": "", **row})
    return path
