"""Wan text-to-video: `WanPipeline` turns prompts into `WanVideo`s. The only place where the parts of a run meet."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from telefuser import __version__, platforms
from telefuser.core import checkpoint, wan_layout
from telefuser.core.checkpoint import Checkpoint, CheckpointError
from telefuser.core.config import AttentionConfig, AttnImplType, ParallelConfig, QuantConfig
from telefuser.core.model_loading import meta_parameters
from telefuser.distributed import get_attention_strategy, numbers_of_first, own_device, require_same, shard_model
from telefuser.models.wan_video_dit import WanModel
from telefuser.models.wan_video_text_encoder import WanTextEncoder
from telefuser.models.wan_video_vae import WanVideoVAE
from telefuser.ops.fp8_quantization import quantize_weight
from telefuser.pipelines import parallel as parallelism
from telefuser.pipelines import placement, wan_quantization
from telefuser.pipelines.attention_choice import (
    Run,
    attending,
    attention_metadata,
    describe_attention,
    make_state,
    settle_attention,
)
from telefuser.pipelines.decode import NonFiniteError, VideoDecodeError, decode_frames, decode_or_keep
from telefuser.pipelines.denoise import denoise
from telefuser.pipelines.prompt import PromptTokenizer, encode_rows
from telefuser.pipelines.request import GenerationRequest, parse_size, resolve_dtype, validate_request
from telefuser.pipelines.video_file import write_video
from telefuser.schedulers import make_scheduler

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)

__all__ = [
    "NonFiniteError",
    "Stage",
    "VideoDecodeError",
    "WanPipeline",
    "WanVideo",
    "find_problems",
    "make_noise",
    "parse_size",
    "validate_request",
]

# Encoded prompts kept between calls: the negative prompt is the same each time, and a repeated prompt then spares the
# text encoder's trip to the device. A row of UMT5-XXL is 8 KiB, so a long prompt of 200 tokens takes 1.6 MiB.
_MAX_TEXTS = 8


@dataclass(frozen=True)
class Stage:
    """One part of a run: seconds, and the peak of the device's memory in bytes (of the process on the CPU)."""

    name: str
    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class WanVideo:
    """A generated video: frames [F, H, W, 3] uint8 on the host, and everything needed to make it again."""

    frames: torch.Tensor
    fps: float
    seed: int
    settings: dict[str, Any]
    stages: list[Stage] = field(default_factory=list)

    def save(self, path: str | Path) -> Path:
        """Write an H.264 file (.mp4, .mkv, .mov) whose comment holds seed, prompt and settings as JSON.

        Raises what `telefuser.pipelines.video_file.write_video` raises.
        """
        return write_video(self.frames, path, self.fps, self.settings)


def make_noise(seed: int, shape: Sequence[int]) -> torch.Tensor:
    """Standard normal float32 noise on the CPU: the same for a seed on every device, batch and rank."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32)


class WanPipeline:
    """Wan 2.1 text-to-video. Use `from_pretrained`; the models are attributes for those who bring their own.

    Args:
        text_encoder, dit, vae, tokenizer: the parts, in eval mode, on `device` or on the host.
        defaults: what a call leaves open: height, width, num_frames, steps, guidance, shift, fps, negative_prompt and
            scheduler.
        device: where the stages run. A part that lies on the host is moved there for its stage and dropped after it.
        name: what the settings of a video call the model.
        loaded_as: how the models were loaded, for a video's metadata (dtype, attention, offload, quantize).
        attention: of calls that name none, as `from_pretrained` takes it; None is the DiT's own attention.
        device_mesh: of all processes of the job, which then make each video together; see `from_pretrained`.
    """

    def __init__(
        self,
        *,
        text_encoder: WanTextEncoder,
        dit: WanModel,
        vae: WanVideoVAE,
        tokenizer: PromptTokenizer,
        defaults: dict[str, Any],
        device: torch.device | str,
        name: str = "custom",
        loaded_as: dict[str, Any] | None = None,
        attention: str | AttnImplType | AttentionConfig | None = None,
        device_mesh: DeviceMesh | None = None,
    ):
        self.text_encoder, self.dit, self.vae, self.tokenizer = text_encoder, dit, vae, tokenizer
        self.defaults, self.device, self.name = dict(defaults), platforms.resolve_device(device), name
        self.loaded_as = {"dtype": str(next(dit.parameters()).dtype).removeprefix("torch."), **(loaded_as or {})}
        self.attention = attention
        self.device_mesh = device_mesh
        if device_mesh is not None:
            dit.enable_usp(device_mesh)
        self._texts: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._warned_sizes: set[tuple[int, ...]] = set()

    @classmethod
    def from_pretrained(
        cls,
        path_or_id: str | Path = "tiny",
        device: str | torch.device | None = "auto",
        dtype: torch.dtype | str | None = None,
        attention: str | AttnImplType | AttentionConfig = "auto",
        offload: bool | None = None,
        quantize: str | QuantConfig | None = None,
        parallel: ParallelConfig | str | None = "auto",
    ) -> WanPipeline:
        """Load a checkpoint.

        Args:
            path_or_id: a folder in the official or the diffusers layout, a hub id, or "tiny", the embedded model.
            device: "auto", "cpu", "cuda", "cuda:1", "npu"; one that is named must be there.
            dtype: of the text encoder and the DiT's large weights; None is bfloat16, on the CPU float32. The VAE is
                always float32.
            attention: backend of the DiT, a name or a member of `AttnImplType`, or a whole `AttentionConfig`. The
                sparse patterns "radial" and "local" take their published settings, scaled to the steps of each call.
            offload: True keeps the models on the host and each on the device only during its stage; None does so when
                the device's free memory is short.
            quantize: "fp8" stores the linear layers of the DiT's blocks in FP8, half the memory of bfloat16: each is
                quantised as it is read. A `QuantConfig` chooses the layers. None leaves the weights as they are; a
                checkpoint in FP8 stays so.
            parallel: "auto" lets all processes that torchrun started make each video together, by guidance first, then
                heads, then tokens (`choose_parallel_config`); each works on its own device, calls the pipeline with the
                same arguments and gets the video. A `ParallelConfig` says how, and with `enable_fsdp` spreads the DiT's
                weights. None is this process alone, whatever started it.

        Raises:
            ValueError: device, dtype, attention, quantize or parallel unknown; before anything large is read.
            CheckpointError: (a ValueError) the checkpoint cannot be used.
        """
        device = platforms.resolve_device(device) if parallel is None else own_device(device)
        dtype, quantize = resolve_dtype(dtype, device), wan_quantization.resolve_quantize(quantize)
        impl = attention.attn_impl if isinstance(attention, AttentionConfig) else AttnImplType.parse(attention)
        parallelism.check_parallel(parallel, offload, quantize)
        found = checkpoint.inspect(path_or_id).require_usable()
        parallelism.check_weights(parallel, found.dit)
        tokenizer = _tokenizer(found)
        if problems := _refused_settings(found):
            raise CheckpointError(problems[0])
        has_guidance, heads = found.defaults["guidance"] != 1, found.dit.config["num_heads"]
        mesh, shares = parallelism.make_mesh(parallel, device, heads, has_guidance, impl.takes_sparse_config)
        if offload is None:
            size = [found.defaults[name] for name in ("width", "height", "num_frames")]
            fits = placement.fits(device, _weight_bytes(found, dtype, quantize), math.prod(size))
            offload = not fits and not shares.enable_fsdp
        home = torch.device("cpu") if offload else device
        with platforms.platform_of(device).device_ctx(device):
            dit = found.dit.load(
                wan_quantization.builder(found.dit, quantize, dtype),
                dtype=dtype,
                # Sharding moves it to the device block by block.
                device=torch.device("cpu") if shares.enable_fsdp else home,
                fp32_fragments=WanModel.FP32_PARAMETERS,
                quantize=quantize_weight,
            )
            dit.merge_projections()
            # The 14B's single weights, 3 GiB of 25 MiB each, are too small for what is allocated next.
            platforms.platform_of(home).empty_cache()
            if not impl.takes_sparse_config:
                dense = attention if isinstance(attention, AttentionConfig) else AttentionConfig(attn_impl=impl)
                dit.set_attention_config(dense)
            if shares.enable_fsdp and mesh is not None:
                shard_model(dit, device.type)
            return cls(
                text_encoder=found.text_encoder.load(WanTextEncoder.from_config, dtype=dtype, device=home),
                dit=dit,
                vae=found.vae.load(WanVideoVAE.from_config, dtype=torch.float32, device=home),
                tokenizer=tokenizer,
                defaults=found.defaults,
                device=device,
                name=found.folder.name if Path(path_or_id).is_dir() else str(path_or_id),
                loaded_as={
                    "dtype": str(dtype).removeprefix("torch."),
                    "attention": impl.name.lower(),
                    "offload": offload,
                    "quantize": "fp8" if wan_quantization.describe(dit) else None,
                    **({} if mesh is None else {"parallel": parallelism.describe(shares)}),
                },
                attention=attention if impl.takes_sparse_config else None,
                device_mesh=mesh,
            )

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | Sequence[str],
        negative_prompt: str | Sequence[str] | None = None,
        *,
        height: int | None = None,
        width: int | None = None,
        num_frames: int | None = None,
        steps: int | None = None,
        guidance: float | None = None,
        shift: float | None = None,
        seed: int | Sequence[int | None] | None = None,
        scheduler: str | None = None,
        attention: str | AttnImplType | AttentionConfig | None = None,
        decay: float | None = None,
        dense_steps: int | None = None,
        dense_layers: int | None = None,
        local_window: int | Sequence[int] | None = None,
        callback: Callable[[int, int, torch.Tensor], None] | None = None,
        on_stage: Callable[[Stage], None] | None = None,
    ) -> WanVideo | list[WanVideo]:
        """Generate a video, or for a list of prompts a list of them, each equal to the run of its prompt alone.

        None takes the checkpoint's default. Limits: see `validate_request`.

        Args:
            attention: of this call, as for `from_pretrained`; None is what was said there.
            decay: of radial attention, above 0: how fast the window narrows with the distance in time. By default 0.2.
            dense_steps, dense_layers: how many first steps, and layers, of a sparse run attend densely; by default 24 %
                of the steps and 1 layer.
            local_window: of local attention: how many tokens one sees to each side, or (frames, rows, columns). By
                default 6.
            callback: called as `callback(step, total, latents)` after each step of each video.
            on_stage: called after each stage: "text" once, "denoise" and "decode" for each video.

        Raises:
            ValueError: a value outside its limits.
            NonFiniteError: the model produced NaN or infinity.
            VideoDecodeError: the VAE failed; it names the file that keeps the latents.
        """
        shared_on = None if self.device_mesh is None else self.device_mesh.device_type
        asked = (prompt, negative_prompt, height, width, num_frames, steps, guidance, shift, seed, scheduler)
        asked += (attention, decay, dense_steps, dense_layers, local_window)
        require_same(repr(asked), "request", shared_on)
        request = validate_request(
            self.defaults,
            prompt,
            negative_prompt,
            height=height,
            width=width,
            num_frames=num_frames,
            steps=steps,
            guidance=guidance,
            shift=shift,
            seed=seed,
            scheduler=scheduler,
        )
        # A seed that nobody gave was drawn by each process.
        request = replace(request, seeds=numbers_of_first(request.seeds, shared_on))
        config = self._settle_attention(
            request,
            attention,
            decay=decay,
            dense_steps=dense_steps,
            dense_layers=dense_layers,
            local_window=local_window,
        )
        self._warn_of_another_size(request)
        vae_dim = self.vae.encoder.conv1.weight.shape[0]
        placement.require_memory(self.device, request.width, request.height, request.num_frames, self.dit.dim, vae_dim)
        shared: list[Stage] = []
        videos = []
        with platforms.platform_of(self.device).device_ctx(self.device):
            with self._stage("text", shared, on_stage):
                texts = self._encode(request)
                placement.make_room(self.text_encoder, self.device, request.num_pixels)
            for i, seed_i in enumerate(request.seeds):
                settings, stages = self._settings(request, i, config), list(shared)
                with self._stage("denoise", stages, on_stage), attending(self.dit, config):
                    latents = self._denoise(request, i, texts, config, callback)
                with self._stage("decode", stages, on_stage), placement.on_device(self.vae, self.device):
                    frames = decode_or_keep(self.vae, latents, settings, self.device_mesh)
                videos.append(WanVideo(frames, request.fps, seed_i, settings, stages))
        return videos[0] if isinstance(prompt, str) else videos

    def _warn_of_another_size(self, request: GenerationRequest) -> None:
        """Once a size. The published models draw many sizes; one with a size of its own was trained at that alone."""
        names = ("width", "height", "num_frames")
        official = wan_layout.default_settings({})
        own, asked = tuple(self.defaults[name] for name in names), tuple(getattr(request, name) for name in names)
        if own in (asked, tuple(official[name] for name in names)) or asked in self._warned_sizes:
            return
        self._warned_sizes.add(asked)
        sizes = "made for {}x{}, {} frames; at {}x{}, {} frames".format(*own, *asked)
        logger.warning("this model is %s what it draws may be wrong", sizes)

    @torch.no_grad()
    def decode_latents(self, latents: torch.Tensor, tiled: bool = False) -> torch.Tensor:
        """Frames [F, H, W, 3] uint8 of latents [C, F', H/8, W/8], such as those that a `VideoDecodeError` kept."""
        with platforms.platform_of(self.device).device_ctx(self.device), placement.on_device(self.vae, self.device):
            return decode_frames(self.vae, latents.to(self.device), tiled)

    def _encode(self, request: GenerationRequest) -> dict[str, torch.Tensor]:
        """Text features [tokens, C] on the host, by text. The negative prompt is left out where it has no effect."""
        wanted = [*request.prompts, *(request.negative_prompts if request.guidance != 1 else ())]
        found = {text: self._texts[text] for text in wanted if text in self._texts}
        missing = [text for text in dict.fromkeys(wanted) if text not in found]
        if missing:
            device = placement.text_device(self.text_encoder, self.device)
            with placement.on_device(self.text_encoder, device):
                # One by one: a batch would pad, and the same prompt would then differ in its last bits.
                for text in missing:
                    found[text] = encode_rows(self.text_encoder, self.tokenizer, [text])[0].cpu()
        for text in dict.fromkeys(wanted):
            self._texts[text] = found[text]
            self._texts.move_to_end(text)
        while len(self._texts) > _MAX_TEXTS:
            self._texts.popitem(last=False)
        return found

    def _settle_attention(self, request: GenerationRequest, asked: Any, **sparse: Any) -> AttentionConfig | None:
        """What this call's self-attention follows; None for what the DiT was given."""
        first = self.dit.blocks[0].self_attn
        own = first.attention_config or AttentionConfig()
        asked = self.attention if asked is None else asked
        config = settle_attention(own if asked is None else asked, **sparse, steps=request.steps)
        strategy = get_attention_strategy(self.dit.device_mesh)
        if config.is_sparse() and strategy in ("ring", "usp"):
            raise ValueError(
                f"attention {config.attn_impl.name} does not work where a ring splits the keys ({strategy}): split "
                "the tokens by sp_ulysses_degree alone, or choose a dense attention"
            )
        if logger.isEnabledFor(logging.INFO):
            # The bias: a quantised weight has another dtype than the activations.
            line = describe_attention(config, self._run(request), self.device, first.projections[0].bias.dtype)
            logger.info("attention %s", line)
        return None if asked is None else config

    def _run(self, request: GenerationRequest) -> Run:
        dit = self.dit
        return Run.of(request, dit.dim, dit.num_heads, dit.num_layers, dit.patch_size)

    def _denoise(
        self,
        request: GenerationRequest,
        i: int,
        texts: dict[str, torch.Tensor],
        config: AttentionConfig | None,
        callback: Callable | None,
    ) -> torch.Tensor:
        """Latents [C, F', H/8, W/8] float32 on the device, of video `i`."""
        noise = make_noise(request.seeds[i], request.latent_shape(self.dit.in_dim)).to(self.device)
        scheduler = make_scheduler(request.scheduler, request.steps, request.shift)
        with placement.on_device(self.dit, self.device):
            # Keys and values of the text, once a prompt instead of once a step.
            context = self.dit.prepare_context([texts[request.prompts[i]].to(self.device)])
            negative = None
            if request.guidance != 1:
                negative = self.dit.prepare_context([texts[request.negative_prompts[i]].to(self.device)])
            latents = denoise(
                self.dit,
                scheduler,
                noise[None],
                context,
                negative,
                request.guidance,
                callback,
                device_mesh=self.device_mesh,
                sparse_state=make_state(config, self._run(request)),
            )[0]
        if not torch.isfinite(latents).all():
            half = " or bfloat16 or float32 instead of float16" if self.loaded_as["dtype"] == "float16" else ""
            raise NonFiniteError(
                f"the model {self.name} produced NaN or infinity, the video would be black: check the weights "
                f"(`telefuser check`), or use a guidance below {request.guidance:g}{half}"
            )
        return latents

    def _settings(self, request: GenerationRequest, i: int, config: AttentionConfig | None) -> dict[str, Any]:
        """Everything that made video `i`; goes into the file's metadata."""
        own = {
            "model": self.name,
            "prompt": request.prompts[i],
            "negative_prompt": request.negative_prompts[i],
            "seed": request.seeds[i],
        }
        shared = {
            name: getattr(request, name)
            for name in ("width", "height", "num_frames", "steps", "guidance", "shift", "scheduler", "fps")
        }
        made_by = {"device": str(self.device), "telefuser": __version__}
        return own | shared | made_by | self.loaded_as | (attention_metadata(config) if config is not None else {})

    @contextlib.contextmanager
    def _stage(self, name: str, stages: list[Stage], on_stage: Callable[[Stage], None] | None) -> Iterator[None]:
        """Measure what runs within it; nothing is recorded when it fails."""
        platform = platforms.platform_of(self.device)
        platform.reset_peak_memory_stats(self.device)
        start = time.perf_counter()
        yield
        platform.synchronize(self.device)
        stages.append(Stage(name, time.perf_counter() - start, platform.max_memory_allocated(self.device)))
        if on_stage is not None:
            on_stage(stages[-1])


def find_problems(found: Checkpoint) -> list[str]:
    """What keeps a checkpoint from being run although `inspect` found its files good. Weights are not read."""
    try:
        _tokenizer(found)
    except ValueError as error:
        return [str(error), *_refused_settings(found)]
    return _refused_settings(found)


def _refused_settings(found: Checkpoint) -> list[str]:
    """What the models say to their sizes, and a request to the defaults. Nothing is allocated: 0.5 s for the 14B."""
    problems = []
    for part, model in ((found.dit, WanModel), (found.vae, WanVideoVAE), (found.text_encoder, WanTextEncoder)):
        try:
            with meta_parameters():
                model.from_config(part.config)
        except (ValueError, TypeError) as error:
            problems.append(f"{found.folder}: config.json of the {part.name}: {error}")
    try:
        validate_request(found.defaults, "a prompt")
    except ValueError as error:
        problems.append(f"{found.folder}: 'defaults' of config.json: {error}")
    return problems


def _tokenizer(found: Checkpoint) -> PromptTokenizer:
    tokenizer = PromptTokenizer(found.tokenizer, found.dit.config.get("text_len", 512))
    vocab = found.text_encoder.config["vocab"]
    if tokenizer.vocab_size > vocab:
        raise CheckpointError(
            f"{found.tokenizer}: {tokenizer.vocab_size} tokens, but the text encoder knows {vocab}. "
            "Take the tokenizer and the weights from one checkpoint."
        )
    return tokenizer


def _weight_bytes(found: Checkpoint, dtype: torch.dtype, quantize: QuantConfig | None) -> int:
    """Bytes of all three models once loaded."""
    rest = found.text_encoder.num_parameters * dtype.itemsize + found.vae.num_parameters * torch.float32.itemsize
    return rest + wan_quantization.loaded_bytes(found.dit, quantize, dtype)
