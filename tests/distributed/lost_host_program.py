"""Run by test_lost_host.py as one process of a job over two hosts: waits, in C or in Python, for what never comes."""

import sys
import time
from pathlib import Path

import torch.distributed as dist
import typer

from telefuser.cli import _one_line_errors
from telefuser.distributed import Job


def main(ready, waits_in):
    with _one_line_errors(False), Job("cpu", timeout=300) as job:
        dist.barrier()
        Path(ready).touch()
        if waits_in == "c" and job.rank:
            dist.barrier()
        time.sleep(300)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except typer.Exit as end:
        sys.exit(end.exit_code)
