"""Every value of a config.json is judged before anything is computed from it."""

import json
import math

import pytest

from telefuser.core.checkpoint import inspect
from telefuser.core.wan_config import check_values
from telefuser.core.wan_layout import RULES
from telefuser.core.weight_files import CheckpointError
from tests.core.wan_folders import CONFIGS, DIT, TEXT_ENCODER, VAE, write_official


@pytest.mark.parametrize("component", RULES)
def test_published_and_small_configs_pass(component, tmp_path):
    check_values(tmp_path, RULES[component].official)
    check_values(tmp_path, CONFIGS[component] | {"text_len": 512, "eps": 1e-6, "dropout": 0.0, "latents_mean": [0.0]})
    check_values(tmp_path, {"unknown": "anything", "window_size": [-1, -1]})


@pytest.mark.parametrize(
    ("name", "values", "wanted"),
    [
        ("dim", ["48", 0, -1, 1.5, None, [48], True, 2**40], "a whole number from 1 to 16777216"),
        ("num_layers", [10**9], "a whole number from 1 to 1000"),
        ("text_len", [0, -5, 10**9, "a"], "a whole number from 1 to 8192"),
        ("eps", ["x", 0, -1, math.inf, math.nan], "a number between 0 and 1"),
        ("dropout", ["x", 2, -0.1], "a number from 0 to 1"),
        ("shared_pos", ["x", 1, None], "true or false"),
        ("patch_size", [2, [], [1, 0, 2], "122"], "a list of whole numbers"),
        ("dim_mult", [3, [], ["1"], [1.5]], "a list of whole numbers"),
        ("temperal_downsample", [3, [], ["a"], [0, 1, 1]], "a list of true or false"),
        ("latents_mean", [3, [], ["a"], [math.nan]], "a list of finite numbers"),
        ("latents_std", [3, [0.0], [-1.0], [math.nan], [math.inf]], "a list of numbers above 0"),
    ],
)
def test_values_of_another_kind_are_refused_by_name(tmp_path, name, values, wanted):
    for value in values:
        with pytest.raises(CheckpointError, match=f"config.json: '{name}' must be {wanted}"):
            check_values(tmp_path / "config.json", {name: value})


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        (None, "num_layers", 10**9),
        (None, "num_heads", "2"),
        (None, "eps", math.inf),
        ("vae", "latents_std", [math.nan] * 16),
        ("text_encoder", "num_buckets", 0),
    ],
)
def test_inspect_names_the_file_and_the_value(tmp_path, section, name, value):
    base = {"vae": VAE, "text_encoder": TEXT_ENCODER}
    overrides = {name: value} if section is None else {section: base[section] | {name: value}}
    folder = write_official(tmp_path / "wan", **overrides)
    (problem,) = inspect(folder).problems
    assert problem.startswith(f"{folder / 'config.json'}: '{name}' must be ")


def test_heads_of_an_odd_width_are_refused(tmp_path):
    folder = write_official(tmp_path / "wan")
    (folder / "config.json").write_text(json.dumps(DIT | {"num_heads": DIT["dim"]}))
    (problem,) = inspect(folder).problems
    assert "makes heads 1 wide for dim 32; an even width is needed" in problem
