"""The benchmark of radial attention in a model, run small."""

import csv

from benchmarks import sparse_wan


def test_a_smoke_run_measures_the_embedded_model_and_records_nothing(capsys, tmp_path):
    sparse_wan.main(["--smoke", "--results", str(tmp_path)])
    shown = capsys.readouterr().out
    label = "tiny, 128x128, 17 frames, float32: "
    assert f"{label}dense " in shown
    assert f"{label}radial decay 0.2, blocks of 128, density 0.84 " in shown
    assert list(tmp_path.iterdir()) == []


def test_a_random_model_is_measured_and_recorded(monkeypatch, tmp_path):
    monkeypatch.setitem(
        sparse_wan.WAN_DIT_SIZES, "T2V-1.3B", {"dim": 48, "ffn_dim": 64, "num_heads": 2, "num_layers": 2}
    )
    sparse_wan.main(
        ["--models", "T2V-1.3B", "--size", "256x128", "--frames", "21", "--decay", "0.2", "--results", str(tmp_path)]
    )
    (path,) = tmp_path.iterdir()
    rows = {row["metric"]: row for row in csv.DictReader(path.open(newline=""))}
    who = "radial decay 0.2, blocks of 128"
    assert rows[who]["unit"] == "ms"
    assert rows[who]["note"] == "TORCH_BLOCKED"
    assert 0 < float(rows[f"{who}, density"]["value"]) < 1
    assert 0 < float(rows[f"{who}, difference to dense"]["value"]) < 1
    assert all(float(row["value"]) > 0 for row in rows.values())
