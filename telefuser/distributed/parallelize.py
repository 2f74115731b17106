"""Spreads the weights of a finished model over the processes, from outside: FSDP of its blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn


def shard_model(
    model: nn.Module,
    device_type: str,
    *,
    blocks: str = "blocks",
    methods: Sequence[str] = ("prepare_context", "project_context"),
) -> nn.Module:
    """Leave 1/P of every weight on each of the job's P processes; returns `model`, changed in place. Forward only.

    A block's weights are gathered before it runs, beside the computing of the block before, and dropped after it
    (PyTorch's FSDP2, arXiv:2304.11277). The results are those of the whole model, bit for bit. All processes must hold
    the same weights and call the model equally often, with whatever inputs: guidance and tokens may be split as well.

    Args:
        device_type: where the model computes. Parameters elsewhere are moved there block by block, so a model that is
            loaded on the host never lies on the device whole.
        blocks: the name of the `nn.ModuleList` whose entries become units. The rest of the model is one more.
        methods: names of methods beside `forward` that are called from outside and read weights.

    Raises ValueError without a process group, for a model without such a list, for quantised layers, and on the CPU
    where PyTorch is too old to (2.6).
    """
    if device_type == "cpu" and not spreads_on_cpu():
        raise ValueError(f"PyTorch {torch.__version__} has no FSDP for the CPU; take a newer one, or leave FSDP out")
    if not dist.is_initialized():
        raise ValueError(
            "FSDP needs a process group: start with `torchrun`, and make one by Job or create_device_mesh_from_config"
        )
    units = getattr(model, blocks, None)
    if not isinstance(units, nn.ModuleList) or not len(units):
        raise ValueError(f"{type(model).__name__}.{blocks} is {type(units).__name__}, not a list of blocks to shard")
    packed = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.element_size() < 2]
    if packed:
        raise ValueError(f"{packed[0]} is quantised: FSDP shards weights of 16 or 32 bits; leave out one of the two")
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    mesh = DeviceMesh.from_group(dist.group.WORLD, device_type, mesh_dim_names=("fsdp",))
    # Gradients would want one dtype a unit; a block mixes bfloat16 projections with float32 norms.
    model.requires_grad_(False)
    for unit in (*units, model):
        # The default keeps the last unit whole after the first pass, in wait for a backward pass that never comes.
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
        for name in methods:
            if hasattr(unit, name):
                register_fsdp_forward_method(unit, name)
    return model


def spreads_on_cpu() -> bool:
    """Whether this PyTorch's FSDP2 runs on the CPU: it records events on streams, which 2.6 has for GPUs only."""
    return hasattr(torch.cpu.Stream, "record_event")


def own_bytes(model: nn.Module) -> int:
    """Bytes of the parameters and buffers that lie on this process."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum((t.to_local() if hasattr(t, "to_local") else t).nbytes for t in tensors if isinstance(t, torch.Tensor))
