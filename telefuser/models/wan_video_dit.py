"""The Wan diffusion transformer, text to video: `WanModel` predicts the flow velocity of a latent video.

Called by `pipelines/denoise.py` at every step and by the training code. State-dict keys are the official ones.
Shape letters: B batch, S tokens (F*H*W patches), L text tokens, T timesteps a sample (1 or S), C model width, N heads,
D head width, F H W the patch grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from telefuser.core.config import AttentionConfig
from telefuser.ops.activations import GELUTanh
from telefuser.ops.attention import SparseAttentionState, attention, long_context_attention
from telefuser.ops.ffn import linear_gelu_tanh
from telefuser.ops.merged_linear import merge_children
from telefuser.ops.normalization import LayerNorm, RMSNorm
from telefuser.ops.quantized_linear import LinearFP8
from telefuser.ops.quantized_rows import QuantizedRows
from telefuser.ops.residual_norm import add_gated, add_layer_norm_modulate, layer_norm_modulate
from telefuser.ops.rotary import rms_norm_rotary
from telefuser.ops.sequence_parallel import TokenSplit, sequence_parallel_mesh, split_tokens

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

WAN_DIT_SIZES = {
    "T2V-1.3B": {"dim": 1536, "ffn_dim": 8960, "num_heads": 12, "num_layers": 30},
    "T2V-14B": {"dim": 5120, "ffn_dim": 13824, "num_heads": 40, "num_layers": 40},
}

# Bounds the memory: one table is 16.8 MB at 832x480, 81 frames (32760 tokens, head width 128).
_MAX_ROPE_TABLES = 8


def timestep_sinusoid(timestep: Tensor, dim: int) -> Tensor:
    """Sinusoidal embedding of `timestep` [...] -> [..., dim] float64: the dim/2 cosines first, then the sines.

    Frequencies 10000^(-i / (dim/2)) (Vaswani et al. 2017, arXiv:1706.03762, section 3.5). In float64 because t goes to
    1000: in float32 the angle alone is off by 3e-5, which reaches the model's output as 1e-5.
    """
    half = dim // 2
    exponents = torch.arange(half, dtype=torch.float64, device=timestep.device) / half
    angles = timestep.to(torch.float64).unsqueeze(-1) * torch.pow(10000.0, -exponents)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def rope_angles(head_dim: int, grid: tuple[int, int, int], device: torch.device | None = None) -> Tensor:
    """Rotary angles (Su et al. 2021, arXiv:2104.09864) of the tokens of an (F, H, W) grid: [F*H*W, head_dim/2] float64.

    Each axis owns a range of the pairs (x[2i], x[2i+1]): height and width head_dim//6 pairs each, the frame axis, which
    comes first, the rest. Within an axis of p pairs the frequencies are 10000^(-i/p); positions count from 0.
    """
    side = head_dim // 6
    angles = []
    for axis, (size, pairs) in enumerate(zip(grid, (head_dim // 2 - 2 * side, side, side))):
        exponents = torch.arange(pairs, dtype=torch.float64, device=device) / pairs
        position = torch.arange(size, dtype=torch.float64, device=device)
        of_axis = torch.outer(position, torch.pow(10000.0, -exponents))
        shape = [1, 1, 1, pairs]
        shape[axis] = size
        angles.append(of_axis.view(shape).expand(*grid, pairs))
    return torch.cat(angles, dim=-1).flatten(0, 2)


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype that autocast computes in on this device type now; None where it is off or does not exist (meta).

    `torch.amp.is_autocast_available` would say so for every device type, but breaks the graph of torch.compile (2.11).
    """
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def _compute_dtype(linear: nn.Linear | nn.Conv3d, device_type: str) -> torch.dtype:
    """The dtype that `linear` computes in: autocast's, else that of its parameters.

    The bias is asked, not the weight: a quantised weight's dtype is not one to hold activations in.
    """
    return _autocast_dtype(device_type) or linear.bias.dtype


def _input_dtype(x: Tensor, *linears: nn.Linear | LinearFP8) -> torch.dtype:
    """The dtype in which what is made from x goes into `linears`: an FP8 one where each would else quantise it itself,
    which takes a pass over memory of its own."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        if all(isinstance(linear, LinearFP8) and linear.takes_rows(x.device) for linear in linears):
            return linears[0].rows_dtype
    return _compute_dtype(linears[0], x.device.type)


def _to_compute_dtype(x: Tensor, linear: nn.Linear | nn.Conv3d) -> Tensor:
    return x.to(_compute_dtype(linear, x.device.type))


class Float32Linear(nn.Linear):
    """A linear layer of an fp32 island: float32 arithmetic and result, whatever its parameters' dtype and autocast."""

    def forward(self, x: Tensor) -> Tensor:
        device_type = x.device.type
        with torch.autocast(device_type, enabled=False) if _autocast_dtype(device_type) else nullcontext():
            return F.linear(x.float(), self.weight.float(), self.bias.float())


class PatchEmbedding(nn.Conv3d):
    """Latents to tokens, [B, C_in, F*pt, H*ph, W*pw] -> [B, S, C].

    The parameters are a Conv3d's (official keys), the arithmetic is one matrix product: patches do not overlap, and
    3-D convolutions in bf16 have slow or missing kernels on several devices.
    """

    def forward(self, x: Tensor) -> Tensor:
        pt, ph, pw = self.kernel_size
        batch, channels, frames, height, width = x.shape
        x = x.view(batch, channels, frames // pt, pt, height // ph, ph, width // pw, pw)
        x = x.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)  # [B, S, C_in * pt * ph * pw]
        return F.linear(_to_compute_dtype(x, self), self.weight.flatten(1), self.bias)


class SelfAttention(nn.Module):
    """Attention among all video tokens, with RMSNorm over the whole width of q and k and rotary positions."""

    def __init__(self, dim: int, num_heads: int, eps: float):
        super().__init__()
        self.num_heads = num_heads
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.o = nn.Linear(dim, dim)
        self.norm_q = RMSNorm(dim, eps=eps)
        self.norm_k = RMSNorm(dim, eps=eps)
        # What `merge_projections` makes of q, k and v.
        self.qkv = None
        self.attention_config: AttentionConfig | None = None

    @property
    def projections(self) -> tuple[nn.Linear | LinearFP8, ...]:
        """The layers that make queries, keys and values of the video's tokens."""
        return (self.q, self.k, self.v) if self.qkv is None else (self.qkv,)

    def merge_projections(self) -> None:
        """Make queries, keys and values by one FP8 product instead of three, where all three are FP8 of one kind.

        From 1536 columns a wider one is faster: to 1536 an H200 reaches 1110 TFLOP/s, to 8960 1328. From 5120 both are
        alike, 1425 and 1360. The weights move once, their values and the keys of state dicts stay.
        """
        linears = self.projections
        is_fp8 = len(linears) == 3 and all(isinstance(linear, LinearFP8) for linear in linears)
        if is_fp8 and len({linear.weight.dtype for linear in linears}) == 1:
            merge_children(self, ("q", "k", "v"), "qkv")

    def project(self, x: Tensor | QuantizedRows) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, S, C] of x, neither normed nor split into heads."""
        if self.qkv is not None:
            return self.qkv(x).chunk(3, dim=-1)
        return self.q(x), self.k(x), self.v(x)

    def split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1))  # [B, S, N, D]

    def forward(
        self,
        x: Tensor | QuantizedRows,
        rope: tuple[Tensor, Tensor],
        split: TokenSplit | None = None,
        sparse_state: SparseAttentionState | None = None,
    ) -> Tensor:
        """x [B, S, C] -> [B, S, C]. With `split` x and `rope` are this process's part of the tokens.

        sparse_state: its configuration takes the place of this module's.
        """
        config = self.attention_config if sparse_state is None else sparse_state.attention_config
        weights = self.norm_q.weight, self.norm_k.weight
        q, k, v = self.project(x)
        q, k = rms_norm_rotary(q, k, *weights, rope, self.num_heads, self.norm_q.eps)  # [B, S, N, D]
        v = self.split_heads(v)
        if split is None:
            out = attention(q, k, v, attention_config=config, sparse_state=sparse_state)
        else:
            shared = {"device_mesh": split.device_mesh, "token_counts": split.counts}
            out = long_context_attention(q, k, v, attention_config=config, sparse_state=sparse_state, **shared)
        return self.o(out.flatten(2))


class CrossAttention(SelfAttention):
    """Attention from video tokens to text tokens: no rotary positions, no mask (padding rows are attended to)."""

    def project_context(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, L, N, D] of the embedded text; they depend on neither the latents nor the timestep."""
        # Not one product in FP8 either: it runs once a prompt, and the values, kept for all steps, would be a part of
        # its result and keep the unnormed keys alive too, 0.2 GiB a prompt in the 14B.
        return self.split_heads(self.norm_k(self.k(text))), self.split_heads(self.v(text))

    def forward(self, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = self.split_heads(self.norm_q(self.q(x)))
        return self.o(attention(q, k, v, attention_config=self.attention_config).flatten(2))


class WanBlock(nn.Module):
    """Self-attention, cross-attention (after norm3) and feed-forward (after norm2) on an fp32 residual stream."""

    def __init__(self, dim: int, ffn_dim: int, num_heads: int, eps: float):
        super().__init__()
        self.norm1 = LayerNorm(dim, eps=eps, elementwise_affine=False)
        self.self_attn = SelfAttention(dim, num_heads, eps)
        self.norm3 = LayerNorm(dim, eps=eps)
        self.cross_attn = CrossAttention(dim, num_heads, eps)
        self.norm2 = LayerNorm(dim, eps=eps, elementwise_affine=False)
        self.ffn = nn.Sequential(nn.Linear(dim, ffn_dim), GELUTanh(), nn.Linear(ffn_dim, dim))
        self.modulation = nn.Parameter(torch.empty(1, 6, dim))

    def project_context(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """`CrossAttention.project_context`; through the block, which is what FSDP gathers the weights of."""
        return self.cross_attn.project_context(text)

    def forward(
        self,
        x: Tensor,
        time_projection: Tensor,
        rope: tuple[Tensor, Tensor],
        text_k: Tensor,
        text_v: Tensor,
        split: TokenSplit | None = None,
        sparse_state: SparseAttentionState | None = None,
    ) -> Tensor:
        """x [B, S, C] fp32, time_projection [B, T, 6, C] fp32, text_k and text_v [B, L, N, D] -> [B, S, C] fp32.

        split: says that S, the rows of `rope` and T (unless 1) are this process's part of the tokens.
        sparse_state: of self-attention; the text has no place in the video's grid, so cross-attention is dense.
        """
        # Six [B, T, C]. With one timestep a sample T is 1 and each use broadcasts instead of holding S copies.
        shift1, scale1, gate1, shift2, scale2, gate2 = (self.modulation.float() + time_projection).unbind(2)
        # Every norm takes the residual addition before it along and gives what the next projection computes in, so that
        # the fp32 stream is read and written once between two projections.
        norm1, norm2, norm3 = self.norm1, self.norm2, self.norm3
        dtype = _input_dtype(x, *self.self_attn.projections)
        h = layer_norm_modulate(x, shift1, scale1, eps=norm1.eps, out_dtype=dtype)
        h = self.self_attn(h, rope, split, sparse_state)
        dtype = _input_dtype(x, self.cross_attn.q)
        x, h = add_layer_norm_modulate(
            x, h, gate1, weight=norm3.weight, bias=norm3.bias, eps=norm3.eps, out_dtype=dtype
        )
        h = self.cross_attn(h, text_k, text_v)
        up, _, down = self.ffn
        dtype = _input_dtype(x, up)
        x, h = add_layer_norm_modulate(x, h, None, shift2, scale2, eps=norm2.eps, out_dtype=dtype)
        dtype = _input_dtype(x, down)
        h = linear_gelu_tanh(h, up, dtype if dtype.itemsize == 1 else None)
        return add_gated(x, down(h), gate2)


class Head(nn.Module):
    """Last norm, modulation and projection to patches, all in fp32: [B, S, C] -> [B, S, pt * ph * pw * C_out]."""

    def __init__(self, dim: int, patch_dim: int, eps: float):
        super().__init__()
        self.norm = LayerNorm(dim, eps=eps, elementwise_affine=False)
        self.head = Float32Linear(dim, patch_dim)
        self.modulation = nn.Parameter(torch.empty(1, 2, dim))

    def forward(self, x: Tensor, time_embedding: Tensor) -> Tensor:
        shift, scale = (self.modulation.float() + time_embedding.unsqueeze(2)).unbind(2)  # [B, T, C]
        return self.head(layer_norm_modulate(x, shift, scale, eps=self.norm.eps))


@dataclass(frozen=True)
class PreparedContext:
    """What `WanModel.prepare_context` returns: keys and values [B, L, N, D] of each block, for that model only."""

    key_values: tuple[tuple[Tensor, Tensor], ...]

    @property
    def batch_size(self) -> int:
        return self.key_values[0][0].shape[0]


class WanModel(nn.Module):
    """Diffusion transformer of Wan 2.1 text to video; with a timestep per token also of Wan 2.2 TI2V.

    The block linears and the text and patch embeddings compute in their parameters' dtype (or autocast's). Float32
    whatever that is: time embedding and projection, sum of the modulation, residual stream, head.

    Args:
        dim, ffn_dim, num_heads, num_layers: see `WAN_DIT_SIZES`; the defaults are T2V-1.3B.
        in_dim, out_dim: latent channels in and out.
        text_dim, text_len: width of the text encoder's output; rows to which a prompt is padded with zeros.
        freq_dim: width of the timestep sinusoid.
        eps: of every norm.
        patch_size: (frames, height, width) of the latent patch that makes one token.
        has_image_input: must be False, the image branch is not part of this version.

    Raises:
        ValueError: for sizes that do not fit each other, or an image model.
    """

    # Fragments of the parameter names that a loader keeps in float32; all others take the run's dtype.
    FP32_PARAMETERS = ("time_embedding", "time_projection", "modulation", "head", "norm")

    def __init__(
        self,
        dim: int = 1536,
        in_dim: int = 16,
        ffn_dim: int = 8960,
        out_dim: int = 16,
        text_dim: int = 4096,
        freq_dim: int = 256,
        eps: float = 1e-6,
        patch_size: Sequence[int] = (1, 2, 2),
        num_heads: int = 12,
        num_layers: int = 30,
        has_image_input: bool = False,
        text_len: int = 512,
    ):
        super().__init__()
        if has_image_input:
            raise ValueError("has_image_input=True: image-to-video is not supported, use a text-to-video checkpoint")
        if dim % num_heads or (dim // num_heads) % 2:
            raise ValueError(f"dim {dim} must be num_heads {num_heads} times an even head width")
        if freq_dim % 2:
            raise ValueError(f"freq_dim must be even (cosines and sines), got {freq_dim}")
        if len(patch_size) != 3:
            raise ValueError(f"patch_size must be (frames, height, width), got {tuple(patch_size)}")
        self.dim, self.in_dim, self.out_dim = dim, in_dim, out_dim
        self.text_dim, self.text_len, self.freq_dim = text_dim, text_len, freq_dim
        self.patch_size = tuple(patch_size)
        self.num_heads, self.num_layers = num_heads, num_layers

        self.patch_embedding = PatchEmbedding(in_dim, dim, kernel_size=self.patch_size, stride=self.patch_size)
        self.text_embedding = nn.Sequential(nn.Linear(text_dim, dim), nn.GELU(approximate="tanh"), nn.Linear(dim, dim))
        self.time_embedding = nn.Sequential(Float32Linear(freq_dim, dim), nn.SiLU(), Float32Linear(dim, dim))
        self.time_projection = nn.Sequential(nn.SiLU(), Float32Linear(dim, 6 * dim))
        self.blocks = nn.ModuleList(WanBlock(dim, ffn_dim, num_heads, eps) for _ in range(num_layers))
        self.head = Head(dim, math.prod(self.patch_size) * out_dim, eps)
        self.device_mesh: DeviceMesh | None = None
        self._rope_tables: dict[tuple, tuple[Tensor, Tensor]] = {}
        self.init_weights()

    @classmethod
    def from_config(cls, config: dict) -> WanModel:
        """Build from the keys of an official config.json (`model_type`, `dim`, ...); other keys are ignored.

        Raises:
            ValueError: for another model type than t2v or ti2v, or an option that no released checkpoint uses.
        """
        model_type = config.get("model_type", "t2v")
        if model_type not in ("t2v", "ti2v"):
            raise ValueError(f"model_type {model_type!r} is not supported: use a text-to-video (t2v) checkpoint")
        for key, only in (("window_size", (-1, -1)), ("qk_norm", True), ("cross_attn_norm", True)):
            value = config.get(key, only)
            if (tuple(value) if isinstance(value, list) else value) != only:
                raise ValueError(f"{key} {value!r} is not supported, only {only!r}")
        names = ("dim", "in_dim", "ffn_dim", "out_dim", "text_dim", "freq_dim", "eps", "patch_size", "num_heads")
        names += ("num_layers", "text_len", "has_image_input")
        return cls(**{name: config[name] for name in names if name in config})

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initial weights for training: Xavier linears with zero bias, embeddings of standard deviation 0.02,
        modulations of 1/sqrt(C), and a zero head, so that the untrained model predicts zero."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
            elif isinstance(module, WanBlock | Head):
                nn.init.normal_(module.modulation, std=self.dim**-0.5)
        nn.init.xavier_uniform_(self.patch_embedding.weight.flatten(1))
        for embedding in (self.text_embedding, self.time_embedding):
            nn.init.normal_(embedding[0].weight, std=0.02)
            nn.init.normal_(embedding[2].weight, std=0.02)
        nn.init.zeros_(self.head.head.weight)

    def set_attention_config(self, config: AttentionConfig | None) -> None:
        """Choose the attention of this instance; None is the default choice.

        A sparse config holds for self-attention among video tokens only: text keys have no place in the video grid, so
        cross-attention then stays on the default dense choice.
        """
        for block in self.blocks:
            block.self_attn.attention_config = config
            block.cross_attn.attention_config = None if config is not None and config.is_sparse() else config

    def merge_projections(self) -> None:
        """`SelfAttention.merge_projections` in every block, once the weights are loaded."""
        for block in self.blocks:
            block.self_attn.merge_projections()

    def enable_usp(self, device_mesh: DeviceMesh | None = None) -> None:
        """Share the tokens of every forward pass from now on among the processes of `device_mesh`.

        Its dimensions `ulysses` and `ring` say how; a mesh with neither changes nothing. None takes the mesh that
        `create_device_mesh_from_config` made last. All processes then call the model with the same arguments, and each
        gets the whole result: that of one process, for any number of tokens. Forward only.

        Raises:
            ValueError: when there is no mesh, or one whose dimensions have no names.
        """
        self.device_mesh = sequence_parallel_mesh(device_mesh)

    def prepare_context(self, context: Tensor | Sequence[Tensor]) -> PreparedContext:
        """Embed a prompt and compute every block's cross-attention keys and values: once a prompt, not once a step.

        Args:
            context: text encoder output without its padding rows, [B, L, text_dim] or a list of B tensors
                [L_i, text_dim], L at most `text_len`. Missing rows become zeros before the embedding, which makes
                them one constant vector that takes part in the attention, as in training.

        Raises:
            ValueError: for a wrong width, rank or length.
        """
        text = self._pad_context(context)
        text = self.text_embedding(_to_compute_dtype(text, self.text_embedding[0]))
        return PreparedContext(tuple(block.project_context(text) for block in self.blocks))

    def _pad_context(self, context: Tensor | Sequence[Tensor]) -> Tensor:
        is_batch = isinstance(context, Tensor)
        for sample in [context] if is_batch else context:
            if sample.ndim != (3 if is_batch else 2) or sample.shape[-1] != self.text_dim:
                wanted = f"[B, L, {self.text_dim}] or a list of [L, {self.text_dim}]"
                raise ValueError(f"context must be {wanted}, got {tuple(sample.shape)}")
            if sample.shape[-2] > self.text_len:
                raise ValueError(f"context has {sample.shape[-2]} text tokens, the model takes at most {self.text_len}")
        if is_batch:
            return F.pad(context, (0, 0, 0, self.text_len - context.shape[1]))
        if not context:
            raise ValueError("context is an empty list, it must hold one tensor a sample")
        return torch.stack([F.pad(sample, (0, 0, 0, self.text_len - sample.shape[0])) for sample in context])

    def rope_table(self, grid: tuple[int, int, int], device: torch.device) -> tuple[Tensor, Tensor]:
        """(cos, sin) [S, D/2] float32 of the grid, computed once and kept for the last few grids and devices."""
        key = (grid, device)
        if key in self._rope_tables:
            return self._rope_tables[key]
        # A table made under inference_mode could never be saved for a backward pass, should training follow.
        with torch.inference_mode(False), torch.no_grad():
            angles = rope_angles(self.dim // self.num_heads, grid, device)
            table = (angles.cos().float(), angles.sin().float())
        # The oldest goes, not the least recently used: a hit that reorders the dict would recompile a compiled model.
        if len(self._rope_tables) >= _MAX_ROPE_TABLES:
            self._rope_tables.pop(next(iter(self._rope_tables)))
        self._rope_tables[key] = table
        return table

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor | Sequence[Tensor] | PreparedContext,
        sparse_state: SparseAttentionState | None = None,
    ) -> Tensor:
        """Predict the velocity noise - x0.

        Args:
            x: latents [B, in_dim, F, H, W], float32; F, H, W divisible by `patch_size`.
            timestep: [B], or [B, S] for a timestep per token; 0 (clean) to 1000 (noise), any dtype.
            context: the text, as for `prepare_context`, or what that returned.
            sparse_state: self-attention follows its pattern, whatever `set_attention_config` chose; it must have been
                made for this grid. Each layer is set here, the denoising step by the caller.

        Returns:
            [B, out_dim, F, H, W] float32.

        Raises:
            ValueError: for shapes that do not fit the model or each other.
        """
        grid = self._patch_grid(x)
        num_tokens = math.prod(grid)
        if tuple(timestep.shape) not in ((x.shape[0],), (x.shape[0], num_tokens)):
            wanted = f"[{x.shape[0]}] or, per token, [{x.shape[0]}, {num_tokens}]"
            raise ValueError(f"timestep must be {wanted}, got {list(timestep.shape)}")
        if not isinstance(context, PreparedContext):
            context = self.prepare_context(context)
        if len(context.key_values) != self.num_layers:
            layers = len(context.key_values)
            raise ValueError(f"context was prepared by a model of {layers} layers, this one has {self.num_layers}")
        if context.batch_size != x.shape[0]:
            raise ValueError(f"context holds {context.batch_size} prompts for {x.shape[0]} latents")

        rope = self.rope_table(grid, x.device)
        timestep = timestep.to(x.device).view(x.shape[0], -1)  # [B, T]
        hidden = self.patch_embedding(x).float()  # [B, S, C]
        split = split_tokens(num_tokens, self.device_mesh)
        if split is not None:
            hidden, rope = split.own(hidden), tuple(split.own(table, dim=0) for table in rope)
            timestep = split.own(timestep) if timestep.shape[1] > 1 else timestep
        time_embedding = self.time_embedding(timestep_sinusoid(timestep, self.freq_dim).float())  # [B, T, C]
        time_projection = self.time_projection(time_embedding).unflatten(-1, (6, self.dim))
        for i, (block, (text_k, text_v)) in enumerate(zip(self.blocks, context.key_values)):
            if sparse_state is not None:
                sparse_state.update(layer_idx=i)
            hidden = block(hidden, time_projection, rope, text_k, text_v, split, sparse_state)
        patches = self.head(hidden, time_embedding)
        return self._unpatchify(patches if split is None else split.gather(patches), grid)

    def _patch_grid(self, x: Tensor) -> tuple[int, int, int]:
        if x.ndim != 5 or x.shape[1] != self.in_dim:
            raise ValueError(f"latents must be [B, {self.in_dim}, F, H, W], got {list(x.shape)}")
        sizes = tuple(x.shape[2:])
        if any(size % patch or not size for size, patch in zip(sizes, self.patch_size)):
            raise ValueError(f"latent size {sizes} (F, H, W) is not divisible by the patch {self.patch_size}")
        return tuple(size // patch for size, patch in zip(sizes, self.patch_size))

    def _unpatchify(self, x: Tensor, grid: tuple[int, int, int]) -> Tensor:
        x = x.view(x.shape[0], *grid, *self.patch_size, self.out_dim)
        x = x.permute(0, 7, 1, 4, 2, 5, 3, 6)  # [B, C_out, F, pt, H, ph, W, pw]
        return x.flatten(6, 7).flatten(4, 5).flatten(2, 3)
