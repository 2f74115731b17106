"""Attention over the kept blocks of a block mask: the executors, and the choice among them.

`sparse_attention` makes the masks and calls `block_sparse_attention`. A new executor is a member of `SparseExecutor`
and one decorated function here. Shape letters: B batch, N heads, S tokens, D head dim, Nb = ceil(S / block size).
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import torch

import telefuser.kernel.triton as kernels
from telefuser import platforms
from telefuser.ops.attention import torch_blocked as blocked
from telefuser.ops.attention import torch_sdpa as sdpa
from telefuser.ops.attention.block_mask import BlockMask
from telefuser.ops.attention.dense_backend import Call
from telefuser.ops.attention.radial_attention_core import BLOCK_SIZES
from telefuser.ops.backend_table import Backend, BackendTable, Entry, Source

_BLOCK_SPARSE_NEEDS = (
    "cu_seqlens_q",
    "cu_seqlens_k",
    "head_mask_type",
    "streaming_info",
    "base_blockmask",
    "max_seqlen_q_",
    "max_seqlen_k_",
    "p_dropout",
    "softmax_scale",
    "is_causal",
)


class SparseExecutor(Enum):
    """What computes attention over kept blocks. SPARGE_ATTN and SPARSE_SAGE_ATTN quantise: on request only."""

    FLASH_ATTN_4 = auto()
    TRITON_BLOCK_SPARSE = auto()
    BLOCK_SPARSE_ATTN = auto()
    FLASHINFER = auto()
    TORCH_BLOCKED = auto()
    SPARGE_ATTN = auto()
    SPARSE_SAGE_ATTN = auto()


@dataclass(frozen=True)
class SparseBackend(Backend):
    """What an executor takes. The defaults are those of a half-precision kernel from a package.

    dtypes: None takes every one. head_dims: None takes every one; others are padded with zeros up to the next of these.
    block_sizes: of the masks. has_gqa: fewer key heads than query heads. has_uneven: values of another head dim.
    has_grad: autograd can go through it. has_lse: it returns the log-sum-exp. is_exact: False where it quantises.
    min_tokens: the least number of tokens.
    refuses: what the fields above cannot say; gets the call and the mask, returns a sentence or None.
    """

    dtypes: tuple[torch.dtype, ...] | None = (torch.float16, torch.bfloat16)
    head_dims: tuple[int, ...] | None = (64, 128)
    block_sizes: tuple[int, ...] = BLOCK_SIZES
    has_gqa: bool = False
    has_uneven: bool = False
    has_grad: bool = False
    has_lse: bool = False
    is_exact: bool = True
    min_tokens: int = 1
    refuses: Callable[[Call, BlockMask], str | None] | None = None


TABLE = BackendTable("sparse attention", SparseExecutor.TORCH_BLOCKED, "it is not part of this version")


def executor(impl: SparseExecutor, **declared) -> Callable:
    """Decorate an adapter `(entry, call, mask) -> (out, lse or None)` with its record, `SparseBackend(...)`.

    The exact ones, and on request the others, are tried in the order in which they are declared: fastest first.
    """

    def register(run: Callable) -> Callable:
        TABLE.register(SparseBackend(impl=impl, run=run, **declared))
        return run

    return register


def block_sparse_attention(
    call: Call, mask: BlockMask, quantised: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of `call` (self-attention, without a mask of its own) over the blocks that `mask` keeps.

    quantised: take the kernel that quantises; where it cannot run, an exact one with one warning.
    Returns out [B, N, S, Dv] and, if the call asks for it, the log-sum-exp [B, N, S] in float32, -inf without a key.
    Raises ValueError where the mask is for other sizes or lies on another device.
    """
    batch, heads, queries, _ = call.q.shape
    if queries != mask.tokens or call.k.shape[2] != mask.tokens:
        raise ValueError(
            f"the block mask is for {mask.tokens} tokens, not for {queries} queries over {call.k.shape[2]} keys"
        )
    if mask.by_head.shape[0] not in (1, batch) or mask.by_head.shape[1] not in (1, heads):
        raise ValueError(f"the block mask {tuple(mask.keep.shape)} does not fit batch {batch} and {heads} heads")
    if mask.keep.device != call.q.device:
        raise ValueError(f"the block mask is on {mask.keep.device} and q on {call.q.device}; make it on q's device")
    return TABLE.run(
        lambda without: _choose(call, mask, quantised, without),
        lambda record, entry: run(record, entry, call, mask),
        call.describe,
    )


def _choose(
    call: Call, mask: BlockMask, quantised: bool, without: frozenset[SparseExecutor] = frozenset()
) -> tuple[SparseBackend, Entry]:
    if quantised:
        reasons = []
        for record in (record for record in TABLE if not record.is_exact):
            entry = TABLE.probe(record.impl, call.q.device)
            reason = entry if isinstance(entry, str) else refusal(record, call, mask)
            if record.impl in without:
                reason = "it failed when called"
            if reason is None:
                return record, entry
            reasons.append(f"{record.impl.name} cannot be used: {reason}")
        TABLE.warn_once(("quantised",), f"sparse attention: {'; '.join(reasons)}. Exact instead.")
    for record in TABLE:
        if not record.is_exact or record.impl in without:
            continue
        entry = TABLE.probe(record.impl, call.q.device)
        if isinstance(entry, Entry) and refusal(record, call, mask) is None:
            return record, entry
    return TABLE.record(TABLE.fallback), Entry()


def refusal(record: SparseBackend, call: Call, mask: BlockMask) -> str | None:
    """Why `record`, which is here, does not take `call` over `mask`; None when it does."""
    q, k, v = call.q, call.k, call.v
    if record.dtypes is not None and q.dtype not in record.dtypes:
        return f"it takes float16 or bfloat16, not {str(q.dtype).removeprefix('torch.')}"
    if record.head_dims is not None and q.shape[3] > record.head_dims[-1]:
        return f"head dim {q.shape[3]} is above its limit of {record.head_dims[-1]}"
    if mask.block_size not in record.block_sizes:
        return f"it has no blocks of {mask.block_size}"
    if q.shape[1] != k.shape[1] and not record.has_gqa:
        return f"it takes as many key heads as query heads, not {k.shape[1]} and {q.shape[1]}"
    if v.shape[3] != q.shape[3] and not record.has_uneven:
        return f"it takes one head dim for q, k and v, not {q.shape[3]} and {v.shape[3]}"
    if call.return_lse and not record.has_lse:
        return "it does not return the log-sum-exp"
    if not record.has_grad and sdpa.needs_grad(q, k, v):
        return "it has no backward pass"
    if mask.tokens < record.min_tokens:
        return f"{mask.tokens} tokens are below its least of {record.min_tokens}"
    return record.refuses(call, mask) if record.refuses is not None else None


def run(record: SparseBackend, entry: Entry, call: Call, mask: BlockMask) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute `call` over `mask` with a chosen executor: out [B, N, S, Dv] and lse [B, N, S] or None."""
    if record.head_dims is None:
        return record.run(entry, call, mask)
    head_dim = call.q.shape[3]
    wide = next(size for size in record.head_dims if size >= head_dim)
    q, k, v = (sdpa.pad_head_dim(t, wide) for t in (call.q, call.k, call.v))
    # Some packages make the tensors' GPU the current one and leave it so; others launch on the current one.
    with platforms.current_platform.device_ctx(q.device):
        out, lse = record.run(entry, call._replace(q=q, k=k, v=v), mask)
    return out[..., :head_dim], lse


def name_executor(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    mask: BlockMask,
    quantised: bool = False,
) -> str:
    """What `block_sparse_attention` would take for q, k, v [B, N, S, D] of this shape, for logs; computes nothing."""
    # A shape without memory behind it.
    q = torch.empty(1, dtype=dtype, device=device).expand(shape)
    return _choose(Call(q, q, q, None, 1.0), mask, quantised)[0].impl.name


def availability(device: torch.device | None = None) -> dict[SparseExecutor, str | None]:
    """For each executor, in the order in which they are tried: None where it can run on `device`, else the reason."""
    return {record.impl: TABLE.reason(record.impl, device) for record in TABLE}


def describe_executor(device: torch.device | None = None) -> str:
    """The exact executor that comes first on `device` (default: the current one), for logs."""
    exact = (record.impl for record in TABLE if record.is_exact)
    return next(impl.name for impl in exact if TABLE.reason(impl, device) is None)


@executor(
    SparseExecutor.FLASH_ATTN_4,
    sources=(
        Source(
            "flash_attn.cute",
            "flash_attn_func",
            ("softmax_scale", "block_sparse_tensors", "return_lse"),
            "pip install --pre flash-attn-4",
        ),
    ),
    # On Blackwell a program takes 256 queries, more than a block of the mask.
    generations=(9,),
    head_dims=(64, 96, 128),
    has_lse=True,
)
def flash_attn_4(entry: Entry, call: Call, mask: BlockMask):
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    size = mask.block_size
    lists = mask.lists(size, size)
    # Two lists a row: blocks that a function masks element by element, none here, and blocks that are seen whole. The
    # end of the sequence is masked in whichever block comes last.
    blocks = BlockSparseTensorsTorch(
        mask_block_cnt=torch.zeros_like(lists.counts),
        mask_block_idx=torch.zeros_like(lists.counts)[..., None],
        full_block_cnt=lists.counts,
        full_block_idx=lists.indices,
        block_size=(size, size),
    )
    q, k, v = (t.transpose(1, 2) for t in (call.q, call.k, call.v))
    out, lse = entry.call(
        q, k, v, softmax_scale=call.scale, causal=False, block_sparse_tensors=blocks, return_lse=call.return_lse
    )
    return out.transpose(1, 2), lse if call.return_lse else None


@executor(
    SparseExecutor.TRITON_BLOCK_SPARSE,
    is_triton=True,
    generations=(8, 9, 10, 11, 12),
    has_gqa=True,
    has_lse=True,
)
def triton_block_sparse(entry: Entry, call: Call, mask: BlockMask):
    tiles = kernels.attention_tiles(mask.block_size, call.q)
    lists = mask.lists(tiles.rows, tiles.columns)
    return kernels.attend_listed_tiles(call.q, call.k, call.v, *lists, call.scale, tiles, call.return_lse)


@executor(
    SparseExecutor.BLOCK_SPARSE_ATTN,
    sources=tuple(
        Source(module, "block_sparse_attn_func", _BLOCK_SPARSE_NEEDS, hint)
        for module, hint in (("block_sparse_attn", "built from mit-han-lab/Block-Sparse-Attention"), ("tf_kernel", ""))
    ),
    generations=(8, 9),
    block_sizes=(128,),
)
def block_sparse_attn(entry: Entry, call: Call, mask: BlockMask):
    batch, heads, tokens, _ = call.q.shape
    device, blocks = call.q.device, mask.keep.shape[-1]
    packed = (t.transpose(1, 2).flatten(0, 1) for t in (call.q, call.k, call.v))  # [B * S, N, D]
    bounds = torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=device)
    out = entry.call(
        *packed,
        cu_seqlens_q=bounds,
        cu_seqlens_k=bounds,
        # 1: the head goes by the block mask.
        head_mask_type=torch.ones(heads, dtype=torch.int32, device=device),
        streaming_info=None,
        base_blockmask=mask.by_head.expand(batch, heads, blocks, blocks),
        max_seqlen_q_=tokens,
        max_seqlen_k_=tokens,
        p_dropout=0.0,
        softmax_scale=call.scale,
        is_causal=False,
    )
    return out.unflatten(0, (batch, tokens)).transpose(1, 2), None


# FlashInfer's plan holds the number of every key that a block of queries sees: 30 million at 480p, 12 heads and a
# density of 0.3. Above this number it takes more than 1 GiB.
_FLASHINFER_MAX_KEYS = 2**28


def _flashinfer_refuses(call: Call, mask: BlockMask) -> str | None:
    keys = mask.density * mask.tokens * mask.keep.shape[-1] * call.q.shape[0] * call.q.shape[1]
    if keys <= _FLASHINFER_MAX_KEYS:
        return None
    return f"its plan would list {keys:.0f} keys, more than {_FLASHINFER_MAX_KEYS}"


@executor(
    SparseExecutor.FLASHINFER,
    sources=(Source("flashinfer", "VariableBlockSparseAttentionWrapper", install="pip install flashinfer-python"),),
    generations=(8, 9, 10, 12),
    head_dims=(64, 128, 256),
    refuses=_flashinfer_refuses,
)
def flashinfer(entry: Entry, call: Call, mask: BlockMask):
    batch, heads, _, head_dim = call.q.shape
    key = (SparseExecutor.FLASHINFER, batch, heads, head_dim, call.q.dtype, call.scale)
    # Its heads have masks of their own, so batch entries can be heads too.
    planned = mask.once(key, lambda: _flashinfer_plan(entry, call, mask))
    out = planned.run(*(t.flatten(0, 1) for t in (call.q, call.k, call.v)))
    return out.unflatten(0, (batch, heads)), None


@functools.cache
def _flashinfer_workspace(device: torch.device) -> torch.Tensor:
    """The 128 MiB that FlashInfer recommends, for all plans: they run one after another."""
    return torch.empty(128 * 2**20, dtype=torch.uint8, device=device)


def _flashinfer_plan(entry: Entry, call: Call, mask: BlockMask):
    batch, heads, _, head_dim = call.q.shape
    device, blocks = call.q.device, mask.keep.shape[-1]
    sizes = torch.full((batch * heads, blocks), mask.block_size, dtype=torch.int32, device=device)
    sizes[:, -1] = mask.tokens - (blocks - 1) * mask.block_size
    planned = entry.function(_flashinfer_workspace(device))
    planned.plan(
        mask.by_head.expand(batch, heads, -1, -1).flatten(0, 1),
        sizes,
        sizes,
        num_qo_heads=batch * heads,
        num_kv_heads=batch * heads,
        head_dim=head_dim,
        sm_scale=call.scale,
        q_data_type=call.q.dtype,
    )
    return planned


@executor(
    SparseExecutor.TORCH_BLOCKED,
    dtypes=None,
    head_dims=None,
    has_gqa=True,
    has_uneven=True,
    has_grad=True,
    has_lse=True,
)
def torch_blocked(entry: Entry, call: Call, mask: BlockMask):
    return blocked.torch_blocked(call, mask)


@executor(
    SparseExecutor.SPARGE_ATTN,
    sources=(
        Source(
            "spas_sage_attn",
            "block_sparse_sage2_attn_cuda",
            ("mask_id", "scale", "tensor_layout", "output_dtype"),
            "built from thu-ml/SpargeAttn",
        ),
    ),
    generations=((8, 0), (8, 6), (8, 7), (8, 9), 9),
    is_exact=False,
    min_tokens=128,
)
def sparge_attn(entry: Entry, call: Call, mask: BlockMask):
    # Its tiles are 128 queries by 64 keys, on Hopper 64 by 128.
    is_hopper = platforms.current_platform.cuda_arch(call.q.device)[0] == 9
    tiles = mask.tiles(64, 128) if is_hopper else mask.tiles(128, 64)
    out = entry.call(
        call.q,
        call.k,
        call.v,
        mask_id=tiles.expand(*call.q.shape[:2], -1, -1).to(torch.int8).contiguous(),
        scale=call.scale,
        tensor_layout="HND",
        output_dtype=call.q.dtype,
    )
    return out, None


def _sparse_sage_refuses(call: Call, mask: BlockMask) -> str | None:
    head_dim = call.q.shape[3]
    if head_dim in (64, 128) and math.isclose(call.scale, head_dim**-0.5, rel_tol=1e-6):
        return None
    return f"its scale is D ** -0.5 with D 64 or 128, not {call.scale} with {head_dim}"


@executor(
    SparseExecutor.SPARSE_SAGE_ATTN,
    sources=(
        Source(
            "sparse_sageattn",
            "sparse_sageattn",
            ("mask_id", "tensor_layout"),
            "built from jt-zhang/Sparse_SageAttention_API",
        ),
    ),
    generations=(8, 9, (12, 0)),
    is_exact=False,
    min_tokens=128,
    refuses=_sparse_sage_refuses,
)
def sparse_sage_attn(entry: Entry, call: Call, mask: BlockMask):
    tiles = mask.tiles(128, 64).expand(*call.q.shape[:2], -1, -1).to(torch.int8).contiguous()
    return entry.call(call.q, call.k, call.v, mask_id=tiles, tensor_layout="HND"), None
