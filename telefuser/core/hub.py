"""From what a user types to a folder on disk: a path, `tiny` (the model inside the package), or a hub id `org/name`."""

import difflib
import os
import re
from collections.abc import Callable
from pathlib import Path

from telefuser.core.weight_files import CheckpointError

EMBEDDED_MODEL = "tiny"
EMBEDDED_FOLDER = Path(__file__).resolve().parent.parent / "weights" / "wan_tiny"
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")

# Both layouts in one list: which one a repository has is known only after looking, and `*` matches `/` here.
_ALLOW_PATTERNS = [
    "config.json",
    "diffusion_pytorch_model*",
    "Wan2.1_VAE.*",
    "models_t5_*",
    "google/*",
    "model_index.json",
    "transformer/*",
    "vae/*",
    "text_encoder/*",
    "tokenizer/*",
]


def find_folder(path_or_id: str | Path, is_complete: Callable[[Path], bool]) -> Path:
    """The folder that `path_or_id` means. A hub id is taken from the local cache where `is_complete` holds, without a
    look at the network, and is downloaded into that cache otherwise.

    Raises CheckpointError for a path that does not exist, a file, and a hub id that is unknown or out of reach.
    """
    if str(path_or_id) == EMBEDDED_MODEL:
        if not EMBEDDED_FOLDER.is_dir():
            raise CheckpointError(f"{EMBEDDED_FOLDER}: the embedded model is missing. Install telefuser again.")
        return EMBEDDED_FOLDER
    # os.path, whose questions have an answer for every string: a name too long for the disk is no folder either.
    path = Path(os.path.expanduser(path_or_id))
    if os.path.isdir(path):
        return path
    if os.path.exists(path):
        raise CheckpointError(
            f"{path}: a file; the folder of a whole checkpoint is needed. Try its folder, {path.parent}."
        )
    if _HUB_ID.match(str(path_or_id)):
        return _hub_folder(str(path_or_id), is_complete)
    raise CheckpointError(_not_found(path))


def _hub_folder(repo_id: str, is_complete: Callable[[Path], bool]) -> Path:
    # Here, not at the top: it takes a third of a second to import and most runs read a folder.
    from huggingface_hub import errors, snapshot_download

    try:
        folder = Path(snapshot_download(repo_id, allow_patterns=_ALLOW_PATTERNS, local_files_only=True))
        if is_complete(folder):
            return folder
    except (errors.LocalEntryNotFoundError, errors.HFValidationError):
        pass  # Not in the cache, or only in part: the download below says what is wrong, if anything is.
    try:
        return Path(snapshot_download(repo_id, allow_patterns=_ALLOW_PATTERNS))
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        reason = "no such folder here, and no repository of that name on the hub that this account can see"
        raise CheckpointError(f"{repo_id}: {reason}. {_near(Path(repo_id))}") from error
    except (errors.HTTPError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"{repo_id}: no such folder here, not complete in the local hub cache, and the hub cannot be reached "
            f"({reason}). Check the network, or give the path of a downloaded folder."
        ) from error


def _not_found(path: Path) -> str:
    return f"{path}: no such folder. {_near(path)}"


def _near(path: Path) -> str:
    """Near names beside the path that was meant; what can be given at all, where there are none."""
    siblings = [entry.name for entry in path.parent.iterdir() if entry.is_dir()] if os.path.isdir(path.parent) else []
    if near := difflib.get_close_matches(path.name, siblings, n=3, cutoff=0.5):
        return "Did you mean " + " or ".join(str(path.parent / name) for name in near) + "?"
    return f"Give a checkpoint folder, a hub id such as Wan-AI/Wan2.1-T2V-1.3B, or '{EMBEDDED_MODEL}'."
