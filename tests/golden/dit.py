"""`WanModel` against "WanModel forward" files, outputs and intermediates; each member of a list is run alone."""

from collections.abc import Iterator
from unittest.mock import patch

import torch
from torch import Tensor

from telefuser.models import wan_video_dit
from telefuser.models.wan_video_dit import WanModel
from tests.golden.case import Case, NotCheckedError, Row, rel_l2

BF16_LIMIT = 1e-2


def build(case: Case, dtype: torch.dtype = torch.float32) -> WanModel:
    model = case.load(WanModel.from_config(case.config["class_args"]))
    for name, parameter in model.named_parameters():
        if not any(fragment in name for fragment in WanModel.FP32_PARAMETERS):
            parameter.data = parameter.data.to(dtype)
    return model


def check(case: Case) -> Iterator[Row]:
    model_type = case.config["class_args"].get("model_type", "t2v")
    if model_type in ("i2v", "flf2v"):
        raise NotCheckedError(f"model_type {model_type}: image-to-video is not part of this version")
    tensors = case.tensors()
    # The reference's own float32 sums differ by 2e-6; a GPU sums in other orders.
    fp32_limit = 8e-6 if case.device.type == "cpu" else 3e-5
    for dtype in case.dtypes:
        model = build(case, dtype)
        for index, run in enumerate(case.config["runs"]):
            for member in range(len(run["latents"])):
                name = f"{str(dtype).removeprefix('torch.')} run{index} out{member}"
                reference = tensors[f"run{index}.out{member}"]
                output, mids = _run(case, model, tensors, index, member)
                if dtype == torch.bfloat16:
                    yield case.row(f"{name} rel_l2", rel_l2(output, reference), BF16_LIMIT)
                    continue
                yield case.max_abs(name, output, reference, fp32_limit)
                for key, value in mids.items():
                    stored = tensors.get(f"run{index}.mid.{key}")
                    if stored is not None:
                        value, stored = _aligned(value, stored[member], run["tokens"][member], key)
                        yield case.max_abs(f"{name} mid.{key}", value, stored, fp32_limit)


def _run(case: Case, model: WanModel, tensors: dict[str, Tensor], index: int, member: int):
    """(output of one sample, its intermediates by the names of the format, without the batch axis)."""
    prefix = f"run{index}.in."
    x = tensors[f"{prefix}x{member}"].unsqueeze(0).to(case.device)
    timestep = tensors[f"{prefix}t"][member : member + 1].to(case.device)
    if timestep.ndim == 2:  # one per token; padding tokens do not exist here
        timestep = timestep[:, : case.config["runs"][index]["tokens"][member]]
    mids: dict[str, Tensor] = {}
    modules = {
        "tokens": model.patch_embedding,
        "time_emb_e": model.time_embedding,
        "time_proj_e0": model.time_projection,
        "context": model.text_embedding,
        "block0_self_attn_out": model.blocks[0].self_attn,
        "block0_cross_attn_out": model.blocks[0].cross_attn,
        "block0_ffn_out": model.blocks[0].ffn,
        "head_out": model.head,
        **{f"block{i}_out": block for i, block in enumerate(model.blocks)},
    }
    hooks = [
        module.register_forward_hook(lambda _module, _args, output, key=key: mids.update({key: output[0]}))
        for key, module in modules.items()
    ]
    attention = wan_video_dit.attention

    def recording(q, k, v, **options):
        out = attention(q, k, v, **options)
        for part, value in zip("qkvo", (q, k, v, out)):  # the first call is block 0's self-attention
            mids.setdefault(f"block0_self_attn_sdpa_{part}", value[0])
        return out

    try:
        with patch.object(wan_video_dit, "attention", recording):
            context = tensors[f"{prefix}context{member}"].to(case.device)
            output = model(x, timestep, [context])[0]
    finally:
        for hook in hooks:
            hook.remove()
    return output, mids


def _aligned(value: Tensor, stored: Tensor, tokens: int, key: str) -> tuple[Tensor, Tensor]:
    """Bring our intermediate to the stored shape: one row a timestep where we keep one a sample, no padding tokens."""
    if key == "context":
        return value, stored
    if key == "time_proj_e0":
        value = value.unflatten(-1, (6, -1))
    if key.startswith("time_"):
        if stored.ndim < value.ndim:  # the format keeps one vector a sample
            return value[0], stored
        value = value.expand(tokens, *value.shape[1:])
    return value, stored[:tokens]
