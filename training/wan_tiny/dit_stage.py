"""Stage two: the diffusion transformer and its text encoder, trained together by flow matching on encoded clips."""

import random
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from telefuser.core.config import AttentionConfig, AttnImplType
from telefuser.models.wan_video_dit import WanModel
from telefuser.models.wan_video_text_encoder import WanTextEncoder
from telefuser.models.wan_video_vae import WanVideoVAE
from training.wan_tiny import checkpoint_folder
from training.wan_tiny.optimisation import Optimisation
from training.wan_tiny.prompts import canonical, grid, reword
from training.wan_tiny.seeds import generator_for
from training.wan_tiny.settings import SAMPLING_DEFAULTS, DitSettings
from training.wan_tiny.tokenizer import build_tokenizer, encode, save_tokenizer
from training.wan_tiny.vae_stage import channels_last, encode_clips

# Of every clip's wordings, this share is the plain one, which is what the evaluation and most people type.
CANONICAL_SHARE = 1 / 8


class DitStage:
    """The transformer in training; `folder` must hold a trained VAE. `step(i)` depends on the seed and `i` alone."""

    name = "dit"

    def __init__(self, settings: DitSettings, device: torch.device, seed: int, compile_model: bool, folder: Path):
        self.settings, self.device, self.seed = settings, device, seed
        self.total_steps = settings.steps
        self._fill_bank(folder)
        self.wordings = _wording_table(settings.wordings, seed).to(device)  # [216, K, L]
        self.no_text = torch.tensor(encode([""], build_tokenizer())[0], device=device)
        torch.manual_seed(seed)
        self.dit = WanModel.from_config(settings.config).to(device)
        self.text_encoder = WanTextEncoder.from_config(settings.text_config).to(device)
        for layer in (self.dit.text_embedding[0], self.dit.text_embedding[2]):
            # The published deviation of 0.02 suits a width of 4096; at 128 the text would reach the blocks at a 30th.
            nn.init.xavier_uniform_(layer.weight)
        self.dit.set_attention_config(AttentionConfig.dense_attention(AttnImplType.TORCH_SDPA))
        modules = {"dit": self.dit, "text": self.text_encoder}
        self.optimisation = Optimisation(modules, settings.peak_lr, settings.warmup, settings.steps, settings.ema_decay)
        frames, height, width = self.bank.shape[2:]
        self.dit.rope_table(
            (frames, height // 2, width // 2), device
        )  # made before compilation, so that it is a constant
        self._loss = torch.compile(self._velocity_loss, dynamic=False) if compile_model else self._velocity_loss

    def _fill_bank(self, folder: Path) -> None:
        """Normalised latents [N, z, f, h, w] fp16 of `bank_clips` clips, every one of the 216 kinds equally often."""
        config = checkpoint_folder.read_config(folder)
        if "vae" not in config:
            raise ValueError(f"{folder} holds no trained VAE: run --stage vae first")
        vae = WanVideoVAE.from_config(config["vae"])
        checkpoint_folder.load_module(vae, folder / checkpoint_folder.VAE)
        vae = channels_last(vae.to(self.device))
        kinds = torch.arange(self.settings.bank_clips, device=self.device) % len(grid())
        attributes = torch.tensor(grid(), device=self.device)[kinds]
        latents = encode_clips(vae, attributes, generator_for(self.device, self.seed, "bank", 0))
        self.bank = torch.cat([vae.normalize(part).half() for part in latents.split(1024)])
        self.kinds = kinds

    def step(self, index: int) -> dict[str, torch.Tensor]:
        x0, ids, noise, level = self._batch(generator_for(self.device, self.seed, self.name, index))
        # The text encoder runs in float32 outside autocast: 1 % of the work, and its position bias must match q.
        mask = ids != 0
        context = self.text_encoder(ids, mask) * mask.unsqueeze(-1)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self._loss(x0, noise, level, context)
        self.optimisation.update(loss, index)
        return {"loss": loss.detach()}

    def _batch(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Latents and noise [B, z, f, h, w] fp32, token ids [B, L] and noise levels [B] in (0, 1)."""
        settings, device = self.settings, self.device
        options = {"generator": generator, "device": device}
        rows = torch.randint(len(self.bank), (settings.batch,), **options)
        wording = torch.randint(settings.wordings, (settings.batch,), **options)
        ids = self.wordings[self.kinds[rows], wording]
        dropped = torch.rand(settings.batch, 1, **options) < settings.drop_text
        ids = torch.where(dropped, self.no_text, ids)
        x0 = self.bank[rows].float()
        noise = torch.randn(x0.shape, **options)
        uniform = torch.rand(settings.batch, **options)
        normal = torch.randn(settings.batch, **options).sigmoid()
        u = torch.where(torch.rand(settings.batch, **options) < settings.uniform_times, uniform, normal)
        level = settings.time_shift * u / (1 + (settings.time_shift - 1) * u)
        return x0, ids, noise, level

    def _velocity_loss(
        self, x0: torch.Tensor, noise: torch.Tensor, level: torch.Tensor, context: torch.Tensor
    ) -> torch.Tensor:
        """Flow matching (Lipman et al. 2022, arXiv:2210.02747): predict noise - x0 at x = (1 - s) x0 + s noise."""
        x = torch.lerp(x0, noise, level.view(-1, 1, 1, 1, 1))
        return F.mse_loss(self.dit(x, 1000 * level, context), noise - x0)

    def finish(self, folder: Path) -> str:
        """Write the averaged weights, the whole configuration and the tokenizer: the folder is then a checkpoint."""
        self.optimisation.load_average()
        checkpoint_folder.save_module(self.dit, folder / checkpoint_folder.DIT)
        checkpoint_folder.save_module(self.text_encoder, folder / checkpoint_folder.TEXT_ENCODER)
        entries = {**self.settings.config, "text_encoder": self.settings.text_config, "defaults": SAMPLING_DEFAULTS}
        checkpoint_folder.update_config(folder, entries)
        save_tokenizer(folder)
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors") if "-state-" not in path.name)
        return f"checkpoint in {folder}: {size / 2**20:.1f} MiB of weights"


def _wording_table(count: int, seed: int) -> torch.Tensor:
    """Token ids [216, count, L] of `count` wordings a kind."""
    rng = random.Random(seed)
    plain = max(1, round(count * CANONICAL_SHARE))
    texts = []
    for attributes in grid():
        texts += [canonical(attributes)] * plain + [reword(attributes, rng) for _ in range(count - plain)]
    return torch.tensor(encode(texts, build_tokenizer())).view(len(grid()), count, -1)
