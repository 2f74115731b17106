import pytest
import torch
import torch.nn.functional as F

from telefuser.kernel.triton import activate, activate_and_mul, activation
from tests.kernel.layouts import LAYOUTS, strided
from tests.tolerances import assert_close

FORMULAS = {
    "gelu": lambda v: 0.5 * v * (1 + torch.erf(v / 2**0.5)),
    "gelu_tanh": lambda v: 0.5 * v * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (v + 0.044715 * v**3))),
    "quick_gelu": lambda v: v / (1 + torch.exp(-1.702 * v)),
    "silu": lambda v: v / (1 + torch.exp(-v)),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# The interpreter computes with numpy, which warns where hardware goes to infinity in silence.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@pytest.mark.usefixtures("poison_empty")
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 63, 1128, 2049])
def test_agrees_with_the_float64_formula(name, dtype, width, device):
    x = (torch.randn(3, 2 * width) * 3).to(device=device, dtype=dtype)
    assert_close(activate(x, name), FORMULAS[name](x.double()))
    first, second = x.double().chunk(2, -1)
    out = activate_and_mul(x, name)
    assert out.dtype == dtype
    assert_close(out, first * FORMULAS[name](second))
    assert_close(activate_and_mul(x, name, gate_first=True), FORMULAS[name](first) * second)


@pytest.mark.parametrize("name", FORMULAS)
def test_large_values_stay_finite(name, device):
    # B38
    x = torch.tensor([-6e4, -1e4, -40.0, 0.0, 40.0, 1e4, 6e4], dtype=torch.float16, device=device)
    assert torch.equal(
        activate(x, name), torch.tensor([0.0, 0, 0, 0, 40, 1e4, 6e4], dtype=torch.float16, device=device)
    )
    x = torch.tensor([-1e30, 1e30], device=device)
    assert torch.equal(activate(x, name), torch.tensor([0.0, 1e30], device=device))


def test_agrees_with_pytorch_at_infinities(device):
    x = torch.tensor([float("inf"), float("nan")], device=device)
    assert torch.equal(activate(x, "silu")[:1], F.silu(x)[:1])
    assert activate(x, "silu")[1].isnan()


@pytest.mark.usefixtures("poison_empty")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_input_equals_contiguous_input(layout, device):
    # B30
    x = strided(layout, 12, torch.float32, device)
    for function in (activate, activate_and_mul):
        out = function(x, "gelu")
        assert out.is_contiguous()
        assert torch.equal(out, function(x.contiguous(), "gelu"))


def test_any_number_of_dimensions(device):
    x = torch.randn(2, 3, 2, 2, 2, 6, device=device)
    for view in (x.permute(4, 2, 0, 3, 1, 5), x[0, 0, 0, 0, 0], x[0, 0, 0, 0, 0, 0]):
        assert_close(activate(view, "silu"), FORMULAS["silu"](view.double()))


def test_empty_input_launches_nothing(device, monkeypatch):
    # B26
    for kernel in ("_activate_kernel", "_activate_flat_kernel", "_activate_and_mul_kernel"):
        monkeypatch.setattr(activation, kernel, None)
    x = torch.empty(2, 0, 8, dtype=torch.bfloat16, device=device)
    assert activate(x, "gelu").shape == (2, 0, 8)
    assert activate_and_mul(x, "gelu").shape == (2, 0, 4)


def test_refuses_what_it_would_compute_wrongly(device):
    x = torch.randn(2, 7, device=device)
    with pytest.raises(ValueError, match="two halves; it is 7"):
        activate_and_mul(x, "silu")
    with pytest.raises(ValueError, match="knows gelu, gelu_tanh, quick_gelu, silu, not 'relu'"):
        activate(x, "relu")
    with pytest.raises(ValueError, match=r"not torch\.float64"):
        activate(x.double(), "silu")
