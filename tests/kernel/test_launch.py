import itertools

import torch

from telefuser.kernel.triton import launch
from telefuser.kernel.triton.launch import Launch, launch_of, warps_of_threads


def test_settings_grow_with_the_width_and_hold_any_row():
    x = torch.empty(1)
    found = [launch_of("norm", width, x) for width in (1, 512, 513, 1536, 5120, 16384, 10**6)]
    assert [settings.threads for settings in found] == [32, 32, 64, 128, 256, 256, 256]
    assert warps_of_threads(128, x) == 4


def test_measured_tables_cover_every_width():
    for table in [launch.SAFE, *launch.MEASURED.values()]:
        widths = [widest for widest, _ in table]
        assert widths == sorted(set(widths))
        assert widths[-1] >= 1 << 31
        for _, (threads, rows, stages) in table:
            assert threads in (32, 64, 128, 256, 512, 1024)
            assert rows >= 1
            assert stages >= 1


def test_a_measured_family_has_its_own_settings(monkeypatch):
    mine = ((1 << 62, Launch(512, 8, 2)),)
    monkeypatch.setitem(launch.MEASURED, ("norm", "sm00", 2), mine)
    wanted = {("norm", "sm00", 2)}
    for key in itertools.product(("norm", "add_norm"), ("sm00", "cpu"), (2, 4)):
        kernel, family, itemsize = key
        assert (launch._launch_of(kernel, 1537, itemsize, family) == mine[0][1]) is (key in wanted)
    launch._launch_of.cache_clear()


def test_an_amd_wave_of_64_takes_half_the_warps(monkeypatch):
    class Target:
        backend, arch, warp_size = "hip", "gfx942", 64

    class OnGpu:
        device = torch.device("cuda")

    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(launch, "_target", Target)
    launch.family.cache_clear()
    assert launch.family() == "amd64"
    assert [warps_of_threads(threads, OnGpu) for threads in (32, 256)] == [1, 4]
    launch.family.cache_clear()
