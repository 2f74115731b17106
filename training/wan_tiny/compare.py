"""What quantising costs in quality: `python -m training.wan_tiny.compare [--quantize fp8] [--model tiny|DIR]`.

Makes the videos of the grid with the weights as they are and quantised, from the same noise, and prints how many are
right in each run and how far the pixels of a video are apart. `--sample 24` takes a few minutes on a CPU.
"""

import argparse
import random
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from telefuser.ops import fp8_gemm
from telefuser.pipelines.wan_video import WanPipeline
from training.wan_tiny.evaluate import Case, Sampling, evaluate, grid_cases


def psnr(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Peak signal-to-noise ratio in dB [V] of videos [V, F, H, W, 3] uint8; 99 where they are equal or nearly so."""
    error = (a.float() - b.float()).square().flatten(1).mean(dim=1)
    return 10 * torch.log10(255.0**2 / error).clamp_max(9.9)


def compare(wide: WanPipeline, quantised: WanPipeline, cases: list[Case], sampling: Sampling) -> dict[str, Any]:
    """Shares of videos with every attribute right in both runs, and the PSNR of the second against the first in dB."""
    (first, frames), (second, others) = (evaluate(pipeline, cases, sampling) for pipeline in (wide, quantised))
    ratios = psnr(others, frames)
    return {
        "videos": len(cases),
        "right": first["right"],
        "right quantised": second["right"],
        "PSNR mean": float(ratios.mean()),
        "PSNR worst": float(ratios.min()),
        "wrong": second["wrong"],
    }


def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    given = {"device": options.device, "dtype": options.dtype}
    wide = WanPipeline.from_pretrained(options.model, **given)
    quantised = WanPipeline.from_pretrained(options.model, **given, quantize=options.quantize)
    cases = grid_cases(options.seeds)
    if options.sample:
        cases = random.Random(options.sample).sample(cases, min(options.sample, len(cases)))
    sampling = Sampling(*(wide.defaults[name] for name in ("steps", "guidance", "shift", "scheduler")))
    product = fp8_gemm.describe_choice(wide.device)
    print(f"{len(cases)} videos on {wide.device} in {options.dtype}: {sampling}; {product}", flush=True)
    result = compare(wide, quantised, cases, sampling)
    print(f"right: {100 * result['right']:.1f} % as they are, {100 * result['right quantised']:.1f} % quantised")
    print(f"PSNR: {result['PSNR mean']:.1f} dB mean, {result['PSNR worst']:.1f} dB worst")
    for case in result["wrong"]:
        print(f"  {case['prompt']} ({case['seed']}): seen {', '.join(case['seen'].values())}, IoU {case['iou']}")
    if options.record:
        print(_record(result, options, product.partition(":")[0]))


def _record(result: dict[str, Any], options: argparse.Namespace, product: str) -> Path:
    case = f"{result['videos']} videos in {options.dtype}, {options.quantize} by {product}"
    units = {"right": "", "right quantised": "", "PSNR mean": "dB", "PSNR worst": "dB"}
    rows = [
        {"case": case, "metric": name, "value": f"{result[name]:.4f}", "unit": unit} for name, unit in units.items()
    ]
    return record.append("wan_tiny quantised", rows, options.record)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="training.wan_tiny.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny", help="tiny, or a checkpoint folder")
    parser.add_argument("--quantize", default="fp8")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bf16", help="of both runs")
    parser.add_argument("--seeds", type=int, default=2, help="videos a prompt")
    parser.add_argument("--sample", type=int, help="only this many videos of the grid, drawn once and for all")
    parser.add_argument(
        "--record",
        type=Path,
        nargs="?",
        const=record.RESULTS,
        metavar="FOLDER",
        help="append the result to the benchmarks' table, or to one in this folder",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
