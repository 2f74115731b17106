"""One real-size Wan run from prompt to mp4 with random weights: stage times, peak memory and host memory while loading.

    python -m benchmarks.wan_end_to_end --size T2V-1.3B --width 832 --height 480 --frames 81 --steps 50 --out DIR

Random weights have the official shapes, names and dtypes, so every stage does the work of a real run; only the picture means nothing.
"""

import argparse
import json
import shutil
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks import record
from telefuser.models.wan_video_dit import WAN_DIT_SIZES, WanModel
from telefuser.models.wan_video_text_encoder import WanTextEncoder
from telefuser.models.wan_video_vae import WanVideoVAE
from telefuser.pipelines.wan_video import WanPipeline
from telefuser.platforms import current_platform

EMBEDDED = Path(__file__).resolve().parent.parent / "telefuser" / "weights" / "wan_tiny"


def random_weights(model_class, config: dict, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """Official names and shapes; matrices scaled by their fan-in so that activations stay finite through every layer."""
    with torch.device("meta"):
        model = model_class(**config)
    weights = {}
    for name, parameter in model.named_parameters():
        fan_in = parameter[0].numel() if parameter.dim() > 1 else 1
        value = torch.randn(parameter.shape, device=device) * (fan_in**-0.5 if parameter.dim() > 1 else 0.02)
        if parameter.dim() == 1 and name.endswith("weight") or name.endswith("gamma"):
            value += 1
        weights[name] = value.to(dtype).cpu().contiguous()
    return weights


def write_folder(folder: Path, size: str, device: torch.device) -> None:
    """A folder in the official layout: float32 transformer and VAE, bfloat16 text encoder, as the published 1.3B files are."""
    folder.mkdir(parents=True, exist_ok=True)
    config = WAN_DIT_SIZES[size]
    dit_dtype = torch.float32 if size == "T2V-1.3B" else torch.bfloat16
    save_file(random_weights(WanModel, config, dit_dtype, device), folder / "diffusion_pytorch_model.safetensors")
    save_file(random_weights(WanVideoVAE, {}, torch.float32, device), folder / "Wan2.1_VAE.safetensors")
    save_file(
        random_weights(WanTextEncoder, {}, torch.bfloat16, device), folder / "models_t5_umt5-xxl-enc-bf16.safetensors"
    )
    (folder / "config.json").write_text(json.dumps({"_class_name": "WanModel", "model_type": "t2v", **config}))
    tokenizer = next(EMBEDDED.glob("google/*/tokenizer.json"))
    (folder / "google" / "umt5-xxl").mkdir(parents=True, exist_ok=True)
    shutil.copy(tokenizer, folder / "google" / "umt5-xxl" / "tokenizer.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(WAN_DIT_SIZES), default="T2V-1.3B")
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--frames", type=int, default=81)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--out", type=Path, required=True, help="folder for the weights and the video")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    options = parser.parse_args()

    device = current_platform.default_device()
    folder = options.out / f"random-{options.size}"
    if not (folder / "config.json").exists():
        write_folder(folder, options.size, torch.device(device))
        current_platform.empty_cache()

    case = f"{options.size} random weights {options.width}x{options.height} {options.frames} frames {options.steps} steps attention={options.attention}"
    rows = []
    current_platform.reset_peak_memory_stats()
    start = time.perf_counter()
    pipe = WanPipeline.from_pretrained(folder, attention=options.attention)
    current_platform.synchronize()
    rows.append({"metric": "load", "value": f"{time.perf_counter() - start:.2f}", "unit": "s"})
    video = pipe(
        "a red circle moving right on a black background",
        height=options.height,
        width=options.width,
        num_frames=options.frames,
        steps=options.steps,
        seed=0,
    )
    for stage in video.stages:
        rows.append(
            {
                "metric": stage.name,
                "value": f"{stage.seconds:.2f}",
                "unit": "s",
                "note": f"peak {stage.peak_bytes / 2**30:.2f} GiB",
            }
        )
    start = time.perf_counter()
    path = video.save(options.out / "end_to_end.mp4")
    rows.append(
        {
            "metric": "write mp4",
            "value": f"{time.perf_counter() - start:.2f}",
            "unit": "s",
            "note": f"{Path(path).stat().st_size / 1e6:.1f} MB",
        }
    )
    for row in rows:
        print(f"{row['metric']:>12} {row['value']:>8} {row['unit']}  {row.get('note', '')}")
    print(record.append("wan_end_to_end", [{"case": case, **row} for row in rows], options.results))


if __name__ == "__main__":
    main()
