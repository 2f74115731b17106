"""Sizes and schedules of the two training stages: `FULL` made the shipped weights, `SMOKE` tests the code."""

from dataclasses import dataclass, field
from typing import Any

from training.wan_tiny.tokenizer import TEXT_LEN, VOCAB_SIZE


def _vae_config(dim: int) -> dict[str, Any]:
    return {
        "dim": dim,
        "z_dim": 16,
        "dim_mult": [1, 2, 4, 4],
        "num_res_blocks": 1,
        "attn_scales": [],
        "temperal_downsample": [False, True, True],
        "dropout": 0.0,
    }


def _text_config(dim: int, num_layers: int) -> dict[str, Any]:
    return {
        "vocab": VOCAB_SIZE,
        "dim": dim,
        "dim_attn": dim,
        "dim_ffn": 2 * dim,
        "num_heads": 4,
        "num_layers": num_layers,
        "num_buckets": 32,
        "shared_pos": False,
        "dropout": 0.0,
    }


def _dit_config(dim: int, num_layers: int, num_heads: int, text_dim: int) -> dict[str, Any]:
    return {
        "_class_name": "WanModel",
        "model_type": "t2v",
        "dim": dim,
        "eps": 1e-6,
        "ffn_dim": 4 * dim,
        "freq_dim": 256,
        "in_dim": 16,
        "num_heads": num_heads,
        "num_layers": num_layers,
        "out_dim": 16,
        "text_dim": text_dim,
        "text_len": TEXT_LEN,
        "patch_size": [1, 2, 2],
    }


@dataclass(frozen=True)
class VaeSettings:
    """5.7 M parameters: a quarter of the published width, one residual block a stage instead of two.

    Trains on random 64x64 windows of whole 17-frame clips: trained on fewer frames it fails past them, and a window a
    quarter of the frame's area shows four times as many clips in the same time.
    """

    steps: int = 7500
    batch: int = 32
    window: int = 64
    peak_lr: float = 2e-3
    warmup: int = 200
    shape_weight: float = 5.0
    kl_weight: float = 2e-4
    statistics_clips: int = 2160
    config: dict[str, Any] = field(default_factory=lambda: _vae_config(24))


@dataclass(frozen=True)
class DitSettings:
    """5.5 M parameters with the text encoder, which is trained along."""

    steps: int = 8000
    batch: int = 256
    bank_clips: int = 32400
    wordings: int = 256
    peak_lr: float = 1e-3
    warmup: int = 500
    ema_decay: float = 0.9995
    time_shift: float = 3.0
    # Half of the times are uniform before the shift: a plain logit-normal gives 1.3 % of them to noise levels below
    # 0.25, where the last steps of sampling decide the outline.
    uniform_times: float = 0.5
    drop_text: float = 0.1
    config: dict[str, Any] = field(default_factory=lambda: _dit_config(192, 8, 6, 128))
    text_config: dict[str, Any] = field(default_factory=lambda: _text_config(128, 2))


@dataclass(frozen=True)
class Settings:
    vae: VaeSettings = field(default_factory=VaeSettings)
    dit: DitSettings = field(default_factory=DitSettings)


# What `telefuser generate --model tiny` uses; guidance, steps and scheduler chosen by `evaluate --sweep`.
SAMPLING_DEFAULTS = {
    "height": 128,
    "width": 128,
    "num_frames": 17,
    "steps": 20,
    "guidance": 3.5,
    "shift": 3.0,
    "fps": 8,
    "scheduler": "euler",
    "negative_prompt": "",
}

FULL = Settings()
SMOKE = Settings(
    VaeSettings(steps=4, batch=2, window=32, warmup=2, statistics_clips=4, config=_vae_config(4)),
    DitSettings(
        steps=4,
        batch=4,
        bank_clips=8,
        wordings=4,
        warmup=2,
        config=_dit_config(32, 2, 2, 32),
        text_config=_text_config(32, 1),
    ),
)
