"""`python -m tests.golden DIR [--device D] [--dtype T] [--json OUT]`: check every reference file under DIR.

Exit code 0: something was checked and every row passed; 1: a miss, an error, or nothing checked; 2: wrong arguments.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import torch

from benchmarks.record import commit
from tests.golden import golden_dir
from tests.golden.case import NotCheckedError, Row
from tests.golden.runner import DTYPES, check_file, exact_matmul, find


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=golden_dir(), help="default: where tests look for it")
    parser.add_argument("--device", default="cpu", help="any device of this PyTorch")
    parser.add_argument("--dtype", choices=[str(d).removeprefix("torch.") for d in DTYPES], help="default: both")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the rows here too")
    options = parser.parse_args(arguments)
    if options.folder is None or not options.folder.is_dir():
        parser.error(f"{options.folder or 'no reference folder'}: not a folder")
    dtypes = DTYPES if options.dtype is None else (getattr(torch, options.dtype),)

    exact_matmul()
    rows, skipped = [], {}
    for path in find(options.folder):
        before = len(rows)
        try:
            for row in check_file(path, torch.device(options.device), dtypes):
                rows.append(row)
                print(_line(row))
        except NotCheckedError as reason:
            skipped[path.stem] = str(reason)
            print(f"{path.stem:<20} skipped: {reason}")
        except Exception as error:  # noqa: BLE001 - one broken file must not hide the results of the others
            rows.append(Row(path.stem, f"stopped after {len(rows) - before} rows", float("nan"), 0.0, repr(error)))
            print(_line(rows[-1]))
    missed = [row for row in rows if not row.passed]
    files = len({row.file for row in rows})
    print(f"{len(rows)} checks in {files} files, {len(missed)} missed, {len(skipped)} files skipped")
    if options.json is not None:
        _write(options.json, options.device, rows, skipped)
    return 1 if missed or not rows else 0


def _line(row: Row) -> str:
    verdict = "pass" if row.passed else "MISS"
    return f"{row.file:<20} {row.check:<58} {row.error:9.2e} limit {row.limit:7.1e}  {verdict} {row.note}".rstrip()


def _write(path: Path, device: str, rows: list[Row], skipped: dict[str, str]) -> None:
    where = torch.device(device)
    name = "cpu" if where.type == "cpu" else torch.get_device_module(where).get_device_name(where)
    record = {
        "device": name,
        "torch": torch.__version__,
        "commit": commit(),
        "tf32": False,
        "rows": [
            {
                "file": row.file,
                "check": row.check,
                "error": _number(row.error),
                "limit": row.limit,
                "pass": row.passed,
                "note": row.note,
            }
            for row in rows
        ],
        "skipped": skipped,
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _number(error: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return error if math.isfinite(error) else None


if __name__ == "__main__":
    sys.exit(main())
