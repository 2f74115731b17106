"""Appends measured rows to `benchmarks/results/<device>.csv`, each with versions and commit."""

import csv
import os
import platform
import re
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

import telefuser
from telefuser.platforms import current_platform

RESULTS = Path(__file__).resolve().parent / "results"
COLUMNS = [
    *("date", "device", "telefuser", "commit", "torch", "triton", "python"),
    *("benchmark", "case", "metric", "value", "unit", "note"),
]


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
        "note": "",
    }
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if fresh:
            writer.writeheader()
        writer.writerows({**common, **row} for row in rows)
    return path


def commit() -> str:
    """Commit of the measured tree, with '+' where it has changes; TELEFUSER_COMMIT names it where git has no answer."""
    if "TELEFUSER_COMMIT" in os.environ:
        return os.environ["TELEFUSER_COMMIT"]
    head = _git("rev-parse", "--short=12", "HEAD")
    if head is None:
        return "unknown"
    return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*arguments: str) -> str | None:
    here = Path(__file__).resolve().parent
    answer = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=False)
    return None if answer.returncode else answer.stdout.strip()


def device_name() -> str:
    if current_platform.device_type == "cpu":
        return f"CPU {platform.machine()} {os.cpu_count()} cores"
    return current_platform.get_device_name()


def triton_version() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "none"
