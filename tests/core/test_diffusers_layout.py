"""diffusers' own models, saved its way, against ours loaded from its folder and from the official layout."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from telefuser.core.checkpoint import inspect
from telefuser.models.wan_video_dit import WanModel
from telefuser.models.wan_video_text_encoder import WanTextEncoder
from telefuser.models.wan_video_vae import WanVideoVAE
from tests.core.wan_folders import FILES

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

MEAN = [0.1 * i for i in range(16)]
STD = [1 + 0.05 * i for i in range(16)]


def randomise(model, seed):
    """Every parameter drawn, also those that initialisers leave at 0 or 1, so that each key matters."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        # Norm weights and biases stay of order 1, matrices keep the size of what passes through them.
        scale = 0.3 if parameter.ndim < 2 else parameter[0].numel() ** -0.5
        offset = 1.0 if parameter.ndim < 2 else 0.0
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * scale + offset)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def reference():
    dit = diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=24, in_channels=16, out_channels=16, text_dim=32, freq_dim=32,
        ffn_dim=64, num_layers=2,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLWan(
        base_dim=4, dim_mult=[1, 2, 2, 2], num_res_blocks=1, latents_mean=MEAN, latents_std=STD
    )
    text = transformers.UMT5EncoderModel(
        transformers.UMT5Config(
            vocab_size=40, d_model=32, d_kv=8, d_ff=48, num_heads=4, num_layers=2, relative_attention_num_buckets=32
        )
    )
    return {name: randomise(model, i) for i, (name, model) in enumerate({"dit": dit, "vae": vae, "text": text}.items())}


@pytest.fixture(scope="module")
def diffusers_folder(reference, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wan-diffusers")
    # Shards, as in the 14B repository.
    reference["dit"].save_pretrained(folder / "transformer", max_shard_size="100KB")
    reference["vae"].save_pretrained(folder / "vae")
    reference["text"].save_pretrained(folder / "text_encoder")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline"}))
    return folder


@pytest.fixture(scope="module")
def official_folder(diffusers_folder, tmp_path_factory):
    """The same weights under the official names, written from what `inspect` understood."""
    found = inspect(diffusers_folder).require_usable()
    folder = tmp_path_factory.mktemp("wan-official")
    for part in found.components:
        state = {part.key_map(key): tensor.clone() for key, tensor in part.weights.tensors()}
        save_file(state, folder / FILES[part.name])
    config = {"model_type": "t2v", **found.dit.config, "vae": {"latents_mean": MEAN, "latents_std": STD}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "google" / "umt5-xxl").mkdir(parents=True)
    (folder / "google" / "umt5-xxl" / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module", params=["diffusers", "official"])
def models(request, diffusers_folder, official_folder):
    found = inspect(diffusers_folder if request.param == "diffusers" else official_folder).require_usable()
    assert found.layout == request.param
    return {
        "dit": found.dit.load(WanModel.from_config, dtype=torch.float32),
        "vae": found.vae.load(WanVideoVAE.from_config, dtype=torch.float32),
        "text": found.text_encoder.load(WanTextEncoder.from_config, dtype=torch.float32),
    }


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_transformer_agrees(reference, models):
    x, context, timestep = randn(2, 16, 3, 6, 8), randn(2, 512, 32, seed=1), torch.tensor([999, 17])
    theirs = reference["dit"](hidden_states=x, timestep=timestep, encoder_hidden_states=context).sample
    ours = models["dit"](x, timestep, context)
    assert theirs.abs().max() > 0.5
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)


@torch.no_grad()
def test_vae_agrees(reference, models):
    video = randn(1, 3, 9, 32, 48).clamp(-1, 1)
    mean, std = (torch.tensor(values).view(1, -1, 1, 1, 1) for values in (MEAN, STD))
    theirs = (reference["vae"].encode(video).latent_dist.mean - mean) / std
    torch.testing.assert_close(models["vae"].encode(video), theirs, atol=1e-5, rtol=1e-5)
    latents = randn(1, 16, 3, 4, 6)
    frames = reference["vae"].decode(latents * std + mean).sample
    assert frames.std() > 0.05
    torch.testing.assert_close(models["vae"].decode(latents), frames, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_text_encoder_agrees(reference, models):
    ids = torch.tensor([[5, 9, 13, 1, 0, 0], [7, 3, 30, 39, 2, 1]])
    mask = (ids != 0).long()
    theirs = reference["text"](input_ids=ids, attention_mask=mask).last_hidden_state
    ours = models["text"](ids, mask)
    valid = mask.bool()
    torch.testing.assert_close(ours[valid], theirs[valid], atol=1e-5, rtol=1e-5)


def test_sizes_come_from_the_configs(diffusers_folder):
    found = inspect(diffusers_folder)
    assert (
        found.dit.config.items() >= {"dim": 48, "num_heads": 2, "num_layers": 2, "ffn_dim": 64, "text_dim": 32}.items()
    )
    assert found.vae.config.items() >= {"dim": 4, "dim_mult": [1, 2, 2, 2], "latents_std": STD}.items()
    assert found.text_encoder.config.items() >= {"dim": 32, "dim_attn": 32, "num_heads": 4, "vocab": 40}.items()
    assert len(found.dit.files) > 1


def test_missing_keys_are_named_as_the_file_spells_them(diffusers_folder, tmp_path):
    for name in ("text_encoder", "transformer", "tokenizer", "model_index.json"):
        (tmp_path / name).symlink_to(diffusers_folder / name)
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_bytes((diffusers_folder / "vae" / "config.json").read_bytes())
    file = "vae/diffusion_pytorch_model.safetensors"
    state = load_file(diffusers_folder / file)
    del state["decoder.up_blocks.1.resnets.0.conv1.bias"]
    save_file(state, tmp_path / file)
    (problem,) = inspect(tmp_path).problems
    assert "1 of 146 keys are missing (decoder.up_blocks.1.resnets.0.conv1.bias)" in problem


def test_both_names_of_the_tied_embedding_are_understood(diffusers_folder, reference, tmp_path):
    for name in ("transformer", "vae", "tokenizer", "model_index.json"):
        (tmp_path / name).symlink_to(diffusers_folder / name)
    (tmp_path / "text_encoder").mkdir()
    reference["text"].config.save_pretrained(tmp_path / "text_encoder")
    state = {key: tensor.clone() for key, tensor in reference["text"].state_dict().items()}
    embedding = state.pop("shared.weight")
    state["encoder.embed_tokens.weight"] = embedding
    for both in (False, True):
        stored = state | {"shared.weight": embedding.clone()} if both else state
        save_file(stored, tmp_path / "text_encoder" / "model.safetensors")
        encoder = inspect(tmp_path).require_usable().text_encoder.load(WanTextEncoder.from_config, dtype=None)
        assert torch.equal(encoder.token_embedding.weight, embedding)
