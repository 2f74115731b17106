"""What the files of a Wan2.1 checkpoint hold: keys and shapes as rules, sizes read back from shapes, official defaults.

Keys are the official ones. core/checkpoint.py judges headers with these rules before a model exists; tests hold them
against the models themselves.
"""

from collections.abc import Callable
from itertools import pairwise
from math import prod
from typing import NamedTuple

Shape = tuple[int, ...]
Shapes = dict[str, Shape]

# (dim, num_layers) of the published text-to-video checkpoints.
_PUBLISHED = {(1536, 30): "T2V-1.3B", (5120, 40): "T2V-14B"}

_NEGATIVE_PROMPT = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，"
    "丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，"
    "静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走"
)
# Sampling settings of the official Wan2.1 text-to-video release; 480p is the size both published models were made for.
_OFFICIAL_DEFAULTS = {
    "height": 480,
    "width": 832,
    "num_frames": 81,
    "steps": 50,
    "guidance": 5.0,
    "shift": 5.0,
    "fps": 16,
    "negative_prompt": _NEGATIVE_PROMPT,
    "scheduler": "unipc",
}


def default_settings(overrides: dict) -> dict:
    """The official sampling settings, replaced where config.json's "defaults" says otherwise.

    Raises ValueError for a name that is no setting.
    """
    if unknown := sorted(set(overrides) - set(_OFFICIAL_DEFAULTS)):
        raise ValueError(f"unknown settings {unknown}; known are {sorted(_OFFICIAL_DEFAULTS)}")
    return _OFFICIAL_DEFAULTS | overrides


def model_name(dit: dict) -> str:
    """`T2V-1.3B`, `T2V-14B`, or the sizes of a DiT that was never published."""
    size = (dit["dim"], dit["num_layers"])
    return _PUBLISHED.get(size, f"custom (dim {size[0]}, {size[1]} layers)")


def dit_shapes(config: dict) -> Shapes:
    """Keys and shapes of the text-to-video DiT for official config names (dim, ffn_dim, num_layers, ...)."""
    dim, ffn_dim, patch = config["dim"], config["ffn_dim"], tuple(config["patch_size"])
    shapes = {"patch_embedding.weight": (dim, config["in_dim"], *patch), "patch_embedding.bias": (dim,)}
    shapes |= _linear("text_embedding.0", dim, config["text_dim"]) | _linear("text_embedding.2", dim, dim)
    shapes |= _linear("time_embedding.0", dim, config["freq_dim"]) | _linear("time_embedding.2", dim, dim)
    shapes |= _linear("time_projection.1", 6 * dim, dim)
    for i in range(config["num_layers"]):
        block = f"blocks.{i}"
        shapes[f"{block}.modulation"] = (1, 6, dim)
        for attention in (f"{block}.self_attn", f"{block}.cross_attn"):
            for name in "qkvo":
                shapes |= _linear(f"{attention}.{name}", dim, dim)
            shapes |= {f"{attention}.norm_q.weight": (dim,), f"{attention}.norm_k.weight": (dim,)}
        shapes |= {f"{block}.norm3.weight": (dim,), f"{block}.norm3.bias": (dim,)}
        shapes |= _linear(f"{block}.ffn.0", ffn_dim, dim) | _linear(f"{block}.ffn.2", dim, ffn_dim)
    shapes["head.modulation"] = (1, 2, dim)
    return shapes | _linear("head.head", config["out_dim"] * prod(patch), dim)


def infer_dit(shapes: Shapes) -> dict:
    """The DiT sizes that shapes tell. Heads are 128 wide in every published Wan; a smaller dim is taken as one head."""
    dim, in_dim, *patch = shapes["patch_embedding.weight"]
    return {
        "dim": dim,
        "in_dim": in_dim,
        "patch_size": tuple(patch),
        "text_dim": shapes["text_embedding.0.weight"][1],
        "freq_dim": shapes["time_embedding.0.weight"][1],
        "ffn_dim": shapes["blocks.0.ffn.0.weight"][0],
        "out_dim": shapes["head.head.weight"][0] // prod(patch),
        "num_heads": max(1, dim // 128),
        "num_layers": _count("blocks.", shapes),
    }


def vae_shapes(config: dict) -> Shapes:
    """Keys and shapes of the Wan2.1 VAE for official config names (dim, z_dim, dim_mult, num_res_blocks, ...)."""
    dim, z_dim, mult = config["dim"], config["z_dim"], list(config["dim_mult"])
    res_blocks, temporal = config["num_res_blocks"], list(config["temperal_downsample"])
    widths = [dim * m for m in [1, *mult]]
    shapes = _conv("encoder.conv1", widths[0], 3, 3, 3, 3)
    index = 0
    for stage, (in_dim, out_dim) in enumerate(pairwise(widths)):
        for block in range(res_blocks):
            shapes |= _residual(f"encoder.downsamples.{index}", in_dim if block == 0 else out_dim, out_dim)
            index += 1
        if stage < len(mult) - 1:
            shapes |= _conv(f"encoder.downsamples.{index}.resample.1", out_dim, out_dim, 3, 3)
            if temporal[stage]:
                shapes |= _conv(f"encoder.downsamples.{index}.time_conv", out_dim, out_dim, 3, 1, 1)
            index += 1
    shapes |= _middle("encoder", widths[-1]) | _head("encoder", widths[-1], 2 * z_dim)
    shapes |= _conv("conv1", 2 * z_dim, 2 * z_dim, 1, 1, 1) | _conv("conv2", z_dim, z_dim, 1, 1, 1)

    widths = [dim * m for m in [mult[-1], *reversed(mult)]]
    shapes |= _conv("decoder.conv1", widths[0], z_dim, 3, 3, 3) | _middle("decoder", widths[0])
    index = 0
    for stage, (in_dim, out_dim) in enumerate(pairwise(widths)):
        # Every upsampling halves the channels, so the stage behind it starts with half.
        in_dim = in_dim if stage == 0 else in_dim // 2
        for block in range(res_blocks + 1):
            shapes |= _residual(f"decoder.upsamples.{index}", in_dim if block == 0 else out_dim, out_dim)
            index += 1
        if stage < len(mult) - 1:
            shapes |= _conv(f"decoder.upsamples.{index}.resample.1", out_dim // 2, out_dim, 3, 3)
            if temporal[-1 - stage]:
                shapes |= _conv(f"decoder.upsamples.{index}.time_conv", 2 * out_dim, out_dim, 3, 1, 1)
            index += 1
    return shapes | _head("decoder", widths[-1], 3)


def infer_vae(shapes: Shapes) -> dict:
    """The VAE sizes that shapes tell; stages are read from the positions of the encoder's downsampling layers."""
    dim = shapes["encoder.conv1.weight"][0]
    prefix = "encoder.downsamples."
    count = _count(prefix, shapes)
    resamples = [i for i in range(count) if f"{prefix}{i}.resample.1.weight" in shapes]
    ends = [*[i - 1 for i in resamples], count - 1]
    return {
        "dim": dim,
        "z_dim": shapes["conv2.weight"][0],
        "dim_mult": tuple(shapes[f"{prefix}{i}.residual.6.weight"][0] // dim for i in ends),
        "num_res_blocks": ends[0] + 1,
        "temperal_downsample": tuple(f"{prefix}{i}.time_conv.weight" in shapes for i in resamples),
    }


def text_encoder_shapes(config: dict) -> Shapes:
    """Keys and shapes of the UMT5 encoder for official config names (vocab, dim, dim_attn, dim_ffn, ...)."""
    dim, dim_attn, dim_ffn = config["dim"], config["dim_attn"], config["dim_ffn"]
    position_table = (config["num_buckets"], config["num_heads"])
    shapes: Shapes = {"token_embedding.weight": (config["vocab"], dim), "norm.weight": (dim,)}
    if config["shared_pos"]:
        shapes["pos_embedding.embedding.weight"] = position_table
    for i in range(config["num_layers"]):
        block = f"blocks.{i}"
        shapes |= {f"{block}.norm1.weight": (dim,), f"{block}.norm2.weight": (dim,)}
        shapes |= {f"{block}.attn.{name}.weight": (dim_attn, dim) for name in "qkv"}
        shapes[f"{block}.attn.o.weight"] = (dim, dim_attn)
        shapes |= {f"{block}.ffn.gate.0.weight": (dim_ffn, dim), f"{block}.ffn.fc1.weight": (dim_ffn, dim)}
        shapes[f"{block}.ffn.fc2.weight"] = (dim, dim_ffn)
        if not config["shared_pos"]:
            shapes[f"{block}.pos_embedding.embedding.weight"] = position_table
    return shapes


def infer_text_encoder(shapes: Shapes) -> dict:
    """The encoder sizes that shapes tell: all of them."""
    shared = "pos_embedding.embedding.weight" in shapes
    buckets, heads = shapes["pos_embedding.embedding.weight" if shared else "blocks.0.pos_embedding.embedding.weight"]
    vocab, dim = shapes["token_embedding.weight"]
    return {
        "vocab": vocab,
        "dim": dim,
        "dim_attn": shapes["blocks.0.attn.q.weight"][0],
        "dim_ffn": shapes["blocks.0.ffn.fc1.weight"][0],
        "num_heads": heads,
        "num_layers": _count("blocks.", shapes),
        "num_buckets": buckets,
        "shared_pos": shared,
    }


class Rule(NamedTuple):
    """shapes: keys and shapes of a config; infer: the sizes that shapes tell; official: those of the 1.3B release."""

    shapes: Callable[[dict], Shapes]
    infer: Callable[[Shapes], dict]
    official: dict


RULES = {
    "dit": Rule(
        dit_shapes,
        infer_dit,
        {
            "dim": 1536,
            "in_dim": 16,
            "patch_size": (1, 2, 2),
            "text_dim": 4096,
            "freq_dim": 256,
            "ffn_dim": 8960,
            "out_dim": 16,
            "num_heads": 12,
            "num_layers": 30,
        },
    ),
    "vae": Rule(
        vae_shapes,
        infer_vae,
        {
            "dim": 96,
            "z_dim": 16,
            "dim_mult": (1, 2, 4, 4),
            "num_res_blocks": 2,
            "temperal_downsample": (False, True, True),
        },
    ),
    "text_encoder": Rule(
        text_encoder_shapes,
        infer_text_encoder,
        {
            "vocab": 256384,
            "dim": 4096,
            "dim_attn": 4096,
            "dim_ffn": 10240,
            "num_heads": 64,
            "num_layers": 24,
            "num_buckets": 32,
            "shared_pos": False,
        },
    ),
}


def _linear(name: str, out_dim: int, in_dim: int) -> Shapes:
    return {f"{name}.weight": (out_dim, in_dim), f"{name}.bias": (out_dim,)}


def _conv(name: str, out_dim: int, in_dim: int, *kernel: int) -> Shapes:
    return {f"{name}.weight": (out_dim, in_dim, *kernel), f"{name}.bias": (out_dim,)}


def _residual(name: str, in_dim: int, out_dim: int) -> Shapes:
    shapes: Shapes = {f"{name}.residual.0.gamma": (in_dim, 1, 1, 1), f"{name}.residual.3.gamma": (out_dim, 1, 1, 1)}
    shapes |= _conv(f"{name}.residual.2", out_dim, in_dim, 3, 3, 3)
    shapes |= _conv(f"{name}.residual.6", out_dim, out_dim, 3, 3, 3)
    return shapes if in_dim == out_dim else shapes | _conv(f"{name}.shortcut", out_dim, in_dim, 1, 1, 1)


def _middle(side: str, dim: int) -> Shapes:
    shapes = _residual(f"{side}.middle.0", dim, dim) | _residual(f"{side}.middle.2", dim, dim)
    shapes[f"{side}.middle.1.norm.gamma"] = (dim, 1, 1)
    return (
        shapes | _conv(f"{side}.middle.1.to_qkv", 3 * dim, dim, 1, 1) | _conv(f"{side}.middle.1.proj", dim, dim, 1, 1)
    )


def _head(side: str, dim: int, out_dim: int) -> Shapes:
    return {f"{side}.head.0.gamma": (dim, 1, 1, 1)} | _conv(f"{side}.head.2", out_dim, dim, 3, 3, 3)


def _count(prefix: str, shapes: Shapes) -> int:
    numbers = {key.removeprefix(prefix).partition(".")[0] for key in shapes if key.startswith(prefix)}
    return 1 + max(int(number) for number in numbers if number.isdigit())
