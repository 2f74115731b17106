"""The kernels compile to machine code for NVIDIA and AMD GPUs, which needs no GPU. The interpreter is laxer."""

import sys

import pytest

from tests.kernel.compiling import unable
from tests.platforms.simulate import in_fresh_process

COMPILE = """
from telefuser.kernel.triton import activation, modulate, norm_rotary, normalization, quantize, rotary
from tests.kernel.compiling import compile_kernel

# The FP8 type that each has
FP8 = "*fp8e4nv"

def build(kernel, types, constants):
    # Sizes and strides are 32-bit; the first stride takes 64 where a tensor is large enough.
    named = {"eps": "fp32", "constant": "fp32", "s0": "i64", "x0": "i64", **types}
    compile_kernel(kernel, (*TARGET, 32), named, constants, num_warps=4)
    print(kernel.__name__, flush=True)

PARTS = ("y", "gate", "weight", "bias", "scale", "shift", "total", "out", "scales")
row = {"SHARED": True, "HEAD": 1024, "TAIL": 512, "WHOLE": True, "TILE": 2, "AHEAD": True}
whole = {"x": "*fp32", "y": "*bf16", "gate": "*fp32", "weight": "*fp32", "bias": "*bf16", "scale": "*fp32"}
whole |= {"shift": "*fp32", "total": "*fp32", "out": "*bf16", "unit": "fp32", "smallest": "fp32"}
to_fp8 = {"out": FP8, "scales": "*fp32"}
plain = {"scales": None}
for types, constants in (
    (whole, {**row, **plain}),
    (whole, {**row, **plain, "SHARED": False, "WHOLE": False, "AHEAD": False}),
    ({**whole, **to_fp8}, row),
):
    build(normalization._norm_kernel, types, {**constants, "RMS": False})
# An absent tensor and a width or stride of 1 reach the kernel as constants.
lone = {"x": "*bf16", "out": "*bf16", "unit": "fp32", "smallest": "fp32"}
absent = dict.fromkeys((*PARTS[:-2], "scales"))
build(normalization._norm_kernel, lone, {**row, **absent, "RMS": True})
build(normalization._norm_kernel, lone, {**row, **absent, "RMS": False, "HEAD": 1, "TAIL": 0, "width": 1})
added = {**lone, **{name: whole[name] for name in ("x", "y", "gate", "total")}}
added.pop("out")
without = dict.fromkeys(("weight", "bias", "scale", "shift", "out", "scales"))
build(normalization._norm_kernel, added, {**row, **without, "RMS": False})
for rms in (True, False):
    build(normalization._norm_wide_kernel, whole, {"BLOCK": 4096, "RMS": rms, **plain})
build(normalization._norm_wide_kernel, {**whole, **to_fp8}, {"BLOCK": 4096, "RMS": False})
qk = {"q": "*bf16", "k": "*bf16", "q_weight": "*fp32", "k_weight": "*bf16", "cos": "*fp32", "sin": "*fp64"}
for sizes in (
    {"HEAD": 1024, "TAIL": 512, "WHOLE": True},
    {"HEAD": 4096, "TAIL": 64, "WHOLE": False},
):
    types = {**qk, "q_out": "*bf16", "k_out": "*bf16"}
    build(norm_rotary._norm_rotary_kernel, types, {"HALF": 64, "NORM": True, "AHEAD": sizes["WHOLE"], **sizes})
alone = {"q": "*bf16", "cos": "*fp32", "sin": "*fp32", "q_out": "*bf16"}
none = dict.fromkeys(("k", "q_weight", "k_weight", "k_out"))
sizes = {"HEAD": 1024, "TAIL": 512, "WHOLE": True}
build(norm_rotary._norm_rotary_kernel, alone, {"HALF": 64, "NORM": False, "AHEAD": True, **sizes, **none})
mixed = {"x": "*fp16", "scale": "*fp32", "shift": "*fp64", "out": "*fp16"}
build(modulate._fused_scale_shift_kernel, mixed, {"BLOCK": 2048})
for name in activation.ACTIVATIONS:
    build(activation._activate_kernel, {"x": "*bf16", "out": "*bf16"}, {"BLOCK": 1024, "ACTIVATION": name})
flat = {"x": "*bf16", "out": "*bf16", "elements": "i64"}
build(activation._activate_flat_kernel, flat, {"BLOCK": 2048, "ACTIVATION": "gelu_tanh"})
gated = {"gate": "*bf16", "hidden": "*bf16", "out": "*bf16"}
build(activation._activate_and_mul_kernel, gated, {"BLOCK": 1024, "ACTIVATION": "gelu"})
turned = {"x": "*bf16", "cos": "*fp64", "sin": "*fp64", "out": "*bf16"}
for interleaved, half in ((True, {}), (False, {"half": 1})):
    tile = {"INTERLEAVED": interleaved, "SHARED": interleaved, "ROWS": 16, "BLOCK": 64, **half}
    build(rotary._apply_rotary_embedding_kernel, turned, tile)
rows = {"x": "*bf16", "y": "*bf16", "unit": "fp32", "smallest": "fp32", **to_fp8}
for activation_name in (None, "silu"):
    constants = {"ACTIVATION": activation_name, "HEAD": 1024, "TAIL": 512, "WHOLE": False, "TILE": 2, "AHEAD": True}
    build(quantize._quantize_rows_kernel, rows, constants)
build(quantize._quantize_rows_kernel, rows, {**constants, "y": None})
build(quantize._quantize_wide_kernel, rows, {"ACTIVATION": "gelu_tanh", "BLOCK": 8192, "y": None})
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compilers come with its Linux wheels")
@pytest.mark.parametrize("target", [("cuda", "90"), ("hip", "gfx1201")], ids=["sm90", "gfx1201"])
def test_every_kernel_compiles(target, tmp_path):
    if (reason := unable(target[0])) is not None:
        pytest.skip(reason)
    code = COMPILE.replace("TARGET", repr(target))
    built = in_fresh_process(code, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path)).split()
    assert len(built) == 25
    assert {name for name in built if name.endswith("_kernel")} == set(built)
