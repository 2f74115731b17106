"""The layout rules against the published checkpoints and against the models."""

import csv
import json

import pytest

from telefuser.core.model_loading import meta_parameters
from telefuser.core.wan_layout import RULES, default_settings, model_name
from telefuser.models.wan_video_dit import WAN_DIT_SIZES, WanModel
from telefuser.models.wan_video_text_encoder import WanTextEncoder
from telefuser.models.wan_video_vae import WanVideoVAE
from tests.core.wan_folders import CONFIGS
from tests.golden import golden_dir

MODELS = {"dit": WanModel, "vae": WanVideoVAE, "text_encoder": WanTextEncoder}


@pytest.mark.parametrize(
    ("component", "manifest", "name"),
    [
        ("dit", "wan21_t2v_1.3b_dit", "T2V-1.3B"),
        ("dit", "wan21_t2v_14b_dit", "T2V-14B"),
        ("vae", "wan21_vae", None),
        ("text_encoder", "umt5_xxl_encoder", None),
    ],
)
def test_published_files_are_described_key_for_key(component, manifest, name):
    if golden_dir() is None:
        pytest.skip("the golden reference data is not here")
    with (golden_dir() / "manifests" / f"{manifest}.tsv").open() as stream:
        published = {
            row["key"]: tuple(int(size) for size in row["shape"].split("x"))
            for row in csv.DictReader(stream, delimiter="\t")
        }
    rule = RULES[component]
    config = rule.infer(published)
    assert rule.shapes(config) == published
    if name:
        assert model_name(config) == name
        assert {key: config[key] for key in ("dim", "ffn_dim", "num_heads", "num_layers")}.items() <= WAN_DIT_SIZES[
            name
        ].items()
    if manifest != "wan21_t2v_14b_dit":
        assert config == rule.official


@pytest.mark.parametrize("component", CONFIGS)
def test_rules_and_models_agree_and_shapes_tell_the_sizes(component):
    config, rule = CONFIGS[component], RULES[component]
    with meta_parameters():
        model = MODELS[component].from_config(config)
    shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    assert rule.shapes(config) == shapes
    told = rule.infer(shapes)
    for key in set(told) - ({"num_heads"} if component == "dit" else set()):
        assert list(told[key]) == config[key] if isinstance(told[key], tuple) else told[key] == config[key], key


def test_shared_position_table_of_the_text_encoder():
    config = CONFIGS["text_encoder"] | {"shared_pos": True}
    with meta_parameters():
        model = WanTextEncoder.from_config(config)
    shapes = RULES["text_encoder"].shapes(config)
    assert {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()} == shapes
    assert RULES["text_encoder"].infer(shapes)["shared_pos"] is True


def test_defaults_are_the_official_ones_unless_said_otherwise():
    settings = default_settings({"steps": 20, "negative_prompt": ""})
    assert (settings["steps"], settings["negative_prompt"]) == (20, "")
    assert (settings["width"], settings["height"], settings["num_frames"], settings["shift"]) == (832, 480, 81, 5.0)
    with pytest.raises(ValueError, match="guidence"):
        default_settings({"guidence": 4})


def test_negative_prompt_is_the_published_one():
    if golden_dir() is None:
        pytest.skip("the golden reference data is not here")
    constants = json.loads((golden_dir() / "manifests" / "constants.json").read_text())
    assert default_settings({})["negative_prompt"] == constants["negative_prompt"]["wan21_t2v"]
