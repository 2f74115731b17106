"""The one scale-free error measure and the one table of limits that tests compare numbers with."""

import torch

# Relative L2 limits by what is compared, then by the dtype of the result.
# fp32 sits a decade above its rounding step (6e-8) because a row sum reorders; fp16 and bf16 sit at one rounding of the
# result (half a step is 2^-11 and 2^-8 at worst, so 4.9e-4 and 3.9e-3; the L2 mean over many elements is 0.4 of that).
TOLERANCES = {
    # one operator, native against its float64 formula or kernel against native
    "op": {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3},
    # an operator with a matrix product inside (FeedForward, AdaLayerNorm, GEGLU): intermediate results are rounded too
    "matmul": {torch.float64: 1e-11, torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2},
    # exact attention backends against float64 attention
    "attention": {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2},
    # attention that quantises its scores or its values
    "attention_int8": {torch.float16: 5e-2, torch.bfloat16: 5e-2},
    # a linear layer with an e4m3 weight against the unquantised one, Gaussian input: 0.026 from the weight's rounding
    # alone, 0.037 with the input's; e5m2 has one bit less
    "fp8_linear": dict.fromkeys((torch.float64, torch.float32, torch.float16, torch.bfloat16), 0.04),
    "fp8_linear_e5m2": dict.fromkeys((torch.float64, torch.float32, torch.float16, torch.bfloat16), 0.1),
    # a whole model against stored reference outputs
    "model": {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2},
}


def tolerance(kind: str, dtype: torch.dtype) -> float:
    """The limit for `rel_error` of a `kind` of comparison whose result has `dtype`."""
    return TOLERANCES[kind][dtype]


def rel_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a - b| / |b| in float64 (L2 over all elements); `b` is the reference.

    0.0 for equal or empty tensors, inf where only one of the two is finite or where `b` is all zero and `a` is not.
    Unlike an absolute limit it means the same for outputs of any scale. Shapes must match: broadcasting hides mistakes.
    """
    if a.shape != b.shape:
        raise AssertionError(f"shapes differ: {tuple(a.shape)} against {tuple(b.shape)}")
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = (t.detach().to(device="cpu").to(dtype=wide) for t in (a, b))
    # Infinities of the same sign in the same place (a log-sum-exp over nothing) agree.
    difference = torch.where(a == b, torch.zeros_like(a), a - b)
    error = torch.linalg.vector_norm(difference).item()
    if error == 0.0:
        return 0.0
    scale = torch.linalg.vector_norm(torch.where(torch.isfinite(b), b, torch.zeros_like(b))).item()
    ratio = error / scale if scale > 0.0 else float("inf")
    return ratio if ratio == ratio else float("inf")


def assert_close(a: torch.Tensor, b: torch.Tensor, kind: str = "op", dtype: torch.dtype | None = None) -> None:
    """Fail unless `rel_error(a, b)` is within the table's limit for `kind` and `dtype` (that of `a` when not given)."""
    limit = tolerance(kind, dtype or a.dtype)
    error = rel_error(a, b)
    assert error <= limit, f"relative error {error:.3e} is above {limit:.1e} ({kind}, {dtype or a.dtype})"
