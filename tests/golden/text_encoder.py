"""`WanTextEncoder` against "UMT5 encoder" files: valid rows of the output, the first block, the position buckets."""

from collections.abc import Iterator

import torch
from torch import Tensor

from telefuser.models.wan_video_text_encoder import WanTextEncoder, relative_position_buckets
from tests.golden.case import Case, Row, rel_l2

FP32_LIMIT = 2e-5
BF16_LIMIT = 2e-2


def check(case: Case) -> Iterator[Row]:
    tensors = case.tensors()
    if torch.float32 in case.dtypes and "bucket.rel" in tensors:
        yield _buckets(case, tensors)
    for dtype in case.dtypes:
        encoder = case.load(WanTextEncoder.from_config(case.config["class_args"])).to(dtype)
        for index in range(len(case.config["runs"])):
            name = f"{str(dtype).removeprefix('torch.')} run{index}"
            mask = tensors[f"run{index}.mask"].bool()
            output, mids = _run(case, encoder, tensors, index)
            reference = tensors[f"run{index}.out"]
            if dtype == torch.bfloat16:
                yield case.row(f"{name} out rel_l2", rel_l2(output[mask], reference[mask]), BF16_LIMIT)
                continue
            yield case.max_abs(f"{name} out", output[mask], reference[mask], FP32_LIMIT)
            for key, value in mids.items():
                stored = tensors[f"run{index}.mid.{key}"]
                yield case.max_abs(f"{name} mid.{key}", value[mask], stored[mask], FP32_LIMIT)


def _run(case: Case, encoder: WanTextEncoder, tensors: dict[str, Tensor], index: int):
    """(output, the first block's intermediates), all on the CPU."""
    mids: dict[str, Tensor] = {}
    modules = {"block0_attn_out": encoder.blocks[0].attn, "block0_out": encoder.blocks[0]}
    hooks = [
        module.register_forward_hook(lambda _module, _args, output, key=key: mids.update({key: output.cpu()}))
        for key, module in modules.items()
        if f"run{index}.mid.{key}" in tensors
    ]
    try:
        ids, mask = (tensors[f"run{index}.{part}"].to(case.device) for part in ("ids", "mask"))
        return encoder(ids, mask).cpu(), mids
    finally:
        for hook in hooks:
            hook.remove()


def _buckets(case: Case, tensors: dict[str, Tensor]) -> Row:
    relative = tensors["bucket.rel"]  # key position - query position
    length = int(relative.abs().max()) + 1
    by_distance = relative_position_buckets(length, case.config["class_args"]["num_buckets"])
    return case.max_abs("bucket.idx", by_distance[relative + length - 1], tensors["bucket.idx"], 0.0)
