"""The diffusers and transformers spelling of Wan2.1 checkpoints: key maps both ways, their config.json in our names.

A rule is a pair of prefixes, official and diffusers, with `#` for any number; what follows the prefix stays as it is.
"""

import re
from collections.abc import Iterable

Rules = tuple[tuple[str, str], ...]

_ATTENTION = (
    ("norm_q.", "norm_q."),
    ("norm_k.", "norm_k."),
    ("q.", "to_q."),
    ("k.", "to_k."),
    ("v.", "to_v."),
    ("o.", "to_out.0."),
)
_DIT: Rules = (
    ("patch_embedding.", "patch_embedding."),
    ("text_embedding.0.", "condition_embedder.text_embedder.linear_1."),
    ("text_embedding.2.", "condition_embedder.text_embedder.linear_2."),
    ("time_embedding.0.", "condition_embedder.time_embedder.linear_1."),
    ("time_embedding.2.", "condition_embedder.time_embedder.linear_2."),
    ("time_projection.1.", "condition_embedder.time_proj."),
    ("blocks.#.modulation", "blocks.#.scale_shift_table"),
    *((f"blocks.#.self_attn.{ours}", f"blocks.#.attn1.{theirs}") for ours, theirs in _ATTENTION),
    *((f"blocks.#.cross_attn.{ours}", f"blocks.#.attn2.{theirs}") for ours, theirs in _ATTENTION),
    # diffusers numbers the three norms in the order of use, the official code does not.
    ("blocks.#.norm3.", "blocks.#.norm2."),
    ("blocks.#.ffn.0.", "blocks.#.ffn.net.0.proj."),
    ("blocks.#.ffn.2.", "blocks.#.ffn.net.2."),
    ("head.modulation", "scale_shift_table"),
    ("head.head.", "proj_out."),
)
_UMT5: Rules = (
    ("norm.", "encoder.final_layer_norm."),
    ("blocks.#.norm1.", "encoder.block.#.layer.0.layer_norm."),
    *((f"blocks.#.attn.{name}.", f"encoder.block.#.layer.0.SelfAttention.{name}.") for name in "qkvo"),
    ("blocks.#.pos_embedding.embedding.", "encoder.block.#.layer.0.SelfAttention.relative_attention_bias."),
    ("blocks.#.norm2.", "encoder.block.#.layer.1.layer_norm."),
    ("blocks.#.ffn.gate.0.", "encoder.block.#.layer.1.DenseReluDense.wi_0."),
    ("blocks.#.ffn.fc1.", "encoder.block.#.layer.1.DenseReluDense.wi_1."),
    ("blocks.#.ffn.fc2.", "encoder.block.#.layer.1.DenseReluDense.wo."),
)
_RESIDUAL = (
    ("residual.0.", "norm1."),
    ("residual.2.", "conv1."),
    ("residual.3.", "norm2."),
    ("residual.6.", "conv2."),
    ("shortcut.", "conv_shortcut."),
)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_RESAMPLE = (("resample.", "resample."), ("time_conv.", "time_conv."))


class KeyMap:
    """Translates keys by prefix rules; a key that no rule covers maps to None, so that it is reported, not dropped."""

    def __init__(self, rules: Iterable[tuple[str, str]]):
        rules = tuple(rules)
        self._from_official = dict(rules)
        self._from_diffusers = {theirs: ours for ours, theirs in rules}

    def to_diffusers(self, key: str) -> str | None:
        """An official key in the diffusers (transformers) spelling."""
        return _translate(self._from_official, key)

    def to_official(self, key: str) -> str | None:
        """The way back."""
        return _translate(self._from_diffusers, key)


def dit_key_map() -> KeyMap:
    """Keys of `WanTransformer3DModel`."""
    return KeyMap(_DIT)


def text_encoder_key_map(embedding: str = "shared") -> KeyMap:
    """Keys of `UMT5EncoderModel`.

    embedding: transformers ties two names, `shared` and `encoder.embed_tokens`, and a file holds one or both.
    """
    return KeyMap((("token_embedding.", f"{embedding}."), *_UMT5))


def vae_key_map(num_stages: int = 4, num_res_blocks: int = 2) -> KeyMap:
    """Keys of `AutoencoderKLWan`.

    num_stages, num_res_blocks: the official decoder counts its layers through, diffusers groups them by stage.
    """
    rules = [
        ("conv1.", "quant_conv."),
        ("conv2.", "post_quant_conv."),
        *((f"encoder.downsamples.#.{ours}", f"encoder.down_blocks.#.{theirs}") for ours, theirs in _RESIDUAL),
        *((f"encoder.downsamples.#.{ours}", f"encoder.down_blocks.#.{theirs}") for ours, theirs in _RESAMPLE),
    ]
    for side in ("encoder", "decoder"):
        rules += [(f"{side}.conv1.", f"{side}.conv_in."), (f"{side}.head.0.", f"{side}.norm_out.")]
        rules += [(f"{side}.head.2.", f"{side}.conv_out."), (f"{side}.middle.1.", f"{side}.mid_block.attentions.0.")]
        for index, resnet in ((0, 0), (2, 1)):
            old, new = f"{side}.middle.{index}.", f"{side}.mid_block.resnets.{resnet}."
            rules += [(old + ours, new + theirs) for ours, theirs in _RESIDUAL]
    per_stage = num_res_blocks + 2
    for stage in range(num_stages):
        for block in range(num_res_blocks + 1):
            old = f"decoder.upsamples.{stage * per_stage + block}."
            new = f"decoder.up_blocks.{stage}.resnets.{block}."
            rules += [(old + ours, new + theirs) for ours, theirs in _RESIDUAL]
        old = f"decoder.upsamples.{stage * per_stage + num_res_blocks + 1}."
        rules += [(old + ours, f"decoder.up_blocks.{stage}.upsamplers.0.{theirs}") for ours, theirs in _RESAMPLE]
    return KeyMap(rules)


def dit_config(diffusers: dict) -> dict:
    """transformer/config.json of WanTransformer3DModel in official names. Raises ValueError for another model."""
    if diffusers.get("image_dim") or diffusers.get("added_kv_proj_dim"):
        raise ValueError("image-to-video weights (image_dim is set); text-to-video weights are needed")
    if diffusers.get("qk_norm", "rms_norm_across_heads") != "rms_norm_across_heads":
        raise ValueError(f"qk_norm '{diffusers['qk_norm']}' is not Wan2.1's rms_norm_across_heads")
    if not diffusers.get("cross_attn_norm", True):
        raise ValueError("cross_attn_norm false is not Wan2.1")
    config = _renamed(
        diffusers,
        {
            "in_channels": "in_dim",
            "out_channels": "out_dim",
            "num_attention_heads": "num_heads",
            "num_layers": "num_layers",
            "ffn_dim": "ffn_dim",
            "freq_dim": "freq_dim",
            "text_dim": "text_dim",
            "eps": "eps",
        },
    )
    if "patch_size" in diffusers:
        config["patch_size"] = tuple(diffusers["patch_size"])
    if {"num_attention_heads", "attention_head_dim"} <= set(diffusers):
        config["dim"] = diffusers["num_attention_heads"] * diffusers["attention_head_dim"]
    return config


def vae_config(diffusers: dict) -> dict:
    """vae/config.json of AutoencoderKLWan in official names. Raises ValueError for the Wan2.2 VAE."""
    if diffusers.get("is_residual") or (diffusers.get("patch_size") or 1) != 1:
        raise ValueError("the Wan2.2 VAE (16x16 spatial compression); the Wan2.1 VAE is needed")
    names = ("z_dim", "dim_mult", "num_res_blocks", "attn_scales", "temperal_downsample", "latents_mean", "latents_std")
    return _renamed(diffusers, {"base_dim": "dim"} | {name: name for name in names})


def text_encoder_config(transformers: dict) -> dict:
    """text_encoder/config.json of UMT5EncoderModel in official names. Raises ValueError for another T5."""
    if transformers.get("model_type", "umt5") != "umt5":
        raise ValueError(f"text encoder '{transformers['model_type']}'; Wan2.1 uses umt5")
    if transformers.get("feed_forward_proj", "gated-gelu") != "gated-gelu":
        raise ValueError(f"feed_forward_proj '{transformers['feed_forward_proj']}'; Wan2.1's UMT5 uses gated-gelu")
    # Not among the model's arguments: with another value, the same weights would silently give other features.
    for name, only in (("relative_attention_max_distance", 128), ("layer_norm_epsilon", 1e-6)):
        if transformers.get(name, only) != only:
            raise ValueError(f"{name} {transformers[name]!r}; Wan2.1's UMT5 has {only}")
    config = _renamed(
        transformers,
        {
            "vocab_size": "vocab",
            "d_model": "dim",
            "d_ff": "dim_ffn",
            "num_heads": "num_heads",
            "num_layers": "num_layers",
            "relative_attention_num_buckets": "num_buckets",
        },
    )
    if {"d_kv", "num_heads"} <= set(transformers):
        config["dim_attn"] = transformers["d_kv"] * transformers["num_heads"]
    return config


def _renamed(config: dict, names: dict[str, str]) -> dict:
    return {ours: config[theirs] for theirs, ours in names.items() if config.get(theirs) is not None}


def _translate(rules: dict[str, str], key: str) -> str | None:
    """Tries prefixes from long to short, first as spelled, then with the first number as `#`."""
    number = _NUMBER.search(key)
    for candidate in (key, _NUMBER.sub("#", key, count=1)):
        for cut in range(len(candidate), 0, -1):
            if candidate[:cut] in rules:
                new = rules[candidate[:cut]] + candidate[cut:]
                return new.replace("#", number[0], 1) if number else new
    return None


CONFIG_TRANSLATIONS = {"dit": dit_config, "vae": vae_config, "text_encoder": text_encoder_config}
ALL_KEY_MAPS = {"dit": dit_key_map(), "vae": vae_key_map(), "text_encoder": text_encoder_key_map()}
