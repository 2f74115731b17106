"""`WanModel`: layout, prepared context, batching, dtype islands, rotary tables, gradients, compile, refusals.

Agreement with the official code is in tests/golden; with diffusers' class at the end of this file.
"""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

import telefuser.kernel.triton as kernels
from telefuser.core.config import AttentionConfig, AttnImplType
from telefuser.core.model_loading import load_model
from telefuser.core.wan_keys import dit_config, dit_key_map
from telefuser.models import wan_video_dit
from telefuser.models.wan_video_dit import WAN_DIT_SIZES, WanModel, rope_angles
from telefuser.ops.attention import MaskMap, SparseAttentionState
from telefuser.ops.attention.backends import availability
from tests.golden import golden_dir
from tests.ops.attention.reference import reference as formula_attention
from tests.ops.machines import interpreted_cuda as interpreted_cuda
from tests.tolerances import rel_error, tolerance

TINY = {
    "dim": 48,
    "in_dim": 4,
    "ffn_dim": 64,
    "out_dim": 4,
    "text_dim": 16,
    "freq_dim": 32,
    "num_heads": 2,
    "num_layers": 2,
    "text_len": 8,
}
TOKENS = 12  # of latents(): 3 frames of 4 x 4 in patches of 1 x 2 x 2


def tiny_model(**changes) -> WanModel:
    torch.manual_seed(0)
    model = WanModel(**{**TINY, **changes})
    for parameter in model.parameters():  # the zero head would hide everything
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def latents(batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, 4, 3, 4, 4, generator=torch.Generator().manual_seed(1))


def text(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, 16, generator=torch.Generator().manual_seed(2))


def cast_as_loaded(model: WanModel, dtype: torch.dtype) -> WanModel:
    for name, parameter in model.named_parameters():
        if not any(fragment in name for fragment in WanModel.FP32_PARAMETERS):
            parameter.data = parameter.data.to(dtype)
    return model


def official_layout(dim, in_dim, ffn_dim, out_dim, text_dim, freq_dim, num_layers) -> dict[str, tuple[int, ...]]:
    """The official names and shapes, written down from the checkpoint layout for patches of 1 x 2 x 2."""
    shapes = {"patch_embedding.weight": (dim, in_dim, 1, 2, 2), "patch_embedding.bias": (dim,)}

    def linear(name, out_features, in_features):
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (out_features, in_features), (out_features,)

    linear("text_embedding.0", dim, text_dim)
    linear("text_embedding.2", dim, dim)
    linear("time_embedding.0", dim, freq_dim)
    linear("time_embedding.2", dim, dim)
    linear("time_projection.1", 6 * dim, dim)
    for i in range(num_layers):
        shapes[f"blocks.{i}.modulation"] = (1, 6, dim)
        shapes[f"blocks.{i}.norm3.weight"] = shapes[f"blocks.{i}.norm3.bias"] = (dim,)
        for attention in ("self_attn", "cross_attn"):
            for part in "qkvo":
                linear(f"blocks.{i}.{attention}.{part}", dim, dim)
            for norm in ("norm_q", "norm_k"):
                shapes[f"blocks.{i}.{attention}.{norm}.weight"] = (dim,)
        linear(f"blocks.{i}.ffn.0", ffn_dim, dim)
        linear(f"blocks.{i}.ffn.2", dim, ffn_dim)
    shapes["head.modulation"] = (1, 2, dim)
    linear("head.head", 4 * out_dim, dim)
    return shapes


def layout(model: WanModel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def test_state_dict_has_the_official_keys_and_shapes():
    sizes = {key: value for key, value in TINY.items() if key not in ("num_heads", "text_len")}
    assert layout(tiny_model()) == official_layout(**sizes)


@pytest.mark.parametrize(
    ("size", "manifest", "num_parameters"),
    [
        ("T2V-1.3B", "wan21_t2v_1.3b_dit.tsv", 1_418_996_800),
        ("T2V-14B", "wan21_t2v_14b_dit.tsv", 14_288_491_584),
    ],
)
def test_published_sizes_have_the_published_layout(size, manifest, num_parameters):
    with torch.device("meta"):
        model = WanModel(**WAN_DIT_SIZES[size])
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
    if golden_dir() is not None:
        rows = (line.split("\t") for line in (golden_dir() / "manifests" / manifest).read_text().splitlines()[1:])
        assert layout(model) == {key: tuple(map(int, shape.split("x"))) for key, shape, _dtype in rows}


def test_initial_weights_predict_zero_with_small_embeddings():
    torch.manual_seed(0)
    model = WanModel(**{**TINY, "dim": 96})
    assert model(latents(), torch.tensor([500.0]), text(1, 8)).abs().max() == 0
    assert model.text_embedding[0].weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert model.time_embedding[2].weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert model.blocks[1].modulation.std().item() == pytest.approx(96**-0.5, rel=0.15)
    assert model.blocks[0].ffn[0].bias.abs().max() == 0
    bound = (6 / (4 * 4 + 96)) ** 0.5  # Xavier over the flattened patch
    assert model.patch_embedding.weight.abs().max().item() == pytest.approx(bound, rel=0.05)


def test_prepared_context_equals_raw_context():
    model, x, t = tiny_model(), latents(), torch.tensor([300])
    context = text(1, 5)
    assert torch.equal(model(x, t, model.prepare_context(context)), model(x, t, context))
    assert torch.equal(model(x, t, [context[0]]), model(x, t, context))


def test_padding_rows_are_zero_and_take_part_in_attention():
    model, x, t = tiny_model(), latents(), torch.tensor([300])
    short = text(1, 3)
    padded = torch.cat((short, torch.zeros(1, 5, 16)), dim=1)
    assert torch.equal(model(x, t, short), model(x, t, padded))
    longer = WanModel(**{**TINY, "text_len": 9})
    longer.load_state_dict(model.state_dict())
    assert rel_error(longer(x, t, short), model(x, t, short)) > 1e-3


def test_batch_equals_its_samples():
    model, x, t = tiny_model(), latents(2), torch.tensor([900, 20])
    context = [text(2), text(7)]
    together = model(x, t, context)
    for i in range(2):
        alone = model(x[i : i + 1], t[i : i + 1], context[i : i + 1])
        assert rel_error(together[i : i + 1], alone) < tolerance("model", torch.float32)


def test_timestep_per_token_equals_scalar_where_constant():
    model, x, context = tiny_model(), latents(2), text(2, 8)
    t = torch.tensor([400, 7])
    per_token = model(x, t[:, None].expand(2, TOKENS), context)
    assert rel_error(per_token, model(x, t, context)) < tolerance("model", torch.float32)
    changed = t[:, None].repeat(1, TOKENS)
    changed[:, :4] = 0  # the first frame is clean
    assert rel_error(model(x, changed, context), per_token) > 1e-2


def test_modulation_is_not_expanded_per_token_for_scalar_timesteps():
    model, seen = tiny_model(), []
    model.time_projection.register_forward_hook(lambda _module, _args, output: seen.append(tuple(output.shape)))
    model(latents(2), torch.tensor([1, 2]), text(2, 8))
    assert seen == [(2, 1, 6 * 48)]


@pytest.mark.parametrize("how", ["as loaded", "whole model", "autocast"])
def test_bf16_run_stays_close_to_fp32_and_returns_fp32(how):
    x, t, context = latents(2), torch.tensor([900, 20]), text(2, 8)
    reference = tiny_model()(x, t, context)
    model = tiny_model()
    if how == "as loaded":
        cast_as_loaded(model, torch.bfloat16)
    elif how == "whole model":
        model.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        output = model(x, t, context)
    assert output.dtype == torch.float32
    assert 1e-5 < rel_error(output, reference) < tolerance("model", torch.bfloat16)


@pytest.mark.parametrize("how", ["as loaded", "whole model", "autocast"])
def test_islands_compute_in_fp32_and_blocks_in_bf16(how, monkeypatch):
    model = tiny_model()
    if how != "autocast":
        cast_as_loaded(model, torch.bfloat16) if how == "as loaded" else model.bfloat16()
    dtypes, attended = {}, set()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _module, _args, output, name=name: dtypes.update({name: output.dtype}))
    attention = wan_video_dit.attention

    def recording(q, k, v, **options):
        attended.update((q.dtype, k.dtype, v.dtype))
        return attention(q, k, v, **options)

    monkeypatch.setattr(wan_video_dit, "attention", recording)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        model(latents(), torch.tensor([500]), text(1, 8))
    assert attended == {torch.bfloat16}
    islands = (
        "time_embedding.0",
        "time_embedding.2",
        "time_projection.1",
        "blocks.0",
        "blocks.1",
        "head.head",
    )
    assert {dtypes[name] for name in islands} == {torch.float32}
    linears = ("patch_embedding", "text_embedding.2", "blocks.0.self_attn.q", "blocks.1.cross_attn.o", "blocks.1.ffn.2")
    assert {dtypes[name] for name in linears} == {torch.bfloat16}


def test_fp32_fragments_name_exactly_the_islands_and_norms():
    kept = {name for name, _ in tiny_model().named_parameters() if any(f in name for f in WanModel.FP32_PARAMETERS)}
    assert {name.rsplit(".", 1)[0] for name in kept if not name.startswith("blocks.")} == {
        "time_embedding.0", "time_embedding.2", "time_projection.1", "head", "head.head",
    }  # fmt: skip
    assert {name.removeprefix("blocks.0.") for name in kept if name.startswith("blocks.0.")} == {
        "modulation", "norm3.weight", "norm3.bias",
        *(f"{attention}.norm_{part}.weight" for attention in ("self_attn", "cross_attn") for part in "qk"),
    }  # fmt: skip


def test_rotary_table_is_made_once_a_shape_and_the_cache_is_bounded():
    """B140: memory must not grow with the number of sizes that were run."""
    model, cpu = tiny_model(), torch.device("cpu")
    first = model.rope_table((1, 2, 3), cpu)
    assert model.rope_table((1, 2, 3), cpu) is first
    assert [part.dtype for part in first] == [torch.float32] * 2
    assert first[0].shape == (6, 12)
    for height in range(1, 30):
        model.rope_table((1, height, 2), cpu)
    assert len(model._rope_tables) == 8
    assert torch.equal(model.rope_table((1, 2, 3), cpu)[0], first[0])
    assert not tiny_model()._rope_tables, "tables belong to an instance, not to the class"
    model.rope_table((1, 2, 3), torch.device("meta"))
    assert model.rope_table((1, 2, 3), cpu)[0].device == cpu


def test_rotary_angles_count_positions_on_each_axis():
    angles = rope_angles(24, (2, 3, 5)).view(2, 3, 5, 12)
    frequency = lambda pairs: 10000.0 ** -(torch.arange(pairs, dtype=torch.float64) / pairs)  # noqa: E731
    assert torch.equal(angles[1, 2, 4, :4], frequency(4) * 1)
    assert torch.equal(angles[1, 2, 4, 4:8], frequency(4) * 2)
    assert torch.equal(angles[1, 2, 4, 8:], frequency(4) * 4)
    assert rope_angles(128, (1, 1, 1)).shape == (1, 64)


def test_gradient_reaches_every_parameter_the_latents_and_the_raw_context():
    model = tiny_model()
    x, context = latents(2).requires_grad_(), text(2, 5).requires_grad_()
    model(x, torch.tensor([900, 20]), context).square().mean().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()} | {"x": x.grad, "c": context.grad}
    assert [name for name, grad in grads.items() if grad is None or not grad.abs().max() > 0] == []


def test_gradient_to_context_is_the_slope_of_the_output():
    model, x, t = tiny_model(), latents(), torch.tensor([500])
    context = text(1, 5).requires_grad_()
    step = 1e-2 * torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(3))
    loss = lambda c: model(x, t, c).square().mean().double()  # noqa: E731
    (grad,) = torch.autograd.grad(loss(context), context)
    with torch.no_grad():
        slope = (loss(context + step) - loss(context - step)) / 2
    assert (grad * step).sum().item() == pytest.approx(slope.item(), rel=1e-2)


def test_training_works_after_inference_mode():
    """Tables cached under inference_mode must not poison a later backward pass."""
    model, x, t, context = tiny_model(), latents(), torch.tensor([500]), text(1, 5)
    with torch.inference_mode():
        model(x, t, context)
    model(x, t, context).sum().backward()
    assert model.blocks[0].self_attn.q.weight.grad.abs().max() > 0


def test_block_compiles_to_one_graph():
    """B114: neither attention nor rotary breaks the graph, and no second timestep or prompt recompiles it."""
    model, x, context = tiny_model(), latents(), text(1, 5)
    expected = [model(x, torch.tensor([t]), context) for t in (900, 20)]
    for block in model.blocks:
        block.compile(backend="eager", fullgraph=True)
    outputs = [model(x, torch.tensor([t]), context) for t in (900, 20)]
    for output, reference in zip(outputs, expected):
        assert rel_error(output, reference) < tolerance("model", torch.float32)


def test_a_block_launches_one_kernel_between_two_matrix_products(interpreted_cuda, monkeypatch):
    """The groups of steps that are limited by memory run as one pass each, and change no number."""
    model, x, t = cast_as_loaded(tiny_model(num_layers=1), torch.bfloat16), latents(2), torch.tensor([900, 20])
    model.set_attention_config(AttentionConfig.dense_attention(AttnImplType.TORCH_SDPA))
    with torch.no_grad():
        context = model.prepare_context(text(2, 8))
        launched = []
        for name in kernels.__all__:
            launch = getattr(kernels, name)
            record = lambda *a, name=name, launch=launch, **k: launched.append(name) or launch(*a, **k)  # noqa: E731
            monkeypatch.setattr(kernels, name, record)
        output = model(x, t, context)
        monkeypatch.setattr(interpreted_cuda, "op_keys", ())
        assert rel_error(output, model(x, t, context)) < tolerance("model", torch.bfloat16)
    # The GELU is part of the matrix product before it; the last one is the head's.
    assert launched == [
        "layer_norm", "rms_norm_rotary", "add_layer_norm", "rms_norm", "add_layer_norm", "add_gated", "layer_norm",
    ]  # fmt: skip


def test_attention_config_belongs_to_the_instance():
    model, other = tiny_model(), tiny_model()
    config = AttentionConfig.dense_attention(AttnImplType.TORCH_SDPA)
    model.set_attention_config(config)
    for block in model.blocks:
        assert block.self_attn.attention_config is block.cross_attn.attention_config is config
    assert all(block.self_attn.attention_config is None for block in other.blocks)
    x, t, context = latents(), torch.tensor([500]), text(1, 5)
    assert rel_error(model(x, t, context), other(x, t, context)) < tolerance("model", torch.float32)


def test_sparse_config_leaves_cross_attention_dense():
    """B52"""
    model = tiny_model()
    config = AttentionConfig.radial_attention(dense_timesteps=1)
    model.set_attention_config(config)
    for block in model.blocks:
        assert block.self_attn.attention_config is config
        assert block.cross_attn.attention_config is None


GRID = (6, 8, 16)  # of video(): 6 blocks of 128 tokens
RADIAL = AttentionConfig.radial_attention(dense_timesteps=2, dense_layers=1, decay_factor=0.2)


def video(batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, 4, 6, 16, 32, generator=torch.Generator().manual_seed(4))


def state_at(step: int, config: AttentionConfig = RADIAL) -> SparseAttentionState:
    state = SparseAttentionState(config, MaskMap(768, 6, grid=GRID))
    state.update(numeral_timestep=step)
    return state


@pytest.mark.parametrize("pattern", ["radial", "local"])
def test_a_sparse_state_makes_self_attention_sparse_past_the_dense_steps_and_layers(pattern, monkeypatch):
    """Against the same model whose attention is the formula with the mask written out; the text's stays whole."""
    config = RADIAL if pattern == "radial" else AttentionConfig.local_sparse_attention(2, 1, (1, 2, 4))
    model, x, t, context = tiny_model(num_layers=3), video(2), torch.tensor([900, 20]), text(2, 8)
    with torch.no_grad():
        dense = model(x, t, context)
        early, late = (model(x, t, context, sparse_state=state_at(step, config)) for step in (1, 2))
        keep = state_at(2, config).block_mask(768).keep.repeat_interleave(128, 0).repeat_interleave(128, 1)
        assert 0.1 < keep.double().mean() < 0.9
        layers = iter(range(3))

        def formula(q, k, v, **options):
            is_text = k.shape[1] == 8
            mask = None if is_text or next(layers) < 1 else keep
            return formula_attention(q, k, v, mask=mask)[0].to(v.dtype)

        monkeypatch.setattr(wan_video_dit, "attention", formula)
        expected = model(x, t, context)
    assert rel_error(early, dense) < tolerance("model", torch.float32)
    assert rel_error(late, expected) < tolerance("model", torch.float32)
    assert rel_error(late, dense) > 100 * tolerance("model", torch.float32)


def test_a_sparse_batch_equals_its_samples():
    model, x, t, context = tiny_model(), video(2), torch.tensor([900, 20]), [text(2), text(7)]
    together = model(x, t, context, sparse_state=state_at(2))
    for i in range(2):
        alone = model(x[i : i + 1], t[i : i + 1], context[i : i + 1], sparse_state=state_at(2))
        assert rel_error(together[i : i + 1], alone) < tolerance("model", torch.float32)


def test_a_state_replaces_the_configuration_for_this_call_only():
    model, x, t, context = tiny_model(), video(), torch.tensor([500]), text(1, 5)
    plain = model(x, t, context)
    sparse = model(x, t, context, sparse_state=state_at(2))
    for config in (AttentionConfig.dense_attention(AttnImplType.TORCH_SDPA), RADIAL):
        model.set_attention_config(config)
        assert torch.equal(model(x, t, context, sparse_state=state_at(2)), sparse)
    model.set_attention_config(None)
    assert torch.equal(model(x, t, context), plain)


def test_a_state_of_another_grid_is_refused():
    with pytest.raises(ValueError, match="12 tokens and the mask is for 768"):
        tiny_model()(latents(), torch.tensor([500]), text(1, 5), sparse_state=state_at(9))


def compiled_graphs(model: WanModel, is_sparse: bool, device: str = "cpu") -> list:
    """The graphs of the compiled blocks over five sizes, three steps and two layers; checks every output."""
    context, graphs = model.prepare_context(text(1, 5).to(device)), []
    sizes = [(3, 8, 16), (5, 8, 16), (3, 16, 16), (2, 24, 16), (4, 16, 24)]
    config = AttentionConfig.radial_attention(dense_timesteps=1, dense_layers=1, decay_factor=0.2, block_size=64)

    def run(frames, height, width):
        x = torch.randn(1, 4, frames, height, width, generator=torch.Generator().manual_seed(5)).to(device)
        grid = (frames, height // 2, width // 2)
        mask_map = MaskMap(grid[0] * grid[1] * grid[2], frames, grid=grid)
        state = SparseAttentionState(config, mask_map) if is_sparse else None
        for step in range(3):
            if is_sparse:
                state.update(numeral_timestep=step)
            yield model(x, torch.tensor([900 - step], device=device), context, sparse_state=state)

    def keep_graph(graph, inputs):
        graphs.append(graph)
        return graph.forward

    expected = [out for size in sizes for out in run(*size)]
    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(backend=keep_graph, fullgraph=True, dynamic=True)
    outputs = [out for size in sizes for out in run(*size)]
    torch._dynamo.reset()
    for output, wanted in zip(outputs, expected):
        assert rel_error(output, wanted) < tolerance("model", model.blocks[0].ffn[0].weight.dtype)
    names = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("telefuser.sparse_attention" in name for name in names) == is_sparse
    assert sum("telefuser.attention" in name for name in names) == 2 - is_sparse
    return graphs


@pytest.mark.parametrize("is_sparse", [False, True])
@torch.no_grad()
def test_a_block_compiles_whole_and_not_once_a_resolution(is_sparse):
    """B110, B114: no break, and at most two graphs for five sizes, three steps and two layers."""
    model = tiny_model()
    model.set_attention_config(AttentionConfig.dense_attention(AttnImplType.TORCH_SDPA))
    assert len(compiled_graphs(model, is_sparse)) <= 2


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["TORCH_SDPA", "TORCH_CUDNN", "FLASH_ATTN_4", "AUTO", "RADIAL_ATTN"])
@torch.no_grad()
def test_a_block_compiles_whole_with_every_backend_of_a_gpu(impl):
    """B110, B114."""
    is_sparse = impl == "RADIAL_ATTN"
    if not is_sparse and impl != "AUTO" and (reason := availability()[AttnImplType[impl]]):
        pytest.skip(reason)
    model = cast_as_loaded(tiny_model(dim=128), torch.bfloat16).cuda()
    model.set_attention_config(AttentionConfig.dense_attention(AttnImplType["AUTO" if is_sparse else impl]))
    assert len(compiled_graphs(model, is_sparse, "cuda")) <= 2


@pytest.mark.parametrize(
    ("x", "t", "context", "words"),
    [
        ((1, 36, 3, 4, 4), (1,), (1, 5, 16), r"\[B, 4, F, H, W\], got \[1, 36, 3, 4, 4\]"),
        ((4, 3, 4, 4), (1,), (1, 5, 16), r"\[B, 4, F, H, W\], got \[4, 3, 4, 4\]"),
        ((1, 4, 3, 5, 4), (1,), (1, 5, 16), r"\(3, 5, 4\).*not divisible by the patch \(1, 2, 2\)"),
        ((1, 4, 0, 4, 4), (1,), (1, 5, 16), "not divisible"),
        ((1, 4, 3, 4, 4), (2,), (1, 5, 16), r"\[1\] or, per token, \[1, 12\], got \[2\]"),
        ((1, 4, 3, 4, 4), (1, 5), (1, 5, 16), r"got \[1, 5\]"),
        ((1, 4, 3, 4, 4), (), (1, 5, 16), r"got \[\]"),
        ((1, 4, 3, 4, 4), (1,), (1, 5, 8), r"\[B, L, 16\].*got \(1, 5, 8\)"),
        ((1, 4, 3, 4, 4), (1,), (5, 16), r"got \(5, 16\)"),
        ((1, 4, 3, 4, 4), (1,), (1, 9, 16), "9 text tokens, the model takes at most 8"),
        ((1, 4, 3, 4, 4), (1,), (2, 5, 16), "2 prompts for 1 latents"),
    ],
)
def test_wrong_input_is_refused_by_name(x, t, context, words):
    with pytest.raises(ValueError, match=words):
        tiny_model()(torch.zeros(x), torch.zeros(t), torch.zeros(context))


@pytest.mark.parametrize("context", [[], [torch.zeros(1, 5, 16)], [torch.zeros(9, 16)]])
def test_wrong_context_list_is_refused(context):
    with pytest.raises(ValueError, match="context"):
        tiny_model().prepare_context(context)


def test_context_of_another_model_is_refused():
    with pytest.raises(ValueError, match="2 layers, this one has 1"):
        tiny_model(num_layers=1)(latents(), torch.tensor([1]), tiny_model().prepare_context(text(1, 5)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_heads": 5}, "dim 48 .* num_heads 5"),
        ({"num_heads": 16}, "even head width"),
        ({"freq_dim": 31}, "freq_dim .* 31"),
        ({"patch_size": (2, 2)}, "patch_size"),
        ({"has_image_input": True}, "image-to-video is not supported"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        WanModel(**{**TINY, **change})


def test_official_config_builds_the_model():
    config = {
        **TINY,
        "_class_name": "WanModel",
        "model_type": "t2v",
        "window_size": [-1, -1],
        "qk_norm": True,
        "vae": {},
    }
    assert layout(WanModel.from_config(config)) == layout(tiny_model())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "i2v"}, "'i2v' is not supported"),
        ({"model_type": "flf2v"}, "'flf2v' is not supported"),
        ({"window_size": [4, 4]}, "window_size"),
        ({"qk_norm": False}, "qk_norm False"),
        ({"cross_attn_norm": False}, "cross_attn_norm"),
    ],
)
def test_config_of_another_model_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        WanModel.from_config({**TINY, **change})


@pytest.mark.parametrize("layout_name", ["official", "diffusers"])
def test_diffusers_transformer_agrees_on_random_weights_of_both_layouts(layout_name, tmp_path):
    diffusers = pytest.importorskip("diffusers", reason="diffusers is a development dependency")
    torch.manual_seed(0)
    reference = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=24, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=64, num_layers=2, cross_attn_norm=True, eps=1e-6,
    ).eval()  # fmt: skip
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    config = {**dit_config(dict(reference.config)), "text_len": 8}
    reference.save_pretrained(tmp_path)
    file, to_official = tmp_path / "diffusion_pytorch_model.safetensors", dit_key_map().to_official
    if layout_name == "official":
        state = {to_official(key): value for key, value in load_file(file).items()}
        file, to_official = tmp_path / "official.safetensors", None
        save_file(state, file)
    model = load_model(partial(WanModel.from_config, config), [file], dtype=torch.float32, key_map=to_official)
    x, t, context = latents(2), torch.tensor([900, 20]), text(2, 8)
    with torch.no_grad():
        theirs = reference(hidden_states=x, timestep=t, encoder_hidden_states=context, return_dict=False)[0]
        # Its float32 sinusoid alone costs about 1e-5 of the output's size.
        assert rel_error(model(x, t, context), theirs) < 2e-5


def test_loader_keeps_the_fp32_fragments_and_casts_the_rest(tmp_path):
    model = tiny_model()
    save_file(model.state_dict(), tmp_path / "dit.safetensors")
    loaded = load_model(
        lambda: WanModel(**TINY),
        [tmp_path / "dit.safetensors"],
        dtype=torch.bfloat16,
        fp32_fragments=WanModel.FP32_PARAMETERS,
    )
    cast_as_loaded(model, torch.bfloat16)
    assert {n: p.dtype for n, p in loaded.named_parameters()} == {n: p.dtype for n, p in model.named_parameters()}
    x, t, context = latents(), torch.tensor([300]), text(1, 5)
    assert torch.equal(loaded(x, t, context), model(x, t, context))
