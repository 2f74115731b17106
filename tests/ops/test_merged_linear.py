"""Several `LinearFP8` as one: the values, the dtypes, and the state dicts, which stay those of the several."""

import copy
import pickle

import pytest
import torch
from torch import nn

from telefuser.ops.merged_linear import merge_children, merge_linears
from telefuser.ops.quantized_linear import LinearFP8
from tests.ops.fp8_machines import fresh_table, gpu
from tests.ops.test_quantized_rows import machine, rows_of
from tests.tolerances import assert_close

__all__ = ["fresh_table", "gpu", "machine"]


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
