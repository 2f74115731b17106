"""x Wᵀ + bias with an FP8 weight: the table of what multiplies, and the rule that chooses. `quantized_linear` calls it.

A backend takes x and W in FP8 with a float32 scale a row each and multiplies them as they are. Without one, W is
brought to x's dtype a piece at a time and multiplied there: half the memory, at the speed of the dtype. Shape letters:
M rows of x, K in_features, N out_features.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

import telefuser.kernel.triton as kernels
from telefuser import kernel, platforms
from telefuser.core.config import QuantKernelBackend
from telefuser.ops.backend_table import Backend, BackendTable, Entry, Source
from telefuser.ops.base import WITHOUT_TRITON, CustomOpFunction, register_custom_op
from telefuser.ops.fp8_quantization import dequantize_rows, quantize_rows, row_chunks

TABLE = BackendTable("FP8 matrix product", QuantKernelBackend.NATIVE, "it is not part of this version")
# Elements of a weight that exist in a wide dtype at a time: 64 MiB in float32, and 1200 rows of Wan 14B's widest layer.
_CHUNK = 2**24
ORDER = (
    QuantKernelBackend.TF_KERNEL,
    QuantKernelBackend.VLLM,
    QuantKernelBackend.TORCH_SCALED_MM,
    QuantKernelBackend.TRITON,
)
_E4M3_OF = {torch.float8_e5m2: torch.float8_e4m3fn, torch.float8_e5m2fnuz: torch.float8_e4m3fnuz}


def rows_dtype(weight_dtype: torch.dtype) -> torch.dtype:
    """What x is quantised to for a weight of this FP8 dtype: e4m3 beside e5m2, for the tensor cores multiply any pair
    and it has a bit more."""
    return _E4M3_OF.get(weight_dtype, weight_dtype)


class Product(NamedTuple):
    """One product: x [M, K] and weight [N, K] in FP8, scales [M, 1] and [N, 1] float32, bias [N] in `dtype`, which is
    the result's, or None. All contiguous."""

    x: torch.Tensor
    x_scale: torch.Tensor
    weight: torch.Tensor
    weight_scale: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype


@dataclass(frozen=True)
class GemmBackend(Backend):
    """What an FP8 product takes.

    what: its name for people.  out_dtypes: dtypes of the result, the preferred one first.
    multiple_of: what in_features and out_features must be multiples of.
    takes_e5m2: whether a weight may be of the kind with more range and less precision.
    refuses: a last question about the device of the tensors; a sentence or None.
    """

    what: str = ""
    out_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    # Most kernels read 16 bytes at a time.
    multiple_of: int = 16
    takes_e5m2: bool = False
    refuses: Callable[[torch.device], str | None] | None = None

    def refuses_weight(self, weight: torch.Tensor) -> str | None:
        """Why it does not take a weight [N, K] of this dtype and these sizes; None when it does."""
        wanted = platforms.current_platform.fp8_dtype
        if weight.dtype is not wanted and not (self.takes_e5m2 and _E4M3_OF.get(weight.dtype) is wanted):
            return f"this machine multiplies {wanted}, and a weight is {weight.dtype}"
        rows, columns = weight.shape
        if rows % self.multiple_of or columns % self.multiple_of:
            return f"a weight has {rows} rows of {columns}, and both must be multiples of {self.multiple_of}"
        return None


def backend(impl: QuantKernelBackend, **declared) -> Callable:
    """Decorate an adapter `(entry, product) -> [M, N]` with its record, `GemmBackend(impl, **declared)`."""

    def register(run: Callable) -> Callable:
        TABLE.register(GemmBackend(impl=impl, run=run, **declared))
        return run

    return register


@backend(
    QuantKernelBackend.TF_KERNEL,
    what="tf_kernel.fp8_scaled_mm",
    sources=(Source("tf_kernel", "fp8_scaled_mm"),),
    generations=(9, 10),
)
def tf_kernel(entry: Entry, product: Product) -> torch.Tensor:
    x, x_scale, weight, weight_scale, bias, dtype = product
    return entry.call(x, weight.t(), x_scale, weight_scale, dtype, bias)


@backend(
    QuantKernelBackend.VLLM,
    what="vLLM's cutlass_scaled_mm",
    sources=(Source("vllm._custom_ops", "cutlass_scaled_mm", ("scale_a", "scale_b", "out_dtype", "bias")),),
    generations=((8, 9), 9, 10, 12),
)
def vllm(entry: Entry, product: Product) -> torch.Tensor:
    x, x_scale, weight, weight_scale, bias, dtype = product
    return entry.call(x, weight.t(), scale_a=x_scale, scale_b=weight_scale, out_dtype=dtype, bias=bias)


def _scaled_mm_refuses(device: torch.device) -> str | None:
    reason = platforms.current_platform.fp8_unavailable_reason(device)
    arch = platforms.current_platform.cuda_arch(device)
    # 2.7.9 stands below every build of 2.8, the alphas that NVIDIA ships included.
    if reason is None and arch is not None and arch[0] != 9 and torch.__version__ < (2, 7, 9):
        return (
            f"PyTorch {torch.__version__} scales rows on compute capability 9.x only; 2.8 does on {arch[0]}.{arch[1]}"
        )
    return reason


@backend(
    QuantKernelBackend.TORCH_SCALED_MM,
    what="torch._scaled_mm with a scale a row",
    # With scales a row the kernels of PyTorch write bfloat16 only.
    out_dtypes=(torch.bfloat16,),
    refuses=_scaled_mm_refuses,
)
def torch_scaled_mm(entry: Entry, product: Product) -> torch.Tensor:
    x, x_scale, weight, weight_scale, bias, dtype = product
    arch = platforms.current_platform.cuda_arch(x.device)
    # Hopper's tensor cores add up in 14 bits or in float32 at half the speed; FP8 itself is 50 times coarser.
    fast = arch is not None and arch[0] == 9
    return torch._scaled_mm(
        x, weight.t(), scale_a=x_scale, scale_b=weight_scale.t(), bias=bias, out_dtype=dtype, use_fast_accum=fast
    )


def _runs_triton() -> str | None:
    platform = platforms.current_platform
    if not set(platform.op_keys) - WITHOUT_TRITON:
        return f"Triton kernels do not run on {platform.device_name}"
    return None if kernel.HAS_TRITON else "Triton cannot be imported"


@backend(
    QuantKernelBackend.TRITON,
    what="a Triton kernel, for any sizes and for e5m2",
    out_dtypes=(torch.bfloat16, torch.float16, torch.float32),
    multiple_of=1,
    takes_e5m2=True,
    requires=_runs_triton,
    refuses=lambda device: platforms.current_platform.fp8_unavailable_reason(device),
)
def triton(entry: Entry, product: Product) -> torch.Tensor:
    return kernels.scaled_mm_fp8(*product)


@backend(
    QuantKernelBackend.NATIVE,
    what="stored in FP8, multiplied in the input's dtype",
    out_dtypes=(torch.bfloat16, torch.float16, torch.float32, torch.float64),
)
def native(entry: Entry, product: Product) -> torch.Tensor:
    x, x_scale, weight, weight_scale, bias, dtype = product
    return native_linear(dequantize_rows(x, x_scale, dtype), weight, weight_scale, bias)


def native_linear(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [..., K] times the dequantised weight [N, K], plus bias, in x's dtype; what every backend must come close to.

    At most 2^24 elements of the weight exist in x's dtype at a time. Differentiable in x and bias.
    """
    weight, weight_scale = weight.detach(), weight_scale.detach()
    bias = None if bias is None else bias.to(x.dtype)
    parts = [
        F.linear(
            x,
            dequantize_rows(weight[rows], weight_scale[rows], x.dtype),
            None if bias is None else bias[rows],
        )
        for rows in row_chunks(weight, _CHUNK)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _first_usable(
    device: torch.device,
    weight: torch.Tensor | None = None,
    without: frozenset[QuantKernelBackend] = frozenset(),
) -> tuple[GemmBackend, Entry, str]:
    """The first of `ORDER` that multiplies on `device`, and takes `weight`, else NATIVE; why those before it do not."""
    reasons: dict[str, list[str]] = {}
    for impl in ORDER:
        record, found = TABLE.record(impl), TABLE.probe(impl, device)
        reason = found if isinstance(found, str) else record.refuses and record.refuses(device)
        if impl in without:
            reason = "it failed when called"
        if not reason and weight is not None:
            reason = record.refuses_weight(weight)
        if not reason:
            return record, found, _joined(reasons)
        reasons.setdefault(reason, []).append(impl.name)
    return TABLE.record(TABLE.fallback), Entry(), _joined(reasons)


def _joined(reasons: dict[str, list[str]]) -> str:
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())


def choose(
    device: torch.device, weight: torch.Tensor, without: frozenset[QuantKernelBackend] = frozenset()
) -> tuple[GemmBackend, Entry]:
    """The first of `ORDER` but `without` that is here and takes `weight` [N, K] for an x on `device`; else NATIVE.

    NATIVE on an accelerator is said once a process for each kind of reason; on a CPU it is what everyone expects.
    """
    platform = platforms.current_platform
    if device.type == platform.device_type:
        record, found, reasons = _first_usable(device, weight, without)
        if record.impl is not TABLE.fallback:
            return record, found
        if not isinstance(platform, platforms.CpuPlatform):
            kind = "shape" if weight.dtype is platform.fp8_dtype else "dtype"
            kind = "device" if _first_usable(device)[0].impl is TABLE.fallback else kind
            TABLE.warn_once(
                (TABLE.fallback, kind),
                f"{TABLE.title}: weights stay in FP8 but are multiplied in the dtype of the input: {reasons}",
            )
    return TABLE.record(TABLE.fallback), Entry()


def describe_choice(device: torch.device | str | None = None) -> str:
    """One line: what multiplies FP8 weights on `device` (default: the current one), and why nothing before it does."""
    device = platforms.current_platform.default_device() if device is None else torch.device(device)
    record, _, reasons = _first_usable(device)
    line = f"{record.impl.name}: {record.what}"
    line = f"{line} ({reasons})" if reasons else line
    odd = torch.empty(1, 1, dtype=platforms.current_platform.fp8_dtype, device="meta")
    other = _first_usable(device, odd)[0]
    if other.impl is record.impl:
        return line
    return f"{line}. {other.impl.name} where a size is no multiple of 16: {other.what}"


def _multiply(choice, x, x_scale, weight, weight_scale, bias, dtype):
    if x.numel() == 0:
        return native_linear(x.to(dtype), weight, weight_scale, bias)
    rows, scales = x.reshape(-1, x.shape[-1]).contiguous(), x_scale.reshape(-1, 1).contiguous()
    out = TABLE.run(
        lambda without: choose(x.device, weight, without),
        lambda record, entry: _run(record, entry, rows, scales, weight, weight_scale, bias, dtype),
        # The bias is there or not: cuBLAS has other kernels for it.
        lambda: f"{len(rows)} rows of {rows.shape[1]} to {len(weight)}{'' if bias is None else ' with bias'}",
        first=choice,
    )
    return out.view(*x.shape[:-1], weight.shape[0])


def _run(record, entry, x, x_scale, weight, weight_scale, bias, dtype):
    """A backend that does not write `dtype` writes its own; the bias is then added in `dtype`, so that it is exact."""
    inner = dtype if dtype in record.out_dtypes else record.out_dtypes[0]
    bias = None if bias is None else bias.to(dtype).contiguous()
    product = Product(x, x_scale, weight, weight_scale, bias if inner is dtype else None, inner)
    # Some packages launch on the current GPU, not on the tensors'.
    with platforms.platform_of(x.device).device_ctx(x.device):
        out = record.run(entry, product)
    out = out.to(dtype)
    return out if bias is None or inner is dtype else out + bias


def _fake(x, x_scale, weight, weight_scale, bias, dtype):
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype)


def _gemm_eager(x, x_scale, weight, weight_scale, bias, dtype):
    choice = choose(x.device, weight)
    if choice[0].impl is QuantKernelBackend.NATIVE:
        return native_linear(dequantize_rows(x, x_scale, dtype), weight, weight_scale, bias)
    return _multiply(choice, x, x_scale, weight, weight_scale, bias, dtype)


@register_custom_op("fp8_gemm", fake_impl=_fake)
def _fp8_gemm_opaque(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    return _gemm_eager(x, x_scale, weight, weight_scale, bias, dtype)


def _gemm_traced(x, x_scale, weight, weight_scale, bias, dtype):
    if not multiplies_fp8(x.device, weight.dtype, *weight.shape):
        return native_linear(dequantize_rows(x, x_scale, dtype), weight, weight_scale, bias)
    return _fp8_gemm_opaque(x, x_scale, weight, weight_scale, bias, dtype)


def _needs_grad(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _eager(x, weight, weight_scale, bias):
    fits = (
        type(x) in (torch.Tensor, torch.nn.Parameter)
        and x.numel() > 0
        and x.dtype is not torch.float64
        # On different devices PyTorch's own product says so; a kernel would see a pointer that it cannot read.
        and all(t is None or t.device == x.device for t in (weight, weight_scale, bias))
        and not _needs_grad(x, bias)
    )
    choice = choose(x.device, weight) if fits else None
    if choice is None or choice[0].impl is QuantKernelBackend.NATIVE:
        return native_linear(x, weight, weight_scale, bias)
    quantized, scale = quantize_rows(x, rows_dtype(weight.dtype))
    return _multiply(choice, quantized, scale, weight, weight_scale, bias, x.dtype)


def _traced(x, weight, weight_scale, bias):
    """The quantiser in plain PyTorch, for the compiler to fuse with what made x, and the product as one opaque node."""
    if x.dtype is torch.float64 or _needs_grad(x, bias) or not multiplies_fp8(x.device, weight.dtype, *weight.shape):
        return native_linear(x, weight, weight_scale, bias)
    quantized, scale = quantize_rows(x, rows_dtype(weight.dtype))
    return _fp8_gemm_opaque(quantized, scale, weight, weight_scale, bias, x.dtype)


def multiplies_fp8(device: torch.device, dtype: torch.dtype, rows: int, columns: int) -> bool:
    """Whether a weight [rows, columns] of this FP8 dtype is multiplied as it is on `device`, and not natively."""
    weight = torch.empty(rows, columns, dtype=dtype, device="meta")
    return choose(device, weight)[0].impl is not QuantKernelBackend.NATIVE


# The compiler asks once and does not look inside, where packages are searched and devices asked. The attribute is what
# torch.compiler.assume_constant_result sets; calling that here would import the compiler, 2 to 5 s.
multiplies_fp8._dynamo_marked_constant = True

# Called with keywords only: the shared rule would ask positional tensors for gradients, and the forms do it themselves.
_fp8_gemm = CustomOpFunction("fp8_gemm", _gemm_eager, compiled_impl=_gemm_traced)
_fp8_linear = CustomOpFunction("fp8_linear", _eager, compiled_impl=_traced)


def fp8_gemm(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """(x * x_scale) (weight * weight_scale)ᵀ + bias in `dtype`, for operators that hand their result on in FP8.

    x [..., K] and weight [N, K] in FP8, of one kind or x in e4m3 and weight in e5m2; x_scale [..., 1] and weight_scale
    [N, 1] float32, as `quantize_rows` gives them; bias [N], any float dtype, or None. Returns [..., N].
    """
    return _fp8_gemm(x=x, x_scale=x_scale, weight=weight, weight_scale=weight_scale, bias=bias, dtype=dtype)


def fp8_linear(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x (weight * weight_scale)ᵀ + bias: x [..., K] float, weight [N, K] FP8, weight_scale [N, 1] float32, bias [N].

    Returns [..., N] in x's dtype. Where a backend multiplies FP8, x is quantised with one scale a row; float64, empty
    and tensor-subclass inputs, and results that need a gradient, take the native form instead.
    """
    return _fp8_linear(x=x, weight=weight, weight_scale=weight_scale, bias=bias)
