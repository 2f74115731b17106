import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from telefuser.ops.ffn import PROJECTIONS, FeedForward, linear_gelu_tanh
from tests.tolerances import assert_close, rel_error

NAMES = ["gelu", "gelu-approximate", "geglu", "geglu-approximate", "swiglu", "linear-silu"]


def filled(module):
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, {"inner_dim": 20}, {"bias": False}, {"dim_out": 9, "mult": 2}], ids=str)
def test_equals_diffusers(name, options):
    # S141-S150, S156, S157, S159, C07, C08: same keys, shapes and numbers
    diffusers = pytest.importorskip("diffusers.models.attention")
    theirs = filled(diffusers.FeedForward(12, activation_fn=name, **options))
    ours = FeedForward(dim=12, activation_fn=name, **options)
    ours.load_state_dict(theirs.state_dict())
    assert {key: value.shape for key, value in ours.state_dict().items()} == {
        key: value.shape for key, value in theirs.state_dict().items()
    }
    x = torch.randn(2, 7, 12)
    assert_close(ours(x), theirs(x), "matmul")


@pytest.mark.parametrize("name", NAMES)
def test_documented_shape(name):
    # S150, S154
    x = torch.randn(2, 256, 32)
    assert FeedForward(dim=32, mult=4, dropout=0.0, activation_fn=name, bias=True)(x).shape == (2, 256, 32)
    assert set(PROJECTIONS) == set(NAMES)


def test_defaults():
    # S152, S153
    defaults = {name: p.default for name, p in inspect.signature(FeedForward).parameters.items() if name != "dim"}
    assert defaults == {
        "dim_out": None,
        "mult": 4,
        "dropout": 0.0,
        "activation_fn": "geglu",
        "final_dropout": False,
        "inner_dim": None,
        "bias": True,
    }


def test_hidden_width():
    # S141, S142, S155, S156: after the gate, an int from a float
    assert FeedForward(8).net[2].in_features == 32
    assert FeedForward(8).net[0].proj.out_features == 64
    assert FeedForward(8, mult=4.0).net[2].in_features == 32
    assert FeedForward(8, mult=8 / 3).net[2].in_features == 21
    assert FeedForward(8, inner_dim=10, mult=7, activation_fn="swiglu").net[2].in_features == 10


def test_dropout_acts_in_training_only():
    # S143, S158
    torch.manual_seed(0)
    ffn, x = FeedForward(32, dropout=0.5, final_dropout=True), torch.randn(4, 32)
    assert (ffn.train()(x) == 0).float().mean() > 0.2
    assert torch.equal(ffn.eval()(x), ffn(x))
    plain = FeedForward(32)
    plain.load_state_dict(ffn.state_dict())
    assert torch.equal(plain(x), ffn(x))


def test_refuses_an_unknown_activation():
    # S151
    with pytest.raises(ValueError, match="unknown activation_fn 'reglu'; choose one of gelu, gelu-approximate, geglu,"):
        FeedForward(8, activation_fn="reglu")


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_and_empty_input(name, interpreted_cuda):
    # B26, B38
    ffn = filled(FeedForward(16, activation_fn=name)).requires_grad_(False)
    x = torch.randn(2, 5, 16)
    assert_close(ffn.bfloat16()(x.bfloat16()), ffn.double()(x.bfloat16().double()), "matmul")
    assert ffn.half()(torch.empty(2, 0, 16).half()).shape == (2, 0, 16)


def test_gradients_equal_diffusers():
    diffusers = pytest.importorskip("diffusers.models.attention")
    theirs = filled(diffusers.FeedForward(12))
    ours = FeedForward(12)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 7, 12)
    theirs(x).square().sum().backward()
    ours(x).square().sum().backward()
    for a, b in zip(ours.parameters(), theirs.parameters()):
        assert_close(a.grad, b.grad, "matmul")


@pytest.mark.parametrize("sizes", [{"mult": 0}, {"mult": -1}, {"mult": 0.01}, {"mult": float("nan")}, {"inner_dim": 0}])
def test_a_network_without_hidden_units_is_refused(sizes):
    with pytest.raises(ValueError, match="the hidden width must be at least 1"):
        FeedForward(8, **sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_projection_and_gelu_in_one_step(dtype):
    linear, x = nn.Linear(24, 40).to(dtype), torch.randn(2, 5, 24, dtype=dtype)
    wanted = F.gelu(F.linear(x.double(), linear.weight.double(), linear.bias.double()), approximate="tanh")
    assert rel_error(linear_gelu_tanh(x, linear), wanted) < (1e-6 if dtype is torch.float32 else 5e-3)
    # A hook, another class of layer or a layer without bias is called as it is.
    called = []
    hook = linear.register_forward_hook(lambda *_: called.append(1))
    linear_gelu_tanh(x, linear)
    hook.remove()
    assert called == [1]
    bare = nn.Linear(24, 40, bias=False).to(dtype)
    wanted = F.gelu(F.linear(x.double(), bare.weight.double()), approximate="tanh")
    assert rel_error(linear_gelu_tanh(x, bare), wanted) < (1e-6 if dtype is torch.float32 else 8e-3)
    rows = linear_gelu_tanh(x, linear, torch.float8_e4m3fn)
    assert rel_error(rows.dequantize(torch.float32), linear_gelu_tanh(x, linear)) < 0.04
