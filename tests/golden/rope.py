"""Rotary tables, their application and the timestep sinusoid against "rope tables" files."""

from collections.abc import Iterator

import torch

from telefuser.models.wan_video_dit import rope_angles, timestep_sinusoid
from telefuser.ops.rotary import apply_rotary_emb
from tests.golden.case import Case, Row, max_ulps


def check(case: Case) -> Iterator[Row]:
    tensors = case.tensors()
    if torch.float32 in case.dtypes:
        yield from _tables(case, tensors)
        for dim in case.config["sinusoid_dims"]:
            ours = timestep_sinusoid(tensors["sinusoid_t"].to(case.device), dim)
            yield case.max_abs(f"float64 sinusoid_dim{dim}", ours, tensors[f"sinusoid_dim{dim}"], 1e-12)
    for apply in case.config["applies"]:
        yield from _application(case, tensors, apply)


def _tables(case: Case, tensors) -> Iterator[Row]:
    for dim in case.config["head_dims"]:
        positions = len(tensors[f"table_d{dim}.cos"])
        side = dim // 6
        # The stored table runs over positions; a grid that is long on one axis only shows that axis' columns.
        grids = ((positions, 1, 1), (1, positions, 1), (1, 1, positions))
        widths = (dim // 2 - 2 * side, side, side)
        columns = [rope_angles(dim, grid, case.device).split(widths, -1)[axis] for axis, grid in enumerate(grids)]
        angles = torch.cat(columns, dim=-1)
        yield case.max_abs(f"float64 table_d{dim}.cos", angles.cos(), tensors[f"table_d{dim}.cos"], 1e-12)
        yield case.max_abs(f"float64 table_d{dim}.sin", angles.sin(), tensors[f"table_d{dim}.sin"], 1e-12)


def _application(case: Case, tensors, apply: dict) -> Iterator[Row]:
    name = apply["tensor"]
    for sample, grid in enumerate(apply["grid_sizes"]):
        tokens = grid[0] * grid[1] * grid[2]
        x = tensors[f"{name}.x"][sample : sample + 1, :tokens].to(case.device)
        angles = rope_angles(x.shape[-1], tuple(grid), case.device)
        table = (angles.cos().float(), angles.sin().float())
        out = tensors[f"{name}.out"][sample : sample + 1, :tokens]
        from_bf16 = tensors[f"{name}.out_from_bf16_x"][sample : sample + 1, :tokens]
        if torch.float32 in case.dtypes:
            # float32 tables are what the model uses; they cost up to 1e-5.
            yield case.max_abs(f"float32 {name} sample{sample}", apply_rotary_emb(x, table), out, 1e-5)
            ours = apply_rotary_emb(x.bfloat16().float(), table)
            yield case.max_abs(f"float32 {name} sample{sample} bf16 values", ours, from_bf16, 1e-5)
        if torch.bfloat16 in case.dtypes:
            ours = apply_rotary_emb(x.bfloat16(), table)
            yield case.row(f"bfloat16 {name} sample{sample} ulps", max_ulps(ours, from_bf16.bfloat16()), 1)
