"""One model of a Wan2.1 checkpoint, judged from headers, config and one page of each tensor; `load` makes the model.

Used by core/checkpoint.py, which puts the three of them together.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from telefuser.core import wan_config, wan_folder, wan_keys, wan_layout
from telefuser.core.fp8_layout import separate_scales
from telefuser.core.model_loading import KeyTranslation, Quantizer, load_model, match_keys
from telefuser.core.weight_files import FLOATING, CheckpointError, WeightSet, brief, read_json

# Names that quantised checkpoints give to scales, zero points and packed weights.
_QUANTISED_NAMES = {
    "weight_scale",
    "scale_weight",
    "weight_scale_inv",
    "scale_input",
    "input_scale",
    "scaled_fp8",
    "SCB",
    "qweight",
    "qzeros",
    "weight_packed",
    "absmax",
    "quant_map",
    "zero_point",
}
_KINDS = {
    "i2v": "image-to-video",
    "flf2v": "first-and-last-frame-to-video",
    "ti2v": "Wan2.2 5B",
    "vace": "VACE",
    "s2v": "speech-to-video",
    "animate": "animation",
}
_WRAPPER_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "module.", "_orig_mod.")


@dataclass(frozen=True)
class Component:
    """A model judged good: its files, its sizes in official names, and how its keys are spelled."""

    name: str
    weights: WeightSet
    config: dict
    key_map: KeyTranslation | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        return self.weights.files

    @property
    def num_parameters(self) -> int:
        """Numbers in all tensors of the files."""
        return sum(torch.Size(entry.shape).numel() for entry in self.weights.entries.values())

    @property
    def fp8_layers(self) -> dict[str, str]:
        """The layers whose weights are stored in FP8 with scales: official name -> dtype."""
        keys = {key: self.key_map(key) if self.key_map else key for key in self.weights.scales}
        return {name.removesuffix(".weight"): self.weights.entries[key].dtype for key, name in keys.items()}

    @property
    def num_bytes(self) -> int:
        """Size of the files."""
        return sum(file.stat().st_size for file in self.files)

    @property
    def dtypes(self) -> dict[str, int]:
        """How many tensors are stored in each dtype."""
        return dict(Counter(entry.dtype for entry in self.weights.entries.values()))

    def load(
        self,
        from_config: Callable[[dict], nn.Module],
        *,
        dtype: torch.dtype | None,
        device: torch.device | str = "cpu",
        fp32_fragments: Iterable[str] = (),
        quantize: Quantizer | None = None,
    ) -> nn.Module:
        """`load_model` with this component's files, config and key map; `from_config` is the model class's own."""
        return load_model(
            partial(from_config, self.config),
            self.weights,
            dtype=dtype,
            fp32_fragments=fp32_fragments,
            device=device,
            key_map=self.key_map,
            quantize=quantize,
        )


def judge(folder: Path, layout: str, name: str) -> Component:
    """The component `name` of a checkpoint folder. Raises CheckpointError for the first thing that is wrong with it."""
    config_file = wan_folder.find_config(folder, layout, name)
    given = _given_config(config_file, layout, name)
    if config_file:
        wan_config.check_values(config_file, given)
    weights = WeightSet(wan_folder.find_weights(folder, layout, name))
    spelling = _key_map(weights, layout, name, given)
    key_map = spelling.to_official if spelling else None
    separate_scales(weights)
    _refuse_quantised(weights)
    shapes = {}
    for key, entry in weights.entries.items():
        if official := key_map(key) if key_map else key:
            shapes[official] = entry.shape
    if name == "dit":
        _refuse_other_kinds(weights, shapes)
    config = _sizes(config_file or weights.files[0].parent / "config.json", weights, name, given, shapes)
    expected = wan_layout.RULES[name].shapes(config)
    known = set(shapes) & set(expected)
    # patch_embedding is spelled alike everywhere, so a file in the wrong spelling has a few keys right.
    if 10 * len(known) < len(weights.entries):
        raise CheckpointError(
            f"{weights.where}: {len(known) or 'none'} of its {len(weights.entries)} keys belong to a Wan2.1 {name}. "
            + _whose(weights)
        )
    match_keys(weights, expected, key_map, spelling.to_diffusers if spelling else None)
    if found := weights.non_finite_sample():
        key, file = found
        raise CheckpointError(f"{file}: '{key}' holds NaN or infinity. The file is damaged: download it again.")
    return Component(name, weights, config, key_map)


def _given_config(file: Path | None, layout: str, name: str) -> dict:
    """What config.json says about one component, in official names."""
    if file is None:
        return {}
    content = read_json(file)
    if layout == "diffusers":
        try:
            return wan_keys.CONFIG_TRANSLATIONS[name](content)
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{file}: {error}.") from error
    if name != "dit":
        section = content.get(name, {})
        if not isinstance(section, dict):
            raise CheckpointError(f"{file}: '{name}' must be an object with that model's sizes.")
        return section
    kind = content.get("model_type", "t2v")
    if kind != "t2v":
        raise CheckpointError(
            f"{file}: model_type '{kind}' ({_KINDS.get(kind, 'unknown')}); text-to-video (t2v) is needed."
        )
    if content.get("_class_name", "WanModel") != "WanModel":
        raise CheckpointError(
            f"{file}: describes a {content['_class_name']}; the official layout's WanModel is needed."
        )
    return {key: value for key, value in content.items() if key not in ("vae", "text_encoder", "defaults")}


def _key_map(weights: WeightSet, layout: str, name: str, given: dict) -> wan_keys.KeyMap | None:
    if layout == "official":
        return None
    if name == "vae":
        num_stages = len(given.get("dim_mult", wan_layout.RULES["vae"].official["dim_mult"]))
        return wan_keys.vae_key_map(num_stages, given.get("num_res_blocks", 2))
    if name == "text_encoder":
        if "shared.weight" not in weights.entries:
            return wan_keys.text_encoder_key_map("encoder.embed_tokens")
        weights.entries.pop("encoder.embed_tokens.weight", None)
        return wan_keys.text_encoder_key_map()
    return wan_keys.dit_key_map()


def _sizes(config_file: Path, weights: WeightSet, name: str, given: dict, shapes: dict) -> dict:
    """The sizes that shapes tell, joined with those that only a config can tell, and no contradiction between them."""
    try:
        inferred = wan_layout.RULES[name].infer(shapes)
    except (KeyError, ValueError, IndexError, ZeroDivisionError):
        # Keys that tell the sizes are missing: judged against the official sizes, the missing ones get listed.
        return wan_layout.RULES[name].official | given
    told = {key: value for key, value in inferred.items() if key != "num_heads" or name == "text_encoder"}
    wrong = {key: value for key, value in told.items() if key in given and _plain(given[key]) != _plain(value)}
    # Fewer layers and nothing else is a file with missing keys, which the comparison of keys says better.
    if set(wrong) - {"num_layers"}:
        said = ", ".join(f"{key} {_plain(given[key])}" for key in wrong)
        have = ", ".join(f"{key} {_plain(value)}" for key, value in wrong.items())
        kind = f" ({wan_layout.model_name(inferred)})" if name == "dit" else ""
        raise CheckpointError(
            f"{config_file}: says {said}, but {weights.files[0].name} has {have}{kind}. "
            "Take config.json and weights from one checkpoint."
        )
    config = inferred | given
    if name == "dit" and "num_heads" not in given and config["dim"] % 128:
        raise CheckpointError(f"{config_file}: 'num_heads' is needed; shapes do not tell it for dim {config['dim']}.")
    if name == "dit" and config["dim"] % config["num_heads"]:
        raise CheckpointError(f"{config_file}: num_heads {config['num_heads']} does not divide dim {config['dim']}.")
    if name == "dit" and config["dim"] // config["num_heads"] % 2:
        width = config["dim"] // config["num_heads"]
        raise CheckpointError(
            f"{config_file}: num_heads {config['num_heads']} makes heads {width} wide for dim {config['dim']}; "
            "an even width is needed."
        )
    if name == "vae":
        _check_vae(config_file, config)
    return config


def _check_vae(config_file: Path, config: dict) -> None:
    halves = config["temperal_downsample"]
    factors = (2 ** len(halves), 2 ** sum(map(bool, halves)))
    if factors != (8, 4):
        # Sizes are checked and latents are shaped by these numbers: any other VAE would give a video of another size.
        raise CheckpointError(
            f"{config_file}: this VAE shrinks edges {factors[0]} times and time {factors[1]} times; "
            "one that shrinks them 8 and 4 times, as Wan2.1's, is needed."
        )
    for key in ("latents_mean", "latents_std"):
        if key not in config and config["z_dim"] != 16:
            raise CheckpointError(f"{config_file}: '{key}' is needed for a VAE with {config['z_dim']} latent channels.")
        if key in config and len(config[key]) != config["z_dim"]:
            raise CheckpointError(
                f"{config_file}: '{key}' has {len(config[key])} values for {config['z_dim']} latent channels."
            )
    if config.get("attn_scales"):
        raise CheckpointError(f"{config_file}: attn_scales {config['attn_scales']}; the Wan2.1 VAE has none.")


def _refuse_quantised(weights: WeightSet) -> None:
    scales = [key for key in weights.entries if key.rpartition(".")[2] in _QUANTISED_NAMES]
    for key, entry in weights.entries.items():
        if key in weights.scales:
            continue
        if entry.dtype not in FLOATING or key in scales:
            kind = "with scales" if scales else "without scales, so their values cannot be restored"
            raise CheckpointError(
                f"{entry.file}: '{key}' is {entry.dtype}: quantised weights {kind}. Use the bf16, fp16 or fp32 "
                "weights, or FP8 weights with a scale each."
            )


def _refuse_other_kinds(weights: WeightSet, shapes: dict) -> None:
    channels = shapes.get("patch_embedding.weight", (0, 16))[1]
    image_key = next(
        (key for key in weights.entries if "img_emb" in key or "k_img" in key or "add_k_proj" in key), None
    )
    if image_key or channels == 36:
        raise CheckpointError(
            f"{weights.where}: image-to-video weights ('patch_embedding.weight' has {channels} input channels"
            + (f", there is '{image_key}'" if image_key else "")
            + "). Text-to-video weights (16 input channels) are needed."
        )
    if vace := next((key for key in weights.entries if key.startswith("vace_")), None):
        raise CheckpointError(f"{weights.where}: VACE weights (there is '{vace}'). Text-to-video weights are needed.")


def _whose(weights: WeightSet) -> str:
    """Whose keys these are, where that can be told."""
    keys = list(weights.entries)
    for prefix in _WRAPPER_PREFIXES:
        if keys and all(key.startswith(prefix) for key in keys):
            return f"Every key starts with '{prefix}': save the model's own state dict, without the wrapper."
    for name, key_map in wan_keys.ALL_KEY_MAPS.items():
        for spelling, translate in (("diffusers", key_map.to_official), ("official", key_map.to_diffusers)):
            if sum(translate(key) is not None for key in keys) > len(keys) // 2:
                return f"They are those of a {name} in {spelling} spelling, in the wrong place."
    return f"It holds {brief(keys)}. Download the file that belongs here."


def _plain(value):
    return list(value) if isinstance(value, tuple | list) else value
