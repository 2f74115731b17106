"""One real-size Wan run from prompt to mp4 with random weights: seconds and peak memory of every stage.

    python -m benchmarks.wan_end_to_end --size T2V-1.3B --width 832 --height 480 --frames 81 --steps 50 --out DIR

Random weights have the official shapes, names and dtypes: every stage does the work of a real run, the picture means
nothing.
"""

import argparse
import json
import shutil
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks import record
from telefuser.core.hub import EMBEDDED_FOLDER
from telefuser.models.wan_video_dit import WAN_DIT_SIZES, WanModel
from telefuser.models.wan_video_text_encoder import WanTextEncoder
from telefuser.models.wan_video_vae import WanVideoVAE
from telefuser.pipelines.wan_video import WanPipeline
from telefuser.platforms import current_platform


def random_weights(model_class, config: dict, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """Official names and shapes; matrices are scaled by their fan-in so that activations stay finite."""
    with torch.device("meta"):
        model = model_class(**config)
    weights = {}
    for name, parameter in model.named_parameters():
        is_matrix = parameter.dim() > 1 and not name.endswith("gamma")
        value = torch.randn(parameter.shape, device=device) * (parameter[0].numel() ** -0.5 if is_matrix else 0.02)
        if name.endswith("gamma") or (parameter.dim() == 1 and name.endswith("weight")):
            value += 1
        weights[name] = value.to(dtype).cpu().contiguous()
    return weights


def write_folder(folder: Path, size: str, device: torch.device) -> None:
    """A folder in the official layout and dtypes: float32 1.3B transformer and VAE, bfloat16 text encoder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = WAN_DIT_SIZES[size]
    dit_dtype = torch.float32 if size == "T2V-1.3B" else torch.bfloat16
    save_file(random_weights(WanModel, config, dit_dtype, device), folder / "diffusion_pytorch_model.safetensors")
    save_file(random_weights(WanVideoVAE, {}, torch.float32, device), folder / "Wan2.1_VAE.safetensors")
    text_encoder = random_weights(WanTextEncoder, {}, torch.bfloat16, device)
    save_file(text_encoder, folder / "models_t5_umt5-xxl-enc-bf16.safetensors")
    (folder / "config.json").write_text(json.dumps({"_class_name": "WanModel", "model_type": "t2v", **config}))
    tokenizer = folder / "google" / "umt5-xxl" / "tokenizer.json"
    tokenizer.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(next(EMBEDDED_FOLDER.glob("google/*/tokenizer.json")), tokenizer)


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

    folder = options.out / f"random-{options.size}"
    if not (folder / "config.json").exists():
        write_folder(folder, options.size, current_platform.default_device())
        current_platform.empty_cache()

    size = f"{options.width}x{options.height}, {options.frames} frames, {options.steps} steps"
    case = f"{options.size} random weights, {size}, attention {options.attention}"
    rows = []

    def measured(metric: str, value: float, unit: str, note: str = "") -> None:
        rows.append({"case": case, "metric": metric, "value": f"{value:.2f}", "unit": unit, "note": note})
        print(f"{metric:>12} {value:8.2f} {unit}  {note}", flush=True)

    start = time.perf_counter()
    pipe = WanPipeline.from_pretrained(folder, attention=options.attention)
    current_platform.synchronize()
    measured("load", time.perf_counter() - start, "s")
    video = pipe(
        "a red circle moving right on a black background",
        height=options.height,
        width=options.width,
        num_frames=options.frames,
        steps=options.steps,
        seed=0,
    )
    for stage in video.stages:
        measured(stage.name, stage.seconds, "s", f"peak {stage.peak_bytes / 2**30:.2f} GiB")
    start = time.perf_counter()
    path = video.save(options.out / "end_to_end.mp4")
    measured("write mp4", time.perf_counter() - start, "s", f"{path.stat().st_size / 1e6:.1f} MB")
    print(record.append("wan_end_to_end", rows, options.results))


if __name__ == "__main__":
    main()
