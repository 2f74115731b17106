"""Attention by PyTorch itself: the fallback of every other backend, and the reference that they are held against.

`F.scaled_dot_product_attention` where a fused kernel takes the inputs; exact attention over chunks of queries where
only the formula is left, so that the score matrix stays small. Shapes: B batch, N heads, S tokens, D head dim; all
tensors here are [B, N, S, D] and have passed `prepare_tensor`, masks `prepare_mask`.
"""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# Largest score matrix of one chunk of queries. At 480p and 81 frames (32,760 tokens, 12 heads) the whole one is 48 GiB.
MAX_SCORE_BYTES = 256 * 2**20

# An additive mask this low means "masked": nothing of it survives a softmax. Kernels disagree about a row full of the
# lowest finite value (times log2(e) it overflows float32, and they give NaN), so it becomes -inf.
_MASKED_BELOW = {torch.float16: -6e4}
_MASKED_BELOW_WIDE = -1e30


def torch_sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    dropout: float = 0.0,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of q [B, N, Sq, D] over k, v [B, Nkv, Skv, D], with N a multiple of Nkv.

    mask: as `prepare_mask` returns it, or None. is_causal: row i sees keys up to i, counted from the top left.
    Returns out [B, N, Sq, Dv] and the natural-log log-sum-exp [B, N, Sq] in float32, or None without `return_lse`.
    """
    if return_lse:
        fused = None
        if mask is None and not needs_grad(q, k, v):
            fused = _fused_with_lse(q, *_repeat_heads(q, k, v), scale, is_causal)
        return fused or math_attention(q, k, v, mask, scale, is_causal, return_lse=True)
    if dropout == 0.0 and (_is_large(q, k) or not _chooses_by_itself(q)):
        if q.shape[1] != k.shape[1] and not _has_fused_kernel(q, k, v, mask, scale, is_causal):
            # Some kernels want as many key heads as query heads; a copy of k and v is small beside a score matrix.
            k, v = _repeat_heads(q, k, v)
        if not _has_fused_kernel(q, k, v, mask, scale, is_causal):
            return math_attention(q, k, v, mask, scale, is_causal)
    return native_sdpa(q, k, v, mask, scale, is_causal, dropout), None


def native_sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    dropout: float = 0.0,
) -> torch.Tensor:
    """`F.scaled_dot_product_attention` with a mask and `is_causal` together, and zeros for rows that see no key.

    Holds no decision that looks at more than shapes, so `torch.compile` traces it, forward and backward.
    """
    empty = None
    if mask is not None:
        if is_causal:
            mask, is_causal = _with_causal(mask, q.shape[-2], k.shape[-2]), False
        mask, empty = _open_empty_rows(mask)
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out if empty is None else out.masked_fill(empty, 0.0)


def math_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """softmax(q kᵀ scale + mask) v by the formula, in float32 (float64 for float64), a chunk of queries at a time.

    A row that sees no key gives 0 and a log-sum-exp of -inf. Arguments and results as for `torch_sdpa`.
    """
    k, v = _repeat_heads(q, k, v)
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    batch, heads, queries, _ = q.shape
    row_bytes = batch * heads * k.shape[-2] * (8 if wide is torch.float64 else 4)
    rows = max(1, MAX_SCORE_BYTES // max(1, row_bytes))
    outs, lses = [], []
    # Autocast would put the products back into low precision.
    with torch.autocast(q.device.type, enabled=False):
        k, v = k.to(wide), v.to(wide)
        for start in range(0, queries, rows):
            stop = min(start + rows, queries)
            part = mask if mask is None or mask.shape[-2] == 1 else mask[..., start:stop, :]
            out, lse = _math_chunk(q[:, :, start:stop].to(wide) * scale, k, v, part, start if is_causal else None)
            outs.append(out.to(q.dtype))
            lses.append(lse)
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
    return out, torch.cat(lses, dim=2).float() if return_lse else None


def _math_chunk(q, k, v, mask, first_row):
    """One chunk of queries, already scaled; `first_row` is its position when causal, else None."""
    scores = torch.matmul(q, k.transpose(-1, -2))
    if mask is not None:
        scores = scores.masked_fill_(~mask, float("-inf")) if mask.dtype is torch.bool else scores.add_(mask)
    if first_row is not None:
        scores = scores.masked_fill_(~_causal_keep(q.shape[-2], k.shape[-2], q.device, first_row), float("-inf"))
    top = scores.detach().amax(dim=-1, keepdim=True)
    top = top.masked_fill(top == float("-inf"), 0.0)
    # In place: the score matrix is the only large one, and autograd needs it only after the exponential.
    weights = scores.sub_(top).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    out = torch.matmul(weights, v) / total.masked_fill(total == 0.0, 1.0)
    return out, (total.log() + top).squeeze(-1)


def prepare_tensor(t: torch.Tensor) -> torch.Tensor:
    """`t` itself, or a dense copy where kernels would misread it.

    Some take a strided last dim for a dense one, and the memory-efficient one reads keys that are broadcast (stride 0)
    wrong at some lengths.
    """
    is_broadcast = any(stride == 0 and size > 1 for size, stride in zip(t.shape, t.stride()))
    return t.contiguous() if is_broadcast else _dense_last_dim(t)


def _dense_last_dim(t: torch.Tensor) -> torch.Tensor:
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def prepare_mask(mask: torch.Tensor, q: torch.Tensor, keys: int) -> torch.Tensor:
    """`mask` as kernels take it: 4-D, the last dim dense and `keys` long; bool (True = keep), or additive in q's dtype.

    A kernel that is handed a float32 mask beside half-precision q reads its bytes as halves, so the mask is cast.
    Values down to -1e30 (-6e4 where the mask or q is float16) are kept, lower ones become -inf.
    """
    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    if mask.dtype is not torch.bool:
        lowest = max(_MASKED_BELOW.get(dtype, _MASKED_BELOW_WIDE) for dtype in (mask.dtype, q.dtype))
        mask = mask.masked_fill(mask < lowest, float("-inf")).to(q.dtype)
    return _dense_last_dim(mask.expand(*mask.shape[:3], keys))


def can_use_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask, scale: float, is_causal: bool) -> bool:
    """Whether PyTorch's cuDNN kernel takes these tensors; asked without a warning and without running anything."""
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):
        return _choice(q, k, v, mask, scale, is_causal) == SDPBackend.CUDNN_ATTENTION.value


def cudnn_sdpa(q, k, v, mask, scale: float, is_causal: bool, return_lse: bool):
    """cuDNN's kernel through PyTorch; arguments and results as for `torch_sdpa`, with as many key as query heads."""
    empty = None
    if mask is not None:
        if is_causal:
            mask, is_causal = _with_causal(mask, q.shape[-2], k.shape[-2]), False
        mask, empty = _open_empty_rows(mask)
        if mask.dtype is torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, float("-inf"))
        mask = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    wants_lse = return_lse or needs_grad(q, k, v)
    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, mask, wants_lse, 0.0, is_causal, False, scale=scale
    )[:2]
    lse = lse.reshape(q.shape[:3]).float() if return_lse else None
    if empty is not None:
        out = out.masked_fill(empty, 0.0)
        lse = lse.masked_fill(empty.squeeze(-1), float("-inf")) if return_lse else None
    return out, lse


def _fused_with_lse(q, k, v, scale, is_causal):
    """(out, lse) by the fused kernel that PyTorch would choose, or None when there is none."""
    if not _chooses_by_itself(q):
        return None
    aten, choice = torch.ops.aten, _choice(q, k, v, None, scale, is_causal)
    if choice == SDPBackend.FLASH_ATTENTION.value and q.is_cpu:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
    elif choice == SDPBackend.FLASH_ATTENTION.value:
        head_dim = v.shape[-1]
        q, k, v = (pad_head_dim(t, -(-t.shape[-1] // 8) * 8) for t in (q, k, v))
        out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)[:2]
        out = out[..., :head_dim]
    elif choice == SDPBackend.EFFICIENT_ATTENTION.value:
        out, lse = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, is_causal, scale=scale)[:2]
    elif choice == SDPBackend.CUDNN_ATTENTION.value:
        return cudnn_sdpa(q, k, v, None, scale, is_causal, True)
    else:
        return None
    # The memory-efficient kernel rounds the length of its log-sum-exp up to a multiple of 32.
    return out, lse[..., : q.shape[-2]].float()


def pad_head_dim(t: torch.Tensor, head_dim: int) -> torch.Tensor:
    """`t` with zeros appended to its last dim up to `head_dim`; scores stay the same, outputs gain zero channels."""
    return t if t.shape[-1] == head_dim else F.pad(t, (0, head_dim - t.shape[-1]))


def _chooses_by_itself(t: torch.Tensor) -> bool:
    """Whether PyTorch's own choice of kernels covers this device; elsewhere only the formula is known to be right."""
    return t.is_cpu or t.is_cuda


def _has_fused_kernel(q, k, v, mask, scale, is_causal) -> bool:
    if not _chooses_by_itself(q):
        return False
    if mask is not None and is_causal:
        # The combined mask is of the mask's kind but has a row a query; only its dims matter to the choice.
        mask, is_causal = mask.expand(*mask.shape[:2], q.shape[-2], k.shape[-2]), False
    return _choice(q, k, v, mask, scale, is_causal) != SDPBackend.MATH.value


def _choice(q, k, v, mask, scale, is_causal) -> int:
    return torch._fused_sdp_choice(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def _is_large(q: torch.Tensor, k: torch.Tensor) -> bool:
    return q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * 4 > MAX_SCORE_BYTES


def needs_grad(*tensors: torch.Tensor) -> bool:
    """Whether autograd will want a gradient for one of these."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _repeat_heads(q, k, v):
    groups = q.shape[1] // k.shape[1]
    if groups == 1:
        return k, v
    return k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)


def _open_empty_rows(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mask with its rows that see no key opened, and those rows [.., .., Sq, 1], whose output is to be set to 0.

    What a kernel makes of such a row differs, 0 or NaN, and its gradient is NaN where the output is.
    """
    if mask.dtype is torch.bool:
        empty = ~mask.any(dim=-1, keepdim=True)
        return mask | empty, empty
    empty = (mask == float("-inf")).all(dim=-1, keepdim=True)
    return mask.masked_fill(empty, 0.0), empty


def _causal_keep(queries: int, keys: int, device: torch.device, first_row: int = 0) -> torch.Tensor:
    rows = torch.arange(first_row, first_row + queries, device=device)
    return torch.arange(keys, device=device) <= rows[:, None]


def _with_causal(mask: torch.Tensor, queries: int, keys: int) -> torch.Tensor:
    keep = _causal_keep(queries, keys, mask.device)
    return mask & keep if mask.dtype is torch.bool else mask.masked_fill(~keep, float("-inf"))
