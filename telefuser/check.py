"""What a checkpoint is and what is wrong with it. `telefuser check` prints it."""

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from telefuser.core import checkpoint
from telefuser.core.wan_component import Component
from telefuser.pipelines.wan_video import find_problems

_LABELS = {"dit": "DiT", "vae": "VAE", "text_encoder": "text encoder"}


def collect(path_or_id: str) -> dict[str, Any]:
    """Everything `render` shows, as plain JSON values. Raises CheckpointError where there is no checkpoint at all."""
    found = checkpoint.inspect(path_or_id)
    # Only whole checkpoints can be judged further.
    problems = list(found.problems) or find_problems(found)
    return {
        "source": found.source,
        "folder": str(found.folder),
        "layout": found.layout,
        "model": found.name,
        "components": {part.name: _component(part) for part in found.components},
        "tokenizer": str(found.tokenizer) if found.tokenizer else None,
        "defaults": found.defaults,
        "problems": problems,
    }


def _component(part: Component) -> dict[str, Any]:
    return {
        "files": [str(file) for file in part.files],
        "bytes": part.num_bytes,
        "parameters": part.num_parameters,
        "tensors": part.dtypes,
        "config": part.config,
    }


def render(found: dict[str, Any]) -> RenderableType:
    """`collect()`'s result for people."""
    title = Text.assemble((found["folder"], "bold"), f": {found['layout']} layout, {found['model']}")
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    for name, part in found["components"].items():
        files = [file.removeprefix(found["folder"]).lstrip("/\\") for file in part["files"]]
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        size = f"{part['parameters'] / 1e6:,.1f} M parameters, {part['bytes'] / 2**20:,.1f} MiB"
        dtypes = ", ".join(part["tensors"])
        table.add_row(f"  {_LABELS[name]}", f"{size}, {dtypes}, {files[0]}{more}")
    if found["tokenizer"]:
        table.add_row("  tokenizer", found["tokenizer"].removeprefix(found["folder"]).lstrip("/\\"))
    chosen = found["defaults"]
    settings = Text(
        f"defaults: {chosen['width']}x{chosen['height']}, {chosen['num_frames']} frames at {chosen['fps']} a second, "
        f"{chosen['steps']} steps ({chosen['scheduler']}), guidance {chosen['guidance']:g}, shift {chosen['shift']:g}"
    )
    if not found["problems"]:
        return Group(title, table, settings, Text("ready to use", style="green"))
    problems = [Text.assemble(("problem: ", "bold red"), problem) for problem in found["problems"]]
    return Group(title, table, *problems)
