"""The kernels compile to machine code for NVIDIA and AMD GPUs, which needs no GPU. The interpreter is laxer."""

import sys

import pytest

from tests.platforms.simulate import in_fresh_process

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from telefuser.kernel.triton import activation, modulate, normalization, rotary

backend, arch = TARGET
target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, 32)

def build(kernel, types, constants):
    # Sizes and strides are 32-bit; the first stride takes 64 where a tensor is large enough.
    named = {"eps": "fp32", "constant": "fp32", "s0": "i64", "x0": "i64", **types}
    named |= dict.fromkeys(constants, "constexpr")
    signature = {name: named.get(name, "i32") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    triton.compile(ASTSource(kernel, signature, places), target=target, options={"num_warps": 4})
    print(kernel.__name__, flush=True)

for norm in (normalization._rms_norm_kernel, normalization._layer_norm_kernel):
    build(norm, {"x": "*bf16", "weight": "*fp32", "bias": "*bf16", "out": "*bf16"}, {"BLOCK": 2048, "s3": 1})
    # A width or stride of 1 and an absent weight reach the kernel as constants.
    build(norm, {"x": "*fp32", "out": "*fp32"}, {"BLOCK": 1, "s3": 1, "width": 1, "weight": None, "bias": None})
mixed = {"x": "*fp16", "scale": "*fp32", "shift": "*fp64", "out": "*fp16"}
build(modulate._fused_scale_shift_kernel, mixed, {"BLOCK": 2048})
for name in activation.ACTIVATIONS:
    build(activation._activate_kernel, {"x": "*bf16", "out": "*bf16"}, {"BLOCK": 1024, "ACTIVATION": name})
gated = {"gate": "*bf16", "hidden": "*bf16", "out": "*bf16"}
build(activation._activate_and_mul_kernel, gated, {"BLOCK": 1024, "ACTIVATION": "gelu"})
turned = {"x": "*bf16", "cos": "*fp64", "sin": "*fp64", "out": "*bf16"}
for interleaved, half in ((True, {}), (False, {"half": 1})):
    tile = {"INTERLEAVED": interleaved, "ROWS": 16, "BLOCK": 64, **half}
    build(rotary._apply_rotary_embedding_kernel, turned, tile)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compilers come with its Linux wheels")
@pytest.mark.parametrize("target", [("cuda", "90"), ("hip", "gfx1201")], ids=["sm90", "gfx1201"])
def test_every_kernel_compiles(target, tmp_path):
    code = COMPILE.replace("TARGET", repr(target))
    built = in_fresh_process(code, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path)).split()
    assert len(built) == 12
    assert {name for name in built if name.endswith("_kernel")} == set(built)
