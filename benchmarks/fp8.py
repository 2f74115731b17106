"""FP8 against bfloat16: the linear layers of Wan 2.1 as the model runs them, and whole forward passes.

    python -m benchmarks.fp8                       layers, blocks, and one forward of both sizes, 832x480, 81 frames
    python -m benchmarks.fp8 --parts layers        or blocks, forward; --sizes T2V-1.3B for one of them
    python -m benchmarks.fp8 --smoke               tiny, on any machine, to see that it runs; records nothing

A layer is timed from its bfloat16 input on, quantising included; "product alone" has an input that is FP8 already. A
block without attention is what a model has of linear layers, with the norms, GELU and residual sums around them, which
quantise for most of them. The two forwards have the same random weights and the same attention. Rivals run where
torchao and diffusers are installed.
"""

import argparse
import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import fp8_rivals, record
from benchmarks.block import CLASSES, GENERATED, REST, inputs, kernel_times
from benchmarks.timing import Timer
from telefuser.core.config import AttentionConfig, AttnImplType
from telefuser.models import wan_video_dit
from telefuser.models.wan_video_dit import WAN_DIT_SIZES, WanModel
from telefuser.ops import fp8_gemm
from telefuser.ops.fp8_quantization import quantize_rows
from telefuser.ops.quantized_linear import WAN_HIGH_PRECISION, LinearFP8, replace_linear_layers
from telefuser.ops.quantized_rows import QuantizedRows
from telefuser.platforms import current_platform

TOKENS = 32760
# in_features, out_features of Wan 2.1 14B and 1.3B; those of three times the width make queries, keys and values.
LAYERS = (
    *((5120, 15360), (5120, 5120), (5120, 13824), (13824, 5120)),
    *((1536, 4608), (1536, 1536), (1536, 8960), (8960, 1536)),
)
LATENTS = (1, 16, 21, 60, 104)
# Before the classes of `benchmarks.block`: a product that scales rows, and the passes that quantise for it.
QUANTISING = "quantising"
PARTS = (
    ("matrix products", re.compile(r"scaled_mm|scaled_gemm", re.IGNORECASE)),
    (QUANTISING, re.compile(r"quant", re.IGNORECASE)),
    *CLASSES.items(),
)
MAX_ERROR = 0.04
PARTS_OF_RUN = ("layers", "blocks", "forward")


def part_of(kernel: str) -> str:
    """Which part of a forward a kernel of this name belongs to."""
    if kernel.startswith(GENERATED):
        return REST
    return next((name for name, pattern in PARTS if pattern.search(kernel)), REST)


def layer(columns: int, rows: int, tokens: int, timer: Timer, rivals: bool) -> list[dict]:
    """Rows to record of one layer [rows, columns]. Raises SystemExit where FP8 is further away than it may be."""
    linear = nn.Linear(columns, rows, device=timer.device, dtype=torch.bfloat16).requires_grad_(False)
    quantised = LinearFP8(linear)
    x = torch.randn(tokens, columns, device=timer.device).bfloat16()
    ready = QuantizedRows(*quantize_rows(x, quantised.weight.dtype))
    calls: dict[str, Callable[[], object]] = {
        "bfloat16": lambda: F.linear(x, linear.weight, linear.bias),
        "FP8": lambda: quantised(x),
        "FP8, product alone": lambda: quantised(ready),
    }
    case = f"{tokens}x{columns} to {rows}"
    some = x[:: max(tokens // 64, 1)]
    wanted = F.linear(some.float(), linear.weight.float(), linear.bias.float())
    error = float((quantised(some).float() - wanted).norm() / wanted.norm())
    if not error <= MAX_ERROR:
        raise SystemExit(f"{case}: relative error {error:.4f} is above {MAX_ERROR}; no speed of a wrong result")
    times = {who: timer.milliseconds(call) for who, call in calls.items()}
    # Last, for it changes `linear`.
    if rivals and fp8_rivals.HAS_TORCHAO:
        rival = fp8_rivals.torchao_compiled(nn.Sequential(linear))
        times["torchao, compiled"] = timer.milliseconds(lambda: rival(x))
    line = ", ".join(f"{who} {ms:.3f} ms ({times['bfloat16'] / ms:.2f}x)" for who, ms in times.items())
    print(f"{case}: {line}; relative error {error:.4f}", flush=True)
    flops = 2 * tokens * columns * rows
    rows_out = [
        {"case": case, "metric": who, "value": f"{ms:.4f}", "unit": "ms", "note": f"{flops / ms / 1e9:.0f} TFLOP/s"}
        for who, ms in times.items()
    ]
    return [*rows_out, {"case": case, "metric": "relative error", "value": f"{error:.5f}", "unit": ""}]


@contextlib.contextmanager
def without_attention() -> Iterator[None]:
    """Blocks hand their queries on in place of what these would attend to: all of a block but attention runs."""
    kept = wan_video_dit.attention
    wan_video_dit.attention = lambda q, k, v, **options: q
    try:
        yield
    finally:
        wan_video_dit.attention = kept


def block(name: str, size: dict, tokens: int, timer: Timer, rivals: bool) -> list[dict]:
    """Rows to record of a block's linear layers as the model runs them: with their norms, GELU and residual sums."""
    case = f"{name} block without attention, {tokens} tokens"
    ours, given = inputs(size, tokens, timer.device)
    times = {}
    with without_attention():
        wanted = ours(*given) - given[0]
        times["bfloat16"] = timer.milliseconds(lambda: ours(*given))
        if rivals:
            forms = {"bfloat16, compiled": lambda: torch.compile(ours, fullgraph=True)}
            if fp8_rivals.HAS_TORCHAO:
                forms["torchao, compiled"] = lambda: fp8_rivals.torchao_compiled(copy.deepcopy(ours))
            for who, make in forms.items():
                rival = make()
                times[who] = timer.milliseconds(lambda rival=rival: rival(*given))
        replace_linear_layers(ours)
        ours.self_attn.merge_projections()
        error = float((ours(*given) - given[0] - wanted).norm() / wanted.norm())
        times["FP8"] = timer.milliseconds(lambda: ours(*given))
    line = ", ".join(f"{who} {ms:.3f} ms ({times['bfloat16'] / ms:.2f}x)" for who, ms in times.items())
    print(f"{case}: {line}; relative error {error:.4f}", flush=True)
    rows = [{"case": case, "metric": who, "value": f"{ms:.4f}", "unit": "ms"} for who, ms in times.items()]
    return [*rows, {"case": case, "metric": "relative error", "value": f"{error:.5f}", "unit": ""}]


def random_model(size: dict, device: torch.device, attention: AttnImplType) -> WanModel:
    """As the loader leaves it (bfloat16, what FP32_PARAMETERS names in float32), without a float32 copy on the way."""
    with torch.device("meta"):
        model = WanModel(**size).bfloat16()
    model.to_empty(device=device).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.02)
        if "norm" in name and name.endswith("weight"):
            parameter.data += 1
        if any(part in name for part in WanModel.FP32_PARAMETERS):
            parameter.data = parameter.data.float()
    model.set_attention_config(AttentionConfig(attn_impl=attention))
    return model


def forward(name: str, size: dict, shape: tuple, attention: AttnImplType, timer: Timer, options) -> Iterator[list]:
    """Rows to record of one forward of a size in bfloat16 and in FP8, then those of the rival."""
    text_dim = size.get("text_dim", 4096)
    x, text = torch.randn(shape, device=timer.device), torch.randn(1, 512, text_dim, device=timer.device).bfloat16()
    case = f"{name} forward, {'x'.join(map(str, shape[2:]))} latents, {attention.name}"
    # Functions of their own, so that a model is gone before the next one needs the memory.
    yield _ours(case, random_model(size, timer.device, attention), x, text, timer, options.compiled)
    current_platform.empty_cache()
    if options.rivals and fp8_rivals.HAS_DIFFUSERS and fp8_rivals.HAS_TORCHAO:
        rival = fp8_rivals.diffusers_forward(size, x, text, attention.name)
        yield _measure(case, "diffusers, torchao rows, compiled blocks", rival, None, timer)
    current_platform.empty_cache()


def _ours(case: str, model: WanModel, x: torch.Tensor, text: torch.Tensor, timer: Timer, compiled: bool) -> list[dict]:
    timestep = torch.tensor([500.0], device=x.device)
    context = model.prepare_context(text)
    wanted = model(x, timestep, context)
    rows = _measure(case, "bfloat16", lambda: model(x, timestep, context), model, timer)
    replace_linear_layers(model, skip=WAN_HIGH_PRECISION)
    model.merge_projections()
    prepared = model.prepare_context(text)
    error = float((model(x, timestep, prepared) - wanted).norm() / wanted.norm())
    print(f"{case}: relative error of FP8 to bfloat16, random weights: {error:.4f}", flush=True)
    rows.append({"case": case, "metric": "FP8, relative error to bfloat16", "value": f"{error:.5f}", "unit": ""})
    rows += _measure(case, "FP8", lambda: model(x, timestep, prepared), model, timer)
    if compiled:
        for block in model.blocks:
            block.compile(fullgraph=True)
        rows += _measure(case, "FP8, compiled blocks", lambda: model(x, timestep, prepared), model, timer)
    return rows


def _measure(case: str, who: str, call: Callable[[], object], model: WanModel | None, timer: Timer) -> list[dict]:
    times = kernel_times(call, timer, repeats=1)
    parts = dict.fromkeys(("attention", "matrix products", QUANTISING, REST), 0.0)
    for kernel, ms in times.items():
        parts[part_of(kernel)] += ms
    current_platform.reset_peak_memory_stats()
    parts = {"whole": timer.milliseconds(call), **parts}
    peak = current_platform.max_memory_allocated() / 2**30
    memory = {"peak": peak}
    if model is not None:
        memory["weights"] = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())) / 2**30
    print(f"{case}, {who}: " + ", ".join(f"{part} {ms:.1f} ms" for part, ms in parts.items()), end="; ")
    print(", ".join(f"{name} {size:.2f} GiB" for name, size in memory.items()), flush=True)
    return [
        *({"case": case, "metric": f"{who}, {p}", "value": f"{ms:.3f}", "unit": "ms"} for p, ms in parts.items()),
        *({"case": case, "metric": f"{who}, {n}", "value": f"{s:.3f}", "unit": "GiB"} for n, s in memory.items()),
    ]


def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    torch.manual_seed(0)
    timer = Timer(torch.device(current_platform.default_device()), options.repeats)
    attention, tokens, layers, shape = AttnImplType.parse(options.attention), TOKENS, LAYERS, LATENTS
    sizes = {name: WAN_DIT_SIZES[name] for name in options.sizes}
    if options.smoke:
        tokens, layers, shape = 24, ((48, 32), (63, 45)), (1, 16, 2, 4, 6)
        sizes = {"smoke": {"dim": 48, "ffn_dim": 64, "num_heads": 2, "num_layers": 2, "text_dim": 32}}
    print(f"{record.device_name()}: {fp8_gemm.describe_choice()}", flush=True)

    def keep(rows: list[dict]) -> None:
        if not options.smoke:
            record.append("fp8", rows, options.results)

    with torch.inference_mode():
        if "layers" in options.parts:
            for columns, rows in layers:
                keep(layer(columns, rows, tokens, timer, options.rivals))
        if "blocks" in options.parts:
            for name, size in sizes.items():
                keep(block(name, size, tokens, timer, options.rivals))
        # A forward takes seconds; its median needs few.
        timer.repeats = min(timer.repeats, 5)
        if "forward" in options.parts:
            for name, size in sizes.items():
                for rows in forward(name, size, shape, attention, timer, options):
                    keep(rows)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks fp8", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="*", choices=PARTS_OF_RUN, default=PARTS_OF_RUN)
    parser.add_argument("--sizes", nargs="*", choices=sorted(WAN_DIT_SIZES), default=sorted(WAN_DIT_SIZES))
    parser.add_argument("--attention", default="auto", help="of all forwards; cudnn is one that diffusers has too")
    parser.add_argument("--compiled", action="store_true", help="our FP8 blocks under torch.compile as well")
    parser.add_argument("--no-rivals", dest="rivals", action="store_false", help="skip torchao and diffusers")
    parser.add_argument("--smoke", action="store_true", help="tiny, nothing recorded")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
