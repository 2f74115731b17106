"""A Wan2.1 checkpoint judged before it is loaded: what a folder is, and everything that is wrong with it.

Called by pipelines (`inspect(...).require_usable()`) and by `telefuser check`.
"""

from dataclasses import dataclass
from pathlib import Path

from telefuser.core import hub, wan_folder, wan_layout
from telefuser.core.wan_component import Component, judge
from telefuser.core.weight_files import CheckpointError, read_json

__all__ = ["Checkpoint", "CheckpointError", "Component", "inspect"]


@dataclass(frozen=True)
class Checkpoint:
    """What `inspect` found. A component or the tokenizer is None where `problems` says why it cannot be used.

    defaults: height, width, num_frames, steps, guidance, shift, fps, negative_prompt, scheduler of this checkpoint.
    """

    source: str
    folder: Path
    layout: str
    dit: Component | None
    vae: Component | None
    text_encoder: Component | None
    tokenizer: Path | None
    defaults: dict
    problems: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The published model's name, or the DiT's sizes, or `unknown`."""
        return wan_layout.model_name(self.dit.config) if self.dit else "unknown"

    @property
    def components(self) -> tuple[Component, ...]:
        """Those that can be used."""
        return tuple(part for part in (self.dit, self.vae, self.text_encoder) if part)

    def require_usable(self) -> "Checkpoint":
        """Returns self. Raises CheckpointError with the first problem and the number of others, where there is one."""
        if self.problems:
            others = len(self.problems) - 1
            more = f" ({others} more: see `telefuser check {self.source}`)" if others else ""
            raise CheckpointError(self.problems[0] + more)
        return self


def inspect(path_or_id: str | Path) -> Checkpoint:
    """Finds and judges a checkpoint: a folder in the official or the diffusers layout, a hub id, or `tiny`.

    Reads headers, config files and one page of each tensor, never a whole one. Problems of a found checkpoint are
    collected, not raised: call `require_usable()` before loading. Raises CheckpointError where there is nothing to
    judge: no such path or id, a file instead of a folder, or a folder that holds no Wan checkpoint.
    """
    folder = hub.find_folder(path_or_id, wan_folder.is_complete)
    layout = wan_folder.find_layout(folder)
    problems: list[str] = []

    def attempt(step, *arguments):
        try:
            return step(*arguments)
        except CheckpointError as error:
            problems.append(str(error))
            return None

    if layout == "diffusers":
        attempt(wan_folder.check_pipeline_class, folder)
    parts = {name: attempt(judge, folder, layout, name) for name in wan_folder.COMPONENTS}
    if all(parts.values()):
        attempt(_check_fit, folder, *(part.config for part in parts.values()))
    tokenizer = attempt(wan_folder.find_tokenizer, folder, layout)
    defaults = attempt(_defaults, wan_folder.find_config(folder, layout, "dit"), layout)
    return Checkpoint(
        source=str(path_or_id),
        folder=folder,
        layout=layout,
        **parts,
        tokenizer=tokenizer,
        defaults=defaults or wan_layout.default_settings({}),
        problems=tuple(problems),
    )


def _check_fit(folder: Path, dit: dict, vae: dict, text_encoder: dict) -> None:
    remedy = "Take all parts from one checkpoint."
    for key in ("in_dim", "out_dim"):
        if dit[key] != vae["z_dim"]:
            raise CheckpointError(f"{folder}: the DiT's {key} is {dit[key]}, the VAE's z_dim {vae['z_dim']}. {remedy}")
    if dit["text_dim"] != text_encoder["dim"]:
        raise CheckpointError(
            f"{folder}: the DiT's text_dim is {dit['text_dim']}, the text encoder's dim {text_encoder['dim']}. {remedy}"
        )


def _defaults(config_file: Path | None, layout: str) -> dict:
    given = read_json(config_file).get("defaults", {}) if config_file and layout == "official" else {}
    if not isinstance(given, dict):
        raise CheckpointError(f"{config_file}: 'defaults' must be an object.")
    try:
        return wan_layout.default_settings(given)
    except ValueError as error:
        raise CheckpointError(f"{config_file}: 'defaults': {error}.") from error
