"""Every Python block of README and docs runs as printed, on a CPU; so does every block of the specification.

The specification lies beside the repository for its authors only (`../shared/seeds`, or the folder in TELEFUSER_SEEDS);
without it those tests skip.
"""

import ast
import importlib.util
import os
import re
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.distributed.checks import execute
from tests.distributed.processes import run_processes

ROOT = Path(__file__).resolve().parent.parent
SEEDS = Path(os.environ.get("TELEFUSER_SEEDS", ROOT.parent / "shared" / "seeds"))
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def fenced_blocks():
    for page in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            line = text[: match.start()].count("\n") + 2
            yield pytest.param(match.group(1), id=f"{page.relative_to(ROOT)}:{line}")


def parses(lines):
    try:
        return ast.parse("\n".join(lines)).body
    except (SyntaxError, ValueError):
        return None


def longest_block(lines, start):
    """End of the longest run of lines from `start` that is Python; prose never parses (pilcrows, full-width marks)."""
    for end in range(min(len(lines), start + 90), start, -1):
        body = parses(lines[start:end])
        if body and not all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Name) for node in body):
            return end
    return None


def seed_blocks():
    for document in sorted(SEEDS.glob("*.txt")):
        lines = document.read_text(encoding="utf-8").splitlines()
        at = 0
        while at < len(lines):
            end = longest_block(lines, at) if re.match(r"(from|import|class) ", lines[at]) else None
            if end is None:
                # Advice samples start with an assignment or a bare call, not with an import.
                end = longest_block(lines, at) if re.match(r"(config = |replace_linear_layers\()", lines[at]) else None
            if end is None:
                at += 1
                continue
            yield pytest.param("\n".join(lines[at:end]), id=f"{document.stem[:3]}:{at + 1}")
            at = end


def free_names():
    """What the samples of the specification leave to the reader."""
    from telefuser.core.config import AttentionConfig
    from telefuser.ops import CustomOp
    from telefuser.ops.attention import MaskMap, SparseAttentionState
    from telefuser.ops.quantized_linear import convert_params_to_buffers, replace_linear_layers

    heads = torch.randn(3, 1, 32, 4, 16)
    return {
        "torch": torch,
        "CustomOp": CustomOp,
        "AttentionConfig": AttentionConfig,
        # One sample imports the singular name and calls the plural (C01); another imports nothing.
        "convert_params_to_buffers": convert_params_to_buffers,
        "replace_linear_layers": replace_linear_layers,
        "inputs": torch.randn(2, 8),
        "hidden_states": torch.randn(2, 4, 1024),
        "x": torch.randn(2, 4, 64),
        "shift": torch.randn(2, 64),
        "scale": torch.randn(2, 64),
        "q": heads[0],
        "k": heads[1],
        "v": heads[2],
        "sparse_state": SparseAttentionState(AttentionConfig.radial_attention(dense_timesteps=40), MaskMap(32, 4)),
        "load_my_model": lambda: torch.nn.Sequential(torch.nn.Linear(64, 64)),
        "model": torch.nn.Sequential(torch.nn.Linear(64, 64)),
        "input_tensor": torch.randn(2, 64),
    }


def missing_part(source):
    """The module or name of the specification that this version does not have yet, or None."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("telefuser"):
            try:
                spec = importlib.util.find_spec(node.module)
            except ModuleNotFoundError:
                spec = None
            if spec is None:
                return node.module
            module = importlib.import_module(node.module)
            absent = [alias.name for alias in node.names if not hasattr(module, alias.name)]
            if absent:
                return f"{node.module}.{absent[0]}"
    return None


@pytest.fixture
def device_mesh():
    """A mesh of this one process."""
    from telefuser.core.config import ParallelConfig
    from telefuser.distributed import create_device_mesh_from_config

    yield create_device_mesh_from_config(ParallelConfig())
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("source", list(fenced_blocks()))
def test_documentation_block_runs(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(source, "<documentation block>", "exec"), {"__name__": "documentation"})


@pytest.mark.skipif(not SEEDS.is_dir(), reason="the specification is not beside this checkout (../shared/seeds)")
@pytest.mark.parametrize("source", list(seed_blocks()) if SEEDS.is_dir() else [])
def test_specification_block_runs_on_cpu(source, request):
    """S269, S270."""
    missing = missing_part(source)
    if "telefuser.kernel" in source and importlib.util.find_spec("triton") is None:
        pytest.skip("the block imports Triton kernels and Triton is not installed")
    if missing:
        pytest.skip(f"{missing} is not part of this version")
    source = source.replace('"cuda"', '"cpu"').replace(".cuda()", '.to("cpu")')
    if "device_ids=[0, 1, 2, 3]" in source:
        # S262, S264, S265: the block is for four processes, and the model it switches over must still be right.
        for failure, error in run_processes(4, [partial(execute, source)])[0]:
            assert failure is None, failure
            assert error <= 1e-5
        return
    names = free_names()
    if "device_mesh" in source:
        names["device_mesh"] = request.getfixturevalue("device_mesh")
    exec(compile(source, "<specification block>", "exec"), names)
    if "MyTransformerBlock" in names:
        block = names["MyTransformerBlock"](dim=64, num_heads=4)
        out = block(torch.randn(2, 16, 64), torch.randn(2, 64))
        assert out.shape == (2, 16, 64)
        assert out.isfinite().all()
