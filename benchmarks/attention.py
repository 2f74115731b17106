"""Attention at Wan's sizes: every exact dense backend beside the one that AUTO takes, and every sparse executor on the
blocks that radial attention keeps.

    python -m benchmarks attention            S = 32760 and 75600, 12 and 40 heads of 128, appended to the results
    python -m benchmarks attention --smoke    tiny, to see that it runs; records nothing

TFLOP/s of sparse attention count the kept blocks only. "difference to dense" is of the outputs on the same random
inputs, whose scores have no structure that a pattern could follow: of a trained model it is smaller.
"""

import argparse
import functools
import itertools
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks import record
from benchmarks.timing import Timer
from telefuser.core.config import AttentionConfig, AttnImplType, SparseAttentionConfig
from telefuser.ops.attention import attention
from telefuser.ops.attention import block_sparse as sparse
from telefuser.ops.attention.backends import TABLE, availability, describe_choice
from telefuser.ops.attention.block_mask import BlockMask
from telefuser.ops.attention.dense_backend import Call
from telefuser.ops.attention.radial_attention_core import radial_block_mask
from telefuser.ops.attention.sparse_attention import MaskMap
from telefuser.platforms import current_platform

# (frames, tokens a frame): 832x480 and 1280x720, 81 frames
VIDEOS = ((21, 1560), (21, 3600))
HEADS = (12, 40)
HEAD_DIM = 128
DECAYS = (0.2, 0.5, 1.0)
# Relative L2 distance to the first backend: bfloat16 results of float32 sums in another order.
SAME = 5e-3


def qkv(tokens: int, heads: int, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """[1, S, N, D] each, as slices of one projection, which is how a model has them."""
    packed = torch.randn(1, tokens, 3, heads, HEAD_DIM, device=device)
    return [t.to(dtype) for t in packed.unbind(2)]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def dense(label: str, q, k, v, timer: Timer) -> tuple[list[dict], torch.Tensor, float]:
    """Rows of each exact backend and AUTO; AUTO's result and milliseconds."""
    flops = 4 * q.shape[1] ** 2 * q.shape[2] * q.shape[3]
    usable = [impl for impl, reason in availability().items() if reason is None]
    usable = [impl for impl in usable if TABLE.record(impl) is not None and TABLE.record(impl).is_exact]
    config = AttentionConfig(AttnImplType.AUTO)
    wanted = attention(q, k, v, attention_config=config)
    found, rows = {}, []
    for impl in usable:
        config_of = AttentionConfig(impl, strict=True)
        try:
            apart = distance(attention(q, k, v, attention_config=config_of), wanted)
            if not apart <= SAME:
                raise ValueError(f"result is {apart:.1e} from AUTO's")
            found[impl.name] = timer.milliseconds(functools.partial(attention, q, k, v, attention_config=config_of))
        except Exception as failure:  # noqa: BLE001
            # One package that does not take the call leaves the others to measure.
            print(f"    {impl.name}: {type(failure).__name__} {str(failure)[:120]}", flush=True)
    auto = timer.milliseconds(lambda: attention(q, k, v, attention_config=config))
    best = min(found.values(), default=auto)
    print(f"{label}: AUTO {auto:.3f} ms ({auto / best:.3f} of the fastest)", flush=True)
    for name, ms in {**found, "AUTO": auto}.items():
        print(f"    {name:20} {ms:9.3f} ms {flops / ms / 1e9:7.0f} TFLOP/s", flush=True)
        rows.append({"case": label, "metric": name, "value": f"{ms:.4f}", "unit": "ms"})
        rows[-1]["note"] = f"{flops / ms / 1e9:.0f} TFLOP/s"
    return rows, wanted, auto


def executors(device: torch.device) -> list[tuple[sparse.SparseBackend, object]]:
    """Exact sparse executors that are here, without the last resort in plain PyTorch unless it is the only one."""
    here = [(found, sparse.TABLE.probe(found.impl, device)) for found in sparse.TABLE if found.is_exact]
    here = [(found, entry) for found, entry in here if not isinstance(entry, str)]
    kernels = [pair for pair in here if pair[0].impl is not sparse.SparseExecutor.TORCH_BLOCKED]
    return kernels or here


def radial(label: str, grid: tuple[int, int], q, k, v, decay: float, full: torch.Tensor, ms: float, timer) -> list:
    """Rows of each executor over a radial mask."""
    tokens = q.shape[1]
    config = SparseAttentionConfig(sparse_impl=AttnImplType.RADIAL_ATTN, decay_factor=decay)
    block = config.block_size
    build = timer.milliseconds(lambda: radial_block_mask(tokens, grid[0], tokens, block, decay, "wan", q.device))
    mask: BlockMask = MaskMap(tokens, grid[0]).block_mask(tokens, config, device=q.device)
    flops = 4 * mask.density * tokens**2 * q.shape[2] * q.shape[3]
    label = f"{label}, radial decay {decay}"
    rows = [{"case": label, "metric": "density", "value": f"{mask.density:.4f}", "unit": "of the blocks"}]
    rows.append({"case": label, "metric": "mask building", "value": f"{build:.3f}", "unit": "ms"})
    print(f"{label}: density {mask.density:.3f}, mask {build:.2f} ms", flush=True)
    heads_first = [t.transpose(1, 2) for t in (q, k, v)]
    call = Call(*heads_first, None, q.shape[-1] ** -0.5)
    calls = {}
    for found, entry in executors(q.device):
        if (reason := sparse.refusal(found, call, mask)) is not None:
            print(f"    {found.impl.name}: {reason}", flush=True)
            continue
        calls[found.impl.name] = functools.partial(_executed, found, entry, call, mask)
    if timer.module is not None and q.shape[2] == HEADS[0] and tokens == VIDEOS[0][0] * VIDEOS[0][1]:
        calls["flex_attention compiled"] = flex(heads_first, mask)
    first = None
    for name, run in calls.items():
        try:
            out = run()
            first = out if first is None else first
            apart, lost = distance(out, first), distance(out, full)
            if not apart <= SAME:
                raise ValueError(f"result is {apart:.1e} from the first executor's")
            took = timer.milliseconds(run)
        except Exception as failure:  # noqa: BLE001
            print(f"    {name}: {type(failure).__name__} {str(failure)[:160]}", flush=True)
            continue
        note = (
            f"{flops / took / 1e9:.0f} TFLOP/s on kept blocks, {ms / took:.2f}x dense, difference to dense {lost:.3f}"
        )
        print(f"    {name:24} {took:9.3f} ms {note}", flush=True)
        rows.append({"case": label, "metric": name, "value": f"{took:.4f}", "unit": "ms", "note": note})
    return rows


def _executed(found: sparse.SparseBackend, entry: object, call: Call, mask: BlockMask) -> torch.Tensor:
    return sparse.run(found, entry, call, mask)[0].transpose(1, 2)


def flex(heads_first, mask: BlockMask):
    """PyTorch's compiled flex_attention over the same blocks; its mask holds whole blocks, so tokens are padded."""
    from torch.nn.attention.flex_attention import BlockMask as FlexMask
    from torch.nn.attention.flex_attention import flex_attention

    tokens, size = mask.tokens, mask.block_size
    padded = -(-tokens // size) * size
    q, k, v = (F.pad(t, (0, 0, 0, padded - tokens)).contiguous() for t in heads_first)
    keep = mask.keep[None, None]
    counts = keep.sum(-1, dtype=torch.int32)
    order = keep.to(torch.int32).argsort(-1, descending=True, stable=True).to(torch.int32)
    blocks = FlexMask.from_kv_blocks(
        torch.zeros_like(counts), torch.zeros_like(order), counts, order, BLOCK_SIZE=size, seq_lengths=(padded, padded)
    )
    # Padding keys are attended to here, which changes the last digits only: 8 of 32768.
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=blocks)[:, :, :tokens].transpose(1, 2)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks attention", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny, nothing recorded")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    device = torch.device(current_platform.default_device())
    timer = Timer(device, options.repeats)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    videos, heads = (((5, 64),), (2,)) if options.smoke else (VIDEOS, HEADS)
    print(f"{record.device_name()}: {describe_choice(AttnImplType.AUTO)}", flush=True)
    with torch.inference_mode():
        for grid, count in itertools.product(videos, heads):
            tokens = grid[0] * grid[1]
            label = f"{tokens} tokens, {count} heads of {HEAD_DIM}"
            q, k, v = qkv(tokens, count, device, dtype)
            rows, full, ms = dense(label, q, k, v, timer)
            for decay in DECAYS:
                rows += radial(label, grid, q, k, v, decay, full, ms, timer)
            if not options.smoke:
                record.append("attention", rows, options.results)


if __name__ == "__main__":
    main()
