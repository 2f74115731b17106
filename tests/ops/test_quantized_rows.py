"""`LinearFP8` fed with rows that are quantised already, and several layers merged into one."""

import copy
import pickle

import pytest
import torch
from torch import nn

from telefuser.ops.fp8_quantization import dequantize_rows, quantize_rows
from telefuser.ops.quantized_linear import LinearFP8, merge_children, merge_linears
from telefuser.ops.quantized_rows import QuantizedRows
from tests.ops.fp8_machines import fresh_table, gpu
from tests.tolerances import assert_close

__all__ = ["fresh_table", "gpu"]
E4M3 = torch.float8_e4m3fn


@pytest.fixture(params=["native", "fp8 product"])
def machine(request, gpu):
    torch.manual_seed(0)
    return gpu() if request.param == "fp8 product" else None


def rows_of(x, dtype=E4M3):
    return QuantizedRows(*quantize_rows(x, dtype))


def test_rows_stand_for_the_tensor_they_were_made_from():
    x = torch.randn(2, 3, 64)
    rows = rows_of(x)
    assert (rows.shape, rows.device) == (x.shape, x.device)
    assert torch.equal(rows.dequantize(torch.bfloat16), dequantize_rows(*rows, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_takes_rows_as_they_are(dtype, bias, machine):
    layer = LinearFP8(nn.Linear(64, 48, bias=bias).to(dtype))
    x = torch.randn(2, 5, 64).to(dtype)
    x[0, 1] = 0
    out = layer(rows_of(x))
    assert out.dtype is layer.compute_dtype is dtype
    if machine is not None:
        # The same values meet the same product as when the layer quantises.
        assert torch.equal(out, layer(x))
    exact = rows_of(x).dequantize(torch.float64) @ layer.dequantize(torch.float64).T
    # The products of PyTorch write bfloat16.
    assert_close(out, exact + layer.bias.double() if bias else exact, "matmul", torch.bfloat16 if machine else dtype)
    assert torch.equal(out[0, 1], layer.bias if bias else torch.zeros(48, dtype=dtype))


def test_the_result_has_the_layers_dtype_through_casts_and_copies(machine):
    layer = LinearFP8(nn.Linear(64, 32, bias=False).bfloat16())
    assert layer.compute_dtype is torch.bfloat16
    rows = rows_of(torch.randn(3, 64))
    for cast in (layer.half(), copy.deepcopy(layer)):
        assert cast(rows).dtype is cast.compute_dtype is torch.float16
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(rows).dtype is torch.bfloat16
    assert LinearFP8.from_quantized(layer.weight, layer.weight_scale, dtype=torch.float32)(rows).dtype is torch.float32


def test_rows_that_do_not_fit_are_refused():
    layer = LinearFP8(nn.Linear(64, 32))
    rows = rows_of(torch.randn(3, 64))
    with pytest.raises(ValueError, match="e5m2"):
        layer(rows_of(torch.randn(3, 64), torch.float8_e5m2))
    with pytest.raises(ValueError, match=r"\[..., 64\].*\(3, 32\)"):
        layer(rows_of(torch.randn(3, 32)))
    with pytest.raises(ValueError, match=r"one float32 scale a row, \(3, 1\)"):
        layer(QuantizedRows(rows.values, rows.scales[:1]))
    with pytest.raises(ValueError, match="float64"):
        layer(QuantizedRows(rows.values, rows.scales.double()))


@pytest.mark.parametrize("kind", [E4M3, torch.float8_e5m2])
def test_a_producer_asks_the_layer_what_to_hand_over(kind, gpu):
    layer, odd = LinearFP8(nn.Linear(64, 32), kind), LinearFP8(nn.Linear(64, 31), kind)
    assert layer.rows_dtype is E4M3
    device = torch.device("cpu")
    assert not layer.takes_rows(device)
    assert layer(rows_of(torch.randn(3, 64), layer.rows_dtype)).isfinite().all()
    gpu()
    assert layer.takes_rows(device) == (kind is E4M3)
    assert not odd.takes_rows(device)
    seen = []
    torch.compile(lambda x: seen.append(layer.takes_rows(x.device)) or x, backend="eager", fullgraph=True)(
        torch.ones(2)
    )
    assert seen == [kind is E4M3]


def test_rows_without_elements(machine):
    layer = LinearFP8(nn.Linear(64, 32))
    assert layer(rows_of(torch.randn(2, 0, 64))).shape == (2, 0, 32)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_rows_pass_through_one_graph(backend, machine):
    torch._dynamo.reset()
    layer = LinearFP8(nn.Linear(64, 32).bfloat16())

    def quantised_by_the_producer(x):
        return layer(QuantizedRows(*quantize_rows(x * 2, E4M3)))

    x = torch.randn(5, 64).bfloat16()
    with torch.no_grad():
        out = torch.compile(quantised_by_the_producer, backend=backend, fullgraph=True)(x)
        assert_close(out, quantised_by_the_producer(x), "matmul")


# Several layers as one


@pytest.mark.parametrize("bias", [(True, True, True), (False, False, False), (True, False, True)])
def test_merged_layers_give_what_each_gives_alone(bias, machine):
    layers = [LinearFP8(nn.Linear(64, n, bias=b).bfloat16()) for n, b in zip((48, 48, 32), bias)]
    merged = merge_linears(layers)
    assert (merged.in_features, merged.out_features) == (64, 128)
    assert (merged.bias is not None) == any(bias)
    assert not any(parameter.requires_grad for parameter in merged.parameters())
    x = torch.randn(2, 7, 64).bfloat16()
    for given in (x, rows_of(x)):
        parts = merged(given).split([48, 48, 32], dim=-1)
        for part, layer in zip(parts, layers):
            # The scales are those of the rows, so only the order of a sum can differ.
            assert_close(part, layer(given), "matmul")
    assert torch.equal(merged.dequantize(), torch.cat([layer.dequantize() for layer in layers]))


def test_layers_that_do_not_belong_together_are_refused():
    layer = LinearFP8(nn.Linear(64, 32))
    with pytest.raises(ValueError, match=r"Linear; call replace_linear_layers"):
        merge_linears([layer, nn.Linear(64, 32)])
    with pytest.raises(ValueError, match="none"):
        merge_linears([])
    with pytest.raises(ValueError, match=r"64 features.*beside 32"):
        merge_linears([layer, LinearFP8(nn.Linear(32, 32))])
    with pytest.raises(ValueError, match="e5m2"):
        merge_linears([layer, LinearFP8(nn.Linear(64, 32), torch.float8_e5m2)])


def parent(sizes=(48, 48, 32), bias=True):
    made = nn.Module()
    for name, size in zip("qkv", sizes):
        made.add_module(name, LinearFP8(nn.Linear(64, size, bias=bias).bfloat16()))
    return made


@pytest.mark.parametrize("bias", [True, False])
def test_state_dicts_of_merged_children_are_those_of_the_parts(bias):
    model = nn.Sequential(parent(bias=bias))
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    merge_children(model[0], "qkv", "all")
    assert [name for name, _ in model[0].named_children()] == ["all"]
    twin = copy.deepcopy(model)
    for kept in (model, twin, pickle.loads(pickle.dumps(model))):
        state = kept.state_dict()
        assert state.keys() == before.keys()
        assert all(torch.equal(state[key].view(torch.uint8), before[key].view(torch.uint8)) for key in before)
    # Back in, also with a scale of one number, and nothing else than the parts.
    other = nn.Sequential(parent(bias=bias)).state_dict()
    other["0.k.weight_scale"] = torch.tensor(0.5)
    twin.load_state_dict(other)
    assert torch.equal(twin[0].all.weight[48:96].view(torch.uint8), other["0.k.weight"].view(torch.uint8))
    assert twin[0].all.weight_scale[48:96].eq(0.5).all()
    assert not torch.equal(twin[0].all.weight.view(torch.uint8), model[0].all.weight.view(torch.uint8))


def same_state(model, other):
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[key].view(torch.uint8), theirs[key].view(torch.uint8)) for key in ours)


@pytest.mark.parametrize("assign", [False, True])
def test_merged_children_load_as_the_layers_that_they_were(assign):
    """Whatever a state dict lacks, adds or spells differently, what the parts alone made of it is what happens."""
    changes = {
        "whole": lambda state: None,
        "another kind": lambda state: state.update({"q.weight": state["q.weight"].float().to(torch.float8_e5m2)}),
        "one scale": lambda state: state.update({"v.weight_scale": torch.tensor(0.25)}),
        "one part alone": lambda state: [state.pop(key) for key in list(state) if key[0] != "k"],
        "biases alone": lambda state: [state.pop(key) for key in list(state) if "bias" not in key],
        "no scale": lambda state: state.pop("q.weight_scale"),
        "a wide weight": lambda state: state.update({"v.weight": torch.randn(32, 64)}),
        "rows": lambda state: state.update({key.translate({107: 118, 118: 107}): state[key] for key in list(state)}),
        "columns": lambda state: state.update({"k.weight": state["k.weight"][:, :32]}),
        "scales": lambda state: state.update({"k.weight_scale": torch.ones(3, 1)}),
        "more": lambda state: state.update({"k.more": torch.ones(1)}),
    }
    for name, change in changes.items():
        alone = parent()
        state = parent().state_dict()
        change(state)
        model, strict = copy.deepcopy(alone), "alone" not in name
        merge_children(model, "qkv", "all")
        given, outcomes = copy.deepcopy(state), []
        for kind in (alone, model):
            try:
                result = kind.load_state_dict(state, strict=strict, assign=assign)
                outcomes.append((sorted(result.missing_keys), sorted(result.unexpected_keys)))
            except RuntimeError as error:
                outcomes.append(sorted(str(error).splitlines()))
        assert outcomes[0] == outcomes[1], name
        assert same_state(model, alone), name
        # What the caller holds is left as it is.
        assert all(torch.equal(state[key].float(), given[key].float()) for key in given), name


def test_merged_children_on_meta_get_what_is_assigned():
    model, filled = parent(), parent()
    merge_children(model.to("meta"), "qkv", "all")
    model.load_state_dict(filled.state_dict(), assign=True)
    assert same_state(model, filled)
    assert model.all.weight.device.type == "cpu"


def test_children_of_different_kinds_are_not_merged():
    mixed = parent()
    mixed.v = LinearFP8(nn.Linear(64, 32, bias=False).bfloat16())
    with pytest.raises(ValueError, match="some have none"):
        merge_children(mixed, "qkv", "all")
    assert [name for name, _ in mixed.named_children()] == ["q", "k", "v"]
