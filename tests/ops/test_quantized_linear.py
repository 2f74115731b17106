"""`LinearFP8` and the tools that convert a model, on a CPU: values, dtypes, and what must survive which operation."""

import copy
import gc
import io
import logging
import pickle
import weakref

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

from telefuser import platforms
from telefuser.models.wan_video_dit import Float32Linear, WanModel
from telefuser.ops import quantized_linear
from telefuser.ops.quantized_linear import (
    WAN_HIGH_PRECISION,
    LinearFP8,
    QuantizationReport,
    convert_params_to_buffer,
    convert_params_to_buffers,
    replace_linear_layers,
)
from tests.ops.fp8_machines import fresh_table, gpu
from tests.ops.machines import use
from tests.platforms.simulate import gpu_build
from tests.tolerances import assert_close, rel_error, tolerance

__all__ = ["fresh_table", "gpu"]
E4M3, E5M2, FNUZ = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz
LIMIT = {E4M3: "fp8_linear", FNUZ: "fp8_linear", E5M2: "fp8_linear_e5m2", torch.float8_e5m2fnuz: "fp8_linear_e5m2"}


@pytest.fixture(autouse=True)
def same_numbers():
    # Errors scatter around 0.037 and the limit is 0.04.
    torch.manual_seed(0)


@pytest.fixture(params=["native", "fp8 product"])
def machine(request, gpu):
    """The tests that take it run once as on a CPU and once as on a GPU that multiplies FP8."""
    return gpu() if request.param == "fp8 product" else None


class Nested(nn.Module):
    """Linear layers at every depth and kind of nesting."""

    def __init__(self, dim=32):
        super().__init__()
        self.first = nn.Linear(dim, dim)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim, bias=False)) for _ in "ab"])
        self.by_name = nn.ModuleDict({"head": nn.Linear(dim, 2 * dim)})
        self.listed = nn.ModuleList([nn.ModuleList([nn.Linear(2 * dim, dim)])])
        self.shift = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        x = self.blocks(self.first(x)) + self.shift
        return self.listed[0][0](F.gelu(self.by_name["head"](x)))


def num_bytes(model):
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))


def same(a, b):
    """Bit equality of two tensors, FP8 ones too."""
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# The layer


@pytest.mark.parametrize("dtype", LIMIT)
def test_weight_is_within_the_rounding_of_its_format(dtype):
    # S192, S193, S194
    linear = nn.Linear(100, 63)
    layer = LinearFP8(linear, data_type=dtype)
    assert (layer.weight.dtype, layer.weight_scale.dtype, layer.weight_scale.shape) == (dtype, torch.float32, (63, 1))
    step = 2**-4 if "e4m3" in str(dtype) else 2**-3
    weight = linear.weight.detach()
    floor = torch.finfo(dtype).smallest_normal * layer.weight_scale.detach()
    assert ((layer.dequantize() - weight).abs() <= step * torch.maximum(weight.abs(), floor) * 1.0001).all()
    assert torch.equal(layer.bias, linear.bias)
    assert LinearFP8(nn.Linear(4, 4, bias=False)).bias is None


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize(("columns", "rows"), [(1024, 512), (100, 63)])
def test_output_is_close_to_the_original(dtype, columns, rows, machine):
    # S195, S198, S213, B94
    for bias in (True, False):
        linear = nn.Linear(columns, rows, bias=bias)
        layer = LinearFP8(linear, dtype)
        for shape in ((37,), (8, 5), (2, 3, 7)):
            x = torch.randn(*shape, columns)
            out = layer(x)
            assert out.shape == (*shape, rows)
            assert_close(out, linear(x), LIMIT[dtype])


def test_sample_layer_of_the_specification(machine):
    # S195
    linear = nn.Linear(1024, 4096)
    x = torch.randn(2, 64, 1024)
    assert_close(LinearFP8(linear, data_type=E4M3)(x), linear(x), "fp8_linear")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("layer_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_any_mix_of_dtypes(dtype, layer_dtype, autocast, machine):
    # S197, B90: by the rule of nn.Linear, autocast changes every dtype but float64
    linear = nn.Linear(256, 128)
    layer = LinearFP8(linear).to(layer_dtype)
    x = torch.randn(16, 256).to(dtype)
    wanted = torch.bfloat16 if autocast and dtype is not torch.float64 else dtype
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = layer(x)
        assert out.dtype == wanted
        assert_close(out, F.linear(x.float(), linear.weight, linear.bias), "fp8_linear", torch.float32)


def test_zero_rows_outliers_and_empty_inputs(machine):
    # B80, B26
    linear = nn.Linear(1024, 512)
    layer = LinearFP8(linear)
    with torch.no_grad():
        x = torch.randn(64, 1024)
        x[3] *= 1000
        x[5] = 0
        out, wanted = layer(x), linear(x)
        for row in range(64):
            assert rel_error(out[row], wanted[row]) <= tolerance("fp8_linear", torch.float32) * 1.25  # one row alone
        others = torch.arange(64) != 3
        assert_close(out[others], wanted[others], "fp8_linear")
        assert torch.equal(out[5], linear.bias)
        for shape in ((0, 1024), (2, 0, 1024)):
            assert layer(torch.empty(shape)).shape == (*shape[:-1], 512)


def test_zero_rows_of_the_weight_give_the_bias(machine):
    linear = nn.Linear(32, 16)
    with torch.no_grad():
        linear.weight[4] = 0
        out = LinearFP8(linear)(torch.randn(8, 32))
    assert torch.equal(out[:, 4], linear.bias[4].expand(8))
    assert out.isfinite().all()


def test_half_precision_does_not_overflow_inside():
    # The raw FP8 numbers go up to 448 whatever the weight: unscaled, their sum would pass float16's 65504.
    linear = nn.Linear(4096, 16, bias=False)
    x = torch.full((1, 4096), 4.0, dtype=torch.float16)
    nn.init.constant_(linear.weight, 0.5)
    assert torch.equal(LinearFP8(linear)(x), torch.full((1, 16), 8192.0, dtype=torch.float16))


def test_gradient_reaches_the_input_only(machine):
    layer = LinearFP8(nn.Linear(32, 16))
    x = torch.randn(3, 32, requires_grad=True)
    layer(x).sum().backward()
    assert_close(x.grad, layer.dequantize().sum(0).expand(3, 32))
    assert not any(p.requires_grad for p in layer.parameters())
    layer.requires_grad_()
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert torch.equal(layer.bias.grad, torch.full((16,), 3.0))


def test_attributes_that_other_code_reads():
    # B92
    layer = LinearFP8(nn.Linear(32, 16)).eval()
    assert (layer.in_features, layer.out_features, layer.weight.shape, layer.bias.shape) == (32, 16, (16, 32), (16,))
    assert repr(layer) == "LinearFP8(in_features=32, out_features=16, bias=True, weight=float8_e4m3fn)"
    assert layer.dequantize(torch.bfloat16).dtype is torch.bfloat16
    assert not LinearFP8(nn.Linear(4, 4).eval()).training


def test_the_original_layer_is_left_as_it_is():
    linear = nn.Linear(32, 16)
    before = copy.deepcopy(linear.state_dict())
    LinearFP8(linear).to(torch.bfloat16)
    assert all(same(before[key], value) for key, value in linear.state_dict().items())
    assert linear.weight.requires_grad
    assert linear.bias.requires_grad


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, "fp8", None])
def test_other_formats_are_refused(dtype):
    # B94
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        LinearFP8(nn.Linear(4, 4), dtype)
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        replace_linear_layers(Nested(), quant_type=dtype)


def test_what_cannot_be_quantised_is_refused():
    fp8 = nn.Linear(4, 4)
    fp8.weight = nn.Parameter(fp8.weight.detach().to(E4M3), requires_grad=False)
    with pytest.raises(ValueError, match="from_quantized"):
        LinearFP8(fp8)
    with pytest.raises(ValueError, match="LinearFP8"):
        LinearFP8(LinearFP8(nn.Linear(4, 4)))
    damaged = nn.Sequential(nn.Linear(4, 4))
    with torch.no_grad():
        damaged[0].weight[2, 1] = float("inf")
    with pytest.raises(ValueError, match=r"0: 1 of 4 rows .* NaN or infinity"):
        replace_linear_layers(damaged)
    for x in (torch.ones(2, 5), torch.ones(2, 4, dtype=torch.int64), torch.ones(2, 4).to(E4M3), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"\[\.\.\., 4\]"):
            LinearFP8(nn.Linear(4, 4))(x)


def test_amd_layer_takes_the_variant_of_its_hardware(monkeypatch):
    # B94, S202: on CDNA3 operands are fnuz, whatever name is asked for
    linear, x = nn.Linear(64, 32), torch.randn(5, 64)
    gpu_build(monkeypatch, "rocm", capability=(9, 4))
    use(monkeypatch, platforms.RocmPlatform())
    for asked, stored in ((E4M3, FNUZ), (FNUZ, FNUZ), (E5M2, torch.float8_e5m2fnuz)):
        layer = LinearFP8(linear, asked)
        assert layer.weight.dtype is stored
        assert_close(layer(x), linear(x), LIMIT[asked])


# What survives


CASTS = {
    "to bfloat16": lambda layer: layer.to(torch.bfloat16),
    "half": lambda layer: layer.half(),
    "double, then float": lambda layer: layer.double().float(),
    "to cpu and float16": lambda layer: layer.to("cpu", torch.float16),
    "type": lambda layer: layer.type(torch.float16),
    "inside a model": lambda layer: nn.Sequential(nn.Sequential(layer)).bfloat16()[0][0],
    "as buffers": lambda layer: convert_params_to_buffers(layer).bfloat16(),
}


@pytest.mark.parametrize("cast", CASTS)
def test_weight_and_scale_survive_casts(cast):
    layer = LinearFP8(nn.Linear(64, 32))
    weight, scale, bias = layer.weight.clone(), layer.weight_scale.clone(), layer.bias.clone()
    layer = CASTS[cast](layer)
    assert same(layer.weight, weight)
    assert same(layer.weight_scale, scale)
    if cast != "double, then float":
        assert layer.bias.dtype in (torch.bfloat16, torch.float16)
    assert torch.allclose(layer.bias.float(), bias, atol=1e-2)


def test_a_cast_makes_no_wide_copy_of_the_weight():
    layer = LinearFP8(nn.Linear(64, 32))
    widest = []
    layer._apply(lambda t: widest.append(t.numel()) or t.to(torch.bfloat16))
    assert max(widest) == 32


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: saved(model),
}


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("buffers", ["none", "wide", "all"])
def test_copies_compute_the_same(how, buffers):
    # B92
    model, x = Nested().eval(), torch.randn(3, 32)
    replace_linear_layers(model)
    if buffers != "none":
        convert_params_to_buffers(model, ignore_dtype=(E4M3,) if buffers == "wide" else ())
    twin = COPIES[how](model)
    assert all(same(value, twin.state_dict()[key]) for key, value in model.state_dict().items())
    assert torch.equal(twin(x), model(x))
    with torch.no_grad():
        twin.first.bias.add_(1)
    assert not torch.equal(twin(x), model(x))
    assert isinstance(model.first.weight, nn.Parameter) == (buffers != "all")
    assert [name for name, _ in twin.named_parameters()] == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_round_trip_through_safetensors(buffers, assign):
    # S212, B86
    def make():
        model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 16, bias=False), nn.Linear(16, 8)).bfloat16()
        replace_linear_layers(model)
        return convert_params_to_buffers(model) if buffers else model

    model, x = make(), torch.randn(3, 32).bfloat16()
    names = [f"{i}.{n}" for i in range(3) for n in ("weight", "weight_scale", "bias") if (i, n) != (1, "bias")]
    assert sorted(model.state_dict()) == sorted(names)
    data = safetensors.torch.load(safetensors.torch.save(model.state_dict()))
    other = make()
    assert not torch.equal(other(x), model(x))
    other.load_state_dict(data, strict=True, assign=assign)
    assert torch.equal(other(x), model(x))
    for layer in other:
        assert (layer.weight.dtype, layer.weight_scale.dtype) == (E4M3, torch.float32)
        assert (len(list(layer.parameters())) == 1) == buffers


def test_a_weight_without_scale_or_of_another_kind_is_no_cast():
    layer = LinearFP8(nn.Linear(32, 16))
    state = layer.state_dict()
    without = {key: value for key, value in state.items() if key != "weight_scale"}
    for strict in (True, False):
        with pytest.raises(RuntimeError, match="weight_scale"):
            layer.load_state_dict(without, strict=strict)
        with pytest.raises(RuntimeError, match="replace_linear_layers"):
            layer.load_state_dict(nn.Linear(32, 16).state_dict(), strict=strict)
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer.load_state_dict(LinearFP8(nn.Linear(32, 8)).state_dict())


def test_a_checkpoint_of_another_variant_is_converted():
    linear, x = nn.Linear(64, 32), torch.randn(5, 64)
    for theirs in LIMIT:
        layer = LinearFP8(nn.Linear(64, 32), E4M3)
        given = LinearFP8(linear, theirs).state_dict()
        layer.load_state_dict(given)
        assert layer.weight.dtype is E4M3
        assert given["weight"].dtype is theirs
        # Rounded once more where the formats differ.
        assert rel_error(layer(x), linear(x)) <= tolerance(LIMIT[theirs], torch.float32)


@pytest.mark.parametrize("shape", [(), (1,), (32,), (32, 1)])
def test_published_scales_of_any_shape(shape):
    weight, scale = torch.randn(32, 64).to(E4M3), torch.rand(shape) + 0.5
    layer = LinearFP8.from_quantized(weight, scale.to(torch.float16))
    column = scale.half().float().reshape(-1, 1)
    assert torch.equal(layer.dequantize(), weight.float() * column)
    other = LinearFP8(nn.Linear(64, 32, bias=False))
    other.load_state_dict({"weight": weight, "weight_scale": scale.half()})
    assert torch.equal(other.dequantize(), layer.dequantize())


@pytest.mark.parametrize("shape", [(3,), (1, 32), (8, 4), (4, 8)])
def test_scales_of_other_things_than_rows_are_refused(shape):
    # Blocks of 4 x 16 are as many as the rows.
    weight, layer = torch.randn(32, 64).to(E4M3), LinearFP8(nn.Linear(64, 32, bias=False))
    with pytest.raises(ValueError, match="one number a row"):
        LinearFP8.from_quantized(weight, torch.ones(shape))
    with pytest.raises(RuntimeError, match="size mismatch for weight_scale"):
        layer.load_state_dict({"weight": weight, "weight_scale": torch.ones(shape)})


@pytest.mark.parametrize("shapes", [((64,), None), ((2, 32, 64), None), ((32, 64), (31,)), ((32, 64), (1, 32))])
def test_parts_of_a_layer_that_do_not_fit_are_refused(shapes):
    weight, bias = (None if shape is None else torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=r"give \[out, in\] and \[out\]"):
        LinearFP8.from_quantized(weight.to(E4M3), torch.ones(1), bias)


def test_meta_model_is_filled_from_a_checkpoint():
    model = Nested()
    x, wanted = torch.randn(3, 32), None
    replace_linear_layers(model)
    with torch.device("meta"):
        empty = Nested()
    report = replace_linear_layers(empty)
    assert len(report.replaced) == 5
    assert empty.first.weight.device.type == "meta"
    assert empty.first(torch.empty(2, 32, device="meta")).shape == (2, 32)
    wanted = model(x)
    for fill in ("assign", "to_empty"):
        twin = copy.deepcopy(empty)
        if fill == "to_empty":
            twin.to_empty(device="cpu").load_state_dict(model.state_dict())
        else:
            twin.load_state_dict(model.state_dict(), assign=True)
        assert (twin.first.weight.dtype, twin.first.weight_scale.dtype) == (E4M3, torch.float32)
        assert torch.equal(twin(x), wanted)


# Whole models


def test_every_linear_layer_is_replaced_at_any_depth():
    # S205, S206, B88
    model, x = Nested(), torch.randn(3, 32)
    wanted, before = model(x), num_bytes(model)
    report = replace_linear_layers(model, quant_type=E4M3)
    names = {"first", "blocks.0.1", "blocks.1.1", "by_name.head", "listed.0.0"}
    assert set(report.replaced) == names
    assert report.skipped == {}
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert {name for name, module in model.named_modules() if isinstance(module, LinearFP8)} == names
    assert (report.bytes_before, report.bytes_after) == (before, num_bytes(model))
    assert rel_error(model(x), wanted) <= 0.1  # four layers deep
    linears = [module for module in model.modules() if isinstance(module, LinearFP8)]
    assert sum(m.weight.numel() * m.weight.element_size() for m in linears) == 3 * 32 * 32 + 2 * 32 * 64


def test_memory_of_a_bfloat16_model_halves():
    # S203
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(3)]).bfloat16()
    report = replace_linear_layers(model)
    assert report.bytes_saved == 3 * 512 * (512 - 4)
    assert "3 linear layers" in str(report)


def test_each_old_weight_is_freed_before_the_next_is_quantised(monkeypatch):
    # S203: the peak is one model and one layer
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    old = [weakref.ref(layer.weight) for layer in model]
    alive = []

    def watched(weight, dtype):
        alive.append(sum(ref() is not None for ref in old))
        return quantize(weight, dtype)

    quantize = quantized_linear.quantize_weight
    monkeypatch.setattr(quantized_linear, "quantize_weight", watched)
    gc.disable()
    replace_linear_layers(model)
    gc.enable()
    assert alive == [4, 3, 2, 1]
    assert not any(ref() for ref in old)


def test_include_and_skip_choose_by_name():
    model = Nested()
    report = replace_linear_layers(model, include=("blocks", "head"), skip="blocks.1")
    assert set(report.replaced) == {"blocks.0.1", "by_name.head"}
    assert set(report.skipped) == {"first", "blocks.1.1", "listed.0.0"}
    assert "blocks.1" in report.skipped["blocks.1.1"]
    with pytest.raises(ValueError, match="parts of layer names"):
        replace_linear_layers(model, skip=(nn.Linear,))


def test_nothing_replaced_is_a_warning(caplog):
    # B88
    report = replace_linear_layers(nn.Sequential(nn.ReLU()))
    assert report == QuantizationReport(())
    replace_linear_layers(nn.Sequential(nn.Linear(4, 4)), include=["absent"])
    assert len(warnings(caplog)) == 2
    assert "has none" in warnings(caplog)[0]
    with pytest.raises(ValueError, match=r"LinearFP8\(model\)"):
        replace_linear_layers(nn.Linear(4, 4))


def test_a_second_call_changes_nothing(caplog):
    model = Nested()
    replace_linear_layers(model)
    before = dict(model.named_modules())
    report = replace_linear_layers(model, E5M2)
    assert report.replaced == ()
    assert set(report.skipped.values()) == {"is FP8 already"}
    assert dict(model.named_modules()) == before
    assert warnings(caplog) == []


def test_subclasses_of_linear_are_left_alone():
    model = nn.ModuleDict(
        {"attention": nn.MultiheadAttention(8, 2), "island": Float32Linear(8, 8), "x": nn.Linear(8, 8)}
    )
    report = replace_linear_layers(model)
    assert report.replaced == ("x",)
    assert set(report.skipped) == {"attention.out_proj", "island"}
    q = torch.randn(3, 1, 8)
    assert model["attention"](q, q, q)[0].isfinite().all()


def test_tied_weights_stay_tied():
    model = nn.ModuleDict({name: nn.Linear(16, 16) for name in "abc"})
    model["b"].weight = model["a"].weight
    model["again"] = model["c"]
    report = replace_linear_layers(model)
    assert report.replaced == ("a", "b", "c", "again")
    assert model["a"].weight is model["b"].weight
    assert model["a"].weight_scale is model["b"].weight_scale
    assert not torch.equal(model["a"].bias, model["b"].bias)
    assert model["again"] is model["c"]
    twin = copy.deepcopy(model.bfloat16())
    assert twin["a"].weight is twin["b"].weight
    assert twin["again"] is twin["c"]


def test_wan_keeps_its_sensitive_layers():
    torch.manual_seed(0)
    model = WanModel(dim=24, ffn_dim=32, num_heads=2, num_layers=2, text_dim=16, freq_dim=8, text_len=4)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    model.eval().requires_grad_(False)
    x, context = torch.randn(1, 16, 2, 4, 4), torch.randn(1, 4, 16)
    wanted = model(x, torch.tensor([500.0]), context)
    report = replace_linear_layers(model, skip=WAN_HIGH_PRECISION)
    assert len(report.replaced) == 2 * 10
    assert all(name.startswith("blocks.") for name in report.replaced)
    assert rel_error(model(x, torch.tensor([500.0]), context), wanted) <= 0.1
    assert type(model.head.head) is Float32Linear
    assert type(model.text_embedding[0]) is nn.Linear


def test_parameters_become_buffers_and_fp8_weights_stay():
    # S207, S208, S209
    model = Nested()
    replace_linear_layers(model)
    before = {name: (t.data_ptr(), t.dtype) for name, t in model.state_dict().items()}
    size = num_bytes(model)
    assert convert_params_to_buffers(model) is model
    assert {name for name, _ in model.named_parameters()} == {name for name in before if name.endswith(".weight")} - {
        "blocks.0.0.weight",
        "blocks.1.0.weight",
    }
    assert all(p.dtype is E4M3 for p in model.parameters())
    assert {name: (t.data_ptr(), t.dtype) for name, t in model.state_dict().items()} == before
    assert num_bytes(model) == size
    assert not any(b.requires_grad for b in model.buffers())


def test_conversion_keeps_what_its_caller_names_and_ties():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4).bfloat16())
    model[1].weight = model[0].weight
    convert_params_to_buffers(model, ignore_dtype=torch.bfloat16)
    assert {name for name, _ in model.named_parameters()} == {"2.weight", "2.bias"}
    assert model[0].weight is model[1].weight
    convert_params_to_buffers(model)
    assert list(model.parameters()) == []
    assert model[:2](torch.randn(2, 4)).shape == (2, 4)


def test_both_names_of_the_conversion():
    # S204, S210, C01
    assert convert_params_to_buffer is convert_params_to_buffers


# torch.compile


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_targets(module, *args, backend="eager", dynamic=None):
    graphs = []

    def look(graph, example_inputs):
        graphs.append(graph)
        return graph

    if backend == "aot_eager":
        from torch._dynamo.backends.common import aot_autograd

        look = aot_autograd(fw_compiler=look)
    out = torch.compile(module, backend=look, fullgraph=True, dynamic=dynamic)(*args)
    return out, [str(node.target) for graph in graphs for node in graph.graph.nodes]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_layer_is_one_graph(backend, machine):
    # B114: on a GPU the quantiser is traced, for fusion, and the product is one opaque node
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32)).bfloat16()
    replace_linear_layers(model)
    x = torch.randn(5, 64).bfloat16()
    with torch.no_grad():
        wanted = model(x)
        out, targets = compiled_targets(model, x, backend=backend)
    assert_close(out, wanted, "matmul")
    assert sum("fp8_gemm" in target for target in targets) == (0 if machine is None else 2)
    assert any("amax" in target for target in targets) == (machine is not None)


@pytest.mark.usefixtures("fresh_compiler")
def test_one_graph_serves_every_number_of_tokens(machine):
    # B110
    from torch._dynamo.testing import CompileCounter

    counter, model = CompileCounter(), nn.Sequential(nn.Linear(64, 32))
    replace_linear_layers(model)
    compiled = torch.compile(convert_params_to_buffers(model), backend=counter, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for tokens in (60, 96, 161):
            x = torch.randn(2, tokens, 64)
            assert_close(compiled(x), model(x), "matmul")
    assert counter.frame_count == 1


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_under_autocast(machine):
    model = nn.Sequential(nn.Linear(64, 32))
    replace_linear_layers(model)
    x = torch.randn(3, 64)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
        assert out.dtype is torch.bfloat16
        assert_close(out, model(x), "matmul")


def test_the_constant_mark_is_the_compilers_own():
    # `fp8_gemm` sets it by hand because the decorator imports the compiler.
    marked = torch.compiler.assume_constant_result(lambda: None)
    assert vars(marked) == {"_dynamo_marked_constant": True}
