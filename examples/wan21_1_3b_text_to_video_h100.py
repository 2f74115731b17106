"""Wan2.1 1.3B text to video on one NVIDIA GPU (written for an H100; 21.7 GiB at most on an H200).

    python examples/wan21_1_3b_text_to_video_h100.py Wan-AI/Wan2.1-T2V-1.3B "a cat surfing a wave at sunset"

The model is a folder in the official or the diffusers layout, or a hub id.
"""

import sys

from telefuser.pipelines.wan_video import WanPipeline

# Settings of this example; the ROCm twin takes them over.
PPL_CONFIG = {
    "attention": "auto",
    "height": 480,
    "width": 832,
    "num_frames": 81,
    "steps": 50,
    "guidance": 5.0,
    "shift": 5.0,
}


def run(model: str, prompt: str, output: str = "wan21_1_3b.mp4", device: str = "auto", **settings) -> str:
    """Generate one video and return its path; `settings` replace those of PPL_CONFIG."""
    settings = {**PPL_CONFIG, **settings}
    pipe = WanPipeline.from_pretrained(model, device=device, attention=settings.pop("attention"))
    return str(pipe(prompt, **settings).save(output))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    print(run(sys.argv[1], sys.argv[2]))
