"""Radial attention in a Wan model: a forward's time, density, peak memory, and how far its output is from dense.

    python -m benchmarks sparse_wan --models tiny T2V-1.3B --decay 0.2 0.5 1.0

`tiny` is the embedded model with its trained weights, at its own size; the others have random weights, whose output
difference bounds nothing about pictures. A forward is one of the two passes of a step; all but the first layer are
sparse in it. Building the mask, and what an executor plans from it, is timed apart: it is paid once a shape.
"""

import argparse
import time
from pathlib import Path

import torch

from benchmarks import record
from benchmarks.timing import Timer
from telefuser.core import checkpoint
from telefuser.core.config import AttentionConfig
from telefuser.models.wan_video_dit import WAN_DIT_SIZES, WanModel
from telefuser.ops.attention import MaskMap, SparseAttentionState
from telefuser.ops.attention.block_sparse import name_executor
from telefuser.pipelines.request import parse_size
from telefuser.pipelines.wan_video import WanPipeline
from telefuser.platforms import current_platform

# Of the embedded model and of Wan 2.1: (width, height), frames.
SIZES = {"tiny": ((128, 128), 17)}
SIZE_OF_WAN = (832, 480), 81
PROMPTS = (
    "a red circle moving right on a black background",
    "a green square growing on a white background",
    "a blue triangle moving up on a white background",
)


def embedded(device: torch.device, dtype: torch.dtype) -> WanModel:
    """The embedded model's transformer."""
    part = checkpoint.inspect("tiny").require_usable().dit
    return part.load(WanModel.from_config, dtype=dtype, device=device, fp32_fragments=WanModel.FP32_PARAMETERS)


def random_model(size: str, device: torch.device, dtype: torch.dtype, num_layers: int | None) -> WanModel:
    """Weights as the loader leaves them, scaled by their fan-in so that activations stay finite."""
    config = WAN_DIT_SIZES[size] | ({} if num_layers is None else {"num_layers": num_layers})
    with device:
        model = WanModel(**config)
    for name, parameter in model.named_parameters():
        fan_in = parameter[0].numel() if parameter.dim() > 1 else 2500
        torch.nn.init.normal_(parameter, std=fan_in**-0.5)
        if "norm" in name and name.endswith("weight"):
            parameter.data += 1
        if not any(part in name for part in WanModel.FP32_PARAMETERS):
            parameter.data = parameter.data.to(dtype)
    return model


def first_call_ms(call, timer: Timer) -> float:
    """One call by the clock, the device idle before and after it."""
    timer.synchronize()
    start = time.perf_counter()
    call()
    timer.synchronize()
    return (time.perf_counter() - start) * 1e3


class Case:
    """One model at one size, and what was measured of it."""

    def __init__(self, label: str, model: WanModel, latents: tuple[int, int, int], timer: Timer):
        self.label, self.model, self.timer, self.rows = label, model, timer, []
        device = timer.device
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(1, model.in_dim, *latents, generator=generator).to(device)
        text = torch.randn(1, min(60, model.text_len), model.text_dim, generator=generator).to(device)
        self.context, self.timestep = model.prepare_context(text), torch.tensor([500.0], device=device)
        self.grid = tuple(size // patch for size, patch in zip(latents, model.patch_size))
        self.tokens = self.grid[0] * self.grid[1] * self.grid[2]

    def forward(self, state: SparseAttentionState | None = None) -> torch.Tensor:
        return self.model(self.x, self.timestep, self.context, sparse_state=state)

    def write(self, metric: str, value: float, unit: str, note: str = "") -> None:
        self.rows.append({"case": self.label, "metric": metric, "value": f"{value:.4g}", "unit": unit, "note": note})
        print(f"{self.label}: {metric} {value:.4g} {unit} {note}", flush=True)

    def peak_bytes(self, state: SparseAttentionState | None) -> int:
        current_platform.reset_peak_memory_stats(self.timer.device)
        self.forward(state)
        self.timer.synchronize()
        return current_platform.max_memory_allocated(self.timer.device)

    def dense(self) -> torch.Tensor:
        out = self.forward()
        self.write("dense", self.timer.milliseconds(self.forward), "ms")
        self.write("dense, peak", self.peak_bytes(None) / 2**30, "GiB")
        return out.double()

    def radial(self, config: AttentionConfig, dense: torch.Tensor) -> None:
        sparse, device = config.sparse_config, self.timer.device
        who = f"radial decay {sparse.decay_factor:g}, blocks of {sparse.block_size}"
        self.model.set_attention_config(config)
        state = SparseAttentionState(config, MaskMap(self.tokens, self.grid[0], grid=self.grid))
        state.update(numeral_timestep=sparse.dense_timesteps)
        self.forward(state)
        MaskMap.clear_cache()
        building = first_call_ms(lambda: state.block_mask(self.tokens, device), self.timer)
        MaskMap.clear_cache()
        first = first_call_ms(lambda: self.forward(state), self.timer)
        mask, later = state.block_mask(self.tokens, device), self.timer.milliseconds(lambda: self.forward(state))
        difference = (self.forward(state).double() - dense).norm() / dense.norm()
        attn = self.model.blocks[0].self_attn
        shape = 1, attn.num_heads, self.tokens, self.model.dim // attn.num_heads
        executor = name_executor(shape, attn.projections[0].bias.dtype, device, mask, sparse.use_sage_attention)
        self.write(who, later, "ms", executor)
        self.write(f"{who}, density", mask.density, "")
        self.write(f"{who}, difference to dense", difference.item(), "relative")
        self.write(f"{who}, peak", self.peak_bytes(state) / 2**30, "GiB")
        self.write(f"{who}, mask", building, "ms")
        self.write(f"{who}, mask and plan", max(first - later, building), "ms", "first forward of a shape over later")
        self.model.set_attention_config(None)


def video_rows(decays: list[float], device: torch.device) -> list[dict]:
    """PSNR of the embedded model's videos under radial attention, with the default dense steps, against dense ones."""
    pipe, rows = WanPipeline.from_pretrained("tiny", device=device), []
    dense = [pipe(prompt, seed=1).frames.double() for prompt in PROMPTS]
    for decay in decays:
        psnr = []
        for prompt, reference in zip(PROMPTS, dense):
            frames = pipe(prompt, seed=1, attention="radial", decay=decay).frames.double()
            psnr.append(10 * torch.log10(255**2 / (frames - reference).square().mean().clamp_min(1e-9)).item())
        case, note = "tiny, whole videos", f"mean of {len(PROMPTS)}, lowest {min(psnr):.1f}"
        value = f"{sum(psnr) / len(psnr):.2f}"
        rows.append(
            {"case": case, "metric": f"radial decay {decay:g}, PSNR", "value": value, "unit": "dB", "note": note}
        )
        print(f"{case}: radial decay {decay:g}, PSNR {value} dB, {note}", flush=True)
    return rows


def arguments_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks sparse_wan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=["tiny", *sorted(WAN_DIT_SIZES)], default=["tiny", "T2V-1.3B"])
    parser.add_argument("--decay", nargs="+", type=float, default=[0.2, 0.5, 1.0])
    parser.add_argument("--block-size", type=int, default=128, help="64 or 128")
    parser.add_argument("--size", help="WIDTHxHEIGHT of every model; by default its own")
    parser.add_argument("--frames", type=int)
    parser.add_argument("--layers", type=int, help="of the random models, by default all")
    parser.add_argument("--sage", action="store_true", help="ask for the executor that quantises")
    parser.add_argument("--smoke", action="store_true", help="the embedded model at one decay, nothing recorded")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = arguments_of(arguments)
    if options.smoke:
        options.models, options.decay = ["tiny"], options.decay[:1]
    device = torch.device(current_platform.default_device())
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    timer, rows = Timer(device, repeats=5), []
    for name in options.models:
        size, frames = SIZES.get(name, SIZE_OF_WAN)
        width, height = parse_size(options.size) if options.size else size
        frames = options.frames or frames
        with torch.inference_mode():
            model = embedded(device, dtype) if name == "tiny" else random_model(name, device, dtype, options.layers)
            layers = f", {model.num_layers} layers" if options.layers and name != "tiny" else ""
            label = f"{name}{layers}, {width}x{height}, {frames} frames, {str(dtype).removeprefix('torch.')}"
            case = Case(label, model.eval(), ((frames - 1) // 4 + 1, height // 8, width // 8), timer)
            dense = case.dense()
            for decay in options.decay:
                config = AttentionConfig.radial_attention(
                    12, 1, decay, use_sage_attention=options.sage, block_size=options.block_size
                )
                case.radial(config, dense)
        rows += case.rows
        del case, model
        current_platform.empty_cache()
        if name == "tiny" and not options.smoke:
            rows += video_rows(options.decay, device)
    if not options.smoke:
        print(record.append("sparse_wan", rows, options.results))


if __name__ == "__main__":
    main()
