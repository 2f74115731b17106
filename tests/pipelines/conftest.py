"""A random tiny Wan checkpoint, written as a folder in the official layout with our own models' state dicts."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from telefuser.models.wan_video_dit import WanModel
from telefuser.models.wan_video_text_encoder import WanTextEncoder
from telefuser.models.wan_video_vae import WanVideoVAE

WORDS = ("a", "cat", "dog", "red", "blue", "circle", "moving", "left", "right", "on", "black", "background", "blurry")
DIT = {
    "model_type": "t2v", "dim": 48, "in_dim": 16, "ffn_dim": 64, "out_dim": 16, "text_dim": 32, "freq_dim": 32,
    "num_heads": 2, "num_layers": 2, "text_len": 512, "patch_size": [1, 2, 2], "eps": 1e-6,
}  # fmt: skip
VAE = {"dim": 4, "z_dim": 16, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1, "temperal_downsample": [False, True, True]}
TEXT_ENCODER = {
    "vocab": 32, "dim": 32, "dim_attn": 32, "dim_ffn": 64, "num_heads": 2, "num_layers": 2, "num_buckets": 32,
    "shared_pos": False,
}  # fmt: skip
DEFAULTS = {
    "height": 32, "width": 48, "num_frames": 5, "steps": 2, "guidance": 3.0, "shift": 3.0, "fps": 8,
    "negative_prompt": "blurry", "scheduler": "unipc",
}  # fmt: skip


def write_tokenizer(path: Path) -> None:
    """Words to ids with an end token, as the official tokenizer.json: <pad> 0, </s> 1, <unk> 2."""
    vocab = {token: i for i, token in enumerate(("<pad>", "</s>", "<unk>", *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    path.parent.mkdir(parents=True)
    tokenizer.save(str(path))


def write_checkpoint(folder: Path, seed: int = 0) -> Path:
    """Every parameter drawn: also the head and the norms, which initialisers leave at 0 and 1."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(seed)
    parts = {
        "diffusion_pytorch_model": WanModel.from_config(DIT),
        "Wan2.1_VAE": WanVideoVAE.from_config(VAE),
        "models_t5_tiny": WanTextEncoder.from_config(TEXT_ENCODER),
    }
    for name, model in parts.items():
        state = {}
        for key, value in model.state_dict().items():
            drawn = torch.randn_like(value) * (0.3 if value.ndim < 2 else max(value[0].numel(), 1) ** -0.5)
            state[key] = drawn + 1 if key.endswith(("norm_q.weight", "norm_k.weight", "gamma")) else drawn
            if "norm" in key.split(".")[-2] and key.endswith("weight"):
                state[key] = drawn + 1
        save_file(state, folder / f"{name}.safetensors")
    config = {**DIT, "vae": VAE, "text_encoder": TEXT_ENCODER, "defaults": DEFAULTS}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder / "google" / "tiny" / "tokenizer.json")
    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("wan_random_tiny"))


@pytest.fixture
def tiny_pipeline(tiny_folder):
    from telefuser.pipelines.wan_video import WanPipeline

    return WanPipeline.from_pretrained(tiny_folder, device="cpu")
