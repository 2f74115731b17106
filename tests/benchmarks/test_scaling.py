"""The scaling benchmark: it runs on two real processes, and its cost model finds the costs that made the times."""

import os
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path

import pytest

from benchmarks import record, scaling
from benchmarks.scaling_model import UNFITTED, Costs, Split, Work, efficiency, features, fit, step_seconds
from telefuser.distributed.parallelize import spreads_on_cpu
from telefuser.models.wan_video_dit import WAN_DIT_SIZES

ROOT = Path(__file__).resolve().parents[2]
WORK_14B = Work(32760, 5120, 13824, 40)
WORK_1B = Work(32760, 1536, 8960, 30)


def test_the_work_of_a_pass_is_that_of_the_formulas():
    # The 1.3B model at 480p: 197.8 and 81.9 TFLOP, counted by hand from its matrix products.
    assert WORK_1B.attention_flops == pytest.approx(197.8e12, rel=1e-3)
    assert WORK_1B.linear_flops == pytest.approx(81.9e12, rel=0.02)


def test_every_way_to_divide_the_processes_is_measured_once():
    assert splits_of(1) == [(1, 1, 1)]
    assert splits_of(4) == [(2, 2, 1), (2, 1, 2), (1, 4, 1), (1, 2, 2), (1, 1, 4)]
    assert len(splits_of(8)) == len(set(splits_of(8))) == 7
    assert splits_of(3) == [(1, 3, 1), (1, 1, 3)]


def splits_of(num_processes):
    return [(split.cfg, split.ulysses, split.ring) for split in scaling.splits(num_processes)]


def test_ulysses_sends_a_shrinking_share_and_guidance_nothing():
    one, two, four = (features(WORK_14B, Split(ulysses=n))[3] for n in (1, 2, 4))
    # 4 tensors of S/P x C in bfloat16, of which (P-1)/P go to others, on 40 layers
    assert (one, two) == (0, 4 * 32760 / 2 * 5120 * 2 / 2 * 40)
    assert four == pytest.approx(two * 0.75)
    assert efficiency(WORK_14B, Split(cfg=2), UNFITTED) == pytest.approx(1.0)
    assert features(WORK_14B, Split(ulysses=16))[3:5] == (0.0, features(WORK_14B, Split(ulysses=16, per_host=16))[3])


def test_a_ring_costs_only_what_computing_does_not_hide():
    fast, slow = UNFITTED, Costs(*astuple(UNFITTED)[:3], 1 / 5e9, 1 / 1e9, 20e-6)
    assert efficiency(WORK_14B, Split(ring=4), fast) > 0.99
    assert efficiency(WORK_14B, Split(ring=4), slow) < 0.9
    assert step_seconds(WORK_14B, Split(ring=4, fsdp=True), slow) > step_seconds(WORK_14B, Split(ring=4), slow)


@pytest.mark.parametrize("link", [1 / 200e9, 1 / 10e9])
def test_the_fit_finds_the_costs_that_made_the_times(link):
    true = Costs(1 / 600e12, 1 / 500e12, 6e-3, link, UNFITTED.host_link, 50e-6)
    works = [Work(tokens, **size) for tokens in (32760, 75600) for size in sizes()]
    points = [(work, split, step_seconds(work, split, true)) for work in works for n in (1, 2, 4, 8)
              for split in scaling.splits(n)]  # fmt: skip
    assert astuple(fit(points)) == pytest.approx(astuple(true), rel=0.02)


def sizes():
    names = ("dim", "ffn_dim", "num_layers")
    return [{name: size[name] for name in names} for size in WAN_DIT_SIZES.values()]


def test_recorded_steps_are_read_back_fitted_and_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    rows = []
    for split in [*scaling.splits(1), *scaling.splits(4), Split(2, 2, 1, fsdp=True)]:
        name = f"T2V-14B, 480p, 81 frames, {split.size} GPUs, {scaling.name_of(split)}"
        rows.append(
            {"case": name, "metric": "step", "value": f"{step_seconds(WORK_14B, split, UNFITTED)}", "unit": "s"}
        )
    found = scaling.points(record.append("scaling", rows, tmp_path))
    assert {split for _, split, _ in found} == {*scaling.splits(1), *scaling.splits(4), Split(2, 2, 1, fsdp=True)}
    assert {work for work, _, _ in found} == {WORK_14B}
    scaling.main(["--report", "--results", str(tmp_path)])
    assert "Costs(" in capsys.readouterr().out
    assert len(list(tmp_path.glob("*_scaling.png"))) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="torchrun over gloo is tested on Linux")
def test_smoke_checks_and_times_two_processes(tmp_path):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "benchmarks.scaling"]
    done = subprocess.run(
        [sys.executable, *launch, "--smoke", "--device", "cpu", "--repeats", "1", "--results", str(tmp_path)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for name in ("cfg 2", "ulysses 2", "ring 2", *(["cfg 2 + FSDP"] if spreads_on_cpu() else [])):
        assert sum(name + " " in line and "efficiency" in line for line in done.stdout.splitlines()) >= 1, done.stdout
    assert "decoding: shared" in done.stdout
    assert not list(tmp_path.iterdir())
