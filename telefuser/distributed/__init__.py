"""Several processes on one job: the mesh they form and what they exchange. Operators use it, models through them."""

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

__all__ = [
    "create_device_mesh_from_config",
    "get_attention_strategy",
    "get_device_mesh",
    "get_group",
    "get_mesh_dim_names",
    "get_rank",
    "get_ranks",
    "get_world_size",
]
