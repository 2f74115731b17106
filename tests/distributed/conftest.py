"""One start of four and one of two processes for the whole folder; tests ask for what a check gave on every rank."""

from collections.abc import Callable

import pytest

from tests.distributed import checks
from tests.distributed.processes import run_processes


def started(world_size: int, table: dict) -> Callable[[str], list]:
    outcomes = dict(zip(table, run_processes(world_size, list(table.values()))))

    def results(name: str) -> list:
        """What the check returned on each rank, in rank order; a rank's exception fails the test with its traceback."""
        failed = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(outcomes[name]) if error is not None]
        assert not failed, "\n".join(failed)
        return [value for _, value in outcomes[name]]

    return results


@pytest.fixture(scope="session")
def four():
    return started(4, checks.FOUR)


@pytest.fixture(scope="session")
def two():
    return started(2, checks.TWO)
