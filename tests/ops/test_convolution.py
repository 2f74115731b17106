"""`conv3d` against a float64 sum over taps, and which routine a CPU runs it in."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from telefuser.ops.convolution import conv3d
from tests.tolerances import assert_close

# x, weight, stride, padding: the VAE's kinds (causal, in time only, strided in time, pointwise) and odd sizes.
CASES = [
    ((1, 4, 4, 5, 7), (6, 4, 3, 3, 3), (1, 1, 1), (0, 1, 1)),
    ((2, 3, 3, 4, 4), (5, 3, 3, 1, 1), (1, 1, 1), (0, 0, 0)),
    ((1, 3, 5, 2, 3), (3, 3, 3, 1, 1), (2, 1, 1), (0, 0, 0)),
    ((1, 8, 1, 1, 1), (2, 8, 1, 1, 1), (1, 1, 1), (0, 0, 0)),
]


def case_inputs(x_shape, weight_shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    tensors = (torch.randn(shape, generator=generator) for shape in (x_shape, weight_shape, weight_shape[:1]))
    return [tensor.to(dtype) for tensor in tensors]


def sum_over_taps(x, weight, bias, stride, padding):
    x, weight = x.double(), weight.double()
    (time, height, width), (pad_t, pad_h, pad_w) = weight.shape[2:], padding
    x = F.pad(x, (pad_w, pad_w, pad_h, pad_h, pad_t, pad_t))
    frames, rows, columns = ((n - k) // s + 1 for n, k, s in zip(x.shape[2:], weight.shape[2:], stride, strict=True))
    out = bias.double().view(1, -1, 1, 1, 1)
    for t, h, w in itertools.product(range(time), range(height), range(width)):
        window = x[:, :, t :: stride[0], h :: stride[1], w :: stride[2]][:, :, :frames, :rows, :columns]
        out = out + torch.einsum("bcfhw,oc->bofhw", window, weight[:, :, t, h, w])
    return out


@pytest.mark.parametrize(("x_shape", "weight_shape", "stride", "padding"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_equals_the_sum_over_taps(x_shape, weight_shape, stride, padding, dtype):
    x, weight, bias = case_inputs(x_shape, weight_shape, dtype)
    expected = sum_over_taps(x, weight, bias, stride, padding)
    strided = x.transpose(3, 4).contiguous().transpose(3, 4)
    for tensor in (x, strided, x.contiguous(memory_format=torch.channels_last_3d)):
        out = conv3d(tensor, weight, bias, stride, padding)
        assert out.dtype == dtype
        assert_close(out, expected, kind="op", dtype=dtype)


@pytest.mark.parametrize(("x_shape", "weight_shape", "stride", "padding"), CASES)
def test_gradients_equal_those_of_pytorch(x_shape, weight_shape, stride, padding):
    inputs = [tensor.requires_grad_() for tensor in case_inputs(x_shape, weight_shape)]
    ours = torch.autograd.grad(conv3d(*inputs, stride, padding).sin().sum(), inputs)
    theirs = torch.autograd.grad(F.conv3d(*inputs, stride, padding).sin().sum(), inputs)
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine, other, kind="matmul")


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch is built without oneDNN")
def test_small_float32_input_runs_in_onednn_on_a_cpu(monkeypatch):
    inputs = case_inputs(*CASES[0][:2])
    with Operators() as operators:
        out = conv3d(*inputs)
    assert "mkldnn_convolution" in operators.names
    assert out.is_contiguous(memory_format=torch.channels_last_3d)

    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with Operators() as operators:
        assert_close(conv3d(*inputs), out, kind="op")
    assert "mkldnn_convolution" not in operators.names


def test_autocast_decides_the_dtype():
    inputs = case_inputs(*CASES[0][:2])
    with torch.autocast("cpu", torch.bfloat16):
        assert conv3d(*inputs).dtype == torch.bfloat16


def test_compiles_without_a_graph_break():
    inputs = case_inputs(*CASES[0][:2])
    torch._dynamo.reset()
    compiled = torch.compile(conv3d, backend="aot_eager", fullgraph=True)
    assert_close(compiled(*inputs), conv3d(*inputs), kind="op")
    torch._dynamo.reset()
