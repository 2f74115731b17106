"""`create_device_mesh_from_config` and what the accessors say, on one process and in a group of four."""

import pytest
import torch
import torch.distributed as dist

from telefuser import distributed, platforms
from telefuser.core.config import ParallelConfig
from telefuser.distributed import device_mesh
from telefuser.distributed.comm import split_ranges, split_sizes


def test_dimensions_follow_the_degrees(four):
    # S259, S262, S263
    for rank, mesh in enumerate(four("mesh: usp")):
        assert mesh["names"] == ("ring", "ulysses")
        assert mesh["device_type"] == "cpu"
        assert mesh["coordinate"] == {"ring": rank // 2, "ulysses": rank % 2}
        assert mesh["ranks"] == {"ring": [rank % 2, rank % 2 + 2], "ulysses": [rank // 2 * 2, rank // 2 * 2 + 1]}
        assert mesh["strategy"] == "usp"
        assert mesh["is_last"]
    for rank, mesh in enumerate(four("mesh: cfg ring")):
        assert (mesh["names"], mesh["strategy"]) == (("cfg", "ring"), "ring")
        assert mesh["coordinate"] == {"cfg": rank // 2, "ring": rank % 2}
    for rank, mesh in enumerate(four("mesh: ulysses")):
        assert (mesh["shape"], mesh["strategy"]) == ((4,), "ulysses")
        assert mesh["ranks"] == {"ulysses": [0, 1, 2, 3]}
        assert mesh["coordinate"] == {"ulysses": rank}
    assert {mesh["strategy"] for mesh in four("mesh: dp")} == {"local"}


@pytest.fixture
def no_group(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_lone_process_needs_no_launcher(no_group):
    # S045: the platform's own backend, gloo on a CPU
    mesh = distributed.create_device_mesh_from_config(ParallelConfig(), "cpu" if dist.is_nccl_available() else None)
    assert distributed.get_mesh_dim_names(mesh) == ("world",)
    assert distributed.get_attention_strategy(mesh) == "local"
    assert distributed.get_rank(mesh, "ulysses") == 0
    assert distributed.get_ranks(mesh, "ulysses") == [0]
    assert distributed.get_world_size(mesh, "ring") == 1
    assert distributed.get_group(mesh, "ring") is None
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="no device mesh"):
        distributed.get_device_mesh()


def test_gloo_on_a_host_with_an_accelerator_moves_cpu_tensors(no_group, monkeypatch):
    # B106
    monkeypatch.setattr(platforms, "current_platform", platforms.NPUPlatform())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert distributed.create_device_mesh_from_config(ParallelConfig()).device_type == "cpu"
    with pytest.raises(ValueError, match=r"backend 'gloo'.*'npu'"):
        distributed.create_device_mesh_from_config(ParallelConfig(), device_type="npu")


class Recorded(platforms.NPUPlatform):
    """A machine with two devices that remembers which one was chosen."""

    def __init__(self):
        super().__init__()
        self.chosen = []

    @classmethod
    def device_count(cls):
        return 2

    def set_device(self, device):
        self.chosen.append(device)


def test_each_process_works_on_its_own_device(no_group, monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    platform = Recorded()
    monkeypatch.setattr(platforms, "current_platform", platform)
    monkeypatch.setattr(device_mesh, "_settle_device_type", lambda device_type: "npu")
    monkeypatch.setattr(device_mesh, "_make_mesh", lambda config, device_type: None)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    distributed.create_device_mesh_from_config(ParallelConfig())
    assert platform.chosen == []
    distributed.create_device_mesh_from_config(ParallelConfig(device_ids=[1]))
    monkeypatch.setenv("LOCAL_RANK", "0")
    distributed.create_device_mesh_from_config(ParallelConfig())
    # One visible device for each process: LOCAL_RANK counts beyond what this one sees.
    monkeypatch.setenv("LOCAL_RANK", "3")
    distributed.create_device_mesh_from_config(ParallelConfig())
    assert platform.chosen == [1, 0]
    with pytest.raises(ValueError, match="device 5, but 2"):
        distributed.create_device_mesh_from_config(ParallelConfig(device_ids=[5]))


def test_several_processes_need_a_launcher(no_group):
    with pytest.raises(ValueError, match="torchrun --nproc-per-node 4"):
        distributed.create_device_mesh_from_config(ParallelConfig(device_ids=[0, 1, 2, 3], sp_ulysses_degree=4))
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="give a ParallelConfig"):
        distributed.create_device_mesh_from_config({"sp_ulysses_degree": 4})


def test_without_a_mesh_accessors_answer_for_one_process():
    assert distributed.get_mesh_dim_names(None) == ()
    assert distributed.get_attention_strategy(None) == "local"
    assert distributed.get_world_size(None, "ulysses") == 1
    assert distributed.get_rank(None, "ulysses") == 0


@pytest.mark.parametrize(("total", "parts", "sizes"), [(33, 4, [9, 8, 8, 8]), (3, 4, [1, 1, 1, 0]), (8, 2, [4, 4])])
def test_items_are_dealt_in_order(total, parts, sizes):
    assert split_sizes(total, parts) == sizes == [len(part) for part in torch.arange(total).tensor_split(parts)]
    ranges = split_ranges(total, parts)
    assert [stop - start for start, stop in ranges] == sizes
    assert ranges[0][0] == 0
    assert ranges[-1][1] == total
