"""Triton's interpreter where it differs from hardware. For the tests that launch kernels on a CPU."""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def round_fp8_as_hardware_does(patch) -> None:
    """The interpreter rounds float32 to FP8 half away from zero in some ties, hardware half to even."""
    convert = interpreter._convert_float
    formats = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}

    def rounded(values, source, target, mode):
        if source == tl.float32 and target in formats:
            wide = torch.from_numpy(np.ascontiguousarray(values).view(np.float32))
            return wide.to(formats[target]).view(torch.uint8).numpy().reshape(values.shape)
        return convert(values, source, target, mode)

    patch.setattr(interpreter, "_convert_float", rounded)


def round_bfloat16_as_hardware_does(patch) -> None:
    """The interpreter cuts float32 off to bfloat16 (error: one step), hardware rounds to nearest even (half a step)."""
    convert = interpreter._convert_float

    def rounded(values, source, target, mode):
        if source == tl.float32 and target == tl.bfloat16:
            bits = torch.from_numpy(np.ascontiguousarray(values).view(np.float32)).to(torch.bfloat16)
            return bits.view(torch.int16).numpy().view(np.uint16).reshape(values.shape)
        return convert(values, source, target, mode)

    patch.setattr(interpreter, "_convert_float", rounded)


def multiply_bfloat16_as_hardware_does(patch) -> None:
    """The interpreter holds bfloat16 in 16-bit integers and multiplies these; hardware the values."""
    create_dot = interpreter.InterpreterBuilder.create_dot

    def dot(self, a, b, *rest):
        if a.dtype == tl.bfloat16:
            a, b = (
                interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32) for x in (a, b)
            )
        return create_dot(self, a, b, *rest)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
