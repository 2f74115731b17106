"""Latents to frames: rounding, streaming, the retry in tiles, and latents that survive a failure."""

import json

import pytest
import torch
from safetensors import safe_open

from telefuser.models.wan_video_vae import WanVideoVAE
from telefuser.pipelines import decode
from telefuser.pipelines.decode import NonFiniteError, VideoDecodeError, decode_frames, decode_or_keep, to_uint8
from tests.pipelines.conftest import VAE


@pytest.fixture(scope="module")
def vae() -> WanVideoVAE:
    torch.manual_seed(0)
    return WanVideoVAE.from_config(VAE).eval()


@pytest.fixture
def latents() -> torch.Tensor:
    return torch.randn(16, 3, 4, 6, generator=torch.Generator().manual_seed(1))


def out_of_memory(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")


def test_pixels_are_rounded_to_the_nearest_level():
    levels = torch.arange(256)
    video = (levels / 127.5 - 1).view(1, 1, 16, 16).expand(3, -1, -1, -1)
    frames = to_uint8(video)
    assert frames.shape == (1, 16, 16, 3)
    assert torch.equal(frames[0, ..., 1].flatten(), levels.to(torch.uint8))
    near = torch.tensor([-1.0, 1.0, 0.4 / 127.5 - 1, 0.6 / 127.5 - 1, 254.6 / 127.5 - 1]).view(1, 1, 1, 5)
    assert to_uint8(near.expand(3, -1, -1, -1))[0, 0, :, 0].tolist() == [0, 255, 0, 1, 255]


def test_frames_equal_the_whole_clip_decoded_at_once(vae, latents):
    frames = decode_frames(vae, latents)
    assert (frames.shape, frames.dtype) == ((9, 32, 48, 3), torch.uint8)
    whole = to_uint8(vae.decode(latents[None], streaming=False)[0])
    assert (frames.int() - whole.int()).abs().max() <= 1
    assert (frames != whole).float().mean() < 1e-3


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_pixels_that_are_no_numbers_are_an_error_not_black(vae, latents, monkeypatch, tmp_path, value):
    monkeypatch.chdir(tmp_path)
    latents[0, 1, 0, 0] = value
    for tiled in (False, True):
        with pytest.raises(NonFiniteError, match="the VAE produced NaN"):
            decode_frames(vae, latents, tiled)
    with pytest.raises(VideoDecodeError, match="latents are kept"):
        decode_or_keep(vae, latents, {})


def test_tiled_frames_equal_the_untiled_ones(vae, latents):
    """B118, through the pipeline's door."""
    frames, tiled = decode_frames(vae, latents), decode_frames(vae, latents, tiled=True)
    assert tiled.shape == frames.shape
    assert (frames.int() - tiled.int()).abs().max() <= 1


def test_only_one_chunk_of_pixels_is_on_the_device_at_a_time(vae, latents):
    """Memory flat in the number of frames: a chunk is asked for after the last one was turned into bytes."""
    alive = []

    class Watched:
        def decode_chunks(self, z):
            for chunk in vae.decode_chunks(z):
                alive.append(chunk.shape[2])
                yield chunk

    decode_frames(Watched(), latents)
    assert alive == [1, 4, 4]


def test_out_of_memory_is_retried_in_tiles_with_one_warning(vae, latents, monkeypatch, caplog):
    """B116."""
    expected = decode_frames(vae, latents)
    monkeypatch.setattr(vae, "decode_chunks", out_of_memory)
    frames = decode_or_keep(vae, latents, {})
    assert (frames.int() - expected.int()).abs().max() <= 1
    assert [record.getMessage() for record in caplog.records] == [
        "out of memory while decoding the video; decoding it again in tiles"
    ]


@pytest.mark.parametrize("failure", [out_of_memory, lambda *_, **__: 1 / 0])
def test_latents_survive_a_failed_decode(vae, latents, monkeypatch, tmp_path, failure):
    """B116: the file holds them exactly, and decoding them later gives the video."""
    expected = decode_frames(vae, latents)
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(vae, "decode", failure)
        patch.setattr(vae, "decode_chunks", failure)
        with pytest.raises(VideoDecodeError) as caught:
            decode_or_keep(vae, latents, {"prompt": "a cat", "seed": 5})
    path = caught.value.latents_path
    assert path.parent == tmp_path
    assert str(path) in str(caught.value)
    assert "tiled=True" in str(caught.value)
    if failure is out_of_memory:
        assert "smaller size or fewer frames" in str(caught.value)
    with safe_open(path, "pt") as file:
        kept = file.get_tensor("latents")
        assert json.loads(file.metadata()["settings"]) == {"prompt": "a cat", "seed": 5}
    assert torch.equal(kept, latents)
    assert torch.equal(decode_frames(vae, kept), expected)


def test_latents_go_to_the_temporary_folder_where_the_working_one_is_closed(vae, latents, monkeypatch, tmp_path):
    monkeypatch.setattr(vae, "decode_chunks", lambda _: 1 / 0)
    monkeypatch.setattr(decode.Path, "cwd", lambda: tmp_path / "absent")
    monkeypatch.setattr(decode.tempfile, "gettempdir", lambda: str(tmp_path))
    with pytest.raises(VideoDecodeError) as caught:
        decode_or_keep(vae, latents, {})
    assert caught.value.latents_path.parent == tmp_path
