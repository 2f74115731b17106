"""Real processes of `Job`: they agree, end together, and end within 10 s with one message when one of them does not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from telefuser import platforms
from telefuser.distributed import Job, choose_parallel_config, own_device
from telefuser.distributed.watch import Failure, Watch

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the processes are forked")


@pytest.fixture(scope="module")
def jobs():
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # stderr is for the line that the job writes
    program = [sys.executable, "-m", "tests.distributed.job_program"]
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def message(job):
    """The one line that all processes of the job wrote together."""
    lines = "".join(job["errors"]).splitlines()
    assert len(lines) == 1, job["errors"]
    return lines[0]


@pytest.mark.parametrize(
    ("name", "dead"), [("killed", 2), ("killed while gloo waits", 1), ("first is killed", 0)], ids=str
)
def test_a_killed_process_ends_the_job(jobs, name, dead):
    # B134; in the first case the others wait where neither a signal handler nor an exception reaches them
    job = jobs[name]
    assert [code for rank, code in enumerate(job["codes"]) if rank != dead] == [1, 1]
    assert job["codes"][dead] == -9
    assert message(job).startswith(f"error: process {dead} ")
    assert "ended without a word" in message(job)
    assert job["last"] < 10


def test_an_error_of_one_process_is_told_by_the_first(jobs):
    assert jobs["one fails"]["codes"] == [1, 1]
    assert message(jobs["one fails"]) == "error: process 1: ValueError: the weights are odd"
    assert jobs["one fails"]["errors"][1] == ""
    assert jobs["one fails"]["last"] < 10


def test_a_text_to_exit_with_is_the_error(jobs):
    assert jobs["one says why it exits"]["codes"] == [1, 1]
    assert message(jobs["one says why it exits"]) == "error: process 1: no such file: a.txt"
    assert jobs["one says why it exits"]["last"] < 10


def test_an_error_of_all_is_told_once(jobs):
    assert jobs["all fail"]["codes"] == [1, 1, 1]
    assert message(jobs["all fail"]) == "error: steps is 0"


def test_the_first_process_may_still_keep_what_it_has(jobs):
    # The others leave after it: torchrun ends all of them once one has ended.
    assert message(jobs["all fail while the first saves"]) == "error: saved"
    assert jobs["all fail while the first saves"]["first"] >= 0.6


@pytest.mark.parametrize("name", ["interrupted", "interrupted in python"])
def test_ctrl_c_ends_all(jobs, name):
    # B134
    assert jobs[name]["codes"] == [130, 130]
    assert message(jobs[name]) == "interrupted; no unfinished file is left"
    assert jobs[name]["last"] < 10


@pytest.mark.parametrize("name", ["all end together", "another job before"])
def test_processes_end_together_with_the_first_ones_seeds(jobs, name):
    job = jobs[name]
    assert job["codes"] == [0, 0, 0]
    assert set(job["errors"]) == {f"{(1000, 2**63 - 1)}\n"}
    assert job["first"] >= 0.9  # the first one is at its file for a second


def test_different_requests_are_refused_everywhere(jobs):
    assert jobs["requests differ"]["codes"] == [1, 1, 1]
    assert "process(es) [2] have another request" in message(jobs["requests differ"])


@pytest.mark.parametrize(
    ("rank", "local_rank", "dead", "speaks"),
    [(0, 0, 3, True), (1, 1, 3, False), (1, 1, 0, True), (2, 2, 0, False), (8, 0, 0, True), (9, 1, 0, False)],
)
def test_where_the_first_process_is_gone_each_host_says_so_once(rank, local_rank, dead, speaks, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    watch = Watch(rank, 16)
    watch.failure = Failure(dead, f"process {dead} ended without a word", weight=0)
    assert watch.is_speaker() == speaks


def test_a_lone_process_needs_none_of_it(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with Job("cpu") as job:
        assert (job.rank, job.size, job.is_first) == (0, 1, True)
    with pytest.raises(KeyError), Job("cpu"):
        raise KeyError


class FourDevices(platforms.CudaPlatform):
    @classmethod
    def device_count(cls):
        return 4

    @classmethod
    def default_device(cls):
        return torch.device("cuda", 0)


def test_each_process_takes_the_device_of_its_place_on_the_host(monkeypatch):
    platform = FourDevices()
    monkeypatch.setattr(platforms, "current_platform", platform)
    for name, value in {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2"}.items():
        monkeypatch.setenv(name, value)
    assert [str(own_device(device)) for device in ("auto", None, "cuda", "cuda:2", "cpu")] == ["cuda:2"] * 4 + ["cpu"]
    with pytest.raises(ValueError, match="cannot share"):
        own_device("cuda:0")
    monkeypatch.setenv("LOCAL_RANK", "5")
    with pytest.raises(ValueError, match="--nproc-per-node 4"):
        own_device()
    monkeypatch.setattr(FourDevices, "device_count", classmethod(lambda cls: 1))
    assert own_device().index == 0  # the launcher left each process its own


@pytest.mark.parametrize(
    ("processes", "heads", "guidance", "given", "degrees"),
    [
        (1, 12, True, {}, (1, 1, 1)),
        (2, 12, True, {}, (2, 1, 1)),
        (4, 12, True, {}, (2, 2, 1)),
        (8, 40, True, {}, (2, 4, 1)),
        (8, 40, False, {}, (1, 8, 1)),
        (8, 12, False, {}, (1, 4, 2)),
        (16, 12, True, {}, (2, 4, 2)),
        (5, 12, True, {}, (1, 1, 5)),
        (3, 12, True, {}, (1, 3, 1)),
        (4, 12, True, {"cfg_degree": 1}, (1, 4, 1)),
        (8, 12, True, {"ring_degree": 4}, (2, 1, 4)),
        (8, 12, True, {"ulysses_degree": 2}, (2, 2, 2)),
        (8, 12, False, {"allow_ring": False}, (1, 8, 1)),
    ],
)
def test_processes_are_divided_by_guidance_then_heads_then_ring(processes, heads, guidance, given, degrees):
    config = choose_parallel_config(processes, heads, guidance, **given)
    assert (config.cfg_degree, config.sp_ulysses_degree, config.sp_ring_degree) == degrees


@pytest.mark.parametrize("given", [{"cfg_degree": 2}, {"ulysses_degree": 4}, {"ring_degree": 2}, {"ring_degree": 0}])
def test_degrees_that_do_not_fit_say_what_must_multiply(given):
    with pytest.raises(ValueError, match=r"must multiply to 3|at least 1"):
        choose_parallel_config(3, 12, True, **given)
    with pytest.raises(ValueError, match="sparse pattern does not work on a ring"):
        choose_parallel_config(4, 12, True, ring_degree=2, allow_ring=False)
