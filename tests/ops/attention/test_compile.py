"""`attention` inside `torch.compile`: one opaque node, no graph break, and a traced SDPA where a gradient is needed."""

import importlib

import pytest
import torch
from torch import nn

from telefuser.core.config import AttentionConfig, AttnImplType
from telefuser.ops.attention import attention
from telefuser.ops.normalization import RMSNorm
from telefuser.ops.rotary import apply_rotary_emb
from tests.ops.attention.conftest import ALL_STUBS
from tests.ops.attention.reference import qkv, reference
from tests.tolerances import assert_close


@pytest.fixture(autouse=True)
def no_leftover_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Recorder:
    """A backend that keeps the graphs and runs them as they are."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return graph.forward

    def targets(self):
        return [str(node.target) for graph in self.graphs for node in graph.graph.nodes if node.op == "call_function"]


class SelfAttention(nn.Module):
    """Linear, RMSNorm of q, rotary embedding, attention."""

    def __init__(self, dim=32, heads=4, config=None):
        super().__init__()
        self.heads, self.config = heads, config
        self.qkv = nn.Linear(dim, 3 * dim)
        self.q_norm = RMSNorm(dim // heads)

    def forward(self, x, freqs):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k = apply_rotary_emb(self.q_norm(q), freqs), apply_rotary_emb(k, freqs)
        return attention(q, k, v, attention_config=self.config).flatten(2)


def tables(tokens, head_dim):
    angle = torch.arange(tokens)[:, None] * 0.1 ** torch.arange(head_dim // 2)
    return angle.cos(), angle.sin()


def test_a_block_compiles_whole_and_equals_eager():
    """S110, S114, C11, B114: norm is in the graph; rotary and attention are one opaque node each call."""
    block, x, freqs = SelfAttention(), torch.randn(2, 16, 32), tables(16, 8)
    recorder = Recorder()
    with torch.no_grad():
        eager = block(x, freqs)
        compiled = torch.compile(block, backend=recorder, fullgraph=True)(x, freqs)
    assert torch.equal(compiled, eager)
    assert len(recorder.graphs) == 1
    targets = recorder.targets()
    assert sum("telefuser.attention" in target for target in targets) == 1
    assert sum("telefuser.apply_rotary_emb" in target for target in targets) == 2
    assert any("rsqrt" in target for target in targets)
    assert not any("scaled_dot_product" in target for target in targets)


PACKAGES = {
    "FLASH_ATTN_4": "flash_attn.cute",
    "FLASH_ATTN_3": "flash_attn_interface",
    "FLASH_ATTN_2": "flash_attn",
    "SAGE_ATTN_2_8_16": "sageattention",
    "AUTO": "flash_attn.cute",
}


@pytest.mark.parametrize("impl", PACKAGES)
def test_a_package_is_called_from_one_node_of_an_unbroken_graph(sim_gpu, stub, impl):
    """S110, S246: the compiler sees no line of it, and it gets the views of the projection."""
    for name, source in ALL_STUBS.items():
        stub(name, source)
    sim_gpu((9, 0))
    block, x, freqs = SelfAttention(256), torch.randn(1, 130, 256), tables(130, 64)
    block.config = AttentionConfig(AttnImplType[impl])
    block, x, freqs = block.bfloat16(), x.bfloat16(), tuple(t.bfloat16() for t in freqs)
    recorder, package = Recorder(), importlib.import_module(PACKAGES[impl])
    with torch.no_grad():
        eager = block(x, freqs)
        assert torch.equal(torch.compile(block, backend=recorder, fullgraph=True)(x, freqs), eager)
    assert len(package.calls) == 2
    assert [call["v"].stride() for call in package.calls] == [(130 * 768, 768, 64, 1)] * 2
    assert len(recorder.graphs) == 1
    assert sum("telefuser.attention" in target for target in recorder.targets()) == 1
    assert not any("softmax" in target or "matmul" in target for target in recorder.targets())


def test_inductor_agrees_with_eager():
    """S114, S243, with the default backend."""
    block, x, freqs = SelfAttention(), torch.randn(2, 16, 32), tables(16, 8)
    with torch.no_grad():
        assert_close(torch.compile(block)(x, freqs), block(x, freqs), "matmul")


@pytest.mark.parametrize("output_layout", ["BSND", "BNSD"])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_results_and_strides_survive_the_compiler(output_layout, return_lse, masked):
    q, k, v = qkv(queries=12, keys=9, key_heads=2)
    mask = torch.rand(12, 9) > 0.3 if masked else None

    def whole(q, k, v):
        result = attention(q, k, v, attn_mask=mask, output_layout=output_layout, return_lse=return_lse)
        out, lse = result if return_lse else (result, torch.zeros(()))
        return out.flatten(2) * 2, lse + 1

    for got, expected in zip(torch.compile(whole, backend="aot_eager", fullgraph=True)(q, k, v), whole(q, k, v)):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_compiled_gradients_equal_eager_ones(dtype, masked):
    """A model is trained through it: SDPA is traced, forward and backward."""
    q, k, v = (t.requires_grad_() for t in qkv(queries=16, dtype=dtype))
    keep = torch.ones(16, 16, dtype=torch.bool).tril() if masked else None
    config = AttentionConfig.dense_attention(AttnImplType.FLASH_ATTN_2)

    def step(attend):
        out = attend(q, k, v, config, attn_mask=keep)
        out.float().square().sum().backward()
        grads = [t.grad for t in (q, k, v)]
        q.grad = k.grad = v.grad = None
        return out.detach(), grads

    recorder = Recorder()
    out, grads = step(torch.compile(attention, backend="aot_eager", fullgraph=True))
    expected, expected_grads = step(attention)
    assert_close(out, expected, "attention")
    for got, wanted in zip(grads, expected_grads):
        assert_close(got, wanted, "attention")
    torch._dynamo.reset()
    torch.compile(attention, backend=recorder, fullgraph=True)(q, k, v, config)
    assert any("scaled_dot_product" in target for target in recorder.targets())


def test_compiled_log_sum_exp_carries_a_gradient():
    q, k, v = (t.requires_grad_() for t in qkv(queries=8))

    def grads(attend):
        out, lse = attend(q, k, v, return_lse=True)
        (out.sum() + lse.square().sum()).backward()
        result = [t.grad.clone() for t in (q, k, v)]
        q.grad = k.grad = v.grad = None
        return result

    for got, wanted in zip(grads(torch.compile(attention, backend="aot_eager", fullgraph=True)), grads(attention)):
        assert_close(got, wanted, "attention")


def test_autocast_and_mixed_dtypes_are_settled_before_the_node():
    """B24."""
    q, k, v = qkv()
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    assert compiled(q, k, v.bfloat16()).dtype is torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        out = compiled(q, k, v)
    assert out.dtype is torch.bfloat16
    assert_close(out, reference(q, k, v)[0], "attention", torch.bfloat16)


def test_lengths_do_not_cost_a_graph_each():
    """B110."""
    recorder = Recorder()
    compiled = torch.compile(attention, backend=recorder, fullgraph=True, dynamic=True)
    for tokens in (16, 24, 33, 40):
        q, k, v = qkv(queries=tokens)
        assert_close(compiled(q, k, v), reference(q, k, v)[0], "attention")
    assert len(recorder.graphs) <= 2


def test_a_fallback_warns_once_from_compiled_code_too(caplog):
    q, k, v = qkv()
    config = AttentionConfig.dense_attention(AttnImplType.FLASH_ATTN_2)
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(compiled(q, k, v, config), attention(q, k, v, attn_impl="sdpa"))
    assert len([record for record in caplog.records if "FLASH_ATTN_2" in record.getMessage()]) == 1


def test_the_registered_operator_is_sound():
    """PyTorch's own checks of schema, fake result and aliasing."""
    q, k, v = qkv(queries=8, keys=5)
    options = ("TORCH_SDPA", 0.25, False, 0.0, False, True, "BSND", "BNSD")
    torch.library.opcheck(
        torch.ops.telefuser.attention.default,
        (q, k, v, None, *options),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )
