"""Two hosts, as network namespaces, and the cable between them is pulled: nothing closes, everything falls silent."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts():
    """The names of two namespaces with 10.213.77.1 and 10.213.77.2, joined by a pair of virtual network cards."""
    names = [f"telefuser{os.getpid()}{end}" for end in "ab"]
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` to make network namespaces with")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "cable0", "netns", names[0], "type", "veth", "peer", "name", "cable1", "netns", names[1])
        for end, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.213.77.{end + 1}/24", "dev", f"cable{end}")
            for card in ("lo", f"cable{end}"):
                ip("-n", name, "link", "set", card, "up")
        yield names
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this user cannot make network namespaces: {error.stderr.decode().strip()}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.mark.parametrize("waits_in", ["c", "python"])
def test_a_host_that_falls_silent_ends_the_job(hosts, waits_in, tmp_path):
    # B134
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2"}
    environment |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.213.77.1", "MASTER_PORT": "29500"}
    environment |= {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    ready, processes = [tmp_path / "0", tmp_path / "1"], []
    for rank, name in enumerate(hosts):
        program = [sys.executable, "-m", "tests.distributed.lost_host_program", str(ready[rank]), waits_in]
        process = subprocess.Popen(
            ["ip", "netns", "exec", name, *program],
            cwd=ROOT,
            env={**environment, "RANK": str(rank), "GLOO_SOCKET_IFNAME": f"cable{rank}"},
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
    try:
        began = time.monotonic()
        while not all(path.exists() for path in ready):
            assert time.monotonic() < began + 120, [process.poll() for process in processes]
            time.sleep(0.1)
        ip("-n", hosts[1], "link", "set", "cable1", "down")
        cut, texts = time.monotonic(), []
        for process in processes:
            texts.append(process.communicate(timeout=60)[1])
        took = time.monotonic() - cut
    finally:
        for process in processes:
            process.kill()
    assert took < 10
    assert [process.returncode for process in processes] == [1, 1]
    # Neither hears the other, so each says it for itself.
    for text, lost in zip(texts, ("process 1 ", "process 0 ")):
        assert text.startswith(f"error: {lost}")
        assert "ended without a word" in text
        assert text.count("\n") == 1
