"""The dense attention backends: one declared record and one adapter each, and the rule that chooses among them.

A new backend is a member of `AttnImplType` and one decorated function here. `attention_impl` calls `choose` and runs
what it returns. Importing this module imports no vendor package and asks no device; the flags below say "this is an
NVIDIA platform and the package is there", `availability()` gives the whole answer. Shape letters: B batch, N heads,
S tokens, D head dim; BSND is [B, S, N, D], BNSD is [B, N, S, D].
"""

import math
from collections.abc import Callable

import torch

import telefuser.kernel.triton as kernels
from telefuser import platforms
from telefuser.core.config import AttentionConfig, AttnImplType
from telefuser.ops.attention import torch_sdpa as sdpa
from telefuser.ops.attention.block_sparse import describe_executor
from telefuser.ops.attention.dense_backend import Call, DenseBackend, run, unsuitable
from telefuser.ops.backend_table import BackendTable, Entry, Source

TABLE = BackendTable("attention", AttnImplType.TORCH_SDPA, "it is a sparse pattern, not a dense backend")


def backend(impl: AttnImplType, **declared) -> Callable:
    """Decorate an adapter `(entry, call) -> (out, lse or None)` with its record, `DenseBackend(impl, **declared)`."""

    def register(run: Callable) -> Callable:
        TABLE.register(DenseBackend(impl=impl, run=run, **declared))
        return run

    return register


@backend(
    AttnImplType.TORCH_SDPA,
    layout="BNSD",
    dtypes=None,
    has_mask=True,
    has_grad=True,
    has_dropout=True,
    has_uneven=True,
    lse_keyword="return_lse",
)
def torch_sdpa(entry: Entry, call: Call):
    return sdpa.torch_sdpa(*call)


def _cudnn_refuses(call: Call) -> str | None:
    if call.mask is not None and call.mask.requires_grad and torch.is_grad_enabled():
        return "PyTorch's cuDNN kernel gives no gradient for the mask"
    if sdpa.can_use_cudnn(call.q, call.k, call.v, call.mask, call.scale, call.is_causal):
        return None
    return "PyTorch's cuDNN kernel does not take these shapes on this GPU"


@backend(
    AttnImplType.TORCH_CUDNN,
    layout="BNSD",
    generations=(8, 9, 10, 11, 12),
    requires=lambda: None if torch.backends.cudnn.is_available() else "this PyTorch comes without cuDNN",
    has_mask=True,
    has_gqa=False,
    has_grad=True,
    lse_keyword="return_lse",
    refuses=_cudnn_refuses,
)
def torch_cudnn(entry: Entry, call: Call):
    return sdpa.cudnn_sdpa(call.q, call.k, call.v, call.mask, call.scale, call.is_causal, call.return_lse)


def _flash(entry: Entry, call: Call, **lse_keyword):
    # Old builds return (out, lse, ...) always, new ones a bare tensor unless asked.
    result = entry.call(
        call.q,
        call.k,
        call.v,
        softmax_scale=call.scale,
        causal=call.is_causal,
        **(lse_keyword if call.return_lse else {}),
    )
    out, lse = result[:2] if isinstance(result, (tuple, list)) else (result, None)
    return out, lse if call.return_lse else None


@backend(
    AttnImplType.FLASH_ATTN_2,
    sources=(
        Source(
            "flash_attn", "flash_attn_func", ("softmax_scale", "causal"), "pip install flash-attn --no-build-isolation"
        ),
    ),
    generations=(8, 9, 10, 12),
    head_dims=tuple(range(8, 257, 8)),
    has_grad=True,
    lse_keyword="return_attn_probs",
)
def flash_attn_2(entry: Entry, call: Call):
    return _flash(entry, call, return_attn_probs=True)


@backend(
    AttnImplType.FLASH_ATTN_3,
    sources=(
        Source(
            "flash_attn_interface",
            "flash_attn_func",
            ("softmax_scale", "causal"),
            "built from the hopper folder of Dao-AILab/flash-attention",
        ),
    ),
    generations=(9,),
    head_dims=tuple(range(8, 257, 8)),
    has_grad=True,
    lse_keyword="return_attn_probs",
)
def flash_attn_3(entry: Entry, call: Call):
    return _flash(entry, call, return_attn_probs=True)


def _fa4_refuses(call: Call) -> str | None:
    arch = platforms.current_platform.cuda_arch(call.q.device)
    if arch[0] != 9 and call.q.shape[-1] > 128:
        return f"head dim {call.q.shape[-1]} is above 128, the most that FlashAttention 4 takes outside Hopper"
    return None


@backend(
    AttnImplType.FLASH_ATTN_4,
    sources=(
        Source("flash_attn.cute", "flash_attn_func", ("softmax_scale", "causal"), "pip install --pre flash-attn-4"),
    ),
    generations=(9, 10, 11, 12),
    head_dims=tuple(range(8, 257, 8)),
    has_grad=True,
    lse_keyword="return_lse",
    refuses=_fa4_refuses,
)
def flash_attn_4(entry: Entry, call: Call):
    return _flash(entry, call, return_lse=True)


def _sage_sources(*functions: str, built_flag: str) -> tuple[Source, ...]:
    needs = ("tensor_layout", "is_causal", "sm_scale")
    hint = {"sageattention": "pip install sageattention, or version 2 from thu-ml/SageAttention", "tf_kernel": ""}
    return tuple(Source(module, function, needs, hint[module], built_flag) for function in functions for module in hint)


# Kernels quantise blocks of 128 queries; below that there is nothing to gain and a single query has given NaN.
_SAGE = {
    "head_dims": (64, 128),
    "lse_keyword": "return_lse",
    "is_exact": False,
    "min_queries": 128,
    "refuses": lambda call: (
        "grouped key heads and the log-sum-exp do not go together"
        if call.return_lse and call.q.shape[1] != call.k.shape[1]
        else None
    ),
}
# The kernels with 8-bit values have returned noise above 160,000 tokens; 720p with 81 frames has 75,600.
_SAGE_FP8_MAX_KEYS = 131_072


def _sage(entry: Entry, call: Call, **options):
    # Version 1 subtracts the mean of k from k in place. It is told by the log-sum-exp that it does not offer.
    k = call.k if entry.accepts("return_lse") else call.k.clone()
    result = entry.call(
        call.q,
        k,
        call.v,
        tensor_layout="NHD",
        is_causal=call.is_causal,
        sm_scale=call.scale,
        **({"return_lse": True} if call.return_lse else {}),
        **options,
    )
    return result if call.return_lse else (result, None)


@backend(
    AttnImplType.SAGE_ATTN_2_8_16,
    # The Triton forms, version 1 included, quantise blocks of queries and run where the CUDA form was not built.
    sources=(
        *_sage_sources("sageattn_qk_int8_pv_fp16_cuda", built_flag="SM80_ENABLED"),
        *_sage_sources("sageattn_qk_int8_pv_fp16_triton", built_flag=""),
        Source("sageattention", "sageattn", ("tensor_layout", "is_causal", "sm_scale"), generations=(8, 9)),
    ),
    generations=(8, 9, (10, 0), (12, 0), (12, 1)),
    **_SAGE,
)
def sage_attn_2_8_16(entry: Entry, call: Call):
    return _sage(entry, call)


@backend(
    AttnImplType.SAGE_ATTN_2_8_8,
    sources=_sage_sources("sageattn_qk_int8_pv_fp8_cuda", built_flag="SM89_ENABLED"),
    generations=((8, 9), 9, (10, 0), (12, 0), (12, 1)),
    max_keys=_SAGE_FP8_MAX_KEYS,
    **_SAGE,
)
def sage_attn_2_8_8(entry: Entry, call: Call):
    # The package itself quantises by warp on consumer Blackwell.
    is_sm12 = platforms.current_platform.cuda_arch(call.q.device)[0] == 12
    return _sage(entry, call, **({"qk_quant_gran": "per_warp"} if is_sm12 else {}))


@backend(
    AttnImplType.SAGE_ATTN_2_8_8_SM90,
    sources=_sage_sources("sageattn_qk_int8_pv_fp8_cuda_sm90", built_flag="SM90_ENABLED"),
    generations=(9,),
    max_keys=_SAGE_FP8_MAX_KEYS,
    **_SAGE,
)
def sage_attn_2_8_8_sm90(entry: Entry, call: Call):
    return _sage(entry, call)


def _sparge_sources() -> tuple[Source, ...]:
    needs = ("is_causal", "scale", "tensor_layout")
    hint = "built from thu-ml/SpargeAttn"
    fp8, fp16 = ((8, 9), 9), ((8, 0), (8, 6), (8, 7))
    return (
        Source("spas_sage_attn", "spas_sage2_attn_meansim_topk_cuda", needs, hint, generations=fp8),
        Source("spas_sage_attn", "spas_sage2_attn_meansim_cuda", needs, hint, generations=fp8),
        Source("spas_sage_attn", "spas_sage_attn_meansim_topk_cuda", needs, hint, generations=fp16),
        Source("spas_sage_attn", "spas_sage_attn_meansim_cuda", needs, hint, generations=fp16),
    )


@backend(
    AttnImplType.SPARGE_ATTN,
    layout="BNSD",
    sources=_sparge_sources(),
    generations=((8, 0), (8, 6), (8, 7), (8, 9), 9),
    head_dims=(64, 128),
    # Its causal flag prunes blocks but does not mask inside one.
    has_causal=False,
    has_gqa=False,
    has_cross=False,
    is_exact=False,
    min_queries=128,
)
def sparge_attn(entry: Entry, call: Call):
    out = entry.call(
        call.q, call.k, call.v, is_causal=False, scale=call.scale, tensor_layout="HND", output_dtype=call.q.dtype
    )
    return out, None


@backend(
    AttnImplType.TRITON_INT8,
    layout="BNSD",
    is_triton=True,
    generations=(8, 9, 10, 11, 12),
    head_dims=(64, 128),
    has_causal=False,
    lse_keyword="return_lse",
    is_exact=False,
)
def triton_int8(entry: Entry, call: Call):
    """int8 scores by our own kernels: SageAttention's per-block numerics without its packages."""
    # Every score of a query changes by the same amount, which its softmax does not see, and keys keep more of their
    # 8 bits for what tells them apart.
    mean = call.k.mean(dim=2, keepdim=True)
    q, q_scale = kernels.per_block_quant_int8(call.q, 128, factor=call.scale * math.log2(math.e))
    k, k_scale = kernels.per_block_quant_int8(call.k, 64, mean)
    out, lse = kernels.int8_attention(q, k, call.v, q_scale, k_scale, call.return_lse)
    if lse is None:
        return out, None
    mean = mean.repeat_interleave(call.q.shape[1] // call.k.shape[1], dim=1).float()
    return out, lse + torch.matmul(call.q.float(), mean.transpose(-1, -2)).squeeze(-1) * call.scale


def run_chosen(impl: AttnImplType, call: Call, strict: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out [B, N, Sq, Dv] and lse or None, by what `choose` names; AUTO goes on to the next where a package fails."""
    return TABLE.run(
        lambda without: choose(impl, call, strict, without),
        lambda record, entry: run(record, entry, call),
        call.describe,
        is_replaceable=impl is AttnImplType.AUTO,
    )


def choose(
    impl: AttnImplType, call: Call, strict: bool = False, without: frozenset[AttnImplType] = frozenset()
) -> tuple[DenseBackend, Entry]:
    """The record and function that compute `call` when `impl` is asked for; AUTO passes over those in `without`.

    AUTO takes the first exact backend of its order that is here and takes the call, without a word. Another `impl`
    that cannot is replaced by TORCH_SDPA with one warning a process and kind of reason; with `strict`, ValueError.
    """
    if impl is AttnImplType.AUTO:
        return _choose_auto(call, without)
    if impl.takes_sparse_config:
        return _choose_without_pattern(impl, call, strict)
    found = TABLE.probe(impl, call.q.device)
    if isinstance(found, str):
        return TABLE.fall_back(impl, found, strict), Entry()
    record = TABLE.record(impl)
    refusal = unsuitable(record, found, call)
    if refusal is None:
        return record, found
    if refusal.kind == "cross" and not record.is_exact and not strict:
        # A sparse pattern is for the video's own tokens; the text's cross-attention is dense by design.
        return TABLE.record(TABLE.fallback), Entry()
    return TABLE.fall_back(impl, refusal.text, strict, refusal.kind), Entry()


def _choose_without_pattern(impl: AttnImplType, call: Call, strict: bool) -> tuple[DenseBackend, Entry]:
    """What computes a call that the sparse pattern does not take: dense, and said so except for text."""
    if call.q.shape[2] != call.k.shape[2]:
        return _choose_auto(call)
    if call.mask is not None:
        kind, reason = "mask", "it takes no attention mask beside its own"
    elif call.is_causal:
        kind, reason = "causal", "it has no causal form"
    elif call.dropout:
        kind, reason = "dropout", "it has no dropout"
    else:
        kind, reason = "state", "attention() was given no sparse_state, so it does not know the video's shape"
    return TABLE.fall_back(impl, reason, strict, kind), Entry()


def _choose_auto(call: Call, without: frozenset[AttnImplType] = frozenset()) -> tuple[DenseBackend, Entry]:
    for impl in auto_order(call.q.device):
        if impl in without:
            continue
        found = TABLE.probe(impl, call.q.device)
        if isinstance(found, Entry) and unsuitable(TABLE.record(impl), found, call) is None:
            return TABLE.record(impl), found
    return TABLE.record(TABLE.fallback), Entry()


def auto_order(device: torch.device | None = None) -> tuple[AttnImplType, ...]:
    """The exact backends that AUTO tries on the GPU of `device`, fastest first, before TORCH_SDPA."""
    platform = platforms.current_platform
    if device is not None and device.type != platform.device_type:
        return ()
    arch = platform.cuda_arch(device)
    if arch is None:
        return ()
    fa2, fa3, fa4 = AttnImplType.FLASH_ATTN_2, AttnImplType.FLASH_ATTN_3, AttnImplType.FLASH_ATTN_4
    # A caller may have switched it off (`torch.nn.attention.sdpa_kernel`).
    cudnn = (AttnImplType.TORCH_CUDNN,) if torch.backends.cuda.cudnn_sdp_enabled() else ()
    if arch[0] in (9, 10, 11):
        # FlashAttention 2 has no code for the tensor cores of Hopper and data-centre Blackwell; cuDNN has.
        return (fa4, fa3, *cudnn, fa2)
    return (fa2, *cudnn)


def availability(device: torch.device | None = None) -> dict[AttnImplType, str | None]:
    """For each member but AUTO: None when it can be used on `device` (default: the current one), else the reason."""
    # PyTorch's own operators compute the patterns wherever nothing faster does.
    return {
        impl: None if impl.takes_sparse_config else TABLE.reason(impl, device)
        for impl in AttnImplType
        if impl is not AttnImplType.AUTO
    }


def describe_choice(
    impl: AttnImplType | AttentionConfig | str = AttnImplType.AUTO, device: torch.device | str | None = None
) -> str:
    """One line for logs: what is used on `device` when `impl` is asked for, and why not something else."""
    device = None if device is None else torch.device(device)
    impl = impl.attn_impl if isinstance(impl, AttentionConfig) else AttnImplType.parse(impl)
    if impl.takes_sparse_config:
        dense = describe_choice(device=device)
        return f"{impl.name} by {describe_executor(device)} where a sparse_state is given (dense: {dense})"
    if impl is not AttnImplType.AUTO:
        reason = TABLE.reason(impl, device)
        return impl.name if reason is None else f"{TABLE.fallback.name} ({impl.name} cannot be used: {reason})"
    order = auto_order(device)
    usable = [i.name for i in order if TABLE.reason(i, device) is None] + [TABLE.fallback.name]
    rest = [f"{i.name}: {TABLE.reason(i, device)}" for i in order if i.name not in usable]
    line = f"AUTO: {usable[0]}" + (
        f", {' or '.join(usable[1:])} where it does not take the inputs" if usable[1:] else ""
    )
    return f"{line} ({'; '.join(rest)})" if rest else line


def supports_return_lse(impl: AttnImplType | str) -> bool:
    """Whether `impl` can return the log-sum-exp; one that cannot leaves such calls to `get_lse_fallback_impl()`."""
    impl = AttnImplType.parse(impl)
    record = TABLE.record(impl)
    return impl.takes_sparse_config or (record is not None and bool(record.lse_keyword))


def get_lse_fallback_impl() -> AttnImplType:
    """The backend that always returns the log-sum-exp."""
    return AttnImplType.TORCH_SDPA


SDPA_AVAILABLE = True
FLASH_ATTN_2_AVAILABLE = TABLE.is_present(AttnImplType.FLASH_ATTN_2)
FLASH_ATTN_3_AVAILABLE = TABLE.is_present(AttnImplType.FLASH_ATTN_3)
FLASH_ATTN_4_AVAILABLE = TABLE.is_present(AttnImplType.FLASH_ATTN_4)
SAGE_ATTN_AVAILABLE = TABLE.is_present(AttnImplType.SAGE_ATTN_2_8_16)
SPARGE_ATTN_AVAILABLE = TABLE.is_present(AttnImplType.SPARGE_ATTN)
