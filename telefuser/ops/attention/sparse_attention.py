"""Sparse attention over a video's tokens: what a pattern needs to know of the video and of the run, and its masks.

`attention(..., sparse_state=state)` comes here; `sparse_attention` is the same without a configuration object. The
patterns' masks are in `radial_attention_core.py` and `local_sparse_attn.py`, what computes them in `block_sparse.py`.
"""

import functools
import itertools
import weakref

import torch

from telefuser.core.config import AttentionConfig, AttnImplType, SparseAttentionConfig
from telefuser.ops.attention import local_sparse_attn, radial_attention_core
from telefuser.ops.attention import torch_sdpa as sdpa
from telefuser.ops.attention.backends import run_chosen
from telefuser.ops.attention.block_mask import BlockMask
from telefuser.ops.attention.block_sparse import TABLE, block_sparse_attention
from telefuser.ops.attention.dense_backend import Call
from telefuser.ops.attention.local_sparse_attn import check_grid, local_block_mask
from telefuser.ops.attention.radial_attention_core import MODEL_TYPES, check_tokens, radial_block_mask

_PATTERNS = {AttnImplType.RADIAL_ATTN: "radial", AttnImplType.LOCAL_SPARSE_ATTN: "local"}


class MaskMap:
    """The shape of one video in tokens, and the block masks over it.

    video_token_num: tokens of the video, which come first in the sequence; text may follow.
    num_frame: latent frames, each with the same number of tokens.
    grid: (frames, rows, columns) of the tokens, columns fastest; a local window needs it, radial attention does not.
    Raises ValueError where these disagree.
    """

    def __init__(self, video_token_num: int = 25440, num_frame: int = 16, grid: tuple[int, int, int] | None = None):
        check_tokens(video_token_num, num_frame, video_token_num)
        if grid is not None:
            grid = check_grid(grid)
            if grid[0] != num_frame or grid[0] * grid[1] * grid[2] != video_token_num:
                raise ValueError(
                    f"grid {grid} has {grid[0]} frames and {grid[0] * grid[1] * grid[2]} tokens, but num_frame is "
                    f"{num_frame} and video_token_num {video_token_num}"
                )
        self.video_token_num = video_token_num
        self.num_frame = num_frame
        self.grid = grid

    def __repr__(self) -> str:
        return f"MaskMap(video_token_num={self.video_token_num}, num_frame={self.num_frame}, grid={self.grid})"

    def block_mask(
        self,
        tokens: int,
        config: SparseAttentionConfig,
        model_type: str = "wan",
        device: torch.device | str = "cpu",
    ) -> BlockMask:
        """The mask over a sequence of `tokens` (video, then text) that `config` describes, made once a shape.

        A query block for which the pattern keeps nothing, which happens where frames are shorter than a block, sees
        everything. Raises ValueError for fewer tokens than the video has and for a local window without a grid.
        """
        device = torch.device(device)
        if config.sparse_impl is AttnImplType.LOCAL_SPARSE_ATTN:
            if self.grid is None:
                raise ValueError(
                    "a local window needs to know where tokens lie: give MaskMap(video_token_num, num_frame, "
                    "grid=(frames, rows, columns))"
                )
            return _local(self.grid, tokens, config.block_size, config.local_window_size, device)
        shape = self.video_token_num, self.num_frame
        return _radial(*shape, tokens, config.block_size, config.decay_factor, model_type, device)

    def query_log_mask(
        self,
        query: torch.Tensor,
        sparse_type: str | AttnImplType,
        block_size: int = 128,
        decay_factor: float = 0.5,
        model_type: str | None = None,
        local_window_size: int | tuple[int, int, int] = 6,
    ) -> torch.Tensor:
        """The block mask, bool [Nb, Nb], for `query` [B, S, N, D] or [S, N, D]; "radial", "local" or "dense".

        The result is cached and shared: do not write to it.
        """
        tokens = query.shape[-3]
        if sparse_type == "dense":
            blocks = -(-tokens // block_size)
            return torch.ones(blocks, blocks, dtype=torch.bool, device=query.device)
        config = SparseAttentionConfig(
            sparse_impl=AttnImplType.parse(sparse_type),
            block_size=block_size,
            decay_factor=decay_factor,
            local_window_size=local_window_size,
        )
        return self.block_mask(tokens, config, model_type or "wan", query.device).keep

    @classmethod
    def clear_cache(cls) -> None:
        """Forget every mask and plan; at most 16 of each pattern are kept."""
        _radial.cache_clear()
        _local.cache_clear()
        radial_attention_core.clear_cache()
        local_sparse_attn.clear_cache()


def create_radial_mask_map(video_token_num: int, num_frame: int) -> MaskMap:
    """A `MaskMap` for radial attention, which needs no grid."""
    return MaskMap(video_token_num, num_frame)


def clear_radial_mask_cache() -> None:
    """`MaskMap.clear_cache()`."""
    MaskMap.clear_cache()


@functools.lru_cache(maxsize=16)
def _radial(video_tokens, num_frame, tokens, block_size, decay_factor, model_type, device) -> BlockMask:
    keep = radial_block_mask(video_tokens, num_frame, tokens, block_size, decay_factor, model_type, device)
    return _opened(keep, block_size, tokens)


@functools.lru_cache(maxsize=16)
def _local(grid, tokens, block_size, window, device) -> BlockMask:
    return _opened(local_block_mask(grid, tokens, block_size, window, device), block_size, tokens)


def _opened(keep: torch.Tensor, block_size: int, tokens: int) -> BlockMask:
    with torch.inference_mode(False):
        return BlockMask(keep | ~keep.any(dim=-1, keepdim=True), block_size, tokens)


class SparseAttentionState:
    """A sparse pattern, the video it is for, and where the run is: what `attention` needs beside q, k and v.

    config: an `AttentionConfig` with a sparse pattern, or its `SparseAttentionConfig`.
    mask_map: the video's shape.
    model_type: "wan" (every query sees the whole first frame) or "hunyuan".
    num_steps, num_layers: of the run, if known: a config under which no step or no layer is ever sparse says so once.

    `config` then is the `SparseAttentionConfig` and `attention_config` what `attention` takes with this state.
    `update` says which denoising step and layer come next, both from 0. One state serves one run at a time.
    """

    def __init__(
        self,
        config: AttentionConfig | SparseAttentionConfig,
        mask_map: MaskMap,
        model_type: str = "wan",
        *,
        num_steps: int | None = None,
        num_layers: int | None = None,
    ):
        sparse = config.sparse_config if isinstance(config, AttentionConfig) else config
        if not isinstance(sparse, SparseAttentionConfig) or sparse.sparse_impl is None:
            raise ValueError(
                f"{config!r} names no sparse pattern; "
                "use AttentionConfig.radial_attention() or .local_sparse_attention()"
            )
        if not isinstance(mask_map, MaskMap):
            raise ValueError(f"mask_map is {mask_map!r}; give a MaskMap of the video's tokens")
        if model_type not in MODEL_TYPES:
            raise ValueError(f"model_type is {model_type!r}; choose one of {', '.join(MODEL_TYPES)}")
        if sparse.sparse_impl is AttnImplType.LOCAL_SPARSE_ATTN and mask_map.grid is None:
            raise ValueError("a local window needs MaskMap(video_token_num, num_frame, grid=(frames, rows, columns))")
        self.config = sparse
        self.attention_config = (
            config
            if isinstance(config, AttentionConfig)
            else AttentionConfig(attn_impl=sparse.sparse_impl, sparse_config=sparse)
        )
        self.mask_map = mask_map
        self.model_type = model_type
        # Number, step and layer. A tensor, because compiled code that read Python numbers would be compiled again for
        # every step; the number finds this object inside an opaque operator, which takes tensors only.
        with torch.inference_mode(False):
            self.position = torch.tensor([next(_numbers), 0, 0], dtype=torch.int64, device="cpu")
        _STATES[int(self.position[0])] = self
        _warn_if_never_sparse(sparse, num_steps, num_layers)

    def __reduce__(self):
        # A copy gets a number of its own.
        return _restored, (self.attention_config, self.mask_map, self.model_type, self.numeral_timestep, self.layer_idx)

    @property
    def numeral_timestep(self) -> int:
        """The denoising step, from 0."""
        return int(self.position[1])

    @property
    def layer_idx(self) -> int:
        """The layer, from 0."""
        return int(self.position[2])

    def update(self, numeral_timestep: int | None = None, layer_idx: int | None = None) -> None:
        """Set the step, the layer, or both."""
        if numeral_timestep is not None:
            self.position[1] = numeral_timestep
        if layer_idx is not None:
            self.position[2] = layer_idx

    def should_use_dense(self) -> bool:
        """Whether attention over all tokens is due at the present step and layer."""
        return self.config.should_use_dense(self.numeral_timestep, self.layer_idx)

    def get_sparsity_type(self) -> str:
        """ "radial", "local", or "dense" where the present step and layer attend densely."""
        return "dense" if self.should_use_dense() else _PATTERNS[self.config.sparse_impl]

    def block_mask(self, tokens: int, device: torch.device | str = "cpu") -> BlockMask:
        """The mask over a sequence of `tokens`, whatever the step."""
        return self.mask_map.block_mask(tokens, self.config, self.model_type, device)


_numbers = itertools.count()
_STATES: weakref.WeakValueDictionary[int, SparseAttentionState] = weakref.WeakValueDictionary()


def _restored(config, mask_map, model_type, numeral_timestep, layer_idx) -> SparseAttentionState:
    state = SparseAttentionState(config, mask_map, model_type)
    state.update(numeral_timestep, layer_idx)
    return state


def _warn_if_never_sparse(config: SparseAttentionConfig, num_steps: int | None, num_layers: int | None) -> None:
    for field, total, what in (("dense_timesteps", num_steps, "steps"), ("dense_layers", num_layers, "layers")):
        dense = getattr(config, field)
        if total is not None and dense >= total:
            TABLE.warn_once(
                ("never sparse", field),
                f"sparse attention: {field} is {dense} and the run has {total} {what}, so nothing will be sparse; "
                f"give fewer dense {what}",
            )


def attend(call: Call, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`call` by the pattern of the state that `position` is of, or dense by AUTO where the step or layer is dense.

    Inside a compiled graph `position` is what the state says at this place of the program; the state's own tensor is
    written when the graph ends.
    """
    number, numeral_timestep, layer_idx = position.tolist()
    state, tokens = _STATES[number], call.q.shape[2]
    check_tokens(state.mask_map.video_token_num, state.mask_map.num_frame, tokens)
    if state.config.should_use_dense(numeral_timestep, layer_idx):
        return run_chosen(AttnImplType.AUTO, call, strict=False)
    mask = state.block_mask(tokens, call.q.device)
    return block_sparse_attention(call, mask, quantised=state.config.use_sage_attention)


def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sparse_config: AttentionConfig | SparseAttentionConfig,
    mask_map: MaskMap,
    numeral_timestep: int = 0,
    layer_idx: int = 0,
    model_type: str = "wan",
    scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Self-attention by a sparse pattern: q, k, v [B, S, N, D] to [B, S, N, D], as `attention` with a sparse state.

    With `return_lse` also the log-sum-exp [B, N, S] in float32. Dense in the first `dense_timesteps` and layers.
    """
    state = SparseAttentionState(sparse_config, mask_map, model_type)
    state.update(numeral_timestep, layer_idx)
    q, k, v = (sdpa.prepare_tensor(t.transpose(1, 2)) for t in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = attend(Call(q, k, v, None, scale, return_lse=return_lse), state.position)
    out = out.transpose(1, 2)
    return (out, lse) if return_lse else out
