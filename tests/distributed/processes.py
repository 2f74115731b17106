"""Runs functions in several real processes that form one gloo group."""

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

# A process that fails inside a collective leaves the others waiting; they must give up soon.
TIMEOUT = 30
# Importing PyTorch takes seconds, on a busy machine a minute; nobody waits in the rendezvous before all have done it.
START_LIMIT = 300


def _wait_for_all(rank: int, world_size: int, folder: str) -> None:
    (Path(folder) / f"{rank}.here").touch()
    deadline = time.monotonic() + START_LIMIT
    while len(list(Path(folder).glob("*.here"))) < world_size and time.monotonic() < deadline:
        time.sleep(0.05)


def _run_rank(rank: int, world_size: int, folder: str, checks: list[Callable]) -> None:
    torch.set_num_threads(1)
    _wait_for_all(rank, world_size, folder)
    where = f"file://{folder}/rendezvous"
    dist.init_process_group(
        "gloo", init_method=where, rank=rank, world_size=world_size, timeout=timedelta(seconds=TIMEOUT)
    )
    results = []
    for check in checks:
        try:
            results.append((None, check()))
        except Exception:  # noqa: BLE001 the test that asked for the check reports it
            results.append((traceback.format_exc(), None))
    torch.save(results, f"{folder}/{rank}.pt")
    # Not destroy_process_group: after a check whose collective timed out, gloo ends the process there with SIGABRT.
    os._exit(0)


def run_processes(world_size: int, checks: list[Callable]) -> list[list[tuple[str | None, object]]]:
    """Call the functions `check()`, which can be pickled, one after the other in each of `world_size` processes.

    Returns for each check what every rank made of it: (traceback or None, returned value). Starting a process costs
    seconds (it imports torch), so tests share one start. The rendezvous is a file of its own: no ports to collide.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ)
        os.environ["OMP_NUM_THREADS"] = "1"
        try:
            multiprocessing.spawn(_run_rank, (world_size, folder, checks), nprocs=world_size)
        finally:
            os.environ.clear()
            os.environ.update(environment)
        ranks = [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]
    return [list(outcomes) for outcomes in zip(*ranks)]
