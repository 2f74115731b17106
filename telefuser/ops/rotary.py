"""Rotary position embedding for queries and keys, alone and behind their norm. Su et al., "RoFormer", 2021."""

import torch

import telefuser.kernel.triton as kernels
from telefuser.kernel.triton.launch import MAX_IN_REGISTERS
from telefuser.ops.base import CustomOpFunction, register_custom_op
from telefuser.ops.normalization import rms_norm_unrounded

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def _rotary_native(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    # Real arithmetic only: some accelerators cannot index complex tensors. float64 tables are used as they are for
    # float32 input, because rounding them first costs a factor ten of accuracy; for half precision that would not be
    # seen.
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else torch.promote_types(x.dtype, cos.dtype)
    first, second = x.to(wide).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = (t.to(wide)[:, None] if t.dim() == 2 else t.to(wide) for t in (cos, sin))
    return torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1).flatten(-2).to(x.dtype)


def _rotary_cuda(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return kernels.apply_rotary_embedding(x, cos, sin, interleaved=True)


def _fake(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


# Under torch.compile the rotation stays one node and keeps its kernel; the attention behind it is opaque as well.
@register_custom_op("apply_rotary_emb", fake_impl=_fake)
def _rotary_opaque(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return _rotary.eager(x, cos, sin).contiguous()


def _save_tables(ctx, inputs, output):
    _, cos, sin = inputs
    ctx.save_for_backward(cos, sin)


def _rotate_back(ctx, grad):
    cos, sin = ctx.saved_tensors
    return _rotary_opaque(grad, cos, -sin), None, None


_rotary_opaque.register_autograd(_rotate_back, setup_context=_save_tables)

_rotary = CustomOpFunction("apply_rotary_emb", _rotary_native, cuda_impl=_rotary_cuda, compiled_impl=_rotary_opaque)


def apply_rotary_emb(x: torch.Tensor, freqs: tuple[torch.Tensor, torch.Tensor], sequence_dim: int = 1) -> torch.Tensor:
    """Rotate neighbouring pairs (2i, 2i+1) of the last dimension: (a, b) -> (a cos - b sin, a sin + b cos).

    x: [B, S, H, D] floating point, any strides; with sequence_dim=2 [B, H, S, D], with 0 [S, B, H, D].
    freqs: (cos, sin), one row a token: [S, D/2], [S, 1, D/2], [S, 1, 1, D/2] or [B, S, 1, D/2]; or full width, D
    instead of D/2, where entries 2i and 2i+1 are equal and the even ones are read. float32 or float64.
    Returns x's shape and dtype; computed in float32 and rounded once, float64 input (and float32 with float64 tables,
    on the native path) in float64. Raises ValueError where a shape does not fit (the tables must hold exactly the S
    tokens of x) and where freqs is no pair of tensors, TypeError for a sequence_dim that is not an int.
    """
    if x.dim() != 4 or not x.is_floating_point():
        raise ValueError(
            f"apply_rotary_emb rotates a floating-point [B, S, H, D] tensor, got {x.dtype} of shape {tuple(x.shape)}"
        )
    if x.shape[-1] % 2:
        raise ValueError(f"apply_rotary_emb rotates pairs, so the head dimension must be even, not {x.shape[-1]}")
    if not isinstance(sequence_dim, int):
        raise TypeError(f"sequence_dim must be an int, not {sequence_dim!r}")
    axis = sequence_dim + 4 if sequence_dim < 0 else sequence_dim
    if axis not in (0, 1, 2):
        raise ValueError(f"sequence_dim is {sequence_dim}; the tokens lie in dimension 0, 1 or 2 of x")
    cos, sin = _pair(freqs)
    return _rotary(x, _beside("cos", cos, x.shape, axis), _beside("sin", sin, x.shape, axis))


def _pair(freqs: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(freqs, (tuple, list)) and len(freqs) == 2:
        cos, sin = freqs
        if isinstance(cos, torch.Tensor) and isinstance(sin, torch.Tensor):
            return cos, sin
    kinds = [type(t).__name__ for t in freqs] if isinstance(freqs, (tuple, list)) else type(freqs).__name__
    raise ValueError(
        f"freqs must be the pair (cos, sin) of tensors, not {kinds}; split a complex table into .real, .imag"
    )


def _beside(name: str, table: torch.Tensor, x_shape: tuple[int, ...], axis: int) -> torch.Tensor:
    """`table` itself where it is [S, D/2] beside [B, S, H, D], the models' form, which spares the host two views; else
    a view with D/2 columns that broadcasts against x's leading dimensions.
    """
    if axis == 1 and table.dtype in _FLOATS and table.shape == (x_shape[1], x_shape[3] // 2):
        return table
    tokens, width = x_shape[axis], x_shape[-1]
    batch = x_shape[1 if axis == 0 else 0]
    shape = tuple(table.shape)
    if not table.is_floating_point():
        raise ValueError(f"{name} must hold real floating-point numbers, not {table.dtype}")
    if table.dim() == 2:
        table = table[None, :, None]
    elif table.dim() == 3:
        table = table[None]
    elif table.dim() == 4 and table.shape[1] == 1 and not (tokens == 1 and table.shape[0] == batch):
        table = table.transpose(0, 1)
    fits = (
        table.dim() == 4
        and table.shape[0] in (1, batch)
        and table.shape[2] == 1
        and table.shape[3] in (width, width // 2)
    )
    if not fits:
        raise ValueError(
            f"{name} of shape {shape} does not fit x of shape {tuple(x_shape)} with {tokens} tokens: expected "
            f"[S, D/2], [S, 1, D/2], [S, 1, 1, D/2] or [B, S, 1, D/2], or D instead of D/2"
        )
    if table.shape[1] != tokens:
        raise ValueError(
            f"{name} holds {table.shape[1]} positions and x has {tokens} tokens; pass one row for each token of x"
        )
    if table.shape[3] == width:
        table = table[..., ::2]
    return table.movedim(1, axis)


def _norm_rotary_native(q, k, q_weight, k_weight, cos, sin, num_heads, eps):
    return tuple(
        _rotary_native(rms_norm_unrounded(x, weight, None, eps).unflatten(-1, (num_heads, -1)), cos, sin).to(x.dtype)
        for x, weight in ((q, q_weight), (k, k_weight))
    )


def _norm_rotary_traced(q, k, q_weight, k_weight, cos, sin, num_heads, eps):
    # The norm is rounded here, so that the opaque rotation behind it reads half of what float32 would be.
    return tuple(
        _rotary(rms_norm_unrounded(x, weight, None, eps).to(x.dtype).unflatten(-1, (num_heads, -1)), cos, sin)
        for x, weight in ((q, q_weight), (k, k_weight))
    )


def _norm_rotary_cuda(q, k, q_weight, k_weight, cos, sin, num_heads, eps):
    # The kernel holds a row in registers; published models are 5120 wide at most.
    if q.shape[-1] > MAX_IN_REGISTERS or k.dtype != q.dtype:
        return _norm_rotary_native(q, k, q_weight, k_weight, cos, sin, num_heads, eps)
    return kernels.rms_norm_rotary(q, k, q_weight, k_weight, cos, sin, num_heads, eps)


_norm_rotary = CustomOpFunction(
    "rms_norm_rotary", _norm_rotary_native, cuda_impl=_norm_rotary_cuda, traced_impl=_norm_rotary_traced
)


def rms_norm_rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    freqs: tuple[torch.Tensor, torch.Tensor],
    num_heads: int,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`RMSNorm` over the whole width of q and of k, then `apply_rotary_emb` on each head: one pass over memory.

    q, k: [B, S, C] floating point, any strides (slices of one projection as they are).  q_weight, k_weight: [C] or
    None.  freqs: as for `apply_rotary_emb` on [B, S, num_heads, C / num_heads].
    Returns contiguous [B, S, num_heads, C / num_heads] tensors of the inputs' dtype, computed in float32 (float64 for
    float64) and rounded once; under torch.compile twice, because there the rotation is an operator of its own.
    ValueError where shapes do not fit or C is not num_heads times an even width.
    """
    if q.dim() != 3 or k.shape != q.shape:
        raise ValueError(f"rms_norm_rotary takes q and k [B, S, C] alike, got {tuple(q.shape)} and {tuple(k.shape)}")
    width = q.shape[-1]
    if num_heads < 1 or width == 0 or width % (2 * num_heads):
        raise ValueError(f"a width of {width} is not {num_heads} heads of an even width")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None and weight.shape != (width,):
            raise ValueError(f"{name} has shape {tuple(weight.shape)}, q and k are {width} wide")
    cos, sin = _pair(freqs)
    shape = (*q.shape[:2], num_heads, width // num_heads)
    cos, sin = _beside("cos", cos, shape, 1), _beside("sin", sin, shape, 1)
    return _norm_rotary(q, k, q_weight, k_weight, cos, sin, num_heads, eps)
