"""`attention`: one call for every backend. It checks the inputs, settles layout, dtype and mask, and runs the choice.

Shape letters: B batch, S tokens, N heads, D head dim. BSND is [B, S, N, D], BNSD is [B, N, S, D].
"""

import math

import torch

from telefuser.core.config import AttentionConfig, AttnImplType
from telefuser.ops.attention import torch_sdpa as sdpa
from telefuser.ops.attention.backends import run_chosen
from telefuser.ops.attention.dense_backend import Call
from telefuser.ops.attention.sparse_attention import SparseAttentionState, attend
from telefuser.ops.base import CustomOpFunction

_AUTO = AttentionConfig()
_LAYOUTS = ("BSND", "BNSD")
_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention_config: AttentionConfig | None = None,
    sparse_state: SparseAttentionState | None = None,
    attn_impl: AttnImplType | str | None = None,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
    input_layout: str = "BSND",
    output_layout: str = "BSND",
    is_causal: bool = False,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(q kᵀ scale + mask) v for each batch entry and head.

    q [B, Sq, N, D], k [B, Skv, Nkv, D], v [B, Skv, Nkv, Dv] in BSND, or with S and N exchanged in BNSD; any strides (no
    copy where the backend takes strides); float16, bfloat16, float32 or float64. N must be a multiple of Nkv: query
    head n reads key head n // (N / Nkv). q and k are cast to v's dtype; under autocast all three to autocast's.

    attention_config: backend and defaults; None is AUTO, the fastest exact backend that can run here.
    attn_impl: replaces the config's backend. A backend that cannot run gives way to TORCH_SDPA with one warning a
        process, or with `AttentionConfig.strict` raises ValueError.
    attn_mask: bool (True = attend) or floating point (added to the scaled scores, in q's dtype), broadcastable to
        [B, N, Sq, Skv]. Values below -1e30 (-6e4 where the mask or q is float16) count as -inf, and a row that may
        attend to nothing (all False or -inf) gives 0.
    scale: factor on q kᵀ; None is the config's, and without one D ** -0.5.
    is_causal: query i sees keys 0..i, also when Sq is not Skv (top-left alignment); a mask applies besides.
    sparse_state: what a sparse pattern has to know of the video and the run. RADIAL_ATTN and LOCAL_SPARSE_ATTN compute
        densely without it, with one warning a process, and where q and k differ in length (the text's cross-attention),
        without one. A dense backend does not look at it.
    return_lse: also return log(sum(exp(scores))), natural logarithm, [B, N, Sq] float32, -inf for a row without keys.

    Returns [B, Sq, N, Dv] in BSND, in v's dtype; with `return_lse` the pair (out, lse). Skv = 0 gives zeros.
    Differentiable on the SDPA path; backends without a backward pass give way to it. Under `torch.compile` it is one
    opaque node, or, where a gradient is needed, PyTorch's own SDPA.
    Raises ValueError for shapes, layouts, heads or dtypes that do not fit and for a scale that is not finite, TypeError
    for what is no tensor and for a mask of another dtype and, as PyTorch does, RuntimeError for tensors on different
    devices.
    """
    config = _AUTO if attention_config is None else attention_config
    if not isinstance(config, AttentionConfig):
        raise ValueError(f"attention_config is {config!r}; give an AttentionConfig, or the backend as attn_impl")
    impl = config.attn_impl if attn_impl is None else AttnImplType.parse(attn_impl)
    scale = config.scale if scale is None else scale
    is_causal = is_causal or config.is_causal
    check_inputs(q, k, v, attn_mask, input_layout, output_layout)
    if return_lse and config.dropout:
        raise ValueError(
            f"return_lse and dropout {config.dropout} do not go together; set AttentionConfig.dropout to 0"
        )
    q, k, v = one_dtype(q, k, v)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    elif not -math.inf < scale < math.inf:
        raise ValueError(f"scale is {scale}; give a finite factor, or None for D ** -0.5")
    if sparse_state is not None and impl.takes_sparse_config:
        _check_state(sparse_state, impl, config)
        tokens = 1 if input_layout == "BSND" else 2
        if attn_mask is None and not is_causal and not config.dropout and q.shape[tokens] == k.shape[tokens]:
            out, lse = _sparse_attention(
                q=q,
                k=k,
                v=v,
                position=sparse_state.position,
                scale=scale,
                return_lse=return_lse,
                input_layout=input_layout,
                output_layout=output_layout,
            )
            return (out, lse) if return_lse else out
    out, lse = _attention(
        q=q,
        k=k,
        v=v,
        mask=attn_mask,
        impl=impl.name,
        scale=scale,
        is_causal=is_causal,
        dropout=config.dropout,
        strict=config.strict,
        return_lse=return_lse,
        input_layout=input_layout,
        output_layout=output_layout,
    )
    return (out, lse) if return_lse else out


def _attend(q, k, v, mask, impl, scale, is_causal, dropout, strict, return_lse, input_layout, output_layout):
    call = _to_call(q, k, v, mask, scale, is_causal, dropout, return_lse, input_layout)
    if call.q.numel() == 0 or call.k.numel() == 0 or call.v.numel() == 0:
        out, lse = _without_keys(call)
    else:
        out, lse = run_chosen(AttnImplType[impl], call, strict)
    return out.transpose(1, 2) if output_layout == "BSND" else out, lse


def _compiled(q, k, v, mask, **options):
    needs_grad = q.requires_grad or k.requires_grad or v.requires_grad or (mask is not None and mask.requires_grad)
    if torch.is_grad_enabled() and needs_grad:
        return _traced(q, k, v, mask, **options)
    return _attention_op(q, k, v, mask, **options)


def _traced(q, k, v, mask, impl, scale, is_causal, dropout, strict, return_lse, input_layout, output_layout):
    """What a compiled training step runs: PyTorch's own SDPA, which the compiler knows forward and backward."""
    call = _to_call(q, k, v, mask, scale, is_causal, dropout, return_lse, input_layout)
    if return_lse:
        out, lse = sdpa.math_attention(call.q, call.k, call.v, call.mask, scale, is_causal, return_lse=True)
    else:
        out, lse = sdpa.native_sdpa(call.q, call.k, call.v, call.mask, scale, is_causal, dropout), None
    return out.transpose(1, 2) if output_layout == "BSND" else out, lse


@torch.library.custom_op(
    "telefuser::attention",
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor? mask, str impl, float scale, bool is_causal, float dropout, "
        "bool strict, bool return_lse, str input_layout, str output_layout) -> (Tensor, Tensor)"
    ),
)
def _attention_op(q, k, v, mask, impl, scale, is_causal, dropout, strict, return_lse, input_layout, output_layout):
    out, lse = _attend(q, k, v, mask, impl, scale, is_causal, dropout, strict, return_lse, input_layout, output_layout)
    # The compiler believes the strides of the fake result below.
    return out.contiguous(), q.new_empty(0, dtype=torch.float32) if lse is None else lse.contiguous()


@_attention_op.register_fake
def _attention_fake(q, k, v, mask, impl, scale, is_causal, dropout, strict, return_lse, input_layout, output_layout):
    if input_layout == "BSND":
        batch, queries, heads, _ = q.shape
    else:
        batch, heads, queries, _ = q.shape
    shape = (batch, queries, heads, v.shape[3]) if output_layout == "BSND" else (batch, heads, queries, v.shape[3])
    lse_shape = (batch, heads, queries) if return_lse else (0,)
    return q.new_empty(shape), q.new_empty(lse_shape, dtype=torch.float32)


# Called with keywords only: the shared rule would ask positional tensors for gradients, and `_compiled` asks them all.
_attention = CustomOpFunction("attention", _attend, compiled_impl=_compiled)


def _attend_sparse(q, k, v, position, scale, return_lse, input_layout, output_layout):
    call = _to_call(q, k, v, None, scale, False, 0.0, return_lse, input_layout)
    if call.q.numel() == 0 or call.v.numel() == 0:
        out, lse = _without_keys(call)
    else:
        out, lse = attend(call, position)
    return out.transpose(1, 2) if output_layout == "BSND" else out, lse


def _compiled_sparse(q, k, v, **options):
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        # The backward pass follows the blocks that were computed, which the compiler cannot see: a graph break.
        # Disabling at import instead would load the whole compiler for everybody, which takes a second.
        return torch.compiler.disable(_attend_sparse)(q, k, v, **options)
    return _sparse_attention_op(q, k, v, **options)


@torch.library.custom_op(
    "telefuser::sparse_attention",
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor position, float scale, bool return_lse, str input_layout, "
        "str output_layout) -> (Tensor, Tensor)"
    ),
)
def _sparse_attention_op(q, k, v, position, scale, return_lse, input_layout, output_layout):
    out, lse = _attend_sparse(q, k, v, position, scale, return_lse, input_layout, output_layout)
    return out.contiguous(), q.new_empty(0, dtype=torch.float32) if lse is None else lse.contiguous()


@_sparse_attention_op.register_fake
def _sparse_attention_fake(q, k, v, position, scale, return_lse, input_layout, output_layout):
    return _attention_fake(q, k, v, None, "", scale, False, 0.0, False, return_lse, input_layout, output_layout)


_sparse_attention = CustomOpFunction("sparse_attention", _attend_sparse, compiled_impl=_compiled_sparse)


def _to_call(q, k, v, mask, scale, is_causal, dropout, return_lse, input_layout) -> Call:
    if input_layout == "BSND":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    q, k, v = sdpa.prepare_tensor(q), sdpa.prepare_tensor(k), sdpa.prepare_tensor(v)
    if mask is not None:
        mask = sdpa.prepare_mask(mask, q, k.shape[2])
    return Call(q, k, v, mask, scale, is_causal, dropout, return_lse)


def _without_keys(call: Call):
    """No query, no key or no channel: nothing to compute, and kernels are not launched for nothing."""
    batch, heads, queries, _ = call.q.shape
    out = call.q.new_zeros(batch, heads, queries, call.v.shape[3])
    lse = call.q.new_full((batch, heads, queries), float("-inf"), dtype=torch.float32)
    return out, lse if call.return_lse else None


def one_dtype(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    """q, k, v in v's dtype: a float32 norm under autocast leaves q and k wider than v, and no kernel takes the mix."""
    dtype = v.dtype
    if dtype is not torch.float64 and torch.is_autocast_enabled(v.device.type):
        dtype = torch.get_autocast_dtype(v.device.type)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _check_state(state: SparseAttentionState, impl: AttnImplType, config: AttentionConfig):
    if not isinstance(state, SparseAttentionState):
        raise ValueError(f"sparse_state is {state!r}; give SparseAttentionState(attention_config, MaskMap(...))")
    if impl is not state.config.sparse_impl or config.sparse_config not in (None, state.config):
        raise ValueError(
            f"sparse_state was made for {state.config}, but attention is asked for {impl.name} with "
            f"{config.sparse_config}; make the state from the same configuration"
        )


def check_inputs(q, k, v, mask, input_layout, output_layout):
    for name, layout in (("input_layout", input_layout), ("output_layout", output_layout)):
        if layout not in _LAYOUTS:
            raise ValueError(f"{name} is {layout!r}; choose one of {', '.join(_LAYOUTS)}")
    for name, tensor in (("q", q), ("k", k), ("v", v), ("attn_mask", mask)):
        if not isinstance(tensor, torch.Tensor) and (tensor is not None or name != "attn_mask"):
            raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(f"q, k, v must have 4 dims ({input_layout}); {_shapes(q, k, v)}")
    tokens, heads = (1, 2) if input_layout == "BSND" else (2, 1)
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q, k, v do not fit together: one batch, one head dim of q and k, and k and v alike up to the last dim "
            f"({input_layout}); {_shapes(q, k, v)}"
        )
    if q.shape[3] == 0:
        raise ValueError(f"the head dim of q and k is 0, and must be at least 1; {_shapes(q, k, v)}")
    if k.shape[heads] == 0 or q.shape[heads] % k.shape[heads]:
        raise ValueError(
            f"{q.shape[heads]} query heads are not a multiple of {k.shape[heads]} key heads; "
            f"{_shapes(q, k, v)} in {input_layout}"
        )
    if not {q.dtype, k.dtype, v.dtype} <= _DTYPES:
        raise ValueError(f"q, k, v must be float16, bfloat16, float32 or float64, not {q.dtype}, {k.dtype}, {v.dtype}")
    devices = [t.device for t in (q, k, v, mask) if t is not None]
    if any(device != devices[0] for device in devices):
        # The type and the words of PyTorch's own operators; a vendor kernel would only see a pointer it cannot read.
        names = ", ".join(map(str, devices))
        raise RuntimeError(f"Expected all tensors to be on the same device, but q, k, v (and attn_mask) are on {names}")
    if mask is not None:
        _check_mask(mask, (q.shape[0], q.shape[heads], q.shape[tokens], k.shape[tokens]))


def _check_mask(mask: torch.Tensor, scores: tuple[int, int, int, int]):
    if mask.dtype is not torch.bool and not mask.is_floating_point():
        raise TypeError(f"attn_mask has dtype {mask.dtype}; give bool (True = attend) or a floating point bias")
    fits = mask.dim() <= 4 and all(size in (1, full) for size, full in zip(mask.shape[::-1], scores[::-1]))
    if not fits:
        raise ValueError(f"attn_mask {tuple(mask.shape)} does not broadcast to [B, N, Sq, Skv] = {list(scores)}")


def _shapes(q, k, v) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
