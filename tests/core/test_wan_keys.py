"""Key maps and configs of the diffusers spelling."""

import csv

import pytest

from telefuser.core import wan_keys
from telefuser.core.wan_layout import RULES
from tests.core.wan_folders import CONFIGS
from tests.golden import golden_dir

MAPS = {
    "map_wan21_t2v_1.3b_dit.tsv": wan_keys.dit_key_map(),
    "map_wan21_vae.tsv": wan_keys.vae_key_map(),
    "map_umt5_xxl_encoder.tsv": wan_keys.text_encoder_key_map(),
}


@pytest.mark.parametrize("name", MAPS)
def test_every_published_key_maps_both_ways(name):
    if golden_dir() is None:
        pytest.skip("the golden reference data is not here")
    key_map = MAPS[name]
    with (golden_dir() / "manifests" / name).open() as stream:
        rows = list(csv.DictReader(stream, delimiter="\t"))
    assert len(rows) > 100
    for row in rows:
        assert row["op"] == "copy"
        assert key_map.to_diffusers(row["official_key"]) == row["diffusers_key"]
        assert key_map.to_official(row["diffusers_key"]) == row["official_key"]


@pytest.mark.parametrize("component", CONFIGS)
def test_round_trip_of_every_key_is_the_key(component):
    key_map = wan_keys.vae_key_map(4, 1) if component == "vae" else wan_keys.ALL_KEY_MAPS[component]
    keys = list(RULES[component].shapes(CONFIGS[component]))
    renamed = [key_map.to_diffusers(key) for key in keys]
    assert None not in renamed
    assert len(set(renamed)) == len(keys)
    assert [key_map.to_official(key) for key in renamed] == keys


def test_norms_swap_their_numbers():
    assert wan_keys.dit_key_map().to_official("blocks.12.norm2.weight") == "blocks.12.norm3.weight"
    assert wan_keys.dit_key_map().to_diffusers("blocks.12.norm3.bias") == "blocks.12.norm2.bias"


def test_decoder_layers_are_counted_through():
    key_map = wan_keys.vae_key_map()
    assert (
        key_map.to_official("decoder.up_blocks.1.resnets.0.conv_shortcut.weight")
        == "decoder.upsamples.4.shortcut.weight"
    )
    assert (
        key_map.to_diffusers("decoder.upsamples.7.time_conv.bias") == "decoder.up_blocks.1.upsamplers.0.time_conv.bias"
    )


@pytest.mark.parametrize(
    "key", ["blocks.0.attn3.to_q.weight", "lora_A.weight", "", "decoder.up_blocks.9.resnets.0.conv1.bias"]
)
def test_unknown_keys_map_to_none(key):
    assert all(key_map.to_official(key) is None for key_map in wan_keys.ALL_KEY_MAPS.values())


def test_configs_are_translated():
    assert wan_keys.dit_config(
        {"_class_name": "WanTransformer3DModel", "num_attention_heads": 12, "attention_head_dim": 128, "num_layers": 30,
         "in_channels": 16, "out_channels": 16, "ffn_dim": 8960, "freq_dim": 256, "text_dim": 4096, "eps": 1e-6,
         "patch_size": [1, 2, 2], "image_dim": None, "qk_norm": "rms_norm_across_heads", "cross_attn_norm": True}
    ) == RULES["dit"].official | {"eps": 1e-6}  # fmt: skip
    assert wan_keys.text_encoder_config(
        {"model_type": "umt5", "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_heads": 64, "num_layers": 24,
         "vocab_size": 256384, "relative_attention_num_buckets": 32, "feed_forward_proj": "gated-gelu"}
    ) == {key: value for key, value in RULES["text_encoder"].official.items() if key != "shared_pos"}  # fmt: skip


@pytest.mark.parametrize(
    ("translate", "config", "reason"),
    [
        (wan_keys.dit_config, {"image_dim": 1280}, "image-to-video"),
        (wan_keys.dit_config, {"qk_norm": "rms_norm"}, "rms_norm_across_heads"),
        (wan_keys.dit_config, {"cross_attn_norm": False}, "cross_attn_norm"),
        (wan_keys.vae_config, {"is_residual": True}, "Wan2.2"),
        (wan_keys.text_encoder_config, {"model_type": "t5"}, "umt5"),
        (wan_keys.text_encoder_config, {"feed_forward_proj": "relu"}, "gated-gelu"),
        (wan_keys.text_encoder_config, {"relative_attention_max_distance": 64}, "relative_attention_max_distance 64"),
        (wan_keys.text_encoder_config, {"layer_norm_epsilon": 1.0}, "layer_norm_epsilon 1.0"),
    ],
)
def test_other_architectures_are_refused(translate, config, reason):
    with pytest.raises(ValueError, match=reason):
        translate(config)
