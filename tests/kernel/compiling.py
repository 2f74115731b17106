"""Compiles a kernel for a GPU that is not here, in a fresh process: importing Triton chooses its interpreter or not."""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# Before, constants were named by their parameter and not by its place, and alignment in another form.
_BY_PLACE = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 3)


def unable(backend, tma=False):
    """Why this Triton cannot compile such a kernel here, or None. Before 3.3 it took the linker from ROCm."""
    if _BY_PLACE or (backend == "cuda" and not tma):
        return None
    return f"Triton {triton.__version__} has no {'tensor descriptors' if tma else 'linker for AMD'} of its own"


def compile_kernel(kernel, target, types, constants, aligned=(), **options):
    """The compiled `kernel`; its `metadata.shared` says how many bytes of shared memory a program takes.

    target: (backend, architecture, lanes of a warp).  types: of parameters, "i32" where none is given; constants:
    values.  aligned: parameters that are multiples of 16, as Triton's launcher finds out for itself.
    """
    backend, arch, lanes = target
    signature = {name: types.get(name, "i32") for name in kernel.arg_names} | dict.fromkeys(constants, "constexpr")
    if _BY_PLACE:
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        attrs = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
        source = ASTSource(kernel, signature, places, attrs)
    else:
        source = ASTSource(kernel, signature, dict(constants))
    return triton.compile(
        source, target=GPUTarget(backend, int(arch) if arch.isdigit() else arch, lanes), options=options
    )
