"""Attention by its formula in float64: what every backend is held against."""

import torch


def reference(q, k, v, mask=None, scale=None, is_causal=False, layout="BSND"):
    """(out, lse) of softmax(q kᵀ scale + mask) v in float64; a row without keys gives 0 and -inf."""
    if layout == "BSND":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    q, k, v = (t.detach().double() for t in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        if mask.dtype is torch.bool:
            scores = scores.masked_fill(~mask, float("-inf"))
        else:
            scores = scores + mask.detach().double()
    if is_causal:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~keep, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
    out = weights @ v
    return (out.transpose(1, 2) if layout == "BSND" else out), lse


def qkv(
    batch=2, queries=16, keys=None, heads=4, key_heads=None, head_dim=16, dtype=torch.float32, device="cpu", seed=0
):
    """Random q [B, Sq, N, D], k and v [B, Skv, Nkv, D]."""
    generator = torch.Generator().manual_seed(seed)
    keys, key_heads = queries if keys is None else keys, key_heads or heads
    shapes = ((batch, queries, heads), (batch, keys, key_heads), (batch, keys, key_heads))
    return [torch.randn(*shape, head_dim, generator=generator).to(device, dtype) for shape in shapes]
