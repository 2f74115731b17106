"""Triton's interpreter where it differs from hardware. For the tests that launch kernels on a CPU."""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def round_bfloat16_as_hardware_does(patch) -> None:
    """The interpreter cuts float32 off to bfloat16 (error: one step), hardware rounds to nearest even (half a step)."""
    convert = interpreter._convert_float

    def rounded(values, source, target, mode):
        if source == tl.float32 and target == tl.bfloat16:
            bits = torch.from_numpy(np.ascontiguousarray(values).view(np.float32)).to(torch.bfloat16)
            return bits.view(torch.int16).numpy().view(np.uint16).reshape(values.shape)
        return convert(values, source, target, mode)

    patch.setattr(interpreter, "_convert_float", rounded)
