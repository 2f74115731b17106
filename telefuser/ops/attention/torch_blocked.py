"""Attention over kept blocks by PyTorch alone: the sparse executor of every device, and the fallback of the others."""

import torch
import torch.nn.functional as F

from telefuser.ops.attention import torch_sdpa as sdpa
from telefuser.ops.attention.block_mask import BlockMask, Run
from telefuser.ops.attention.dense_backend import Call


def torch_blocked(call: Call, mask: BlockMask) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Exact on any device: each run of query blocks attends to its gathered key blocks through PyTorch's own attention.

    Beside the inputs and the output it holds the keys and values of one run, so memory is linear in S.
    """
    plan = mask.plan
    if len(plan) == 1 and len(plan[0]) == 1:
        return _attend_runs(call, plan[0][0], mask)
    per_entry = []
    groups = call.q.shape[1] // call.k.shape[1]
    for b in range(call.q.shape[0]):
        runs = plan[b if len(plan) > 1 else 0]
        if len(runs) == 1:
            per_entry.append(_attend_runs(_part(call, b, slice(None), slice(None)), runs[0], mask))
            continue
        heads = [
            _attend_runs(_part(call, b, slice(n, n + 1), slice(n // groups, n // groups + 1)), runs[n], mask)
            for n in range(len(runs))
        ]
        per_entry.append(_join(heads, dim=1))
    return _join(per_entry, dim=0)


def _part(call: Call, b: int, heads: slice, key_heads: slice) -> Call:
    entry = slice(b, b + 1)
    return call._replace(q=call.q[entry, heads], k=call.k[entry, key_heads], v=call.v[entry, key_heads])


def _join(parts: list, dim: int):
    outs, lses = zip(*parts)
    return torch.cat(outs, dim=dim), None if lses[0] is None else torch.cat(lses, dim=dim)


def _attend_runs(call: Call, runs: list[Run], mask: BlockMask):
    size, padding = mask.block_size, -mask.tokens % mask.block_size
    k, v = (F.pad(t, (0, 0, 0, padding)).unflatten(2, (-1, size)) for t in (call.k, call.v))  # [B, Nkv, Nb, size, D]
    outs, lses = [], []
    for run in runs:
        q = call.q[:, :, run.first * size : run.last * size]
        keys, values = (_gather(t, run, padding) for t in (k, v))
        if keys.shape[2] == 0:
            out = q.new_zeros(*q.shape[:3], v.shape[4])
            lse = q.new_full(q.shape[:3], float("-inf"), dtype=torch.float32)
        else:
            out, lse = sdpa.torch_sdpa(q, keys, values, None, call.scale, False, return_lse=call.return_lse)
        # The pieces are joined as [B, S, N, D]: the layout that the caller most likely wants back.
        outs.append(out.transpose(1, 2))
        lses.append(lse)
    out = torch.cat(outs, dim=1).transpose(1, 2)
    return out, torch.cat(lses, dim=2) if call.return_lse else None


def _gather(blocks: torch.Tensor, run: Run, padding: int) -> torch.Tensor:
    """The tokens of the run's key blocks [B, Nkv, n, D], in order and without the padding behind the last token."""
    part = blocks[:, :, run.keys] if isinstance(run.keys, slice) else blocks.index_select(2, run.keys)
    part = part.flatten(2, 3)
    return part[:, :, : part.shape[2] - padding] if run.has_last else part
