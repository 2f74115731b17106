"""`attention` with a sparse state: which steps are sparse, over which blocks, and what is said where none are."""

import copy
import gc
import logging
import pickle

import pytest
import torch

from telefuser.core.config import AttentionConfig, AttnImplType, SparseAttentionConfig
from telefuser.ops.attention import (
    MaskMap,
    SparseAttentionState,
    attention,
    backends,
    block_sparse,
    clear_radial_mask_cache,
    create_radial_mask_map,
    sparse_attention,
)
from telefuser.ops.attention.local_sparse_attn import local_block_mask
from telefuser.ops.attention.radial_attention_core import radial_block_mask
from tests.ops.attention.reference import qkv, reference
from tests.tolerances import assert_close

GRID = (9, 10, 13)
VIDEO = 9 * 10 * 13  # 1,170 tokens, which neither 64 nor 128 divides
RADIAL = AttentionConfig.radial_attention(dense_timesteps=0, decay_factor=0.2, block_size=64)
LOCAL = AttentionConfig.local_sparse_attention(dense_timesteps=0, local_window_size=(1, 3, 4), block_size=64)


@pytest.fixture(autouse=True)
def fresh_table():
    block_sparse.TABLE.forget()
    yield
    block_sparse.TABLE.forget()


def messages(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def state_for(config, **options):
    return SparseAttentionState(config, MaskMap(VIDEO, 9, grid=GRID), **options)


def by_token(keep, block, tokens):
    return keep.repeat_interleave(block, 0).repeat_interleave(block, 1)[:tokens, :tokens]


def expected_mask(config, tokens, model_type="wan"):
    sparse = config.sparse_config
    if sparse.sparse_impl is AttnImplType.RADIAL_ATTN:
        keep = radial_block_mask(VIDEO, 9, tokens, sparse.block_size, sparse.decay_factor, model_type)
    else:
        keep = local_block_mask(GRID, tokens, sparse.block_size, sparse.local_window_size)
    assert not keep.all()
    return by_token(keep, sparse.block_size, tokens)


@pytest.mark.parametrize("text", [0, 77])
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("pattern", ["wan", "hunyuan", "local"])
def test_output_equals_masked_attention(pattern, block, text):
    """S221, S224, S227, S228, S237: odd length, two entries, text behind the video, both kinds of model."""
    if pattern == "local":
        config = AttentionConfig.local_sparse_attention(0, local_window_size=(1, 2, 3), block_size=block)
    else:
        config = AttentionConfig.radial_attention(0, decay_factor=0.2, block_size=block)
    model_type = "hunyuan" if pattern == "hunyuan" else "wan"
    q, k, v = qkv(queries=VIDEO + text)
    state = state_for(config, model_type=model_type)
    out, lse = attention(q, k, v, attention_config=config, sparse_state=state, return_lse=True)
    mask = expected_mask(config, VIDEO + text, model_type)
    expected, expected_lse = reference(q, k, v, mask=mask)
    assert out.shape == q.shape
    assert out.flatten(2).shape == (2, VIDEO + text, 64)
    assert_close(out, expected, "attention")
    assert_close(lse, expected_lse, "attention", torch.float32)
    dense = attention(q, k, v)
    assert not torch.allclose(out, dense, atol=1e-3)


def test_radial_and_local_are_different_patterns():
    """S237."""
    q, k, v = qkv(queries=VIDEO)
    radial, local = (attention(q, k, v, config, state_for(config)) for config in (RADIAL, LOCAL))
    assert not torch.allclose(radial, local, atol=1e-3)


@pytest.mark.parametrize("layouts", [("BSND", "BNSD"), ("BNSD", "BSND"), ("BNSD", "BNSD")])
def test_layouts_and_scale(layouts):
    q, k, v = qkv(queries=VIDEO)
    given = [t.transpose(1, 2).contiguous() if layouts[0] == "BNSD" else t for t in (q, k, v)]
    options = {"scale": 0.4, "input_layout": layouts[0], "output_layout": layouts[1]}
    out = attention(*given, RADIAL, state_for(RADIAL), **options)
    out = out.transpose(1, 2) if layouts[1] == "BNSD" else out
    assert_close(out, reference(q, k, v, mask=expected_mask(RADIAL, VIDEO), scale=0.4)[0], "attention")


def test_sparse_attention_is_the_same_without_a_state():
    """S229."""
    q, k, v = qkv(queries=VIDEO)
    wanted, wanted_lse = attention(q, k, v, RADIAL, state_for(RADIAL), return_lse=True)
    mask_map = create_radial_mask_map(VIDEO, 9)
    out, lse = sparse_attention(q, k, v, RADIAL.sparse_config, mask_map, return_lse=True)
    assert torch.equal(out, wanted)
    assert torch.equal(lse, wanted_lse)
    config = SparseAttentionConfig(sparse_impl=AttnImplType.RADIAL_ATTN, dense_timesteps=3)
    dense = sparse_attention(q, k, v, config, mask_map, numeral_timestep=2)
    assert_close(dense, reference(q, k, v)[0], "attention")


def test_a_backend_name_takes_the_settings_of_the_state():
    q, k, v = qkv(queries=VIDEO)
    out = attention(q, k, v, sparse_state=state_for(RADIAL), attn_impl="radial")
    assert torch.equal(out, attention(q, k, v, RADIAL, state_for(RADIAL)))
    # A dense backend does not look at it.
    assert torch.equal(attention(q, k, v, sparse_state=state_for(RADIAL), attn_impl="sdpa"), attention(q, k, v))


def test_the_first_steps_and_layers_are_dense():
    """S256."""
    config = AttentionConfig.radial_attention(dense_timesteps=2, dense_layers=1, decay_factor=0.2, block_size=64)
    q, k, v = qkv(queries=VIDEO)
    state = state_for(config)
    dense, kinds = attention(q, k, v), {}
    for step in range(4):
        for layer in range(3):
            state.update(numeral_timestep=step, layer_idx=layer)
            assert (state.numeral_timestep, state.layer_idx) == (step, layer)
            is_dense = torch.allclose(attention(q, k, v, config, state), dense, atol=1e-5)
            assert is_dense == state.should_use_dense()
            kinds[step, layer] = state.get_sparsity_type()
            assert is_dense == (kinds[step, layer] == "dense")
    sparse = {place for place, kind in kinds.items() if kind == "radial"}
    assert sparse == {(2, 1), (2, 2), (3, 1), (3, 2)}
    state.update(layer_idx=0)
    assert (state.numeral_timestep, state.layer_idx) == (3, 0)
    assert state_for(LOCAL).get_sparsity_type() == "local"


def test_without_a_state_it_is_dense_with_one_warning(caplog):
    """S223."""
    backends.TABLE.forget()
    q, k, v = qkv(queries=VIDEO)
    for _ in range(3):
        assert_close(attention(q, k, v, RADIAL), reference(q, k, v)[0], "attention")
    assert len(messages(caplog)) == 1
    assert "RADIAL_ATTN" in messages(caplog)[0]
    assert "sparse_state" in messages(caplog)[0]
    backends.TABLE.forget()


@pytest.mark.parametrize("state", [None, "given"])
def test_cross_attention_is_dense_without_a_word(caplog, state):
    """B52: the text's 16 keys."""
    q, k, v = qkv(queries=VIDEO, keys=16)
    for config in (RADIAL, LOCAL):
        given = state_for(config) if state else None
        assert_close(attention(q, k, v, config, given), reference(q, k, v)[0], "attention")
    assert messages(caplog) == []


@pytest.mark.parametrize(
    ("options", "word"), [({"attn_mask": torch.ones(VIDEO, dtype=torch.bool)}, "mask"), ({"is_causal": True}, "causal")]
)
def test_what_a_pattern_does_not_take_is_dense_with_one_warning(caplog, options, word):
    backends.TABLE.forget()
    q, k, v = qkv(queries=VIDEO)
    for _ in range(2):
        out = attention(q, k, v, RADIAL, state_for(RADIAL), **options)
    assert_close(out, attention(q, k, v, **options), "attention")
    assert len(messages(caplog)) == 1
    assert word in messages(caplog)[0]
    strict = AttentionConfig(AttnImplType.RADIAL_ATTN, RADIAL.sparse_config, strict=True)
    with pytest.raises(ValueError, match=word):
        attention(q, k, v, strict, state_for(strict), **options)
    backends.TABLE.forget()


def test_settings_that_are_never_sparse_say_so_once(caplog):
    """C13: honoured, and logged once."""
    config = AttentionConfig.radial_attention(dense_timesteps=40)
    for _ in range(2):
        state = state_for(config, num_steps=40, num_layers=30)
    assert len(messages(caplog)) == 1
    assert "dense_timesteps is 40 and the run has 40 steps" in messages(caplog)[0]
    state.update(numeral_timestep=39)
    assert state.should_use_dense()
    state_for(AttentionConfig.radial_attention(dense_layers=30), num_steps=50, num_layers=30)
    assert "dense_layers is 30" in messages(caplog)[1]
    state_for(AttentionConfig.radial_attention(dense_timesteps=39), num_steps=40, num_layers=30)
    assert len(messages(caplog)) == 2


@pytest.mark.parametrize("frames", [16, 12])
def test_a_query_always_has_a_key(frames):
    """B74: frames of 32 tokens give an all-false mask; what the rule leaves empty sees everything."""
    tokens = frames * 32
    assert not radial_block_mask(tokens, frames, model_type="hunyuan").all(dim=1).any()
    config = AttentionConfig.radial_attention(dense_timesteps=0)
    state = SparseAttentionState(config, MaskMap(tokens, frames), model_type="hunyuan")
    assert state.block_mask(tokens).keep.any(dim=1).all()
    q, k, v = qkv(queries=tokens)
    assert_close(attention(q, k, v, config, state), reference(q, k, v)[0], "attention")


def test_mask_map_gives_the_block_mask_of_a_query():
    """B74."""
    mask_map, q = MaskMap(VIDEO, 9, grid=GRID), torch.zeros(2, VIDEO + 30, 4, 16)
    keep = mask_map.query_log_mask(q, "radial", block_size=64, decay_factor=0.3)
    assert torch.equal(keep, radial_block_mask(VIDEO, 9, VIDEO + 30, 64, 0.3))
    assert mask_map.query_log_mask(q[0], "radial", block_size=64, decay_factor=0.3) is keep
    keep = mask_map.query_log_mask(q, "local", block_size=64, local_window_size=(0, 3, 3))
    assert torch.equal(keep, local_block_mask(GRID, VIDEO + 30, 64, (0, 3, 3)))
    assert mask_map.query_log_mask(q, "dense").all()
    with pytest.raises(ValueError, match="96"):
        mask_map.query_log_mask(q, "radial", block_size=96)


def test_masks_are_made_once_a_shape_and_not_mixed_up():
    state = state_for(RADIAL)
    mask = state.block_mask(VIDEO)
    assert state_for(RADIAL).block_mask(VIDEO) is mask
    assert state.block_mask(VIDEO + 100) is not mask
    assert SparseAttentionState(RADIAL, MaskMap(640, 5)).block_mask(640).tokens == 640
    clear_radial_mask_cache()
    assert state.block_mask(VIDEO) is not mask
    for frames in range(1, 40):
        SparseAttentionState(RADIAL, MaskMap(64 * frames, frames)).block_mask(64 * frames)
    assert state.block_mask(VIDEO) is not mask


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SparseAttentionState(LOCAL, MaskMap(VIDEO, 9)), "grid="),
        (lambda: MaskMap(VIDEO, 9).query_log_mask(torch.zeros(1, VIDEO, 1, 8), "local"), "grid="),
        (lambda: MaskMap(VIDEO, 9, grid=(9, 10, 12)), r"grid \(9, 10, 12\) has 9 frames and 1080 tokens"),
        (lambda: MaskMap(VIDEO, 13, grid=GRID), "num_frame is 13"),
        (lambda: MaskMap(VIDEO, 4), "1170 video tokens are not 4 frames"),
        (lambda: SparseAttentionState(AttentionConfig(), MaskMap(VIDEO, 9)), "no sparse pattern"),
        (lambda: SparseAttentionState(SparseAttentionConfig(), MaskMap(VIDEO, 9)), "no sparse pattern"),
        (lambda: SparseAttentionState(RADIAL, (VIDEO, 9)), "give a MaskMap"),
        (lambda: state_for(RADIAL, model_type="flux"), "choose one of wan, hunyuan"),
        (lambda: attention(*qkv(queries=VIDEO), RADIAL, object()), "give SparseAttentionState"),
        (lambda: attention(*qkv(queries=VIDEO), RADIAL, state_for(LOCAL)), "made for"),
        (
            lambda: attention(*qkv(queries=VIDEO), AttentionConfig.radial_attention(), state_for(RADIAL)),
            "same configuration",
        ),
        (lambda: attention(*qkv(queries=600), RADIAL, state_for(RADIAL)), "600 tokens and the mask is for 1170"),
    ],
)
def test_wrong_states_are_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_copied_state_goes_its_own_way_and_a_dropped_one_is_freed():
    config = AttentionConfig.radial_attention(dense_timesteps=2, block_size=64)
    state = state_for(config)
    state.update(3, 1)
    for other in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert (other.numeral_timestep, other.layer_idx, other.config) == (3, 1, config.sparse_config)
        other.update(0)
        assert other.should_use_dense()
        assert not state.should_use_dense()
    from telefuser.ops.attention.sparse_attention import _STATES

    number = int(state.position[0])
    assert number in _STATES
    del state
    gc.collect()
    assert number not in _STATES


def test_a_state_made_in_inference_mode_works_outside():
    with torch.inference_mode():
        state = state_for(RADIAL)
        state.update(1, 1)
    state.update(2, 2)
    q, k, v = (t.requires_grad_() for t in qkv(queries=VIDEO, heads=1))
    attention(q, k, v, RADIAL, state).sum().backward()
    assert q.grad.isfinite().all()


def test_a_request_for_sage_that_cannot_be_met_says_so_once(caplog):
    config = AttentionConfig.radial_attention(0, decay_factor=0.2, block_size=64, use_sage_attention=True)
    q, k, v = qkv(queries=VIDEO)
    for _ in range(2):
        out = attention(q, k, v, config, state_for(config))
    assert torch.equal(out, attention(q, k, v, RADIAL, state_for(RADIAL)))
    assert len(messages(caplog)) == 1
    assert "SPARGE_ATTN cannot be used" in messages(caplog)[0]


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_compiled_it_is_one_node_and_steps_do_not_recompile(fresh_dynamo):
    config = AttentionConfig.radial_attention(2, 1, decay_factor=0.2, block_size=64)
    state, graphs = state_for(config), []

    def keep_graph(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def block(q, k, v):
        return attention(q * 2, k, v, attention_config=config, sparse_state=state).flatten(2)

    compiled = torch.compile(block, fullgraph=True, backend=keep_graph)
    q, k, v = qkv(queries=VIDEO)
    kinds = set()
    for step in range(4):
        for layer in range(2):
            state.update(step, layer)
            kinds.add(state.get_sparsity_type())
            assert_close(compiled(q, k, v), block(q, k, v), "attention")
    assert kinds == {"dense", "radial"}
    assert len(graphs) == 1
    names = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("sparse_attention" in name for name in names) == 1
    torch.library.opcheck(
        torch.ops.telefuser.sparse_attention.default,
        (q, k, v, state.position, 0.25, True, "BSND", "BSND"),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_compiled_code_that_counts_the_layers_itself(fresh_dynamo):
    """A whole model in one graph: each layer's attention sees the layer that was set before it."""
    config = AttentionConfig.radial_attention(0, dense_layers=1, decay_factor=0.2, block_size=64)
    state = state_for(config)

    def model(q, k, v):
        outs = []
        for layer in range(2):
            state.update(layer_idx=layer)
            outs.append(attention(q, k, v, config, state))
        return outs

    q, k, v = qkv(batch=1, queries=VIDEO, heads=1)
    dense, sparse = torch.compile(model, fullgraph=True, backend="aot_eager")(q, k, v)
    assert_close(dense, reference(q, k, v)[0], "attention")
    assert_close(sparse, reference(q, k, v, mask=expected_mask(config, VIDEO))[0], "attention")
    assert state.layer_idx == 1


def test_the_choice_is_described_in_one_line():
    line = backends.describe_choice(RADIAL)
    assert line == "RADIAL_ATTN by TORCH_BLOCKED where a sparse_state is given (dense: AUTO: TORCH_SDPA)"


def test_compiled_training_follows_the_blocks(fresh_dynamo):
    state = state_for(RADIAL)
    q, k, v = (t.requires_grad_() for t in qkv(batch=1, queries=VIDEO, heads=1))
    attention(q, k, v, RADIAL, state).square().sum().backward()
    wanted, q.grad = q.grad, None
    torch.compile(attention, backend="aot_eager")(q, k, v, RADIAL, state).square().sum().backward()
    assert_close(q.grad, wanted, "matmul")
