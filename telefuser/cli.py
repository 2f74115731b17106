"""The `telefuser` command. Every command imports its work when it runs, so that `--help` costs no torch import."""

import contextlib
import io
import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from telefuser import __version__

app = typer.Typer(
    name="telefuser",
    help="Text to video on NVIDIA, AMD, Ascend and CPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_EXIT_SIGINT, _EXIT_SIGTERM = 130, 143
# Into a file or a pipe, lines stay whole: a path or a message broken at column 80 cannot be searched for.
_WIDTH_OF_FILES = 1000

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Debug = Annotated[bool, typer.Option("--debug", envvar="TELEFUSER_DEBUG", help="Show the traceback of an error.")]
Model = Annotated[str, typer.Argument(metavar="DIR", help="A checkpoint folder, a hub id, or 'tiny'.")]


def main() -> None:
    """Entry point of the installed command and of `python -m telefuser`."""
    for stream in (sys.stdout, sys.stderr):
        # A prompt or a path that the terminal's encoding lacks is printed escaped; the run it belongs to goes on.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    with contextlib.ExitStack() as stack:
        if os.environ.get("RANK", "0") != "0" and "WORLD_SIZE" in os.environ:
            # Of the processes that torchrun started the first alone speaks, for all.
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        app(prog_name="telefuser")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"telefuser {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Text to video on NVIDIA, AMD, Ascend and CPU."""


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="What the video shows.", show_default=False)] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "-o", "--output", help="A file (.mp4, .mov, .mkv), a folder/, or a name with {n}, {prompt} or {seed} in it."
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="'tiny' (comes with TeleFuser), a folder, or a hub id.")] = "tiny",
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT, for example 832x480.")] = None,
    frames: Annotated[int | None, typer.Option(help="Number of frames: 4n + 1, for example 81.")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    guidance: Annotated[float | None, typer.Option(help="Weight of the prompt; 1 turns guidance off.")] = None,
    shift: Annotated[float | None, typer.Option(help="Shift of the noise levels; more for larger videos.")] = None,
    seed: Annotated[int | None, typer.Option(help="0 to 2^63-1; -1 or none draws one.")] = None,
    scheduler: Annotated[str | None, typer.Option(help="unipc, dpm++ or euler.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, npu, ...")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32; by default bf16, on a CPU fp32.")] = None,
    attention: Annotated[
        str, typer.Option(help="auto, a backend that `telefuser info` lists, or radial or local, which are sparse.")
    ] = "auto",
    decay: Annotated[
        float | None,
        typer.Option(help="Of radial attention: more lets distant frames see more. 0.2 by default."),
    ] = None,
    dense_steps: Annotated[
        int | None, typer.Option(help="First steps of a sparse run that attend densely. 24 % of all by default.")
    ] = None,
    dense_layers: Annotated[
        int | None, typer.Option(help="First layers of a sparse run that attend densely. 1 by default.")
    ] = None,
    local_window: Annotated[
        str | None, typer.Option(help="Of local attention, in tokens to each side: 6 or FRAMES,ROWS,COLUMNS.")
    ] = None,
    negative: Annotated[str | None, typer.Option(help="What the video should not show.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="A text file with one prompt a line; # starts a comment.")
    ] = None,
    offload: Annotated[
        bool | None,
        typer.Option(
            "--offload/--no-offload", help="Keep models on the host between stages. By default where memory is short."
        ),
    ] = None,
    quantize: Annotated[
        str | None, typer.Option(help="fp8 halves the memory of the model's weights; none by default.")
    ] = None,
    cfg_degree: Annotated[
        int | None,
        typer.Option(help="Under torchrun: 2 runs both passes of guidance side by side. By default where it fits."),
    ] = None,
    ulysses_degree: Annotated[
        int | None, typer.Option(help="Under torchrun: processes that share a video's tokens by attention heads.")
    ] = None,
    ring_degree: Annotated[
        int | None, typer.Option(help="Under torchrun: processes that share them by passing keys around.")
    ] = None,
    fsdp: Annotated[
        bool, typer.Option("--fsdp", help="Under torchrun: each process holds a part of the weights.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that exists.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print the path only.")] = False,
    debug: Debug = False,
) -> None:
    """Make a video from a prompt, or one from each line of a file. What is left open comes from the model.

    The last line printed is the path of the video, whose metadata holds prompt, seed and settings.
    """
    if (prompt is None) == (prompts is None):
        raise typer.BadParameter("give either a prompt or --prompts FILE")
    with _one_line_errors(debug):
        from telefuser.generate import read_prompts, run
        from telefuser.pipelines.attention_choice import parse_local_window
        from telefuser.pipelines.request import parse_size
        from telefuser.run_report import RunReport

        width, height = parse_size(size) if size is not None else (None, None)
        settings = {
            "negative_prompt": negative,
            "height": height,
            "width": width,
            "num_frames": frames,
            "steps": steps,
            "guidance": guidance,
            "shift": shift,
            "seed": seed,
            "scheduler": scheduler,
        }
        sparse = {"decay": decay, "dense_steps": dense_steps, "dense_layers": dense_layers}
        failures = run(
            [prompt] if prompts is None else read_prompts(prompts),
            settings,
            report=RunReport(quiet=quiet),
            model=model,
            output=output,
            overwrite=overwrite,
            device=device,
            dtype=dtype,
            attention=attention,
            sparse=sparse | {"local_window": parse_local_window(local_window)},
            offload=offload,
            quantize=quantize,
            degrees={"cfg_degree": cfg_degree, "ulysses_degree": ulysses_degree, "ring_degree": ring_degree},
            fsdp=fsdp,
        )
        if failures:
            raise _exit(f"error: {len(failures)} of the prompts failed, the other videos were made", 1)


@app.command()
def check(model: Model, as_json: Json = False, debug: Debug = False) -> None:
    """Say what a checkpoint is and what is wrong with it; the exit code is 1 if anything is."""
    with _one_line_errors(debug):
        from telefuser.check import collect, render

        found = collect(model)
        _show(found, None if as_json else render(found))
        if found["problems"]:
            raise typer.Exit(1)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint folder, a hub id, or 'tiny'.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="The folder to make.")],
    quantize: Annotated[str, typer.Option(help="The format of the transformer's weights: fp8.")] = "fp8",
    force: Annotated[bool, typer.Option("--force", help="Replace a checkpoint folder that exists.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print the path only.")] = False,
    debug: Debug = False,
) -> None:
    """Write a checkpoint again with its transformer quantised: half the disk, and nothing left to do when it loads.

    The last line printed is the path of the folder, which can be given wherever the source could.
    """
    with _one_line_errors(debug):
        from telefuser.convert import run
        from telefuser.run_report import RunReport

        run(source, target, report=RunReport(quiet=quiet), quantize=quantize, force=force)


@app.command()
def info(as_json: Json = False, debug: Debug = False) -> None:
    """Say what this machine offers: platform, devices, attention backends, versions, and why the rest is not there."""
    with _one_line_errors(debug):
        from telefuser.info import collect, render

        found = collect()
        _show(found, None if as_json else render(found))


def _show(found: dict, rendered) -> None:
    """`rendered` for people, or `found` as JSON where it is None."""
    from rich.console import Console

    if rendered is None:
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH_OF_FILES
    console.print(rendered)


class _Terminated(BaseException):
    """SIGTERM as an exception, so that files under way are removed; no `except Exception` takes it."""


class _WarningLines(logging.Handler):
    """The package's warnings, one line each, on whatever stderr is at that moment: a progress bar replaces it."""

    def __init__(self, debug: bool):
        super().__init__(logging.WARNING)
        self.debug = debug

    def emit(self, record: logging.LogRecord) -> None:
        if self.debug and record.exc_info:
            traceback.print_exception(*record.exc_info)
        typer.echo(f"{record.levelname.lower()}: {record.getMessage()}", err=True)


@contextlib.contextmanager
def _one_line_errors(debug: bool) -> Iterator[None]:
    """What a command runs in: an error becomes one line on stderr and exit code 1, SIGINT 130, SIGTERM 143."""
    logger, handler = logging.getLogger("telefuser"), _WarningLines(debug)
    logger.addHandler(handler)
    with contextlib.ExitStack() as stack:
        stack.callback(logger.removeHandler, handler)
        if threading.current_thread() is threading.main_thread():
            stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, _terminate))
        try:
            yield
        except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
            raise
        except KeyboardInterrupt as signal_error:
            raise _exit("interrupted; no unfinished file is left", _EXIT_SIGINT) from signal_error
        except _Terminated as signal_error:
            raise _exit("terminated; no unfinished file is left", _EXIT_SIGTERM) from signal_error
        except Exception as error:
            if debug:
                traceback.print_exc()
            raise _exit(_one_line(error), 1) from error


def _terminate(number, frame) -> None:
    raise _Terminated


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    # Errors written for the user name the way out. For any other, the type and the traceback say more.
    if isinstance(error, ValueError) or type(error).__module__.startswith("telefuser."):
        return f"error: {text}"
    if type(error).__name__ == "OutOfMemoryError":
        return f"error: out of memory: use a smaller --size, fewer --frames, or --offload ({text})"
    return f"error: {type(error).__name__}: {text or 'no message'} (--debug shows where)"


def _exit(line: str, code: int) -> typer.Exit:
    """Says why on stderr; the caller raises what is returned."""
    typer.echo(line, err=True)
    return typer.Exit(code)
