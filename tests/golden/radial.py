"""Radial attention's block masks against the stored ones, block for block, and the windows that they are made from."""

from collections.abc import Iterator

import numpy as np
import torch

from telefuser.ops.attention.radial_attention_core import frame_window, radial_block_mask
from tests.golden.case import Case, Row


def check(case: Case) -> Iterator[Row]:
    stored = np.load(case.path.with_suffix(".npz"))
    for name, config in case.config["cases"].items():
        yield from _windows(case, name, config)
        # Where the official code stops there is nothing to compare; the same video rounded up to whole blocks is there.
        if "official_code_raises" not in config:
            yield _mask(case, name, config, stored[name])


def _windows(case: Case, name: str, config: dict) -> Iterator[Row]:
    wrong = 0
    for entry in config["per_distance"]:
        ours = frame_window(entry["dist"], config["tokens_per_frame"], config["block_size"], config["decay_factor"])
        wrong += ours != (entry["window"], entry["kept"])
    yield case.row(f"{name} windows that differ", wrong, 0)


def _mask(case: Case, name: str, config: dict, packed: np.ndarray) -> Row:
    rows, columns = config["shape"]
    reference = np.unpackbits(packed, count=rows * columns).reshape(rows, columns).astype(bool)
    ours = radial_block_mask(
        config["video_tokens"],
        config["num_frame"],
        config["seq_len"],
        config["block_size"],
        config["decay_factor"],
        config["model"],
        case.device,
    )
    # The stored grid leaves out the tokens after the last whole block; ours has a block for them.
    extra = -(-config["seq_len"] // config["block_size"]) - rows
    ours = ours[: len(ours) - extra, : len(ours) - extra].cpu()
    return case.row(f"{name} blocks that differ", float((ours != torch.from_numpy(reference)).sum()), 0)
