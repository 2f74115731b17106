"""Where one Wan block's time goes: attention, matrix products, and the rest, which memory limits.

    python -m benchmarks block [--size T2V-14B] [--compiled]      one block at 832x480 with 81 frames, random weights
    python -m benchmarks block --smoke                            tiny, to see that it runs; records nothing

"operator by operator" is the same block with each step a call of its own, as it stood before the steps were fused.
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from benchmarks import record
from benchmarks.timing import Timer
from telefuser.models.wan_video_dit import WAN_DIT_SIZES, WanBlock, WanModel
from telefuser.ops import apply_rotary_emb, modulate
from telefuser.ops.attention import attention
from telefuser.platforms import current_platform

TOKENS = 32760
# In this order: names of attention kernels also say what they are built from.
CLASSES = {
    "attention": re.compile(r"attention|attn|flash|fmha|sdpa|sage", re.IGNORECASE),
    "matrix products": re.compile(r"gemm|nvjet|cutlass|cublas|xmma|matmul|addmm|::mm\b|tensile|Cijk", re.IGNORECASE),
}
REST = "the rest"
# Inductor names its own kernels after all that went into them, matrix products' epilogues too.
GENERATED = ("triton_poi_", "triton_red_", "triton_per_")


def class_of(kernel: str) -> str:
    """Which part of the block a kernel of this name belongs to."""
    if kernel.startswith(GENERATED):
        return REST
    return next((name for name, pattern in CLASSES.items() if pattern.search(kernel)), REST)


def operator_by_operator(block: WanBlock, x, time_projection, rope, text_k, text_v):
    """What `block` computes, a call for every step."""
    attn, dtype = block.self_attn, block.self_attn.q.bias.dtype
    shift1, scale1, gate1, shift2, scale2, gate2 = (block.modulation.float() + time_projection).unbind(2)
    h = modulate(block.norm1(x), shift1, scale1).to(dtype)
    q = apply_rotary_emb(attn.split_heads(attn.norm_q(attn.q(h))), rope)
    k = apply_rotary_emb(attn.split_heads(attn.norm_k(attn.k(h))), rope)
    h = attention(q, k, attn.split_heads(attn.v(h)), attention_config=attn.attention_config)
    x = torch.addcmul(x, attn.o(h.flatten(2)), gate1)
    x = x + block.cross_attn(block.norm3(x).to(dtype), text_k, text_v)
    h = modulate(block.norm2(x), shift2, scale2).to(dtype)
    h = block.ffn[2](F.gelu(block.ffn[0](h), approximate="tanh"))
    return torch.addcmul(x, h, gate2)


def inputs(size: dict, tokens: int, device: torch.device) -> tuple[WanBlock, tuple]:
    """A block as the loader leaves it (bfloat16, norms and modulation float32), and what it takes."""
    dim, heads = size["dim"], size["num_heads"]
    block = WanBlock(dim, size["ffn_dim"], heads, 1e-6).to(device)
    for name, parameter in block.named_parameters():
        torch.nn.init.normal_(parameter, std=dim**-0.5)
        if not any(part in name for part in WanModel.FP32_PARAMETERS):
            parameter.data = parameter.data.bfloat16()
    angles = torch.rand(tokens, dim // heads // 2, device=device) * 6
    text = [torch.randn(1, 512, heads, dim // heads, device=device).bfloat16() for _ in range(2)]
    x, time = torch.randn(1, tokens, dim, device=device), torch.randn(1, 1, 6, dim, device=device)
    return block, (x, time, (angles.cos(), angles.sin()), *text)


def kernel_times(call: Callable[[], object], timer: Timer, repeats: int = 3) -> dict[str, float]:
    """Milliseconds of one call by kernel name; on a CPU by operator."""
    is_cpu = timer.device.type == "cpu"
    call()
    timer.synchronize()
    with profile(activities=[ProfilerActivity.CPU if is_cpu else ProfilerActivity.CUDA]) as found:
        for _ in range(repeats):
            call()
        timer.synchronize()
    time = "self_cpu_time_total" if is_cpu else "self_device_time_total"
    return {event.key: getattr(event, time) / 1e3 / repeats for event in found.key_averages()}


def measure(label: str, who: str, call: Callable[[], object], timer: Timer) -> list[dict]:
    """Print and return the rows to record of one form of the block."""
    times = kernel_times(call, timer)
    parts = dict.fromkeys((*CLASSES, REST), 0.0)
    for kernel, ms in times.items():
        parts[class_of(kernel)] += ms
    whole = timer.milliseconds(call)
    print(f"{label}, {who}: {whole:.3f} ms;", ", ".join(f"{part} {ms:.3f}" for part, ms in parts.items()))
    rest = sorted((item for item in times.items() if class_of(item[0]) == REST), key=lambda item: -item[1])
    for kernel, ms in rest[:10]:
        print(f"    {ms:8.4f} ms  {kernel[:90]}", flush=True)
    parts["whole"] = whole
    return [
        {"case": label, "metric": f"{who}, {part}", "value": f"{ms:.4f}", "unit": "ms"} for part, ms in parts.items()
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks block", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=sorted(WAN_DIT_SIZES), default="T2V-1.3B")
    parser.add_argument("--compiled", action="store_true", help="the block under torch.compile as well")
    parser.add_argument("--smoke", action="store_true", help="tiny, nothing recorded")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    timer = Timer(torch.device(current_platform.default_device()), repeats=10)
    size, tokens = WAN_DIT_SIZES[options.size], TOKENS
    if options.smoke:
        size, tokens = {"dim": 48, "ffn_dim": 64, "num_heads": 2}, 24
    rows = []
    with torch.inference_mode():
        block, given = inputs(size, tokens, timer.device)
        forms = {
            "fused": lambda: block(*given),
            "operator by operator": lambda: operator_by_operator(block, *given),
        }
        if options.compiled:
            compiled = torch.compile(block, fullgraph=True)
            forms["compiled"] = lambda: compiled(*given)
        for who, call in forms.items():
            rows += measure(f"{options.size} block, {tokens} tokens", who, call, timer)
    if not options.smoke:
        print(record.append("block", rows, options.results))


if __name__ == "__main__":
    main()
