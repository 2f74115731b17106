"""Stage one: the video autoencoder, trained on windows of freshly drawn clips; then the latents' mean and deviation."""

from pathlib import Path

import torch
import torch.nn.functional as F

from telefuser.models.wan_video_vae import WanVideoVAE
from training.wan_tiny import checkpoint_folder
from training.wan_tiny.clips import NUM_FRAMES, SIZE, draw, sample_attributes, sample_scenes
from training.wan_tiny.judge import judge
from training.wan_tiny.optimisation import Optimisation
from training.wan_tiny.prompts import grid
from training.wan_tiny.seeds import generator_for
from training.wan_tiny.settings import VaeSettings

ENCODE_BATCH = 48


class VaeStage:
    """One VAE in training. `step(i)` draws data by the seed and `i` alone, so a resumed run continues exactly."""

    name = "vae"

    def __init__(self, settings: VaeSettings, device: torch.device, seed: int, compile_model: bool):
        self.settings, self.device, self.seed = settings, device, seed
        self.total_steps = settings.steps
        torch.manual_seed(seed)
        self.vae = channels_last(WanVideoVAE.from_config(settings.config).to(device))
        self.optimisation = Optimisation({"vae": self.vae}, settings.peak_lr, settings.warmup, settings.steps)
        self._loss = torch.compile(self._losses, dynamic=False) if compile_model else self._losses

    def step(self, index: int) -> dict[str, torch.Tensor]:
        video, weight, noise = self._batch(generator_for(self.device, self.seed, self.name, index))
        with torch.autocast(self.device.type, torch.bfloat16):
            loss, squared_error = self._loss(video, weight, noise)
        self.optimisation.update(loss, index)
        return {"loss": loss.detach(), "mse": squared_error.detach()}

    def _batch(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Windows [B, 3, F, w, w] channels-last, pixel weights [B, 1, F, w, w] and latent noise [B, z, f, w/8, w/8]."""
        size, batch = self.settings.window, self.settings.batch
        scenes = sample_scenes(sample_attributes(batch, generator), generator)
        aim = scenes.centre[:, NUM_FRAMES // 2] - size / 2
        aim = aim + 80 * torch.rand(batch, 2, generator=generator, device=self.device) - 40
        video, coverage = draw(scenes, aim.round().clamp(0, SIZE - size), size)
        # The outline's outer side counts like the shape: two pixels of margin, or the blur would simply move outwards.
        weight = 1 + (self.settings.shape_weight - 1) * F.max_pool3d(coverage, (1, 5, 5), 1, (0, 2, 2))
        shape = (batch, self.settings.config["z_dim"], 1 + (NUM_FRAMES - 1) // 4, size // 8, size // 8)
        noise = torch.randn(shape, generator=generator, device=self.device)
        return video.contiguous(memory_format=torch.channels_last_3d), weight, noise

    def _losses(
        self, video: torch.Tensor, weight: torch.Tensor, noise: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mu, logvar = self.vae.encode_moments(video)
        mu, logvar = mu.float(), logvar.float().clamp(-20, 10)
        error = self.vae.decode_raw(mu + torch.exp(0.5 * logvar) * noise).float() - video
        reconstruction = (weight * (error.abs() + 2 * error.square())).mean()
        kl = 0.5 * (mu.square() + logvar.exp() - 1 - logvar).mean()
        return reconstruction + self.settings.kl_weight * kl, error.square().mean()

    def finish(self, folder: Path) -> str:
        """Write weights and configuration, and report how well whole clips come back through the stored weights."""
        checkpoint_folder.save_module(self.vae, folder / checkpoint_folder.VAE)
        checkpoint_folder.load_module(
            self.vae, folder / checkpoint_folder.VAE
        )  # what follows must see the rounded weights
        generator = generator_for(self.device, self.seed, "statistics", 0)
        attributes = torch.tensor(grid(), device=self.device).repeat(-(-self.settings.statistics_clips // 216), 1)
        latents = encode_clips(self.vae, attributes[: self.settings.statistics_clips], generator).float()
        mean, std = latents.mean((0, 2, 3, 4)), latents.std((0, 2, 3, 4))
        statistics = {"latents_mean": mean.tolist(), "latents_std": std.tolist()}
        checkpoint_folder.update_config(folder, {"vae": {**self.settings.config, **statistics}})
        return self._reconstruction_report()

    @torch.no_grad()
    def _reconstruction_report(self) -> str:
        generator = generator_for(self.device, self.seed, "reconstruction", 0)
        asked = torch.tensor(grid(), device=self.device)[:: max(1, 2160 // self.settings.statistics_clips)]
        errors, right, ious = [], [], []
        for part in asked.split(16):
            video, _ = draw(sample_scenes(part, generator))
            result = self.vae.decode_raw(self.vae.encode_moments(video)[0]).clamp(-1, 1)
            errors.append((result - video).square().mean((1, 2, 3, 4)) / 4)
            verdict = judge(((result + 1) * 127.5).round().byte().permute(0, 2, 3, 4, 1))
            right.append(verdict.right(part).all(1).float())
            ious.append(verdict.iou.mean(1))
        psnr = -10 * torch.cat(errors).mean().log10()
        return (
            f"reconstruction of {len(asked)} whole clips: {psnr:.1f} dB, "
            f"{100 * torch.cat(right).mean():.1f} % judged right, IoU {torch.cat(ious).mean():.3f}"
        )


def channels_last(vae: WanVideoVAE) -> WanVideoVAE:
    """Lay the convolution weights out as cuDNN's bf16 kernels want them; `Module.to` refuses a mix of 2-D and 3-D."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for parameter in vae.parameters():
        if parameter.ndim in formats:
            parameter.data = parameter.data.contiguous(memory_format=formats[parameter.ndim])
    return vae


@torch.no_grad()
def encode_clips(vae: WanVideoVAE, attributes: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw and encode a clip for each row of `attributes` [N, 4]: raw mu [N, z, f, 16, 16] fp16."""
    parts = []
    for part in attributes.split(ENCODE_BATCH):
        video, _ = draw(sample_scenes(part, generator))
        with torch.autocast(video.device.type, torch.bfloat16):
            mu, _ = vae.encode_moments(video.contiguous(memory_format=torch.channels_last_3d))
        parts.append(mu.half())
    return torch.cat(parts)
