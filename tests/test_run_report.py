"""The lines and the bar of a run."""

import io
import time

import pytest
import torch
from rich.console import Console

from telefuser import run_report
from telefuser.pipelines.wan_video import Stage
from telefuser.run_report import BytesWatch, RunReport, VideoWatch, amount, duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (12.34, "12.3 s"), (59.96, "1 min 00 s"), (125, "2 min 05 s"), (3725, "1 h 02 min")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_amount():
    assert [amount(size) for size in (0, 5.5 * 2**20, 13.887 * 2**30)] == ["0.0 MiB", "5.5 MiB", "13.89 GiB"]


@pytest.mark.parametrize("terminal", [False, True])
def test_bytes_on_their_way(terminal):
    output = io.StringIO()
    report = RunReport(Console(file=output, force_terminal=terminal, width=100, color_system=None))
    with BytesWatch(report, 2**21) as watch:
        watch.advance(2**20)
        time.sleep(0.15 if terminal else 0)
        watch.advance(2**20)
    assert "2.0 MiB in 0." in output.getvalue()
    # Without a terminal a line tells of a long run only.
    assert ("1.0 MiB of 2.0 MiB" in output.getvalue()) == terminal


def run(terminal, quiet=False, steps=4):
    output = io.StringIO()
    report = RunReport(Console(file=output, force_terminal=terminal, width=100, color_system=None), quiet)
    latents = torch.zeros(1)
    with VideoWatch(report) as watch:
        watch.stage(Stage("text", 0.5, 2**30))
        for i in range(1, steps + 1):
            watch.step(i, steps, latents)
            time.sleep(0.15 if terminal else 0)
        watch.stage(Stage("denoise", 61, 3 * 2**29))
    return output.getvalue()


def test_terminal_gets_a_bar_with_the_time_left_that_goes_away():
    text = run(terminal=True)
    assert "denoise, step 2 of 4" in text
    assert " left" in text
    assert text.endswith("\x1b[2K")  # the bar's line is erased
    assert "1 min 01 s   peak 1.50 GiB" in text


def test_file_gets_plain_lines_now_and_then(monkeypatch):
    expected = ["text           0.5 s   peak 1.00 GiB", "denoise   1 min 01 s   peak 1.50 GiB"]
    assert [line.strip() for line in run(terminal=False).splitlines()] == expected
    monkeypatch.setattr(run_report, "_SECONDS_BETWEEN_LINES", 0)
    lines = [line.strip() for line in run(terminal=False).splitlines()]
    assert lines == [expected[0], *(f"step {i} of 4, 0.0 s left" for i in (1, 2, 3)), expected[1]]


def test_quiet_says_nothing():
    assert run(terminal=True, quiet=True) == ""
