"""`WanModel` with its block linears in FP8: the values, and one graph a block under torch.compile."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import telefuser.kernel.triton as kernels
from telefuser.core.config import AttentionConfig, AttnImplType
from telefuser.models.wan_video_dit import WanModel
from telefuser.ops import fp8_gemm
from telefuser.ops.quantized_linear import WAN_HIGH_PRECISION, LinearFP8, replace_linear_layers
from tests.models.test_wan_video_dit import TINY, cast_as_loaded, latents, text
from tests.ops.fp8_machines import fresh_table, gpu
from tests.ops.machines import interpreted_cuda
from tests.tolerances import rel_error, tolerance

__all__ = ["fresh_table", "gpu", "interpreted_cuda"]


@pytest.fixture(params=["native", "fp8 product"])
def machine(request, gpu):
    torch._dynamo.reset()
    yield gpu() if request.param == "fp8 product" else None
    torch._dynamo.reset()


def model(dtype=torch.float32, fp8=True) -> WanModel:
    torch.manual_seed(0)
    wan = WanModel(**TINY)
    for parameter in wan.parameters():
        nn.init.normal_(parameter, std=0.15)
    cast_as_loaded(wan, dtype)
    if fp8:
        report = replace_linear_layers(wan, skip=WAN_HIGH_PRECISION)
        assert len(report.replaced) == 20
    return wan.eval().requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_velocity_stays_close(dtype, machine):
    # Random weights: 20 roundings of 2.6 or 3.7 % each, which the residual stream dilutes.
    given = latents(2), torch.tensor([300.0, 800.0]), text(2, 5)
    out, wanted = model(dtype)(*given), model(dtype, fp8=False)(*given)
    assert out.dtype is torch.float32
    assert 0 < rel_error(out, wanted) < 0.06
    # The samples of a batch do not share scales.
    one = model(dtype)(given[0][:1], given[1][:1], given[2][:1])
    assert rel_error(out[:1], one) < 10 * tolerance("matmul", dtype)


def test_merged_projections_compute_the_same(machine):
    wan, given = model(torch.bfloat16), (latents(2), torch.tensor([300.0, 800.0]), text(2, 5))
    wanted, keys, size = wan(*given), wan.state_dict().keys(), sum(t.nbytes for t in wan.parameters())
    for _ in range(2):  # the second time there is nothing left to do
        wan.merge_projections()
        assert [name for name, _ in wan.blocks[1].self_attn.named_children()] == ["o", "norm_q", "norm_k", "qkv"]
    # A row of a weight has a scale of its own: not a bit depends on what lies beside it.
    assert torch.equal(wan(*given), wanted)
    assert wan.state_dict().keys() == keys
    assert sum(t.nbytes for t in wan.parameters()) == size
    wan.half()
    assert wan.blocks[0].self_attn.qkv.weight.dtype is torch.float8_e4m3fn


def test_merged_projections_are_read_where_they_lie(interpreted_cuda, monkeypatch):
    """The norm of queries and keys takes two slices of the product, attention the third; none is copied."""
    # FP8 weights are multiplied natively there, the kernels run.
    monkeypatch.setattr(interpreted_cuda, "cuda_arch", lambda device=None: (8, 0))
    wan, made, seen = model(torch.bfloat16), [], []
    wan.set_attention_config(AttentionConfig.dense_attention(AttnImplType.TORCH_SDPA))
    wan.merge_projections()
    for block in wan.blocks:
        block.self_attn.qkv.register_forward_hook(lambda layer, given, out: made.append(out))
    norm, product = kernels.rms_norm_rotary, F.scaled_dot_product_attention
    monkeypatch.setattr(kernels, "rms_norm_rotary", lambda q, k, *a: seen.append((q, k)) or norm(q, k, *a))
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, k, v, **o: seen.append((q, k, v)) or product(q, k, v, **o)
    )
    wan(latents(2), torch.tensor([300.0, 800.0]), text(2, 5))
    width, itemsize = TINY["dim"], torch.bfloat16.itemsize
    assert len(made) == len(wan.blocks)
    # Of each block the norm, self-attention and attention to the text.
    for out, (q, k), (*_, v) in zip(made, seen[::3], seen[1::3]):
        assert out.is_contiguous()
        assert [t.data_ptr() - out.data_ptr() for t in (q, k, v)] == [0, width * itemsize, 2 * width * itemsize]
        assert q.stride() == k.stride() == (v.stride(0), v.stride(2), 1) == out.stride()


def test_what_is_not_fp8_is_not_merged():
    wan = model(fp8=False)
    replace_linear_layers(wan, include=("self_attn.q", "self_attn.k"))
    wan.merge_projections()
    assert wan.blocks[0].self_attn.qkv is None


@pytest.mark.parametrize("is_merged", [False, True])
def test_a_block_is_one_graph(machine, is_merged):
    # B114: each linear is one opaque node where the machine multiplies FP8, and none elsewhere
    wan, graphs = model(torch.bfloat16), []
    if is_merged:
        wan.merge_projections()

    def look(graph, example_inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    given = latents(), torch.tensor([300.0]), text(1, 5)
    wanted = wan(*given)
    for block in wan.blocks:
        block.compile(backend=look, fullgraph=True)
    for step in (300.0, 700.0):
        out = wan(given[0], torch.tensor([step]), given[2])
        if step == 300.0:
            assert rel_error(out, wanted) < tolerance("model", torch.bfloat16)
    # Both blocks and both steps share one graph.
    (targets,) = graphs
    linears = sum(isinstance(module, LinearFP8) for module in wan.blocks[0].modules())
    # Keys and values of the text are made outside of the block.
    nodes = sum("fp8_gemm" in target for target in targets)
    assert nodes == 0 if machine is None else 0 < nodes <= linears - 2


def test_the_whole_model_is_one_graph(machine):
    wan = model()
    given = latents(), torch.tensor([300.0]), text(1, 5)
    compiled = torch.compile(wan, backend="eager", fullgraph=True)
    assert rel_error(compiled(*given), wan(*given)) < tolerance("model", torch.float32)


def test_producers_quantise_what_their_linears_take(gpu, monkeypatch):
    """Only attention's two results take a quantising pass; norms and the GELU hand on FP8 rows themselves."""
    platform = gpu()
    passes, wan = [], model(torch.bfloat16)
    wan.merge_projections()
    quantise = fp8_gemm.quantize_rows
    monkeypatch.setattr(fp8_gemm, "quantize_rows", lambda x, dtype: passes.append(x.shape) or quantise(x, dtype))
    given = latents(), torch.tensor([300.0]), wan.prepare_context(text(1, 5))
    passes.clear()
    platform.calls.clear()
    wan(*given)
    assert len(passes) == 2 * len(wan.blocks)
    # qkv, o, the text's q and o, and the two of the feed-forward.
    assert len(platform.calls) == 6 * len(wan.blocks)
    assert {shape[-1] for shape in passes} == {TINY["dim"]}
    # A gradient would be lost on the way through FP8 rows.
    x = given[0].requires_grad_()
    wan(x, *given[1:]).sum().backward()
    assert x.grad.abs().max() > 0
