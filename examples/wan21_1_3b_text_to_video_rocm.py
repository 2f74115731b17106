"""Wan2.1 1.3B text to video on one AMD GPU, in eager mode.

Meant for a Radeon RX 9070 (gfx1201) with ROCm 7.2; this project has not run it on one.

    python examples/wan21_1_3b_text_to_video_rocm.py Wan-AI/Wan2.1-T2V-1.3B "a cat surfing a wave at sunset"

Nothing beyond a `+rocm` build of PyTorch is needed: attention is TORCH_SDPA, operators are Triton kernels.
"""

import sys

from wan21_1_3b_text_to_video_h100 import run

if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    print(run(sys.argv[1], sys.argv[2], attention="torch_sdpa"))
