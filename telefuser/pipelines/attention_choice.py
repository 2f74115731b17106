"""Which attention a run takes: a dense backend, or a sparse pattern with settings that fit the run's length and size.

`WanPipeline` and `telefuser generate` settle it before any model runs. A grid is (frames, rows, columns) of the tokens
of one video.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from telefuser.core.config import AttentionConfig, AttnImplType, SparseAttentionConfig
from telefuser.models.wan_video_dit import WanModel
from telefuser.ops.attention import MaskMap, SparseAttentionState
from telefuser.ops.attention.backends import describe_choice
from telefuser.ops.attention.block_mask import BlockMask
from telefuser.ops.attention.block_sparse import TABLE, name_executor
from telefuser.pipelines.request import GenerationRequest

# Published with radial attention (arXiv:2506.19852) for Wan 2.1, the 1.3B and the 14B alike: decay 0.2, blocks of 128
# tokens, the first layer dense, and the first 12 of 50 steps; its distilled model takes 1 of 4, the same share.
# Finer blocks are no better for small videos: of frames of 64 tokens, blocks of 64 leave a frame only itself and the
# first one, and the embedded model then paints each frame in a colour of its own.
DECAY, BLOCK_SIZE, DENSE_LAYERS = 0.2, 128, 1
_DENSE_STEPS, _OF_STEPS = 12, 50
_FIELDS = {
    "decay": "decay_factor",
    "dense_steps": "dense_timesteps",
    "dense_layers": "dense_layers",
    "local_window": "local_window_size",
}


class Run(NamedTuple):
    """What a pattern has to know of a run: the tokens of one video, the denoising steps, and the model's sizes."""

    grid: tuple[int, int, int]
    steps: int
    num_layers: int
    num_heads: int
    head_dim: int

    @classmethod
    def of(
        cls, request: GenerationRequest, dim: int, num_heads: int, num_layers: int, patch_size: Sequence[int]
    ) -> Run:
        """Of a request to a model of these sizes."""
        grid = tuple(size // patch for size, patch in zip(request.latent_shape(1)[1:], patch_size))
        return cls(grid, request.steps, num_layers, num_heads, dim // num_heads)

    @property
    def num_tokens(self) -> int:
        return math.prod(self.grid)

    @property
    def mask_map(self) -> MaskMap:
        return MaskMap(self.num_tokens, self.grid[0], grid=self.grid)

    def block_mask(self, config: AttentionConfig) -> BlockMask:
        """On the host, for looking at."""
        return self.mask_map.block_mask(self.num_tokens, config.sparse_config)


def parse_local_window(text: str | None) -> int | tuple[int, ...] | None:
    """A window as a command line takes it: "6" for all three axes, "2,6,6" for frames, rows and columns."""
    if text is None:
        return None
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*,\s*\d+\s*)?", text):
        raise ValueError(f"local window {text!r} is not a number of tokens or FRAMES,ROWS,COLUMNS, for example 2,6,6")
    sizes = tuple(int(size) for size in text.split(","))
    return sizes if len(sizes) == 3 else sizes[0]


def settle_attention(
    attention: str | AttnImplType | AttentionConfig,
    *,
    decay: float | None = None,
    dense_steps: int | None = None,
    dense_layers: int | None = None,
    local_window: int | Sequence[int] | None = None,
    steps: int,
) -> AttentionConfig:
    """The configuration of a run of `steps` steps.

    A pattern's name ("radial", "local") takes the published settings, the dense steps scaled to `steps`; an
    `AttentionConfig` keeps its own. What is given besides replaces either's.

    Raises ValueError for an unknown name, a value outside its limits, and one that this attention does not have.
    """
    config = attention
    if not isinstance(config, AttentionConfig):
        impl = AttnImplType.parse(attention)
        sparse = _published(steps) if impl.takes_sparse_config else None
        config = AttentionConfig(attn_impl=impl, sparse_config=sparse)
    given = {"decay": decay, "dense_steps": dense_steps, "dense_layers": dense_layers, "local_window": local_window}
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return config
    for name, value in given.items():
        _check(name, value, config.attn_impl)
    changes = {_FIELDS[name]: value for name, value in given.items()}
    return replace(config, sparse_config=replace(config.sparse_config, **changes))


def _published(steps: int) -> SparseAttentionConfig:
    return SparseAttentionConfig(
        dense_timesteps=(2 * steps * _DENSE_STEPS + _OF_STEPS) // (2 * _OF_STEPS),  # rounded
        dense_layers=DENSE_LAYERS,
        decay_factor=DECAY,
        block_size=BLOCK_SIZE,
    )


def _check(name: str, value: Any, impl: AttnImplType) -> None:
    """Under the names that the caller typed; the configuration would speak of its own fields."""
    patterns = {"decay": ("radial",), "local_window": ("local",)}.get(name, ("radial", "local"))
    if impl not in map(AttnImplType.parse, patterns):
        wanted = " or ".join(f"attention={pattern!r}" for pattern in patterns)
        raise ValueError(
            f"{name} {value} has no meaning for the attention {impl.name}: use {wanted}, or leave {name} out"
        )
    if name == "decay":
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and 0 < value < math.inf):
            raise ValueError(f"decay must be a finite number above 0, got {value!r}: 0.2 to 1.0 is usual")
    elif name == "local_window":
        sizes = value if isinstance(value, list | tuple) else (value,)
        if len(sizes) not in (1, 3) or not all(_is_count(size) for size in sizes) or value == 0:
            raise ValueError(
                f"local_window must be a number of at least 1, or (frames, rows, columns) of at least 0 each, "
                f"got {value!r}: 6 is the default"
            )
    elif not _is_count(value):
        raise ValueError(f"{name} must be an integer of at least 0, got {value!r}: 0 leaves none of them dense")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def make_state(config: AttentionConfig | None, run: Run) -> SparseAttentionState | None:
    """The state of a run, None without a sparse `config`.

    Settings under which nothing is left out, be it for the steps, the layers or the pattern, say so once a process.
    """
    if config is None or not config.is_sparse():
        return None
    if run.block_mask(config).density == 1:
        TABLE.warn_once(
            ("never sparse", "pattern"),
            f"sparse attention: {_pattern(config.sparse_config)} keeps every pair of the {run.num_tokens} tokens of "
            "this video, so nothing will be sparse; it is for longer or larger videos",
        )
    return SparseAttentionState(config, run.mask_map, num_steps=run.steps, num_layers=run.num_layers)


@contextlib.contextmanager
def attending(dit: WanModel, config: AttentionConfig | None) -> Iterator[None]:
    """`dit` with the dense backend of `config`, within the block only. A pattern comes with its state instead."""
    before = dit.blocks[0].self_attn.attention_config
    is_other = config is not None and not config.is_sparse() and config != before
    if is_other:
        dit.set_attention_config(config)
    try:
        yield
    finally:
        if is_other:
            dit.set_attention_config(before)


def describe_attention(config: AttentionConfig, run: Run, device: torch.device, dtype: torch.dtype) -> str:
    """One line for logs: the backend; of a pattern also its settings, executor, density, and what stays dense."""
    if not config.is_sparse():
        return describe_choice(config, device)
    sparse, mask = config.sparse_config, run.block_mask(config)
    dense_steps, dense_layers = min(sparse.dense_timesteps, run.steps), min(sparse.dense_layers, run.num_layers)
    skipped = (1 - dense_steps / run.steps) * (1 - dense_layers / run.num_layers) * (1 - mask.density)
    shape = 1, run.num_heads, run.num_tokens, run.head_dim
    executor = name_executor(shape, dtype, device, mask, sparse.use_sage_attention)
    return (
        f"{_pattern(sparse)} by {executor}: {mask.density:.0%} of the token pairs where it is "
        f"sparse, {1 - skipped:.0%} over the run; dense: {_first('step', dense_steps, run.steps)}, "
        f"{_first('layer', dense_layers, run.num_layers)} and the text's ({describe_choice(device=device)})"
    )


def _pattern(sparse: SparseAttentionConfig) -> str:
    if sparse.sparse_impl is AttnImplType.RADIAL_ATTN:
        return f"RADIAL_ATTN (decay {sparse.decay_factor:g}, blocks of {sparse.block_size})"
    return f"LOCAL_SPARSE_ATTN (window {sparse.local_window_size}, blocks of {sparse.block_size})"


def _first(what: str, count: int, total: int) -> str:
    if count == 0:
        return f"no {what}"
    return f"{what} 1 of {total}" if count == 1 else f"{what}s 1 to {count} of {total}"


def attention_metadata(config: AttentionConfig) -> dict[str, Any]:
    """What a video's metadata says of it, as plain JSON values under the names that a call takes."""
    found: dict[str, Any] = {"attention": config.attn_impl.name.lower()}
    sparse = config.sparse_config
    if sparse is None:
        return found
    if sparse.sparse_impl is AttnImplType.RADIAL_ATTN:
        found["decay"] = sparse.decay_factor
    else:
        window = sparse.local_window_size
        found["local_window"] = window if isinstance(window, int) else list(window)
    found |= {"dense_steps": sparse.dense_timesteps, "dense_layers": sparse.dense_layers}
    return found | {"block_size": sparse.block_size, "use_sage_attention": sparse.use_sage_attention}
