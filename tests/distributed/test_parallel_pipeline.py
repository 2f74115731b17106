"""Whole videos on several processes: the sampling loop, the shared decoding, the pipeline, and the command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from telefuser.core.config import ParallelConfig
from telefuser.distributed.parallelize import spreads_on_cpu
from telefuser.pipelines.parallel import check_parallel, describe
from telefuser.pipelines.parallel_decode import plan_parts
from tests.distributed import checks

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", [name for name in checks.FOUR if name.startswith("embedded dit")])
def test_the_embedded_transformer_on_four_processes(four, name):
    assert max(max(errors) for errors in four(name)) <= 1e-5


@pytest.mark.parametrize("name", [name for name in checks.TWO if name.startswith("embedded dit")])
def test_the_embedded_transformer_on_two_processes(two, name):
    assert max(max(errors) for errors in two(name)) <= 1e-5


@pytest.mark.parametrize("name", ["pipeline", "pipeline with FSDP"])
def test_the_pipelines_video_is_that_of_one_process(four, name):
    if "FSDP" in name and not spreads_on_cpu():
        pytest.skip("this PyTorch has FSDP for GPUs only")
    # B130: the seed that nobody gave is one for all, and a seed of each process's own is refused
    results = four(name)
    for difference, _, _, own_seed, _ in results:
        assert difference <= 1
        assert "another request" in own_seed
    assert len({(seed, pixels) for _, seed, pixels, _, _ in results}) == 1
    assert results[0][4].startswith("4 processes: cfg 2, ")


@pytest.mark.parametrize("size", ["24x24", "23x31", "1x40"])
def test_shared_decoding_gives_the_frames_of_one_process(four, size):
    # B108, odd sizes included
    for difference, spread, share, _ in four(f"decode: {size}"):
        assert share < 0.8
        assert difference <= 1
        assert spread > 5


def test_shared_decoding_on_two_processes(two):
    assert max(difference for difference, *_ in two("decode: 24x24")) <= 1


def test_a_small_area_is_not_shared(four):
    assert {found[0] for found in four("decode: 8x8")} == {None}


def test_a_failed_part_is_known_to_all(four):
    outcomes = four("decode: error")
    assert outcomes[1] == ("RuntimeError", "no room")
    assert {outcomes[rank] for rank in (0, 2, 3)} == {
        ("RuntimeError", "process(es) [1] could not decode their part of the video")
    }
    # All of them then decode it in tiles.
    for name in ("decode: no memory", "decode: no room"):
        assert {error for error, _ in four(name)} == {"OutOfMemoryError"}


def test_parts_cover_the_area_once():
    vae = checks.make_vae()
    for height, width, processes in ((60, 104, 4), (60, 104, 8), (90, 160, 7), (5, 3, 64), (1, 1, 2)):
        parts, share = plan_parts(vae, height, width, processes)
        area = torch.zeros(height, width, dtype=torch.int)
        for part in parts:
            area[slice(*part.rows), slice(*part.columns)] += 1
        assert torch.equal(area, torch.ones_like(area))
        assert len(parts) <= processes
        assert 1 / processes <= share <= 1


@pytest.mark.parametrize("strategy", ["ulysses", "ring", "usp"])
def test_exchanges_of_one_attention(four, strategy):
    # q, k and v leave together; the ring's next block is under way before the block at hand is computed with.
    ring = ["start", "attention", "finish"]
    expected = {
        "ulysses": ["all_to_all_single", "attention", "all_to_all_single"],
        "ring": [*ring * 3, "attention"],
        "usp": ["all_to_all_single", *ring, "attention", "all_to_all_single"],
    }
    assert four(f"collectives: {strategy}") == [expected[strategy]] * 4


@pytest.mark.parametrize(
    ("parallel", "offload", "quantize", "match"),
    [
        ("four", None, None, "'auto', a ParallelConfig"),
        (ParallelConfig(tp_degree=2), None, None, "tp_degree"),
        (ParallelConfig(enable_fsdp=True), None, None, "this is one: start it with torchrun"),
        (ParallelConfig(cfg_degree=2, enable_fsdp=True), True, None, "offload"),
        (ParallelConfig(cfg_degree=2, enable_fsdp=True), None, "fp8", "quantize"),
    ],
)
def test_choices_that_do_not_fit(parallel, offload, quantize, match):
    with pytest.raises(ValueError, match=match):
        check_parallel(parallel, offload, quantize)


def test_a_config_in_words():
    config = ParallelConfig(cfg_degree=2, sp_ulysses_degree=2, enable_fsdp=True)
    assert describe(config) == "4 processes: cfg 2, ulysses 2, FSDP"


def frames_of(path):
    import av

    with av.open(path) as file:
        return torch.stack([torch.from_numpy(f.to_ndarray(format="rgb24")) for f in file.decode(video=0)]).int()


@pytest.mark.skipif(sys.platform != "linux", reason="torchrun is tested on Linux")
@pytest.mark.parametrize(
    ("device", "processes", "shares"),
    [
        ("cpu", 4, "cfg 2, ulysses 2"),
        pytest.param("cuda", 2, "cfg 2", marks=pytest.mark.multi_gpu),
    ],
)
def test_the_command_under_torchrun(tmp_path, device, processes, shares):
    # 2 steps; the file of several processes against the file of one
    command = ["-m", "telefuser", "generate", "a red circle", "--steps", "2", "--frames", "5", "--device", device]
    command += ["--dtype", "fp32"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    outputs = []
    for name, start in (("one", [sys.executable]), ("several", launch)):
        path = tmp_path / f"{name}.mp4"
        done = subprocess.run(
            [*start, *command, "--seed", "1", "-o", str(path)],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout.splitlines())
    assert outputs[1][-1] == str(tmp_path / "several.mp4")
    assert outputs[1].count(outputs[1][-1]) == 1
    assert f"{processes} processes: {shares}" in outputs[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.mp4", "several.mp4"]
    one, several = frames_of(tmp_path / "one.mp4"), frames_of(tmp_path / "several.mp4")
    assert one.float().std() > 1
    assert (one - several).abs().max() <= 1
