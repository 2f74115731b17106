"""What `inspect` says about good folders and about every wrong one, before anything large is read."""

import json
import shutil
from fnmatch import fnmatch
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors.torch import load_file, save_file

from telefuser.core import hub, wan_keys
from telefuser.core.checkpoint import CheckpointError, inspect
from telefuser.core.wan_layout import RULES
from telefuser.models.wan_video_dit import WanModel
from telefuser.models.wan_video_text_encoder import WanTextEncoder
from telefuser.models.wan_video_vae import WanVideoVAE
from tests.core.wan_folders import DIT, FILES, TEXT_ENCODER, VAE, random_weights, write_official


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    return write_official(tmp_path_factory.mktemp("wan") / "pristine")


@pytest.fixture
def folder(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "wan")


def edit(folder, component, change):
    """Rewrites a component's weights after `change(state_dict)`."""
    file = folder / FILES[component]
    state = {key: tensor.clone() for key, tensor in load_file(file).items()}
    state = change(state) or state
    file.unlink()
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, file)
    return file


def only_problem(folder, *parts):
    found = inspect(folder)
    assert len(found.problems) == 1, found.problems
    for part in parts:
        assert str(part) in found.problems[0], found.problems[0]
    with pytest.raises(CheckpointError) as caught:
        found.require_usable()
    assert str(caught.value) == found.problems[0]
    return found


def test_good_official_folder(folder):
    found = inspect(folder).require_usable()
    assert (found.layout, found.problems, found.name) == ("official", (), "custom (dim 32, 2 layers)")
    assert found.dit.config == DIT
    assert found.vae.config.items() >= {"dim": 4, "z_dim": 16, "dim_mult": (1, 2, 2, 2), "num_res_blocks": 1}.items()
    assert found.text_encoder.config == TEXT_ENCODER
    assert found.tokenizer == folder / "google/umt5-xxl/tokenizer.json"
    assert found.defaults["steps"] == 50
    assert found.dit.files == (folder / FILES["dit"],)
    assert found.dit.num_parameters == sum(tensor.numel() for tensor in random_weights("dit").values())
    assert found.dit.dtypes == {"float32": len(random_weights("dit"))}


def test_components_load_into_the_models(folder):
    found = inspect(folder)
    dit = found.dit.load(WanModel.from_config, dtype=torch.bfloat16, fp32_fragments=WanModel.FP32_PARAMETERS)
    weights = random_weights("dit")
    for name, parameter in dit.named_parameters():
        keep = any(fragment in name for fragment in WanModel.FP32_PARAMETERS)
        assert torch.equal(parameter, weights[name] if keep else weights[name].bfloat16()), name
    vae = found.vae.load(WanVideoVAE.from_config, dtype=torch.float32)
    assert all(torch.equal(tensor, random_weights("vae")[key]) for key, tensor in vae.state_dict().items())
    assert not any(buffer.is_meta for buffer in vae.buffers())
    encoder = found.text_encoder.load(WanTextEncoder.from_config, dtype=torch.float32)
    assert encoder(torch.tensor([[3, 7, 1]]), torch.ones(1, 3)).isfinite().all()


def test_config_sections_override_and_defaults_apply(tmp_path):
    mean = [0.5] * 16
    folder = write_official(
        tmp_path / "wan", vae={"latents_mean": mean}, text_encoder={"num_heads": 4}, defaults={"steps": 8, "fps": 8}
    )
    found = inspect(folder).require_usable()
    assert found.vae.config["latents_mean"] == mean
    assert (found.defaults["steps"], found.defaults["fps"], found.defaults["shift"]) == (8, 8, 5.0)
    assert not {"vae", "text_encoder", "defaults"} & set(found.dit.config)


def test_pth_components_and_shards(folder):
    for component in ("vae", "text_encoder"):
        file = folder / FILES[component]
        torch.save(load_file(file), file.with_suffix(".pth"))
        file.unlink()
    state = load_file(folder / FILES["dit"])
    (folder / FILES["dit"]).unlink()
    keys = sorted(state)
    for number, part in ((1, keys[:20]), (2, keys[20:])):
        save_file(
            {key: state[key] for key in part}, folder / f"diffusion_pytorch_model-{number:05d}-of-00002.safetensors"
        )
    found = inspect(folder).require_usable()
    assert [file.suffix for file in found.vae.files] == [".pth"]
    assert len(found.dit.files) == 2
    loaded = found.dit.load(WanModel.from_config, dtype=None)
    assert all(torch.equal(loaded.state_dict()[key], state[key]) for key in keys)
    found.dit.files[1].unlink()
    only_problem(folder, "1 of 2 weight files are missing", "00002-of-00002.safetensors")


def test_absent_config_is_read_from_the_shapes(folder):
    (folder / "config.json").unlink()
    only_problem(folder, "config.json", "num_heads")
    shapes = RULES["dit"].shapes(DIT | {"dim": 128, "num_heads": 1})
    save_file({key: torch.zeros(shape) for key, shape in shapes.items()}, folder / FILES["dit"])
    found = inspect(folder).require_usable()
    assert (found.dit.config["dim"], found.dit.config["num_heads"], found.dit.config["ffn_dim"]) == (128, 1, 48)


# B132: the wrong kind of checkpoint is detected up front, by what was found and what is needed.


def test_big_config_with_small_weights(folder):
    (folder / "config.json").write_text(json.dumps(DIT | {"dim": 64, "num_layers": 4}))
    only_problem(folder, "config.json: says dim 64, num_layers 4", "has dim 32, num_layers 2", "one checkpoint")


@pytest.mark.parametrize("kind", ["channels", "keys", "config"])
def test_image_to_video_weights(folder, kind):
    if kind == "channels":
        edit(folder, "dit", lambda state: state.update({"patch_embedding.weight": torch.zeros(32, 36, 1, 2, 2)}))
        only_problem(folder, FILES["dit"], "image-to-video", "36 input channels", "16 input channels")
    elif kind == "keys":
        edit(folder, "dit", lambda state: state.update({"blocks.0.cross_attn.k_img.weight": torch.zeros(32, 32)}))
        only_problem(folder, FILES["dit"], "image-to-video", "blocks.0.cross_attn.k_img.weight")
    else:
        (folder / "config.json").write_text(json.dumps(DIT | {"model_type": "i2v"}))
        only_problem(folder, "config.json", "image-to-video", "text-to-video")


@pytest.mark.parametrize("scales", [False, True])
def test_int8_weights(folder, scales):
    def quantise(state):
        state["blocks.0.ffn.0.weight"] = state["blocks.0.ffn.0.weight"].to(torch.int8)
        if scales:
            state["blocks.0.ffn.0.weight_scale"] = torch.ones(48, 1)

    edit(folder, "dit", quantise)
    only_problem(
        folder, FILES["dit"], "blocks.0.ffn.0.weight", "quantised", "with scales" if scales else "without scales"
    )


def test_file_instead_of_a_folder(folder):
    with pytest.raises(CheckpointError, match=r"a file; .*wan"):
        inspect(folder / FILES["dit"])


def test_diffusers_keys_in_an_official_folder(folder):
    rename = wan_keys.dit_key_map().to_diffusers
    edit(folder, "dit", lambda state: {rename(key): tensor for key, tensor in state.items()})
    only_problem(folder, FILES["dit"], "dit in diffusers spelling")


def test_part_of_a_diffusers_folder(folder, tmp_path):
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"one part of a diffusers checkpoint.*" + tmp_path.name):
        inspect(folder)


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ({"_class_name": "WanImageToVideoPipeline"}, "image-to-video"),
        ({"_class_name": "StableDiffusionPipeline"}, "'StableDiffusionPipeline'"),
        ({"_class_name": ["WanPipeline"]}, "WanPipeline"),
        ({"_class_name": "WanPipeline", "transformer_2": 5}, "Wan2.2"),
        ({"_class_name": "WanPipeline", "transformer_2": ["diffusers", "WanTransformer3DModel"]}, "Wan2.2"),
    ],
)
def test_diffusers_folder_of_another_pipeline(tmp_path, index, reason):
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    problems = inspect(tmp_path).problems
    assert reason in problems[0]
    assert "model_index.json" in problems[0]


# Damaged, foreign and half-matching files.


def test_truncated_file(folder):
    file = folder / FILES["vae"]
    file.write_bytes(file.read_bytes()[:-100])
    only_problem(folder, file, "truncated")


def test_foreign_file(folder):
    save_file({"model.embed.weight": torch.zeros(3), "model.head.weight": torch.zeros(3)}, folder / FILES["dit"])
    only_problem(folder, FILES["dit"], "none of its 2 keys", "model.embed.weight")


def test_file_of_another_component(folder):
    shutil.copy(folder / FILES["vae"], folder / FILES["dit"])
    only_problem(folder, FILES["dit"], "those of a vae in official spelling")


def test_wrapped_state_dict(folder):
    edit(folder, "dit", lambda state: {f"module.{key}": tensor for key, tensor in state.items()})
    only_problem(folder, FILES["dit"], "'module.'", "own state dict")


@pytest.mark.parametrize("drop", ["blocks.1.", "patch_embedding.weight", "blocks.0.ffn.0.weight"])
def test_half_matching_file_lists_what_is_missing(folder, drop):
    edit(folder, "dit", lambda state: {key: tensor for key, tensor in state.items() if not key.startswith(drop)})
    only_problem(folder, FILES["dit"], "keys are missing", drop)


def test_wrong_shape_of_one_tensor(folder):
    edit(folder, "dit", lambda state: state.update({"blocks.1.self_attn.q.weight": torch.zeros(32, 31)}))
    only_problem(folder, FILES["dit"], "'blocks.1.self_attn.q.weight' has shape (32, 31)", "(32, 32)")


def test_nan_filled_file_is_found_before_it_is_loaded(folder):
    edit(folder, "dit", lambda state: {key: torch.full_like(tensor, torch.nan) for key, tensor in state.items()})
    only_problem(folder, FILES["dit"], "NaN", "download it again")


def test_late_nan_is_found_while_loading(folder):
    def spoil(state):
        state["blocks.1.ffn.2.weight"].view(-1)[-1] = torch.nan

    edit(folder, "dit", spoil)
    with pytest.raises(CheckpointError, match=r"'blocks.1.ffn.2.weight' holds NaN"):
        inspect(folder).require_usable().dit.load(WanModel.from_config, dtype=None)


def test_parts_of_different_checkpoints(folder):
    shapes = RULES["text_encoder"].shapes(TEXT_ENCODER | {"dim": 16})
    save_file({key: torch.zeros(shape) for key, shape in shapes.items()}, folder / FILES["text_encoder"])
    only_problem(folder, "text_dim is 24", "text encoder's dim 16")


@pytest.mark.parametrize(
    ("sizes", "factors"),
    [
        ({"dim_mult": [1, 2, 2], "temperal_downsample": [True, True]}, "edges 4 times and time 4 times"),
        ({"temperal_downsample": [False, False, True]}, "edges 8 times and time 2 times"),
    ],
)
def test_vae_of_another_compression(folder, sizes, factors):
    """It would decode to a video of another size than was asked for."""
    shapes = RULES["vae"].shapes(VAE | sizes)
    save_file({key: torch.zeros(shape) for key, shape in shapes.items()}, folder / FILES["vae"])
    only_problem(folder, "config.json", factors, "8 and 4 times")


def test_vae_of_unknown_statistics(folder):
    shapes = RULES["vae"].shapes(VAE | {"z_dim": 8})
    save_file({key: torch.zeros(shape) for key, shape in shapes.items()}, folder / FILES["vae"])
    only_problem(folder, "config.json", "'latents_mean' is needed", "8 latent channels")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        (FILES["dit"], "no dit weights (diffusion_pytorch_model*.safetensors)"),
        (FILES["vae"], "no vae weights (Wan2.1_VAE*.safetensors)"),
        (FILES["text_encoder"], "no text_encoder weights (models_t5_*.safetensors)"),
        ("google/umt5-xxl/tokenizer.json", "google/umt5-xxl/tokenizer.json: missing"),
    ],
)
def test_missing_parts_are_named(folder, name, part):
    (folder / name).unlink()
    only_problem(folder, part)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "not readable as JSON"),
        ("[]", "an object is needed"),
        (json.dumps(DIT | {"num_heads": 5}), "num_heads 5 does not divide dim 32"),
        (json.dumps(DIT | {"defaults": {"step": 1}}), "unknown settings ['step']"),
    ],
)
def test_broken_config(folder, text, part):
    (folder / "config.json").write_text(text)
    problems = inspect(folder).problems
    assert any("config.json" in problem and part in problem for problem in problems), problems


def test_several_problems_are_all_listed_and_counted(folder):
    (folder / FILES["vae"]).unlink()
    (folder / FILES["dit"]).write_bytes(b"")
    found = inspect(folder)
    assert (found.dit, found.vae, len(found.problems)) == (None, None, 2)
    with pytest.raises(CheckpointError, match=r"1 more: see `telefuser check"):
        found.require_usable()


# Finding the folder.


def test_folder_that_holds_something_else(tmp_path):
    (tmp_path / "photo.jpg").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no Wan checkpoint.*photo.jpg"):
        inspect(tmp_path)


def test_parent_of_a_checkpoint_names_it(folder):
    with pytest.raises(CheckpointError, match=r"Did you mean .*wan\?"):
        inspect(folder.parent)


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-of-that-name/wan", "a\0b"])
def test_names_that_no_disk_takes_are_no_folder(name):
    with pytest.raises(CheckpointError, match="no such folder"):
        inspect(name)


def test_missing_path_names_near_ones(folder):
    with pytest.raises(CheckpointError, match=r"no such folder\. Did you mean .*wan\?"):
        inspect(folder.parent / "wan2")
    with pytest.raises(CheckpointError, match="'tiny'"):
        inspect("nothing-like-it")


@pytest.fixture
def hub_cache(pristine, tmp_path, monkeypatch):
    """A hub cache with one repository, and a hub that nobody can reach (port 9 discards)."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    repository = tmp_path / "models--org--wan-small"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    return shutil.copytree(pristine, repository / "snapshots" / ("a" * 40))


def test_hub_id_is_taken_from_the_cache_without_the_network(hub_cache):
    found = inspect("org/wan-small").require_usable()
    assert found.folder == hub_cache
    assert found.source == "org/wan-small"


def test_hub_out_of_reach_is_one_clear_error(hub_cache):
    with pytest.raises(CheckpointError) as caught:
        inspect("org/never-downloaded")
    assert "org/never-downloaded: no such folder here" in str(caught.value)
    assert "hub cannot be reached" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_incomplete_cache_is_completed_from_the_hub(hub_cache, pristine, monkeypatch):
    (hub_cache / FILES["vae"]).unlink()
    asked = []

    def download(repo_id, allow_patterns, local_files_only=False):
        asked.append((repo_id, local_files_only))
        if not local_files_only:
            shutil.copy(pristine / FILES["vae"], hub_cache)
        return str(hub_cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    inspect("org/wan-small").require_usable()
    assert asked == [("org/wan-small", True), ("org/wan-small", False)]


def test_unknown_hub_id_names_near_folders(tmp_path, monkeypatch):
    def download(repo_id, allow_patterns, local_files_only=False):
        if local_files_only:
            raise LocalEntryNotFoundError("not cached")
        response = SimpleNamespace(headers={}, request=None, status_code=404)
        raise RepositoryNotFoundError("404", response=response)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "wan").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"models/wam: no such folder here.*Did you mean models/wan\?"):
        inspect("models/wam")


@pytest.mark.skipif(not hub.EMBEDDED_FOLDER.is_dir(), reason="the embedded model has not been built")
def test_embedded_model():
    found = inspect("tiny").require_usable()
    assert (found.layout, found.folder.name) == ("official", "wan_tiny")
    assert sum(part.num_bytes for part in found.components) <= 24 * 2**20


def test_hub_patterns_cover_every_file_of_both_layouts():
    wanted = [
        "config.json", "diffusion_pytorch_model-00001-of-00006.safetensors", "Wan2.1_VAE.pth",
        "models_t5_umt5-xxl-enc-bf16.pth", "google/umt5-xxl/tokenizer.json", "model_index.json",
        "transformer/diffusion_pytorch_model.safetensors.index.json", "vae/config.json",
        "text_encoder/model-00001-of-00005.safetensors", "tokenizer/tokenizer.json",
    ]  # fmt: skip
    for name in wanted:
        assert any(fnmatch(name, pattern) for pattern in hub._ALLOW_PATTERNS), name
    assert not any(fnmatch("assets/demo.mp4", pattern) for pattern in hub._ALLOW_PATTERNS)
