"""The operators' benchmark tries out on a CPU: it refuses wrong results, and its report says what was recorded."""

import csv

import pytest
import torch

from benchmarks import op_cases, ops, record, report
from benchmarks.timing import Timer
from telefuser.kernel.triton import launch
from telefuser.kernel.triton.launch import Launch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", op_cases.OPS)
def test_every_case_is_right_and_counts_its_bytes(name):
    case = op_cases.OPS[name](6, 32, CPU)
    assert ops.error(case) <= 1
    element = {"add_layer_norm_modulate fp32 stream": 4 + 2 + 4 + 2, "add_gated fp32 stream": 4 + 2 + 4}
    element |= {"rms_norm_rotary q and k": 8, "add_layer_norm_modulate bf16": 8, "silu_and_mul": 6}
    element |= {"layer_norm_modulate fp32 to bf16": 6}
    element |= {"layer_norm_modulate fp32 to fp8": 5, "add_layer_norm_modulate fp32 stream to fp8": 4 + 2 + 4 + 1}
    element |= {"gelu_tanh to fp8": 3, "silu_and_mul to fp8": 5, "quantize_rows fp8": 3}
    of_scales = 6 * 4 if "fp8" in name else 0
    of_vectors = sum(t.numel() * t.element_size() for t in case.others)
    assert case.bytes() == 6 * 32 * element.get(name, 4) + of_scales + of_vectors


def test_the_rivals_compute_the_same():
    for name, make in op_cases.OPS.items():
        case = make(6, 32, CPU)
        for rival in case.rivals.values():
            case.ours = rival
            # F.rms_norm and its like may round twice.
            assert ops.error(case) <= 2, name


def test_a_wrong_result_is_not_timed():
    case = op_cases.OPS["gelu_tanh"](6, 32, CPU)
    case.ours = lambda x: torch.nn.functional.gelu(x) * 1.01
    assert ops.error(case) > 1
    case.ours = lambda x: x * float("nan")
    assert ops.error(case) > 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(op_cases.OPS, "wrong", lambda *_: case)
        with pytest.raises(ValueError, match="wrong 6x32: error is inf of its limit"):
            ops.measure("wrong", 6, 32, Timer(CPU), 1.0, False)


def test_the_sweep_finds_the_fastest_settings_and_restores_the_rule(monkeypatch):
    best, regular = Launch(64, 4, 2), launch.launch_of

    def times(cases, timer):
        settings = launch.launch_of("norm", 1, None) if launch.launch_of is not regular else None
        return 1.0 if settings == best else 2.0

    monkeypatch.setattr(ops, "_times", times)
    monkeypatch.setattr(ops, "SWEPT", {("norm", 2): ["rms_norm"]})
    tables = ops.sweep(Timer(CPU), [(4, 768), (4, 2048)])
    assert tables == {("norm", 2): (launch.SAFE[0], (1536, best), (1 << 62, best))}
    assert launch.launch_of is regular


def test_smoke_runs_and_records_nothing(tmp_path, capsys):
    ops.main(["--smoke", "--no-inductor", "--only", "rms_norm", "gelu_tanh", "--results", str(tmp_path)])
    out = capsys.readouterr().out
    assert "rms_norm 24x48" in out
    assert "host time of layer_norm_modulate" in out
    assert not list(tmp_path.iterdir())


def test_what_was_measured_is_recorded_although_another_operator_fails(tmp_path, monkeypatch):
    for name in ("gelu_tanh", "rms_norm"):
        monkeypatch.setitem(op_cases.SHAPES_OF, name, ((6, 32),))
    monkeypatch.setattr(Timer, "copy_ceiling", lambda *_: 0.1)
    broken = op_cases.OPS["gelu_tanh"](6, 32, CPU)
    broken.ours = torch.zeros_like
    monkeypatch.setitem(op_cases.OPS, "gelu_tanh", lambda *_: broken)
    with pytest.raises(SystemExit, match="failed: gelu_tanh"):
        ops.main(["--no-inductor", "--only", "gelu_tanh", "rms_norm", "--results", str(tmp_path)])
    (path,) = tmp_path.iterdir()
    assert set(report.latest(path)) == {"device copy", "rms_norm 6x32", "host time of a call"}
    assert set(report.latest(path)["rms_norm 6x32"]) >= {"bytes", "ours", "F.rms_norm"}


def test_the_report_gives_speeds_shares_and_ratios(tmp_path, monkeypatch):
    monkeypatch.setenv("TELEFUSER_COMMIT", "abc123")

    def rows(ours):
        return [
            {"case": "device copy", "metric": "copy", "value": "4.0", "unit": "TB/s"},
            {"case": "rms_norm 10x20", "metric": "bytes", "value": 3_000_000_000, "unit": "B"},
            {"case": "rms_norm 10x20", "metric": "ours", "value": ours, "unit": "ms"},
            {"case": "rms_norm 10x20", "metric": "F.rms_norm", "value": "1.5", "unit": "ms"},
            {"case": "host time of a call", "metric": "rms_norm", "value": "12.34", "unit": "us"},
        ]

    path = record.append("ops", rows("7"), tmp_path)
    record.append("ops", rows("1.0"), tmp_path)
    record.append("wan_end_to_end", [{"case": "x", "metric": "load", "value": 1, "unit": "s"}], tmp_path)
    with path.open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 11
    report.main(["--results", str(tmp_path)])
    page = path.with_name(f"{path.stem}_ops.md").read_text()
    # The newest run counts: 3 GB in 1 ms are 3 TB/s, three quarters of the copy.
    assert "| rms_norm 10x20 | 1.0000 | 3.00 | 0.75 | F.rms_norm 1.50 |" in page
    assert "commit abc123" in page
    assert "| rms_norm | 12.3 |" in page
    pytest.importorskip("matplotlib")
    assert path.with_name(f"{path.stem}_ops.png").stat().st_size > 5000
