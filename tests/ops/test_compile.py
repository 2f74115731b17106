"""How torch.compile sees the operators: native forms without a graph break, the rotation as one opaque node."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from telefuser.ops import (
    AdaLayerNormContinuous,
    LayerNorm,
    RMSNorm,
    add_layer_norm_modulate,
    apply_rotary_emb,
    layer_norm_modulate,
    modulate,
    rms_norm_rotary,
)
from telefuser.ops.activations import FP32SiLU, gelu_and_mul, silu_and_mul
from telefuser.ops.ffn import PROJECTIONS, FeedForward
from tests.tolerances import assert_close

DIM, HEADS = 32, 4
ROTATION = torch.ops.telefuser.apply_rotary_emb.default


class Block(nn.Module):
    """Linear, norms, modulation, rotation and feed-forward, as a transformer block strings them together."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(DIM), LayerNorm(DIM, elementwise_affine=False)
        self.q, self.q_norm = nn.Linear(DIM, DIM), RMSNorm(DIM)
        self.ffn = FeedForward(DIM, activation_fn="swiglu")
        self.out = AdaLayerNormContinuous(DIM, DIM)
        self.silu = FP32SiLU()

    def forward(self, x, cond, freqs):
        shift, scale = torch.cat([cond, self.silu(cond)], dim=1).chunk(2, dim=1)
        h = modulate(self.norm1(x), shift, scale)
        q = apply_rotary_emb(self.q_norm(self.q(h)).unflatten(-1, (HEADS, -1)), freqs)
        x = x + q.flatten(-2)
        x = x + self.ffn(modulate(self.norm2(x), shift, scale))
        return self.out(x, cond)


def inputs(batch=2, tokens=5, dtype=torch.float32):
    angles = torch.rand(tokens, DIM // HEADS // 2) * 6
    return torch.randn(batch, tokens, DIM).to(dtype), torch.randn(batch, DIM).to(dtype), (angles.cos(), angles.sin())


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def captured(function, *args):
    """The one graph that a full capture gives."""
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph

    torch.compile(function, backend=backend, fullgraph=True)(*args)
    (graph,) = graphs
    return [node.target for node in graph.graph.nodes if node.op in ("call_function", "call_method")]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_equals_eager(backend, dtype, interpreted_cuda):
    # S044, S109, S114, S115, B34: against the kernels that eager mode launches
    block = Block().to(dtype).requires_grad_(False)
    args = inputs(dtype=dtype)
    out = torch.compile(block, backend=backend, fullgraph=True)(*args)
    assert out.dtype == dtype
    assert_close(out, block(*args), "matmul")


def test_rotation_is_the_only_opaque_node():
    # S111 and S114 as C11 reads them, S112, S113
    targets = captured(Block(), *inputs())
    opaque = [target for target in targets if isinstance(target, torch._ops.OpOverload)]
    assert opaque == [ROTATION]
    assert torch.rsqrt in targets
    assert nn.functional.layer_norm in targets


class FusedBlock(nn.Module):
    """The operators that take a whole group of steps each."""

    def __init__(self):
        super().__init__()
        self.norm_q, self.norm_k = RMSNorm(DIM), RMSNorm(DIM)

    def forward(self, x, cond, freqs):
        h = layer_norm_modulate(x, cond, cond)
        q, k = rms_norm_rotary(h, h, self.norm_q.weight, self.norm_k.weight, freqs, HEADS, 1e-5)
        x, h = add_layer_norm_modulate(x, (q * k).flatten(-2), cond, cond, cond)
        return x + h


@pytest.mark.parametrize("grad", [False, True])
def test_fused_operators_are_traced_up_to_the_rotation(grad, interpreted_cuda):
    # C11: norms and modulation fuse with their neighbours, the rotation stays one opaque node, in training too
    block, args = FusedBlock().requires_grad_(grad), inputs()
    targets = captured(block, *args)
    opaque = [target for target in targets if isinstance(target, torch._ops.OpOverload)]
    assert opaque == [ROTATION] * 2
    assert targets.count(nn.functional.layer_norm) == 2
    torch._dynamo.reset()
    out = torch.compile(block, backend="aot_eager", fullgraph=True)(*args)
    assert_close(out, block(*args), "matmul")
    if grad:
        out.sum().backward()
        assert block.norm_k.weight.grad.abs().sum() > 0


def test_the_compiled_rotation_runs_its_kernel(interpreted_cuda, monkeypatch):
    # S111: eager and compiled launch the same kernel
    import telefuser.kernel.triton as kernels

    launched, launch = [], kernels.apply_rotary_embedding

    def record(*args, **options):
        launched.append(1)
        return launch(*args, **options)

    monkeypatch.setattr(kernels, "apply_rotary_embedding", record)
    x, _, freqs = inputs()
    x = x.unflatten(-1, (HEADS, -1))
    for backend in ("eager", "aot_eager"):
        out = torch.compile(lambda x: apply_rotary_emb(x, freqs) + 1, backend=backend, fullgraph=True)(x)
        assert torch.equal(out, apply_rotary_emb(x, freqs) + 1)
    assert len(launched) == 4


def test_no_operator_breaks_the_graph():
    # B114
    x, cond, freqs = inputs()
    cases = {
        "block": (Block(), (x, cond, freqs)),
        "silu_and_mul": (silu_and_mul, (x,)),
        "gelu_and_mul": (gelu_and_mul, (x,)),
    }
    cases |= {name: (FeedForward(DIM, activation_fn=name), (x,)) for name in PROJECTIONS}
    for function, args in cases.values():
        torch._dynamo.reset()
        explained = torch._dynamo.explain(function)(*args)
        assert explained.graph_break_count == 0, explained.break_reasons
        assert explained.graph_count == 1


def test_no_operator_waits_for_a_number(interpreted_cuda):
    # B114: .item(), .tolist() or bool() of a tensor would stall a GPU

    class NoReads(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func is not torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    block, args = Block().requires_grad_(False), inputs()
    with NoReads():
        # Native throughout: the mode cannot see into a kernel, which the interpreter computes with numpy.
        interpreted_cuda.op_keys = ()
        block(*args)


def test_sizes_change_without_compiling_again():
    # B110: one graph for batches, one for a batch of 1
    counter = CompileCounter()
    block = Block().requires_grad_(False)
    compiled = torch.compile(block, backend=counter, dynamic=True, fullgraph=True)
    for batch in (1, 2, 3):
        for tokens in (64, 96, 128, 160, 161):
            args = inputs(batch, tokens)
            assert_close(compiled(*args), block(*args), "matmul")
    assert counter.frame_count <= 2


def test_steps_and_layers_do_not_compile_again():
    # B110: no guard on how often an operator ran or which instance it is
    counter = CompileCounter()
    compiled = torch.compile(lambda x, shift: modulate(x, shift, shift), backend=counter)
    for step in range(3):
        compiled(torch.full((2, 3, 4), float(step)), torch.randn(2, 4))
    assert counter.frame_count == 1
    counter.clear()
    layers = [torch.compile(RMSNorm(8), backend=counter) for _ in range(4)]
    for layer in layers:
        layer(torch.randn(2, 8))
    assert counter.frame_count <= 1


def test_gradients_of_the_compiled_block():
    block, args = Block(), inputs()
    block(*args).square().sum().backward()
    wanted = [parameter.grad.clone() for parameter in block.parameters()]
    block.zero_grad()
    torch.compile(block, backend="aot_eager", fullgraph=True)(*args).square().sum().backward()
    for parameter, gradient in zip(block.parameters(), wanted):
        assert_close(parameter.grad, gradient, "matmul")
