"""The pipeline on a random tiny checkpoint: what calls return and refuse, and that they do not disturb each other."""

import gc
import json

import pytest
import torch

from telefuser import platforms
from telefuser.core import checkpoint, wan_component
from telefuser.core.checkpoint import CheckpointError
from telefuser.core.config import AttentionConfig, AttnImplType
from telefuser.core.weight_files import WeightSet
from telefuser.ops.attention import MaskMap, SparseAttentionState
from telefuser.ops.attention.sparse_attention import _radial as sparse_masks
from telefuser.pipelines import wan_video
from telefuser.pipelines.decode import to_uint8
from telefuser.pipelines.denoise import denoise
from telefuser.pipelines.video_file import read_video
from telefuser.pipelines.wan_video import (
    NonFiniteError,
    VideoDecodeError,
    WanPipeline,
    make_noise,
    parse_size,
    validate_request,
)
from telefuser.platforms import CpuPlatform
from telefuser.schedulers import make_scheduler
from tests.pipelines.conftest import DEFAULTS, write_checkpoint
from tests.tolerances import rel_error


def max_difference(a: torch.Tensor, b: torch.Tensor) -> int:
    assert a.shape == b.shape
    return (a.int() - b.int()).abs().max().item()


def test_a_call_equals_its_parts_put_together_by_hand(tiny_pipeline):
    """The default settings come from the checkpoint; guidance, padding and rounding from here."""
    video = tiny_pipeline("a red cat", seed=11)
    with torch.no_grad():
        context, negative = (
            # Over all 512 tokens; the rows of padding become zeros, as the denoiser was trained.
            tiny_pipeline.text_encoder(ids, mask) * mask.unsqueeze(-1)
            for ids, mask in (tiny_pipeline.tokenizer([text]) for text in ("a red cat", "blurry"))
        )
        assert context.shape == (1, 512, 32)
        noise = torch.randn(16, 2, 4, 6, generator=torch.Generator().manual_seed(11))[None]
        scheduler = make_scheduler("unipc", 2, 3.0)
        latents = denoise(tiny_pipeline.dit, scheduler, noise, context, negative, 3.0)
        frames = to_uint8(tiny_pipeline.vae.decode(latents)[0])
    assert video.frames.dtype == torch.uint8
    assert max_difference(video.frames, frames) <= 1
    assert video.frames.float().std() > 10
    assert [stage.name for stage in video.stages] == ["text", "denoise", "decode"]
    assert all(stage.seconds > 0 and stage.peak_bytes > 0 for stage in video.stages)


def test_settings_tell_how_to_make_the_video_again(tiny_pipeline, tmp_path):
    video = tiny_pipeline("a red cat", seed=11, steps=1, guidance=1.5)
    path = video.save(tmp_path / "cat.mp4")
    back, fps, metadata = read_video(path)
    assert fps == DEFAULTS["fps"]
    assert back.shape == video.frames.shape
    assert metadata == video.settings == json.loads(json.dumps(video.settings))
    assert metadata["seed"] == video.seed == 11
    names = ("prompt", "negative_prompt", "height", "width", "num_frames", "steps", "guidance", "shift", "scheduler")
    again = tiny_pipeline(seed=metadata["seed"], **{name: metadata[name] for name in names})
    assert torch.equal(again.frames, video.frames)


def test_prompt_seed_and_negative_prompt_all_matter(tiny_pipeline):
    base = tiny_pipeline("a red cat", seed=1).frames
    for other in (
        tiny_pipeline("a blue dog", seed=1),
        tiny_pipeline("a red cat", seed=2),
        tiny_pipeline("a red cat", "dog", seed=1),
        tiny_pipeline("a red cat", seed=1, guidance=1.0),
        tiny_pipeline("a red cat", seed=1, scheduler="euler"),
    ):
        assert max_difference(other.frames, base) > 8


@pytest.mark.parametrize(("size", "frames"), [("16x16", 1), ("64x16", 9), ("464x640", 1)])
def test_a_video_has_exactly_the_size_asked_for(tiny_pipeline, size, frames):
    """B120."""
    width, height = parse_size(size)
    video = tiny_pipeline("a cat", width=width, height=height, num_frames=frames, steps=1, guidance=1, seed=0)
    assert tuple(video.frames.shape) == (frames, height, width, 3)


@pytest.mark.parametrize("scheduler", ["unipc", "dpm++", "euler"])
def test_one_step_makes_a_video(tiny_pipeline, scheduler):
    """B122."""
    assert tiny_pipeline("a cat", steps=1, scheduler=scheduler, seed=0).frames.float().std() > 1


def test_videos_of_a_list_equal_the_single_runs(tiny_pipeline):
    """B126."""
    prompts, negatives, seeds = ["a red cat", "a blue dog moving left"], ["blurry", ""], [3, 4]
    together = tiny_pipeline(prompts, negatives, seed=seeds)
    for i, video in enumerate(together):
        alone = tiny_pipeline(prompts[i], negatives[i], seed=seeds[i])
        assert torch.equal(video.frames, alone.frames)
        assert video.settings == alone.settings
    shared = tiny_pipeline(prompts, "blurry", seed=3)
    assert torch.equal(shared[0].frames, together[0].frames)
    assert isinstance(tiny_pipeline(["a cat"], seed=0), list)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"width": 833}, "nearest"),
        ({"num_frames": 6}, "nearest"),
        ({"steps": 0}, "at least 1"),
        ({"scheduler": "heun"}, "unipc"),
        ({"seed": 2**64}, "seed"),
        ({"negative_prompt": ["x", "y", "z"]}, "3 negative prompts"),
        ({"prompt": " "}, "empty"),
    ],
)
def test_wrong_requests_are_refused_before_any_model_runs(tiny_pipeline, monkeypatch, arguments, match):
    """B120, B122, B126, B130."""
    monkeypatch.setattr(tiny_pipeline, "_encode", None)
    with pytest.raises(ValueError, match=match):
        tiny_pipeline(**{"prompt": "a cat", **arguments})


def test_requests_are_checked_from_headers_alone(tiny_folder, monkeypatch):
    """B120: what the command line does before it loads anything."""
    monkeypatch.setattr(wan_component, "load_model", None)
    monkeypatch.setattr(WeightSet, "tensors", None)
    found = checkpoint.inspect(tiny_folder).require_usable()
    with pytest.raises(ValueError, match="nearest such size is 48x32"):
        validate_request(found.defaults, "a cat", width=50)


def test_noise_depends_on_the_seed_alone():
    """B130: on the CPU in float32, whatever device, batch, rank or number of threads."""
    noise = make_noise(42, (16, 21, 60, 104))
    assert noise.dtype == torch.float32
    expected = torch.tensor([1.9269, 1.4873, 0.9007, -2.1055])
    torch.testing.assert_close(noise[0, 0, 0, :4], expected, atol=1e-4, rtol=0)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(make_noise(42, (16, 21, 60, 104)), noise)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(make_noise(2**63 - 1, (16,)), make_noise(2**63 - 2, (16,)))


def test_a_drawn_seed_is_reported_and_reproduces_the_video(tiny_pipeline):
    """B130."""
    drawn = [tiny_pipeline("a cat", seed=seed, steps=1) for seed in (-1, None)]
    assert drawn[0].seed != drawn[1].seed
    assert torch.equal(tiny_pipeline("a cat", seed=drawn[0].seed, steps=1).frames, drawn[0].frames)


def test_the_callback_sees_every_step_and_stages_are_told_as_they_end(tiny_pipeline):
    events = []
    tiny_pipeline(
        ["a cat", "a dog"],
        seed=0,
        steps=3,
        callback=lambda step, total, latents: events.append((step, total, tuple(latents.shape))),
        on_stage=lambda stage: events.append(stage.name),
    )
    steps = [(i, 3, (1, 16, 2, 4, 6)) for i in (1, 2, 3)]
    assert events == ["text", *steps, "denoise", "decode", *steps, "denoise", "decode"]


def test_the_text_encoder_runs_once_for_a_text(tiny_pipeline, monkeypatch):
    encoded = []
    forward = tiny_pipeline.text_encoder.forward
    monkeypatch.setattr(
        tiny_pipeline.text_encoder, "forward", lambda ids, mask: encoded.append(ids.shape[0]) or forward(ids, mask)
    )
    first = tiny_pipeline("a cat", seed=0, steps=1)
    assert encoded == [1, 1]
    again = tiny_pipeline(["a cat", "a dog"], seed=0, steps=1)
    assert encoded == [1, 1, 1]
    assert torch.equal(again[0].frames, first.frames)
    tiny_pipeline("a red dog", "never encoded", seed=0, steps=1, guidance=1)
    assert len(encoded) == 4


def test_the_prompt_is_projected_once_not_once_a_step(tiny_pipeline, monkeypatch):
    calls = []
    prepare = tiny_pipeline.dit.prepare_context
    monkeypatch.setattr(tiny_pipeline.dit, "prepare_context", lambda rows: calls.append(len(rows)) or prepare(rows))
    tiny_pipeline("a cat", seed=0, steps=4)
    assert calls == [1, 1]


def test_nan_from_the_model_is_an_error_not_a_black_video(tiny_pipeline):
    with torch.no_grad():
        tiny_pipeline.dit.blocks[0].ffn[0].weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"NaN or infinity.*telefuser check"):
        tiny_pipeline("a cat", seed=0, steps=1)


def test_out_of_memory_in_the_decoder_keeps_the_latents(tiny_pipeline, monkeypatch, tmp_path):
    """B116, through the pipeline: the file goes on from where the run broke off."""
    expected = tiny_pipeline("a cat", seed=0).frames

    def out_of_memory(*_, **__):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(tiny_pipeline.vae, "decode", out_of_memory)
        patch.setattr(tiny_pipeline.vae, "decode_chunks", out_of_memory)
        with pytest.raises(VideoDecodeError) as caught:
            tiny_pipeline("a cat", seed=0)
    from safetensors.torch import load_file

    latents = load_file(caught.value.latents_path)["latents"]
    assert torch.equal(tiny_pipeline.decode_latents(latents), expected)
    assert max_difference(tiny_pipeline.decode_latents(latents, tiled=True), expected) <= 1


def test_repeated_calls_do_not_grow(tiny_pipeline):
    """B140: 20 runs, 5 sizes, and a new prompt each time; every live tensor is counted.

    1 MiB would hide a leak of this small model: one video's latents are 4 KiB, so fifteen leaked ones are 60 KiB.
    """

    def live_bytes() -> int:
        gc.collect()
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in gc.get_objects()
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
        }
        return sum(storages.values())

    sizes = [(16, 16), (32, 16), (16, 48), (48, 48), (64, 32)]
    after_run = {}
    for run in range(1, 21):
        width, height = sizes[run % 5]
        tiny_pipeline(f"a cat {run}", seed=run, width=width, height=height, steps=1)
        if run in (5, 20):
            after_run[run] = live_bytes()
    assert after_run[20] - after_run[5] <= 2**14


def test_bfloat16_stays_close_to_float32(tiny_folder):
    exact = WanPipeline.from_pretrained(tiny_folder, "cpu")
    half = WanPipeline.from_pretrained(tiny_folder, "cpu", dtype="bf16")
    assert {p.dtype for p in half.text_encoder.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in half.vae.parameters()} == {torch.float32}
    assert half.dit.blocks[0].ffn[0].weight.dtype == torch.bfloat16
    assert half.dit.blocks[0].modulation.dtype == torch.float32
    videos = [pipeline("a red cat", seed=1) for pipeline in (exact, half)]
    assert (videos[0].settings["dtype"], videos[1].settings["dtype"]) == ("float32", "bfloat16")
    assert 0 < rel_error(videos[1].frames.float(), videos[0].frames.float()) < 3e-2


def test_the_attention_choice_reaches_the_model(tiny_folder):
    pipeline = WanPipeline.from_pretrained(tiny_folder, "cpu", attention="torch_sdpa")
    assert pipeline.dit.blocks[1].self_attn.attention_config.attn_impl is AttnImplType.TORCH_SDPA
    assert pipeline("a cat", seed=0, steps=1).settings["attention"] == "torch_sdpa"
    config = AttentionConfig(attn_impl=AttnImplType.TORCH_SDPA, strict=True)
    pipeline = WanPipeline.from_pretrained(tiny_folder, "cpu", attention=config)
    assert pipeline.dit.blocks[0].cross_attn.attention_config is config


LARGE = {"height": 128, "width": 256, "num_frames": 21, "steps": 4, "seed": 3}  # 6 x 8 x 16 tokens: 6 blocks of 128


def test_a_sparse_run_equals_its_parts_put_together_by_hand(tiny_pipeline):
    """Guidance, the first step and the first layer included: every pass of every step knows where it is."""
    video = tiny_pipeline("a red cat", attention="radial", **LARGE)
    config = AttentionConfig.radial_attention(dense_timesteps=1, dense_layers=1, decay_factor=0.2)
    state = SparseAttentionState(config, MaskMap(768, 6, grid=(6, 8, 16)))

    def model(x, timestep, context):
        state.update(numeral_timestep=(len(calls) // 2))
        calls.append(context)
        return tiny_pipeline.dit(x, timestep, context, sparse_state=state)

    calls = []
    with torch.no_grad():
        texts = tiny_pipeline._encode(validate_request(DEFAULTS, "a red cat"))
        noise = make_noise(3, (16, 6, 16, 32))[None]
        context, negative = ([texts[text]] for text in ("a red cat", "blurry"))
        latents = denoise(model, make_scheduler("unipc", 4, 3.0), noise, context, negative, 3.0)
        frames = to_uint8(tiny_pipeline.vae.decode(latents)[0])
    assert len(calls) == 8
    assert max_difference(video.frames, frames) <= 1
    dense = tiny_pipeline("a red cat", **LARGE).frames
    assert max_difference(video.frames, dense) > 8
    # All steps dense is the dense run, by another way.
    assert max_difference(tiny_pipeline("a red cat", attention="radial", dense_steps=4, **LARGE).frames, dense) <= 1


def test_the_attention_of_a_call_is_for_that_call(tiny_folder, tiny_pipeline):
    dense = tiny_pipeline("a red cat", **LARGE)
    before = tiny_pipeline.dit.blocks[0].self_attn.attention_config
    radial = tiny_pipeline("a red cat", attention="radial", **LARGE)
    assert max_difference(radial.frames, dense.frames) > 8
    assert (radial.settings["attention"], radial.settings["dense_steps"]) == ("radial_attn", 1)
    assert tiny_pipeline("a red cat", attention="sdpa", **LARGE).settings["attention"] == "torch_sdpa"
    assert tiny_pipeline.dit.blocks[0].self_attn.attention_config is before
    again = tiny_pipeline("a red cat", **LARGE)
    assert torch.equal(again.frames, dense.frames)
    assert again.settings["attention"] == "auto"
    sparse = WanPipeline.from_pretrained(tiny_folder, "cpu", attention="radial")
    assert torch.equal(sparse("a red cat", **LARGE).frames, radial.frames)
    assert torch.equal(sparse("a red cat", attention="auto", **LARGE).frames, dense.frames)
    names = ("attention", "decay", "dense_steps", "dense_layers")
    other = sparse("a red cat", decay=1.0, dense_layers=0, **LARGE)
    assert not torch.equal(other.frames, radial.frames)
    repeated = tiny_pipeline("a red cat", **{name: other.settings[name] for name in names}, **LARGE)
    assert torch.equal(repeated.frames, other.frames)


def test_a_sparse_run_says_in_the_log_what_it_computes(tiny_pipeline, caplog):
    caplog.set_level("INFO", "telefuser")
    tiny_pipeline("a cat", attention="local", local_window=(1, 2, 3), **LARGE | {"steps": 1})
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("attention ")]
    assert len(lines) == 1
    assert "LOCAL_SPARSE_ATTN (window (1, 2, 3), blocks of 128) by TORCH_BLOCKED" in lines[0]
    assert "no step, layer 1 of 2" in lines[0]


def test_wrong_sparse_settings_are_refused_before_any_model_runs(tiny_pipeline, monkeypatch):
    monkeypatch.setattr(tiny_pipeline, "_encode", None)
    for given, words in (({"decay": 0.2}, "AUTO: use attention='radial'"), ({"attention": "magic"}, "'magic'")):
        with pytest.raises(ValueError, match=words):
            tiny_pipeline("a cat", **given)


def test_a_ring_is_refused_before_the_run(tiny_pipeline, monkeypatch):
    monkeypatch.setattr(wan_video, "get_attention_strategy", lambda mesh: "ring")
    monkeypatch.setattr(tiny_pipeline, "_encode", None)
    with pytest.raises(ValueError, match=r"RADIAL_ATTN .* \(ring\): split the tokens by sp_ulysses_degree alone"):
        tiny_pipeline("a cat", attention="radial")


def test_masks_do_not_pile_up_over_sizes(tiny_pipeline):
    """B140: bounded, and keyed by size, device and settings."""
    MaskMap.clear_cache()
    for width in range(16, 16 * 22, 16):
        tiny_pipeline("a cat", attention="radial", seed=0, steps=1, width=width, height=16, num_frames=9)
    assert sparse_masks.cache_info().currsize == 16
    MaskMap.clear_cache()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"device": "cuda:99"}, "cuda:99"),
        ({"device": "npu:7"}, "npu:7.*[Aa]vailable"),
        ({"attention": "flash_attn_9"}, "flash_attn_9"),
        ({"dtype": "int8"}, "bf16"),
    ],
)
def test_wrong_choices_are_refused_before_the_checkpoint_is_opened(tiny_folder, monkeypatch, arguments, match):
    """B08."""
    monkeypatch.setattr(wan_video.checkpoint, "inspect", None)
    with pytest.raises(ValueError, match=match):
        WanPipeline.from_pretrained(tiny_folder, **arguments)


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "wan")
    tokenizer = next(folder.glob("google/*/tokenizer.json"))
    content = json.loads(tokenizer.read_text())
    content["model"]["vocab"]["unexpected"] = 40
    tokenizer.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="41 tokens, but the text encoder knows 32"):
        WanPipeline.from_pretrained(folder, "cpu")


def test_a_cpu_run_leaves_the_accelerator_alone(tiny_folder, monkeypatch):
    """B138: device "cpu" on a machine whose platform may not be touched."""

    class Untouchable(CpuPlatform):
        device_name = device_type = "cuda"
        op_keys = ("cuda",)

        def __getattribute__(self, name):
            if name in ("device_ctx", "synchronize", "reset_peak_memory_stats", "max_memory_allocated", "empty_cache"):
                raise AssertionError(f"a CPU run called {name} of the accelerator")
            return super().__getattribute__(name)

    expected = WanPipeline.from_pretrained(tiny_folder, "cpu")("a cat", seed=0).frames
    monkeypatch.setattr(platforms, "current_platform", Untouchable())
    assert torch.equal(WanPipeline.from_pretrained(tiny_folder, "cpu")("a cat", seed=0).frames, expected)


@pytest.mark.gpu
def test_offloaded_and_resident_runs_agree_on_a_gpu(tiny_folder):
    """B124: three steps, two runs."""
    resident = WanPipeline.from_pretrained(tiny_folder, "cuda", dtype="fp32", offload=False)
    offloaded = WanPipeline.from_pretrained(tiny_folder, "cuda", dtype="fp32", offload=True)
    assert {p.device.type for p in offloaded.dit.parameters()} == {"cpu"}
    for seed in (0, 1):
        videos = [pipeline("a red cat", seed=seed, steps=3) for pipeline in (resident, offloaded)]
        assert rel_error(videos[0].frames.float(), videos[1].frames.float()) < 1e-3
    assert {p.device.type for p in offloaded.dit.parameters()} == {"cpu"}


@pytest.mark.gpu
def test_a_gpu_run_matches_the_cpu_run(tiny_folder):
    """B130: the same noise, so the same video up to arithmetic."""
    on_cpu = WanPipeline.from_pretrained(tiny_folder, "cpu")("a red cat", seed=5)
    on_gpu = WanPipeline.from_pretrained(tiny_folder, "cuda", dtype="fp32")("a red cat", seed=5)
    assert rel_error(on_gpu.frames.float(), on_cpu.frames.float()) < 1e-2


@pytest.mark.gpu
def test_a_cpu_run_allocates_nothing_on_the_gpu(tiny_folder):
    """B138."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    WanPipeline.from_pretrained(tiny_folder, "cpu")("a cat", seed=0, steps=1)
    assert torch.cuda.max_memory_allocated() == before


@pytest.mark.gpu
def test_gpu_memory_does_not_grow(tiny_folder):
    """B140."""
    pipeline = WanPipeline.from_pretrained(tiny_folder, "cuda")
    sizes = [(16, 16), (32, 16), (16, 48), (48, 48), (64, 32)]
    measured = []
    for run in range(20):
        width, height = sizes[run % 5]
        pipeline(f"a cat {run}", seed=run, width=width, height=height, steps=1)
        measured.append(torch.cuda.memory_allocated())
    assert measured[-1] - measured[4] <= 2**20


@pytest.mark.multi_gpu
def test_only_the_chosen_gpu_is_used(tiny_folder):
    """B138."""
    before = torch.cuda.memory_allocated(0)
    torch.cuda.reset_peak_memory_stats(0)
    WanPipeline.from_pretrained(tiny_folder, "cuda:1")("a cat", seed=0, steps=1)
    assert torch.cuda.max_memory_allocated(0) == before


def test_a_model_with_a_size_of_its_own_warns_once_of_another(tiny_folder, caplog):
    pipeline = WanPipeline.from_pretrained(tiny_folder, "cpu")
    pipeline("a cat", seed=0, steps=1)
    assert "made for" not in caplog.text
    for _ in range(2):
        pipeline("a cat", seed=0, steps=1, width=32)
    assert caplog.text.count("made for 48x32, 5 frames; at 32x32, 5 frames") == 1
