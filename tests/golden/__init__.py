"""Reference data made by the official code: where it lies, and the runner that holds our models against it.

`python -m tests.golden DIR` checks every file of the format in DIR; `test_golden.py` does so file by file.
"""

import os
from pathlib import Path

_DEFAULT = Path(__file__).resolve().parents[2].parent / "shared" / "golden"


def golden_dir() -> Path | None:
    """The folder that `TELEFUSER_GOLDEN` names, else `<repository>/../shared/golden`; None where it does not exist."""
    path = Path(os.environ.get("TELEFUSER_GOLDEN") or _DEFAULT)
    return path if path.is_dir() else None
