"""Numbers to FP8 with one scale a row, and back. `fp8_gemm` quantises activations with it, `quantized_linear` weights.

For a row x and a format whose largest value is M (448 for e4m3fn, 240 for e4m3fnuz, 57344 for e5m2 and e5m2fnuz):

    scale = max(max|x| * (1 / M), 2^-126)    q = round_to_fp8(x * (1 / scale))    x ≈ q * scale

all in float32. Rows are tokens of an activation and output channels of a weight, so that one outlier takes no digits
from the others. The floor under the scale keeps 1 / scale finite: a row of zeros gives zeros, never NaN. The product
cannot pass M by more than float32's rounding, so the cast, which saturates in some versions of PyTorch only, never
overflows. A row that holds NaN or an infinity comes back as NaN.
"""

from collections.abc import Iterator

import torch

import telefuser.kernel.triton as kernels
from telefuser import platforms
from telefuser.ops.base import CustomOpFunction

# Each format beside the one that AMD's CDNA3 (MI300) computes in its place: no negative zero, half the range.
FNUZ_OF = {torch.float8_e4m3fn: torch.float8_e4m3fnuz, torch.float8_e5m2: torch.float8_e5m2fnuz}
FP8_DTYPES = (*FNUZ_OF, *FNUZ_OF.values())

_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
# Elements of a weight quantised at a time. The float32 temporaries, 9 MiB, and the FP8 result stay below the layer's
# own bfloat16 weight for every block of Wan, so converting a model needs no more than one more layer.
_CHUNK = 2**20


def quantize_rows_native(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    if x.shape[-1] == 0:
        return x.to(dtype), x.new_full((*x.shape[:-1], 1), _SMALLEST_SCALE, dtype=torch.float32)
    largest = x.abs().amax(dim=-1, keepdim=True).float()
    # Not `/ M`: PyTorch divides by a number exactly on a CPU and by its reciprocal on a GPU, one digit apart.
    scale = (largest * (1 / torch.finfo(dtype).max)).clamp_min(_SMALLEST_SCALE)
    return (x.float() * scale.reciprocal()).to(dtype), scale


def kernels_quantize(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether kernels on `device` can give this FP8 dtype: Triton does not compile the e4m3 type below compute
    capability 8.9, nor the variant of the other vendor."""
    platform = platforms.current_platform
    return dtype is platform.fp8_dtype and platform.fp8_unavailable_reason(device) is None


def _quantize_cuda(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    if not kernels_quantize(dtype, x.device):
        return quantize_rows_native(x, dtype)
    return kernels.per_token_quant_fp8(x, dtype)


_quantize = CustomOpFunction("quantize_rows", quantize_rows_native, cuda_impl=_quantize_cuda)


def quantize_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K], floating point, any strides -> q [..., K] of the FP8 `dtype` and scale [..., 1] float32."""
    return _quantize(x, dtype)


def quantize_weight(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] -> q [N, K] of the FP8 `dtype` and scale [N, 1] float32, a piece at a time."""
    weight = weight.detach()
    quantized = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    scale = torch.empty(weight.shape[0], 1, dtype=torch.float32, device=weight.device)
    for rows in row_chunks(weight, _CHUNK):
        quantized[rows], scale[rows] = quantize_rows_native(weight[rows], dtype)
    return quantized, scale


def dequantize_rows(quantized: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """q [..., K] and scale [..., 1] -> q * scale in `dtype`, multiplied in float32 and rounded once."""
    return (quantized.float() * scale).to(dtype)


def row_chunks(weight: torch.Tensor, elements: int) -> Iterator[slice]:
    """Slices of the rows of a [N, K] matrix, each of so many elements at most; an empty one gives one empty slice."""
    rows, width = weight.shape
    step = max(elements // max(width, 1), 1)
    for start in range(0, max(rows, 1), step):
        yield slice(start, min(start + step, rows))


def hardware_dtype(dtype: torch.dtype) -> torch.dtype:
    """The variant of an FP8 `dtype` that this machine computes: the fnuz one on CDNA3, `dtype` itself elsewhere."""
    if platforms.current_platform.fp8_dtype is torch.float8_e4m3fnuz:
        return FNUZ_OF.get(dtype, dtype)
    return dtype
