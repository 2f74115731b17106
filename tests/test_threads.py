"""Parallel test workers share the processors instead of each taking all of them."""

import pytest

from tests.platforms.simulate import in_fresh_process

CODE = """
import os
os.environ.pop("OMP_NUM_THREADS", None)
os.environ["PYTEST_XDIST_WORKER_COUNT"] = "{workers}"
import torch
before = torch.get_num_threads()
import tests.conftest
print(torch.get_num_threads() == {expected}, os.environ.get("OMP_NUM_THREADS"))
"""


@pytest.mark.parametrize(
    ("workers", "expected", "inherited"), [(1, "before", "None"), (4096, "1", "1")], ids=["alone", "among many"]
)
def test_a_worker_takes_its_share_of_the_processors(workers, expected, inherited):
    printed = in_fresh_process(CODE.format(workers=workers, expected=expected))
    assert printed.split() == ["True", inherited]
