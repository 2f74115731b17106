"""Several processes on one job: the mesh they form and what they exchange. Operators use it, models through them."""

from telefuser.distributed.agreement import numbers_of_first, require_same
from telefuser.distributed.device_mesh import (
    create_device_mesh_from_config,
    get_attention_strategy,
    get_device_mesh,
    get_group,
    get_mesh_dim_names,
    get_rank,
    get_ranks,
    get_world_size,
)
from telefuser.distributed.job import Job, JobError, announced, own_device
from telefuser.distributed.parallelize import shard_model
from telefuser.distributed.plan import choose_parallel_config

__all__ = [
    "Job",
    "JobError",
    "announced",
    "choose_parallel_config",
    "create_device_mesh_from_config",
    "get_attention_strategy",
    "get_device_mesh",
    "get_group",
    "get_mesh_dim_names",
    "get_rank",
    "get_ranks",
    "get_world_size",
    "numbers_of_first",
    "own_device",
    "require_same",
    "shard_model",
]
