"""What a run tells its user while it goes: header, a bar with the time left on a terminal, a line a stage."""

import time
from pathlib import Path
from types import TracebackType

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from telefuser.pipelines.wan_video import Stage

# Without a terminal a step is told at most this often: the log of a two-hour run stays readable.
_SECONDS_BETWEEN_LINES = 15.0
_NEXT_STAGE = {"text": "denoise", "denoise": "decode", "decode": "write"}


def duration(seconds: float) -> str:
    """`0.4 s`, `12.3 s`, `2 min 05 s`, `1 h 02 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def amount(num_bytes: float) -> str:
    """`5.5 MiB`, `13.89 GiB`."""
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:.2f} GiB"


class RunReport:
    """Prints to `console`; only results when quiet."""

    def __init__(self, console: Console | None = None, quiet: bool = False):
        self.console = console or Console(highlight=False)
        self.quiet = quiet

    def line(self, text: str) -> None:
        if not self.quiet:
            # soft_wrap: a log or a script gets whole lines, whatever width a terminal would have.
            self.console.print(text, markup=False, soft_wrap=True)

    def stage(self, stage: Stage) -> None:
        self.line(f"  {stage.name:<8}{duration(stage.seconds):>12}   peak {stage.peak_bytes / 2**30:.2f} GiB")

    def result(self, path: Path) -> None:
        """The path on a line of its own, quiet or not."""
        self.console.print(str(path), markup=False, soft_wrap=True)


class VideoWatch:
    """One video under way: `with VideoWatch(report) as w: pipeline(..., callback=w.step, on_stage=w.stage)`."""

    def __init__(self, report: RunReport):
        self._report = report
        self._bar: Progress | None = None
        self._task = None
        self._stage_started = self._last_line = 0.0

    def __enter__(self) -> "VideoWatch":
        if self._report.console.is_terminal and not self._report.quiet:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[left]}"),
            )
            self._bar = Progress(*columns, console=self._report.console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task("text", total=None, left="")
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def step(self, step: int, total: int, latents: torch.Tensor) -> None:
        """The pipeline's `callback`."""
        now = time.monotonic()
        left = f"{duration((now - self._stage_started) / step * (total - step))} left"
        if self._bar:
            text = f"denoise, step {step} of {total}"
            self._bar.update(self._task, description=text, completed=step, total=total, left=left)
        elif now - self._last_line >= _SECONDS_BETWEEN_LINES and step < total:
            self._last_line = now
            self._report.line(f"  step {step} of {total}, {left}")

    def stage(self, stage: Stage) -> None:
        """The pipeline's `on_stage`."""
        self._report.stage(stage)
        self._stage_started = self._last_line = time.monotonic()
        if self._bar:
            self._bar.reset(self._task, description=_NEXT_STAGE.get(stage.name, ""), total=None, left="")


class BytesWatch:
    """Bytes on their way: `with BytesWatch(report, total) as w: w.advance(written)`."""

    def __init__(self, report: RunReport, total: int):
        self._report, self._total, self._done = report, max(total, 1), 0
        self._bar: Progress | None = None
        self._task = None
        self._started = self._last_line = time.monotonic()

    def __enter__(self) -> "BytesWatch":
        if self._report.console.is_terminal and not self._report.quiet:
            columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=self._report.console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()
        if error is None:
            self._report.line(f"  {amount(self._done)} in {duration(time.monotonic() - self._started)}")

    def advance(self, num_bytes: int) -> None:
        """Call after each piece; a piece of 100 MB is small."""
        self._done += num_bytes
        now = time.monotonic()
        text = f"{amount(self._done)} of {amount(self._total)}"
        if self._bar:
            self._bar.update(self._task, description=text, completed=self._done)
        elif now - self._last_line >= _SECONDS_BETWEEN_LINES and self._done < self._total:
            self._last_line = now
            self._report.line(f"  {text}")
