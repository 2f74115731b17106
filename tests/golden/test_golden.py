"""Every file of the reference folder, held against our code: one test a file."""

import pytest
import torch

from tests.golden import golden_dir
from tests.golden.case import NotCheckedError
from tests.golden.runner import check_file, exact_matmul, find

FOLDER = golden_dir()
FILES = [] if FOLDER is None else [path for path in find(FOLDER) if path.parent.name != "manifests"]


@pytest.mark.skipif(FOLDER is None, reason="no reference folder: set TELEFUSER_GOLDEN or put it at ../shared/golden")
@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_reference_file_is_reproduced(path):
    exact_matmul()
    try:
        rows = list(check_file(path, torch.device("cpu")))
    except NotCheckedError as reason:
        pytest.skip(str(reason))
    assert rows
    misses = [f"{row.check}: {row.error:.2e} above {row.limit:.1e}" for row in rows if not row.passed]
    assert not misses
