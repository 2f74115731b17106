"""Run by test_job.py as a program: the processes of small jobs, forked, so that PyTorch is imported once for all.

Prints, as JSON by scenario: exit codes by rank, what each wrote to stderr, and the seconds until its first and its last
process ended.
"""

import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import torch.distributed as dist

from telefuser.cli import _one_line_errors
from telefuser.distributed import Job, numbers_of_first, require_same


def wait_in_c(job):
    """As a collective of a GPU waits: in C++, where neither a Python signal handler nor an exception comes through."""
    job.store.get("nobody sets this")


def killed(job):
    if job.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_in_c(job)


def killed_while_gloo_waits(job):
    if job.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def first_is_killed(job):
    if job.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_in_c(job)


def one_fails(job):
    if job.rank == 1:
        raise ValueError("the weights are odd")
    dist.barrier()


def one_says_why_it_exits(job):
    if job.rank == 1:
        sys.exit("no such file: a.txt")
    wait_in_c(job)


def all_fail(job):
    raise ValueError("steps is 0")


def all_fail_while_the_first_saves(job):
    if job.rank == 0:
        time.sleep(0.7)
        (job.folder / "saved").touch()
        raise ValueError("saved" if (job.folder / "saved").exists() else "not saved")
    raise ValueError("process 0 saves")


def interrupted(job):
    if job.rank == 0:
        for pid in job.pids_of_all():
            os.kill(pid, signal.SIGINT)
    wait_in_c(job)


def interrupted_in_python(job):
    if job.rank == 0:
        for pid in job.pids_of_all():
            os.kill(pid, signal.SIGINT)
    time.sleep(30)


def all_end_together(job):
    require_same("a request", "request", "cpu")
    seeds = numbers_of_first([1000 + job.rank, 2**63 - 1], "cpu")
    if job.rank == 0:
        time.sleep(1.0)  # writes its file
    print(seeds, file=sys.stderr)


def requests_differ(job):
    require_same(f"seed {job.rank // 2}", "request", "cpu")


SCENARIOS = {
    "killed": (killed, 3),
    "killed while gloo waits": (killed_while_gloo_waits, 3),
    "first is killed": (first_is_killed, 3),
    "one fails": (one_fails, 2),
    "one says why it exits": (one_says_why_it_exits, 2),
    "all fail": (all_fail, 3),
    "all fail while the first saves": (all_fail_while_the_first_saves, 3),
    "interrupted": (interrupted, 2),
    "interrupted in python": (interrupted_in_python, 2),
    "all end together": (all_end_together, 3),
    "requests differ": (requests_differ, 3),
    "another job before": (all_end_together, 3),
}


class Observed(Job):
    """A job that notes when all of its processes had begun."""

    def begin(self, folder, store):
        self.store, self.folder = store, folder
        (folder / f"{self.rank}.pid").write_text(str(os.getpid()))
        dist.barrier()
        (folder / f"{self.rank}.begun").touch()

    def pids_of_all(self):
        return sorted((int(path.read_text()) for path in self.folder.glob("*.pid")), key=lambda pid: pid == os.getpid())


def child(rank, size, port, body, folder):
    error_file = os.open(folder / f"{rank}.err", os.O_WRONLY | os.O_CREAT)
    os.dup2(error_file, 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    code = 0
    try:
        if folder.name == "another job before":
            with Job("cpu", timeout=120):
                dist.barrier()
            names = [thread.name for thread in threading.enumerate()]
            assert "telefuser-watch" not in names, names
        with _one_line_errors(False), Observed("cpu", timeout=120) as job:
            job.begin(folder, dist.TCPStore("127.0.0.1", port, is_master=False))
            body(job)
    except SystemExit as error:
        code = error.code or 0
    except BaseException as error:  # noqa: BLE001 the test reads it
        code = getattr(error, "exit_code", None)
        if code is None:
            traceback.print_exc()
            code = 99
    sys.stderr.flush()
    os._exit(code)


def start(body, size, port, folder):
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            child(rank, size, port, body, folder)
        pids.append(pid)
    return pids


def serve_stores(count):
    """A process that holds so many stores: its number, their ports.

    Not this process: a store has a thread, and what is forked while that asks for a host's name waits forever for the
    resolver's lock.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        # Port 0: the system gives a free one, so that jobs beside these cannot collide with them.
        stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(count)]
        os.write(writer, json.dumps([store.port for store in stores]).encode())
        os.close(writer)
        signal.pause()
    os.close(writer)
    with open(reader) as ports:
        return pid, json.load(ports)


def main(names):
    server, ports = serve_stores(len(names))
    try:
        return run(dict(zip(names, ports)))
    finally:
        os.kill(server, signal.SIGKILL)


def run(ports):
    with tempfile.TemporaryDirectory() as top:
        processes, found = {}, {}
        for name, port in ports.items():
            folder = Path(top) / name
            folder.mkdir()
            pids = start(*SCENARIOS[name], port, folder)
            found[name] = {"codes": [None] * len(pids), "last": 0.0, "first": None}
            processes.update({pid: (name, rank) for rank, pid in enumerate(pids)})
        while processes:
            pid, status = os.wait()
            name, rank = processes.pop(pid)
            begun = max((path.stat().st_mtime for path in (Path(top) / name).glob("*.begun")), default=0.0)
            found[name]["codes"][rank] = os.waitstatus_to_exitcode(status)
            found[name]["last"] = time.time() - begun
            found[name]["first"] = found[name]["first"] or found[name]["last"]
        for name, job in found.items():
            job["errors"] = [(Path(top) / name / f"{rank}.err").read_text() for rank in range(len(job["codes"]))]
        return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:] or list(SCENARIOS))))
