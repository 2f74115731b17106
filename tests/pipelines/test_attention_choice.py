"""Settings of a run's attention: published defaults, what replaces them, refusals, and what the log says."""

import pytest
import torch

from telefuser.core.config import AttentionConfig, AttnImplType
from telefuser.ops.attention import block_sparse
from telefuser.pipelines.attention_choice import (
    Run,
    attention_metadata,
    describe_attention,
    make_state,
    parse_local_window,
    settle_attention,
)
from telefuser.pipelines.request import validate_request
from tests.pipelines.conftest import DEFAULTS

RUN = Run((21, 30, 52), 50, 30, 12, 128)  # 832x480, 81 frames, 1.3B
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh_table():
    block_sparse.TABLE.forget()
    yield
    block_sparse.TABLE.forget()


def test_the_grid_is_that_of_the_latents_in_patches():
    request = validate_request(DEFAULTS, "a cat", width=832, height=480, num_frames=81, steps=50)
    assert Run.of(request, 1536, 12, 30, (1, 2, 2)) == RUN


@pytest.mark.parametrize(("steps", "dense"), [(50, 12), (40, 10), (20, 5), (8, 2), (4, 1), (1, 0)])
def test_radial_takes_the_published_settings_scaled_to_the_steps(steps, dense):
    sparse = settle_attention("radial", steps=steps).sparse_config
    assert sparse.sparse_impl is AttnImplType.RADIAL_ATTN
    assert (sparse.decay_factor, sparse.block_size, sparse.dense_layers, sparse.dense_timesteps) == (0.2, 128, 1, dense)


def test_local_takes_a_window_of_six():
    sparse = settle_attention(AttnImplType.LOCAL_SPARSE_ATTN, steps=50).sparse_config
    assert sparse.sparse_impl is AttnImplType.LOCAL_SPARSE_ATTN
    assert (sparse.local_window_size, sparse.dense_timesteps, sparse.dense_layers) == (6, 12, 1)


def test_what_is_given_replaces_defaults_and_those_of_a_configuration():
    sparse = settle_attention("radial", decay=1, dense_steps=0, dense_layers=2, steps=50).sparse_config
    assert (sparse.decay_factor, sparse.dense_timesteps, sparse.dense_layers) == (1, 0, 2)
    assert settle_attention("local", local_window=[2, 6, 0], steps=9).sparse_config.local_window_size == (2, 6, 0)
    config = AttentionConfig.radial_attention(7, 3, 0.5, use_sage_attention=True, block_size=64, strict=True)
    assert settle_attention(config, steps=50) is config
    changed = settle_attention(config, decay=0.9, steps=50)
    assert changed.strict
    assert changed.sparse_config.use_sage_attention
    assert (changed.sparse_config.decay_factor, changed.sparse_config.dense_timesteps) == (0.9, 7)


def test_dense_backends_pass_through():
    assert settle_attention("sdpa", steps=50) == AttentionConfig(AttnImplType.TORCH_SDPA)
    assert settle_attention("auto", steps=50) == AttentionConfig()


@pytest.mark.parametrize(
    ("attention", "given", "words"),
    [
        ("magic", {}, "'magic' is unknown; choose one of .*RADIAL_ATTN"),
        ("auto", {"decay": 0.2}, "decay 0.2 has no meaning for the attention AUTO: use attention='radial'"),
        ("local", {"decay": 0.2}, "decay 0.2 has no meaning for the attention LOCAL_SPARSE_ATTN"),
        ("radial", {"local_window": 6}, "local_window 6 .* RADIAL_ATTN: use attention='local'"),
        ("sdpa", {"dense_steps": 3}, "dense_steps 3 .* TORCH_SDPA: use attention='radial' or attention='local'"),
        ("radial", {"decay": 0}, "decay must be a finite number above 0, got 0: 0.2 to 1.0"),
        ("radial", {"decay": float("nan")}, "decay must be a finite number above 0, got nan"),
        ("radial", {"decay": "0.2"}, "decay must be a finite number above 0, got '0.2'"),
        ("radial", {"dense_steps": -1}, "dense_steps must be an integer of at least 0, got -1: 0 leaves none"),
        ("radial", {"dense_layers": 1.5}, "dense_layers must be an integer of at least 0, got 1.5"),
        ("local", {"local_window": 0}, "local_window must be a number of at least 1.* got 0: 6 is"),
        ("local", {"local_window": (1, 2)}, r"got \(1, 2\)"),
        ("local", {"local_window": (1, 2, -1)}, r"got \(1, 2, -1\)"),
        ("local", {"local_window": True}, "got True"),
    ],
)
def test_refusals_name_value_limit_and_way_out(attention, given, words):
    with pytest.raises(ValueError, match=words):
        settle_attention(attention, **given, steps=50)


def test_a_window_on_the_command_line():
    assert [parse_local_window(text) for text in (None, "6", " 2, 6,0 ")] == [None, 6, (2, 6, 0)]
    for text in ("", "a", "1,2", "2x6x6", "-1", "1,2,3,4", "1.5"):
        with pytest.raises(ValueError, match=r"not a number of tokens or FRAMES,ROWS,COLUMNS, for example 2,6,6"):
            parse_local_window(text)


def test_the_log_line_says_executor_density_and_what_is_dense():
    line = describe_attention(settle_attention("radial", steps=50), RUN, CPU, torch.float32)
    assert line == (
        "RADIAL_ATTN (decay 0.2, blocks of 128) by TORCH_BLOCKED: 34% of the token pairs where it is sparse, "
        "52% over the run; dense: steps 1 to 12 of 50, layer 1 of 30 and the text's (AUTO: TORCH_SDPA)"
    )
    local = settle_attention("local", local_window=(2, 6, 6), dense_steps=0, dense_layers=0, steps=50)
    line = describe_attention(local, RUN, CPU, torch.float32)
    assert "LOCAL_SPARSE_ATTN (window (2, 6, 6), blocks of 128)" in line
    assert "12% of the token pairs where it is sparse, 12% over the run; dense: no step, no layer" in line
    assert describe_attention(AttentionConfig(), RUN, CPU, torch.float32) == "AUTO: TORCH_SDPA"


def test_the_log_line_says_what_takes_these_shapes(monkeypatch):
    """On a GPU a kernel for half precision does not compute a float32 run; the line must not name it."""
    seen = []
    monkeypatch.setattr(
        block_sparse,
        "_choose",
        lambda call, mask, quantised: (
            seen.append((call, mask, quantised))
            or (block_sparse.TABLE.record(block_sparse.SparseExecutor.SPARGE_ATTN), None)
        ),
    )
    config = AttentionConfig.radial_attention(12, 1, 0.2, use_sage_attention=True)
    assert "by SPARGE_ATTN: " in describe_attention(config, RUN, CPU, torch.bfloat16)
    ((call, mask, quantised),) = seen
    assert (call.q.shape, call.q.dtype, mask.tokens, quantised) == ((1, 12, 32760, 128), torch.bfloat16, 32760, True)
    assert call.q.untyped_storage().nbytes() == 2


def test_density_is_the_share_of_pairs_of_tokens():
    config = settle_attention("radial", steps=50)
    keep = make_state(config, RUN).block_mask(32760).keep
    by_token = keep.repeat_interleave(128, 1)[:, :32760].sum(1).double()
    rows = torch.full((256,), 128.0, dtype=torch.float64)
    rows[-1] = 120
    assert RUN.block_mask(config).density == pytest.approx(float((by_token * rows).sum()) / 32760**2)


@pytest.mark.parametrize(
    ("given", "grid", "words"),
    [
        ({"dense_steps": 50}, RUN.grid, "dense_timesteps is 50 and the run has 50 steps, so nothing will be sparse"),
        ({"dense_steps": 99}, RUN.grid, "dense_timesteps is 99 and the run has 50 steps"),
        ({"dense_layers": 30}, RUN.grid, "dense_layers is 30 and the run has 30 layers"),
        ({}, (1, 8, 8), "keeps every pair of the 64 tokens of this video, so nothing will be sparse"),
    ],
)
def test_settings_that_leave_nothing_out_say_so_once(caplog, given, grid, words):
    for _ in range(3):
        make_state(settle_attention("radial", **given, steps=50), RUN._replace(grid=grid))
    assert len(caplog.records) == 1
    assert words in caplog.text


def test_metadata_is_what_a_call_takes():
    config = settle_attention("local", local_window=(2, 6, 6), dense_steps=3, steps=50)
    found = attention_metadata(config)
    assert found.pop("block_size") == 128
    assert found.pop("use_sage_attention") is False
    assert settle_attention(**found, steps=50) == config
    assert attention_metadata(AttentionConfig()) == {"attention": "auto"}
