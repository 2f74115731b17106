"""Attention at Wan's sizes: every exact dense backend beside the one that AUTO takes, over the video's own tokens and
over a text's, and every sparse executor on the blocks that radial attention keeps.

    python -m benchmarks attention            S = 32760 and 75600, 12 and 40 heads of 128, appended to the results
    python -m benchmarks attention --smoke    tiny, to see that it runs; records nothing

TFLOP/s of sparse attention count the kept blocks only. "difference to dense" is of the outputs on the same random
inputs, whose scores have no structure that a pattern could follow: of a trained model it is smaller.
"""

import argparse
import functools
import itertools
from collections.abc import Callable
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
from telefuser.ops.attention.sparse_attention import MaskMap
from telefuser.platforms import current_platform

# (frames, tokens a frame): 832x480 and 1280x720, 81 frames
VIDEOS = ((21, 1560), (21, 3600))
HEADS = (12, 40)
HEAD_DIM = 128
# Of a prompt: what cross-attention attends to.
TEXT_TOKENS = 512
DECAYS = (0.2, 0.5, 1.0)
# Relative L2 distance to the first backend: bfloat16 results of float32 sums in another order.
SAME = 5e-3


def qkv(tokens: int, heads: int, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """[1, S, N, D] each, as slices of one projection, which is how a model has them."""
    packed = torch.randn(1, tokens, 3, heads, HEAD_DIM, device=device)
    return [t.to(dtype) for t in packed.unbind(2)]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def peak(call: Callable[[], object]) -> float:
    """The most memory in GiB that exists during `call`, its inputs included."""
    current_platform.empty_cache()
    current_platform.reset_peak_memory_stats()
    call()
    return current_platform.max_memory_allocated() / 2**30


def dense(label: str, q, k, v, timer: Timer) -> tuple[list[dict], torch.Tensor, float, float]:
    """Rows of each exact backend and AUTO; AUTO's result, milliseconds and peak memory in GiB."""
    flops = 4 * q.shape[1] * k.shape[1] * q.shape[2] * q.shape[3]
    usable = [impl for impl, reason in availability().items() if reason is None]
    usable = [impl for impl in usable if TABLE.record(impl) is not None and TABLE.record(impl).is_exact]
    auto = functools.partial(attention, q, k, v, attention_config=AttentionConfig(AttnImplType.AUTO))
    wanted = auto()
    found = {}
    for impl in usable:
        call = functools.partial(attention, q, k, v, attention_config=AttentionConfig(impl, strict=True))
        try:
            apart = distance(call(), wanted)
            if not apart <= SAME:
                raise ValueError(f"result is {apart:.1e} from AUTO's")
            found[impl.name] = timer.milliseconds(call)
        except Exception as failure:  # noqa: BLE001
            # One package that does not take the call leaves the others to measure.
            print(f"    {impl.name}: {type(failure).__name__} {str(failure)[:120]}", flush=True)
    took = timer.milliseconds(auto)
    most = peak(auto)
    best = min(found.values(), default=took)
    print(f"{label}: AUTO {took:.3f} ms ({took / best:.3f} of the fastest), peak {most:.2f} GiB", flush=True)
    rows = [{"case": label, "metric": "AUTO, peak", "value": f"{most:.3f}", "unit": "GiB"}]
    for name, ms in {**found, "AUTO": took}.items():
        print(f"    {name:20} {ms:9.3f} ms {flops / ms / 1e9:7.0f} TFLOP/s", flush=True)
        rows.append({"case": label, "metric": name, "value": f"{ms:.4f}", "unit": "ms"})
        rows[-1]["note"] = f"{flops / ms / 1e9:.0f} TFLOP/s"
    return rows, wanted, took, most


def executors(device: torch.device) -> list[tuple[sparse.SparseBackend, object]]:
    """Exact sparse executors that are here, without the last resort in plain PyTorch unless it is the only one."""
    here = [(found, sparse.TABLE.probe(found.impl, device)) for found in sparse.TABLE if found.is_exact]
    here = [(found, entry) for found, entry in here if not isinstance(entry, str)]
    kernels = [pair for pair in here if pair[0].impl is not sparse.SparseExecutor.TORCH_BLOCKED]
    return kernels or here


def radial(label: str, grid: tuple[int, int], qkv: list, decay: float, full: tuple, timer: Timer) -> list[dict]:
    """Rows of each executor over a radial mask; full: the dense result, its milliseconds and its peak memory."""
    q, tokens = qkv[0], qkv[0].shape[1]
    wanted, dense_ms, dense_peak = full
    config = SparseAttentionConfig(sparse_impl=AttnImplType.RADIAL_ATTN, decay_factor=decay)
    label = f"{label}, radial decay {decay}"

    def made_anew() -> BlockMask:
        MaskMap.clear_cache()
        return MaskMap(tokens, grid[0]).block_mask(tokens, config, device=q.device)

    build = timer.milliseconds(made_anew)
    plan = timer.milliseconds(lambda: made_anew().lists(config.block_size, config.block_size)) - build
    mask = made_anew()
    flops = 4 * mask.density * tokens**2 * q.shape[2] * q.shape[3]
    print(f"{label}: density {mask.density:.3f}, mask {build:.2f} ms, its lists {plan:.2f} ms", flush=True)
    rows = [
        {"case": label, "metric": "density", "value": f"{mask.density:.4f}", "unit": "of the pairs"},
        {"case": label, "metric": "mask building", "value": f"{build:.3f}", "unit": "ms"},
        {"case": label, "metric": "lists of the mask", "value": f"{plan:.3f}", "unit": "ms"},
    ]
    heads_first = [t.transpose(1, 2) for t in qkv]
    call = Call(*heads_first, None, q.shape[-1] ** -0.5)
    makers: dict[str, Callable] = {}
    for found, entry in executors(q.device):
        if (reason := sparse.refusal(found, call, mask)) is not None:
            print(f"    {found.impl.name}: {reason}", flush=True)
            continue
        makers[found.impl.name] = lambda pair=(found, entry): functools.partial(_executed, *pair, call, mask)
    if timer.module is not None and q.shape[2] == HEADS[0] and tokens == VIDEOS[0][0] * VIDEOS[0][1]:
        makers["flex_attention compiled"] = lambda: flex(heads_first, mask)
    first = None
    for name, make in makers.items():
        try:
            run = make()
            out = run()
            first = out if first is None else first
            apart, lost = distance(out, first), distance(out, wanted)
            if not apart <= SAME:
                raise ValueError(f"result is {apart:.1e} from the first executor's")
            took, most = timer.milliseconds(run), peak(run)
        except Exception as failure:  # noqa: BLE001
            print(f"    {name}: {type(failure).__name__} {str(failure)[:160]}", flush=True)
            continue
        note = (
            f"{flops / took / 1e9:.0f} TFLOP/s on kept blocks, {dense_ms / took:.2f}x dense, difference to dense "
            f"{lost:.3f}, peak {most / dense_peak:.2f} of dense"
        )
        print(f"    {name:24} {took:9.3f} ms {note}", flush=True)
        rows.append({"case": label, "metric": name, "value": f"{took:.4f}", "unit": "ms", "note": note})
    return rows


def _executed(found: sparse.SparseBackend, entry: object, call: Call, mask: BlockMask) -> torch.Tensor:
    return sparse.run(found, entry, call, mask)[0].transpose(1, 2)


def flex(heads_first: list[torch.Tensor], mask: BlockMask) -> Callable[[], torch.Tensor]:
    """PyTorch's compiled flex_attention over the same blocks; its mask holds whole blocks, so tokens are padded."""
    from torch.nn.attention.flex_attention import flex_attention

    blocks, attend = flex_mask(mask), torch.compile(flex_attention)
    q, k, v = (F.pad(t, (0, 0, 0, -mask.tokens % mask.block_size)).contiguous() for t in heads_first)
    # Padding keys are attended to here, which changes the last digits only: 8 of 32768.
    return lambda: attend(q, k, v, block_mask=blocks)[:, :, : mask.tokens].transpose(1, 2)


def flex_mask(mask: BlockMask):
    """`mask`, the same for all heads, as flex_attention's BlockMask."""
    from torch.nn.attention.flex_attention import BlockMask as FlexMask

    size = mask.block_size
    counts, order, _ = mask.lists(size, size)
    padded = counts.shape[-1] * size
    return FlexMask.from_kv_blocks(
        torch.zeros_like(counts), torch.zeros_like(order), counts, order, BLOCK_SIZE=size, seq_lengths=(padded, padded)
    )


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
            keys, values = qkv(TEXT_TOKENS, count, device, dtype)[1:]
            rows = dense(f"{tokens} over {TEXT_TOKENS} tokens, {count} heads of {HEAD_DIM}", q, keys, values, timer)[0]
            found, *full = dense(label, q, k, v, timer)
            rows += found
            for decay in DECAYS:
                rows += radial(label, grid, [q, k, v], decay, full, timer)
            if not options.smoke:
                record.append("attention", rows, options.results)


if __name__ == "__main__":
    main()
