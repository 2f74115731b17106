"""What is written about the training agrees with the settings and with the weights that ship."""

import re
from pathlib import Path

from telefuser.core import checkpoint
from telefuser.core.hub import EMBEDDED_FOLDER
from training.wan_tiny.settings import FULL, SAMPLING_DEFAULTS

README = Path(__file__).resolve().parents[2] / "training" / "README.md"


def test_the_readme_states_the_steps():
    rows = re.findall(r"^\| `(\w+)` \|.* (\d+) \|$", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [("vae", str(FULL.vae.steps)), ("dit", str(FULL.dit.steps))]


def test_the_shipped_weights_have_the_sizes_and_defaults_of_the_settings():
    found = checkpoint.inspect(EMBEDDED_FOLDER).require_usable()
    assert found.defaults == SAMPLING_DEFAULTS
    for part, config in ((found.dit, FULL.dit.config), (found.vae, FULL.vae.config)):
        assert {key: _plain(part.config.get(key, config[key])) for key in config} == config
    assert {key: found.text_encoder.config.get(key, value) for key, value in FULL.dit.text_config.items()} == (
        FULL.dit.text_config
    )


def _plain(value):
    return list(value) if isinstance(value, tuple) else value
