"""The mesh of processes that a `ParallelConfig` describes, and what each dimension of it says about this process."""

from __future__ import annotations

import math
import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from telefuser import platforms
from telefuser.core.config import ParallelConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Outermost first: neighbours in the last dimensions are neighbours in rank, so on one host, and exchange the most.
_DIM_DEGREES = {
    "dp": "dp_degree",
    "cfg": "cfg_degree",
    "ring": "sp_ring_degree",
    "ulysses": "sp_ulysses_degree",
    "pp": "pp_degree",
    "tp": "tp_degree",
}

# The mesh made last and the process group it was made in: a mesh does not outlive its group.
_last_mesh: tuple[DeviceMesh, dist.ProcessGroup] | None = None


def create_device_mesh_from_config(parallel_config: ParallelConfig, device_type: str | None = None) -> DeviceMesh:
    """The mesh of `parallel_config` over all processes of the job; every process must call it.

    Dimensions are dp, cfg, ring, ulysses, pp, tp in this order, each only where its degree is above 1; a lone process
    gives the one dimension `world`. Collectives of the mesh wait `parallel_config.timeout` seconds for the others.

    device_type: of the tensors that will be exchanged. None is the current platform's, or "cpu" where the process group
        was started on gloo, which moves CPU tensors only. Rank r works on `device_ids[r]`, without `device_ids`
        on the device of torchrun's LOCAL_RANK; it becomes the current one.

    Without a process group one is started: over the processes that torchrun announces in the environment, or of this
    process alone where the config asks for no more.

    Raises ValueError where config and process group differ in size, where the backend does not move tensors of
    `device_type`, where a device index does not exist, and for sequence parallelism together with tensor parallelism.
    """
    global _last_mesh
    if not isinstance(parallel_config, ParallelConfig):
        raise ValueError(f"parallel_config is {parallel_config!r}; give a ParallelConfig")
    sp_degree = parallel_config.sp_ulysses_degree * parallel_config.sp_ring_degree
    if sp_degree > 1 and parallel_config.tp_degree > 1:
        raise ValueError(
            f"sequence parallelism (sp_ulysses_degree x sp_ring_degree = {sp_degree}) and "
            f"tp_degree={parallel_config.tp_degree} do not go together; set one of them to 1"
        )
    if not dist.is_initialized():
        _start_process_group(parallel_config, device_type)
    _check_size(parallel_config)
    device_type = _settle_device_type(device_type)
    _use_own_device(parallel_config, device_type)
    mesh = _make_mesh(parallel_config, device_type)
    _last_mesh = (mesh, dist.group.WORLD)
    return mesh


def get_device_mesh() -> DeviceMesh:
    """The mesh that `create_device_mesh_from_config` made last; ValueError when there is none in this process group."""
    if _last_mesh is None or not dist.is_initialized() or _last_mesh[1] is not dist.group.WORLD:
        raise ValueError("there is no device mesh; make one with create_device_mesh_from_config(ParallelConfig(...))")
    return _last_mesh[0]


def _start_process_group(config: ParallelConfig, device_type: str | None) -> None:
    platform = platforms.current_platform if device_type is None else platforms.platform_of(device_type)
    backend, timeout = platform.dist_backend, timedelta(seconds=config.timeout)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    elif config.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        raise ValueError(
            f"the config is for {config.world_size} processes but this is a single one; start the program with "
            f"`torchrun --nproc-per-node {config.world_size}` or call torch.distributed.init_process_group first"
        )


def _check_size(config: ParallelConfig) -> None:
    num_processes = dist.get_world_size()
    if config.world_size != num_processes:
        degrees = [f"{name}={getattr(config, name)}" for name in _DIM_DEGREES.values() if getattr(config, name) > 1]
        raise ValueError(
            f"{' x '.join(degrees) or 'all degrees 1'} need {config.world_size} process(es) but the job has "
            f"{num_processes}; start it with `torchrun --nproc-per-node {config.world_size}` or change the degrees"
        )


def _settle_device_type(device_type: str | None) -> str:
    backend = dist.get_backend()
    if device_type is None:
        return "cpu" if backend == "gloo" else platforms.current_platform.device_type
    device_type = device_type.partition(":")[0]
    # "cpu:gloo,npu:hccl" names a backend a device type; a lone accelerator backend moves no CPU tensors.
    served = {part.partition(":")[0] for part in backend.split(",")} if ":" in backend else None
    if served is None and backend == "gloo":
        served = {"cpu"}
    elif served is None and backend == platforms.current_platform.dist_backend:
        served = {platforms.current_platform.device_type}
    if served is not None and device_type not in served:
        raise ValueError(
            f"the process group runs on backend {backend!r}, which does not exchange {device_type!r} tensors; "
            f"start it on {platforms.current_platform.full_dist_backend!r} or give device_type={min(served)!r}"
        )
    return device_type


def _use_own_device(config: ParallelConfig, device_type: str) -> None:
    platform = platforms.current_platform
    if device_type == "cpu" or device_type != platform.device_type:
        return
    if config.device_ids is not None:
        index = config.device_ids[dist.get_rank()]
        if index >= platform.device_count():
            raise ValueError(
                f"device_ids {config.device_ids} names device {index}, but {platform.device_count()} "
                f"{platform.vendor_device}(s) are visible; use indices below that"
            )
        platform.set_device(index)
    # A launcher may also have left each process a single visible device, which then is the current one.
    elif int(os.environ.get("LOCAL_RANK", platform.device_count())) < platform.device_count():
        platform.set_device(int(os.environ["LOCAL_RANK"]))


def _make_mesh(config: ParallelConfig, device_type: str) -> DeviceMesh:
    # Some builds of PyTorch come without torch.distributed; they must still be able to import the models.
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    degrees = {name: getattr(config, field) for name, field in _DIM_DEGREES.items() if getattr(config, field) > 1}
    if not degrees:
        return init_device_mesh(device_type, (1,), mesh_dim_names=("world",))
    ranks = torch.arange(math.prod(degrees.values()), dtype=torch.int).view(*degrees.values())
    groups = []
    # Made here and not by DeviceMesh, whose groups would wait for the backend's own timeout.
    for axis, size in enumerate(degrees.values()):
        members = ranks.movedim(axis, -1).reshape(-1, size).tolist()
        groups.append(dist.new_subgroups_by_enumeration(members, timeout=timedelta(seconds=config.timeout))[0])
    names = tuple(degrees)
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=names)
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)


def get_mesh_dim_names(device_mesh: DeviceMesh | None) -> tuple[str, ...]:
    """The names of the mesh's dimensions; empty without a mesh or names."""
    return () if device_mesh is None else tuple(device_mesh.mesh_dim_names or ())


def get_group(device_mesh: DeviceMesh | None, group_type: str) -> dist.ProcessGroup | None:
    """The processes that differ from this one in dimension `group_type` only; None where the mesh lacks it."""
    return device_mesh.get_group(group_type) if group_type in get_mesh_dim_names(device_mesh) else None


def get_ranks(device_mesh: DeviceMesh | None, group_type: str) -> list[int]:
    """The global ranks of that group in its order, or this process's own where the mesh lacks the dimension."""
    group = get_group(device_mesh, group_type)
    if group is not None:
        return dist.get_process_group_ranks(group)
    return [dist.get_rank() if dist.is_initialized() else 0]


def get_rank(device_mesh: DeviceMesh | None, group_type: str) -> int:
    """The place of this process in dimension `group_type`; 0 where the mesh lacks it."""
    return device_mesh.get_local_rank(group_type) if group_type in get_mesh_dim_names(device_mesh) else 0


def get_world_size(device_mesh: DeviceMesh | None, group_type: str) -> int:
    """The size of dimension `group_type`; 1 where the mesh lacks it."""
    names = get_mesh_dim_names(device_mesh)
    return device_mesh.size(names.index(group_type)) if group_type in names else 1


def get_attention_strategy(device_mesh: DeviceMesh | None) -> str:
    """How attention over a token sequence that the mesh splits is computed: "local", "ulysses", "ring" or "usp" (both).

    Raises ValueError for a mesh of several processes whose dimensions have no names.
    """
    if device_mesh is not None and device_mesh.mesh_dim_names is None and device_mesh.size() > 1:
        raise ValueError(
            f"the mesh {tuple(device_mesh.shape)} has no dimension names; name those that split the tokens "
            "'ring' and 'ulysses', or make it with create_device_mesh_from_config"
        )
    has_ring, has_ulysses = (get_world_size(device_mesh, name) > 1 for name in ("ring", "ulysses"))
    if has_ring and has_ulysses:
        return "usp"
    return "ring" if has_ring else "ulysses" if has_ulysses else "local"
