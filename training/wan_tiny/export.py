"""Copies a trained checkpoint into the package: `python -m training.wan_tiny.export --run DIR`."""

import argparse
import json
import shutil
from pathlib import Path

from telefuser.core.hub import EMBEDDED_FOLDER
from training.wan_tiny import checkpoint_folder
from training.wan_tiny.settings import SAMPLING_DEFAULTS
from training.wan_tiny.tokenizer import save_tokenizer

MAX_BYTES = 24 * 2**20


def export(run: Path, target: Path = EMBEDDED_FOLDER) -> int:
    """Write `target` from the trained folder `run`, with the sampling defaults of `settings`; returns its bytes.

    Raises ValueError where a part is missing or all files together pass 24 MiB.
    """
    names = (checkpoint_folder.VAE, checkpoint_folder.DIT, checkpoint_folder.TEXT_ENCODER)
    missing = [name for name in (*names, checkpoint_folder.CONFIG) if not (run / name).exists()]
    if missing:
        raise ValueError(f"{run} lacks {', '.join(missing)}: finish the training first")
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copyfile(run / name, target / name)
    config = {**checkpoint_folder.read_config(run), "defaults": SAMPLING_DEFAULTS}
    (target / checkpoint_folder.CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    save_tokenizer(target)
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    if size > MAX_BYTES:
        limit = MAX_BYTES / 2**20
        raise ValueError(f"{target} takes {size / 2**20:.2f} MiB, over the {limit:.0f} MiB a package may carry")
    return size


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="training.wan_tiny.export", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="the --out folder of the training")
    parser.add_argument("--target", type=Path, default=EMBEDDED_FOLDER)
    options = parser.parse_args(arguments)
    size = export(options.run, options.target)
    print(f"{options.target}: {size / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
