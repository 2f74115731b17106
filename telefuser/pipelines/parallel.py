"""A pipeline on several processes: which mesh it works on, and which choices of the caller fit it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from telefuser.core.config import ParallelConfig
from telefuser.distributed import announced, choose_parallel_config, create_device_mesh_from_config

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from telefuser.core.wan_component import Component


def check_parallel(parallel: ParallelConfig | str | None, offload: bool | None, quantize: Any) -> None:
    """Raises ValueError for a value or a combination that the pipeline does not take."""
    if parallel is not None and parallel != "auto" and not isinstance(parallel, ParallelConfig):
        raise ValueError(f"parallel is {parallel!r}; give 'auto', a ParallelConfig, or None for this process alone")
    if not isinstance(parallel, ParallelConfig):
        return
    unused = [name for name in ("dp_degree", "pp_degree", "tp_degree") if getattr(parallel, name) > 1]
    if unused:
        raise ValueError(
            f"parallel: the pipeline does not divide its work by {', '.join(unused)}; use cfg_degree, "
            "sp_ulysses_degree and sp_ring_degree"
        )
    if parallel.enable_fsdp and parallel.world_size == 1:
        raise ValueError("enable_fsdp spreads the weights over several processes, this is one: start it with torchrun")
    if parallel.enable_fsdp and (offload or quantize is not None):
        other = "offload" if offload else "quantize"
        raise ValueError(f"enable_fsdp and {other} do not go together: leave out one of the two")


def check_weights(parallel: ParallelConfig | str | None, dit: Component) -> None:
    """Raises ValueError for a transformer whose files cannot be spread over the processes, before they are read."""
    spreads = isinstance(parallel, ParallelConfig) and parallel.enable_fsdp and parallel.world_size > 1
    if spreads and dit.fp8_layers:
        raise ValueError(
            f"{dit.files[0]}: holds FP8 weights ({len(dit.fp8_layers)} layers), and enable_fsdp spreads those of 16 or "
            "32 bits: leave it out, or use the bf16, fp16 or fp32 weights"
        )


def make_mesh(
    parallel: ParallelConfig | str | None, device: torch.device, num_heads: int, has_guidance: bool, is_sparse: bool
) -> tuple[DeviceMesh | None, ParallelConfig]:
    """The mesh of all processes of the job and its config; no mesh for a single process.

    "auto" is a mesh of the processes that torchrun announced; see `choose_parallel_config`.
    """
    num_processes = announced()[1]
    if parallel == "auto" and num_processes > 1:
        parallel = choose_parallel_config(num_processes, num_heads, has_guidance, allow_ring=not is_sparse)
    if not isinstance(parallel, ParallelConfig) or parallel.world_size == 1:
        return None, ParallelConfig()
    return create_device_mesh_from_config(parallel, device.type), parallel


def describe(config: ParallelConfig) -> str:
    """Such as `4 processes: cfg 2, ulysses 2, FSDP`."""
    degrees = {"cfg": config.cfg_degree, "ulysses": config.sp_ulysses_degree, "ring": config.sp_ring_degree}
    words = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    return f"{config.world_size} processes: " + ", ".join(words + ["FSDP"] * config.enable_fsdp)
