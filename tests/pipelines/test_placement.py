"""Moving models for their stage only, and the choice of where they live."""

import logging

import pytest
import torch
from torch import nn

from telefuser import platforms
from telefuser.pipelines import placement
from telefuser.platforms import CpuPlatform

META = torch.device("meta")
GIB = 2**30


class SmallDevice(CpuPlatform):
    """The platform of the meta device with a chosen amount of free memory."""

    device_type = "meta"
    free = 0

    @classmethod
    def get_device_free_memory(cls, device=None):
        return cls.free


@pytest.fixture
def small_device(monkeypatch) -> type[SmallDevice]:
    monkeypatch.setattr(platforms, "current_platform", SmallDevice())
    return SmallDevice


def model_with_a_tied_weight_and_a_buffer() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    return model.eval()


def test_a_module_is_on_the_device_within_and_unchanged_after(small_device):
    model = model_with_a_tied_weight_and_a_buffer()
    before = dict(model.state_dict(keep_vars=True))
    with placement.on_device(model, META):
        assert {tensor.device for tensor in model.state_dict().values()} == {META}
        assert model[1].weight is model[0].weight
        assert isinstance(model[0].weight, nn.Parameter)
        assert model[0].weight.requires_grad
        assert not model[0].bias.requires_grad
        assert model(torch.zeros(2, 3, device=META)).device == META
    after = model.state_dict(keep_vars=True)
    assert all(after[key] is before[key] for key in before)


def test_a_module_comes_back_when_its_stage_fails(small_device):
    model = model_with_a_tied_weight_and_a_buffer()
    weight = model[0].weight
    with pytest.raises(KeyboardInterrupt), placement.on_device(model, META):
        raise KeyboardInterrupt
    assert model[0].weight is weight


def test_a_resident_module_is_not_touched():
    model = nn.Linear(2, 2)
    weight = model.weight
    with placement.on_device(model, torch.device("cpu")):
        assert model.weight is weight


def test_models_stay_on_the_device_only_where_the_run_fits_too(small_device):
    small_device.free = 24 * GIB
    pixels = 832 * 480 * 81
    assert placement.fits(META, 15 * GIB, pixels)
    assert not placement.fits(META, 17 * GIB, pixels)
    assert not placement.fits(META, 15 * GIB, 2 * pixels)
    assert placement.fits(torch.device("cpu"), 10**15, pixels)


def test_the_text_encoder_leaves_only_when_the_video_needs_its_place(small_device):
    encoder = nn.Linear(2, 2, device=META)
    small_device.free = 9 * GIB
    placement.make_room(encoder, META, 832 * 480 * 81)
    assert encoder.weight.device == META
    small_device.free = 7 * GIB
    moved = []
    encoder.to = moved.append
    placement.make_room(encoder, META, 832 * 480 * 81)
    assert moved == ["cpu"]


def test_a_text_encoder_that_does_not_fit_runs_on_the_cpu_with_a_reason(small_device, caplog):
    encoder = nn.Linear(1024, 1024)
    small_device.free = 8 * 2**20
    assert placement.text_device(encoder, META) == META
    small_device.free = 4 * 2**20
    with caplog.at_level(logging.WARNING):
        assert placement.text_device(encoder, META) == torch.device("cpu")
    assert "on the CPU" in caplog.text
    # Where it already lies on the device there is nothing to decide.
    assert placement.text_device(encoder.to(META), META) == META


def test_a_video_larger_than_the_memory_is_refused_with_its_size(monkeypatch):
    monkeypatch.setattr(CpuPlatform, "get_device_total_memory", classmethod(lambda cls, device=None: 24 * GIB))
    cpu, sizes = torch.device("cpu"), {"dit_dim": 192, "vae_dim": 32}
    for width, height, num_frames, needed in [(100_000, 100_000, 1, r"\d+"), (128, 128, 4 * 10**8 + 1, r"\d{5}")]:
        with pytest.raises(ValueError, match=rf"{width}x{height}.* at least {needed} GiB.*has 24 GiB: use a smaller"):
            placement.require_memory(cpu, width, height, num_frames, **sizes)
    placement.require_memory(cpu, 832, 480, 81, dit_dim=1536, vae_dim=96)
    # Of another device only the host's share is known: its own error comes when it is full.
    placement.require_memory(META, 16_384, 16_384, 1, dit_dim=5120, vae_dim=96)
    with pytest.raises(ValueError, match="at least"):
        placement.require_memory(META, 100_000, 100_000, 1, **sizes)
    monkeypatch.setattr(CpuPlatform, "get_device_total_memory", classmethod(lambda cls, device=None: 0))
    placement.require_memory(cpu, 10**6, 10**6, 1, **sizes)
