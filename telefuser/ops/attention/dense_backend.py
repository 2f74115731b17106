"""What a dense attention backend declares, whether it takes a call, and how it is run.

`backends.py` fills these records in. Shape letters: B batch, N heads, S tokens, D head dim; BSND is [B, S, N, D], BNSD
is [B, N, S, D].
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from telefuser import platforms
from telefuser.ops.attention.torch_sdpa import needs_grad, pad_head_dim
from telefuser.ops.backend_table import Backend, Entry

_HALF = (torch.float16, torch.bfloat16)


class Call(NamedTuple):
    """One attention problem: q [B, N, Sq, D], k [B, Nkv, Skv, D], v [B, Nkv, Skv, Dv] as `prepare_tensor` left them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    scale: float
    is_causal: bool = False
    dropout: float = 0.0
    return_lse: bool = False

    def describe(self) -> str:
        """Its shapes and what it asks for, in words."""
        sizes = " ".join(f"{name} {tuple(t.shape)}" for name, t in zip("qkv", (self.q, self.k, self.v)))
        asked = {
            "a mask": self.mask is not None,
            "the causal form": self.is_causal,
            "dropout": self.dropout > 0,
            "the log-sum-exp": self.return_lse,
            "gradients": needs_grad(self.q, self.k, self.v),
        }
        extras = " and ".join(name for name, is_asked in asked.items() if is_asked)
        return f"{sizes} of {str(self.q.dtype).removeprefix('torch.')}" + (f" with {extras}" if extras else "")


class Refusal(NamedTuple):
    """Why a backend does not take a call: what kind of reason, and the sentence."""

    kind: str
    text: str


@dataclass(frozen=True)
class DenseBackend(Backend):
    """What a dense backend takes. The defaults are those of a half-precision flash kernel.

    layout: how the adapter wants q, k, v and returns its output.
    dtypes, head_dims: None takes every one; a head dim between two of these is padded with zeros up to the next.
    has_mask, has_causal, has_gqa, has_cross (Sq other than Skv), has_grad, has_dropout, has_uneven (Dv other than D).
    lse_keyword: keyword that makes the function return the log-sum-exp; "" when it cannot.
    is_exact: False for kernels that quantise or skip blocks; AUTO never takes those.
    min_queries, max_keys: limits on the number of tokens, or None.
    refuses: what the fields above cannot say; gets the call, returns a sentence or None.
    """

    layout: str = "BSND"
    dtypes: tuple[torch.dtype, ...] | None = _HALF
    head_dims: tuple[int, ...] | None = None
    has_mask: bool = False
    has_causal: bool = True
    has_gqa: bool = True
    has_cross: bool = True
    has_grad: bool = False
    has_dropout: bool = False
    has_uneven: bool = False
    lse_keyword: str = ""
    is_exact: bool = True
    min_queries: int = 1
    max_keys: int | None = None
    refuses: Callable[[Call], str | None] | None = None


def unsuitable(record: DenseBackend, entry: Entry, call: Call) -> Refusal | None:
    """Why `record`, which is here, does not take `call`; None when it does."""
    q, k, v = call.q, call.k, call.v
    queries, keys, head_dim = q.shape[2], k.shape[2], q.shape[3]
    if record.dtypes is not None and q.dtype not in record.dtypes:
        return Refusal("dtype", f"it takes float16 or bfloat16, not {str(q.dtype).removeprefix('torch.')}")
    if call.mask is not None and not record.has_mask:
        return Refusal("mask", "it takes no attention mask")
    if call.dropout and not record.has_dropout:
        return Refusal("dropout", "it has no dropout")
    if call.return_lse and not (record.lse_keyword and (not record.sources or entry.accepts(record.lse_keyword))):
        return Refusal("lse", "it does not return the log-sum-exp")
    if (not record.has_grad or (call.return_lse and record.is_nvidia_only)) and needs_grad(q, k, v):
        what = "its log-sum-exp carries no gradient" if record.has_grad else "it has no backward pass"
        return Refusal("grad", what)
    if queries != keys and not record.has_cross:
        return Refusal("cross", f"it takes self-attention only, not {queries} queries over {keys} keys")
    if call.is_causal and not record.has_causal:
        return Refusal("causal", "it has no causal form")
    if call.is_causal and queries != keys and record.is_nvidia_only:
        # Their causal mask starts at the bottom right corner, ours at the top left; for a square one it is the same.
        return Refusal("causal", f"its causal form needs as many queries as keys, not {queries} and {keys}")
    if q.shape[1] != k.shape[1] and not record.has_gqa:
        return Refusal("gqa", f"it takes as many key heads as query heads, not {k.shape[1]} and {q.shape[1]}")
    if v.shape[3] != head_dim and not record.has_uneven:
        return Refusal("head_dim", f"it takes one head dim for q, k and v, not {head_dim} and {v.shape[3]}")
    if record.head_dims is not None and head_dim > record.head_dims[-1]:
        return Refusal("head_dim", f"head dim {head_dim} is above its limit of {record.head_dims[-1]}")
    if queries < record.min_queries:
        return Refusal("min_queries", f"{queries} queries are below its block of {record.min_queries}")
    if record.max_keys is not None and keys > record.max_keys:
        return Refusal("max_keys", f"{keys} tokens are above the {record.max_keys} up to which it is known to be right")
    text = record.refuses(call) if record.refuses is not None else None
    return Refusal("other", text) if text else None


def run(record: DenseBackend, entry: Entry, call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute `call` with a chosen backend: out [B, N, Sq, Dv], a view where it must be, and lse [B, N, Sq] or None."""
    if record.head_dims is None:
        return record.run(entry, call)
    head_dim = call.q.shape[3]
    wide = next(size for size in record.head_dims if size >= head_dim)
    q, k, v = (pad_head_dim(t, wide) for t in (call.q, call.k, call.v))
    if record.layout == "BSND":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    # Some packages make the tensors' GPU the current one and leave it so; others launch on the current one.
    with platforms.current_platform.device_ctx(q.device):
        out, lse = record.run(entry, call._replace(q=q, k=k, v=v))
    if record.layout == "BSND":
        out = out.transpose(1, 2)
    return out[..., :head_dim], lse
