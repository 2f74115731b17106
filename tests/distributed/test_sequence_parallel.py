"""`long_context_attention` and `WanModel.enable_usp` on two and four real processes, against one process."""

import pytest
import torch

from telefuser.models.wan_video_dit import WanModel
from telefuser.ops.attention import attention, long_context_attention
from telefuser.ops.attention.long_context import merge_attn_states
from tests.distributed import checks
from tests.tolerances import rel_error, tolerance


def limit(name):
    dtype = torch.bfloat16 if "bfloat16" in name else torch.float32
    return tolerance("attention", dtype)


@pytest.mark.parametrize("name", [name for name in checks.FOUR if name.startswith(("attention", "uneven"))])
def test_attention_in_parts_is_attention(four, name):
    # S225, S266, S267, B96, B98, B100, B104: any token count, head count and grouping
    assert max(four(name)) <= limit(name)


@pytest.mark.parametrize("name", [name for name in checks.TWO if name.startswith("attention")])
def test_attention_on_two_processes(two, name):
    # B96, B102, B104
    assert max(two(name)) <= limit(name)


@pytest.mark.parametrize("strategy", ["ulysses", "ring", "usp"])
def test_layouts_and_known_counts(four, strategy):
    assert max(max(errors) for errors in four(f"layouts: {strategy}")) <= 1e-5


@pytest.mark.parametrize("strategy", list(checks.STRATEGIES))
def test_memory_that_was_never_written_is_not_read(four, strategy):
    # B98: nothing that pads a message reaches a softmax
    assert four(f"poison: {strategy}") == [True] * 4


def test_ulysses_passes_gradients_back(four, two):
    # With 2 heads half of the four processes compute no attention, but gradients pass through them.
    for results in (four("gradient: 5 heads"), four("gradient: 2 heads"), two("gradient: 5 heads")):
        assert max(max(errors) for errors in results) <= 1e-5


def test_sparse_patterns_work_through_ulysses(four):
    assert max(max(errors) for errors in four("sparse")) <= 1e-5


def test_a_partner_that_stays_away_is_an_error_after_the_timeout(two):
    # ParallelConfig(timeout=1)
    seconds, _ = two("absent partner")[0]
    assert 0.5 < seconds < 2


def test_ring_takes_another_backend_where_the_chosen_one_gives_no_lse(two):
    # B102
    for errors, warnings in two("no lse"):
        assert max(errors) <= 1e-5
        assert len(warnings) == 1
        assert "SPARGE_ATTN" in warnings[0]


def test_refusals_reach_every_rank_and_say_why(four):
    # S267, B96, B106
    for rank, messages in enumerate(four("refusals")):
        assert "device_mesh=None" in messages["mask"]
        assert "RADIAL_ATTN" in messages["sparse ring"]
        assert "AttentionConfig" in messages["config"]
        assert "dropout 0.1" in messages["dropout ring"]
        assert "no_grad" in messages["gradient ring"]
        assert ("q (2, 2, 4, 16)" if rank == 1 else "part(s) [1]") in messages["one wrong"]
        assert "differ in batch" in messages["one differs"]
        assert "token_counts [9, 9, 9, 9]" in messages["counts"]
        assert "split alike" in messages["causal parts"]
        assert "meta" in messages["other device"]
        assert "gloo" in messages["other device"]
        assert "'ulysses'" in messages["unnamed"]
        assert "--nproc-per-node 5" in messages["size"]
        assert "tp_degree=2" in messages["sp with tp"]
        assert "'gloo'" in messages["backend"]
        assert "'npu'" in messages["backend"]


@pytest.mark.parametrize("name", [name for name in checks.FOUR if name.startswith("dit")])
def test_transformer_in_parts_is_the_transformer(four, name):
    # S264, S265, B96
    for error, is_same_everywhere in four(name):
        assert error <= (tolerance("model", torch.bfloat16) if "bfloat16" in name else 1e-5)
        assert is_same_everywhere


def test_transformer_on_two_processes(two):
    # S265
    for error, is_same_everywhere in two("dit"):
        assert error <= 1e-5
        assert is_same_everywhere


def test_a_sparse_transformer_on_two_processes(two):
    # 441 tokens: each process computes two heads of all of them, over the blocks that the whole video keeps.
    for error, from_dense in two("sparse dit"):
        assert error <= 1e-5
        assert from_dense > 1e-3


@pytest.mark.parametrize("name", [name for name in checks.FOUR if name.startswith("sampling")])
def test_guidance_passes_run_side_by_side(four, name):
    for error, is_same_everywhere, num_calls in four(name):
        assert error <= 1e-5
        assert is_same_everywhere
        assert num_calls == 3  # one a step, with and without guidance


def test_the_embedded_models_video_is_that_of_one_process(four):
    # Rounding of 1e-7 may tip a pixel over.
    assert max(four("embedded model")) <= 1


def test_training_a_split_transformer_is_refused(four):
    assert all("inference_mode" in message for message in four("training"))


def test_without_a_mesh_it_is_plain_attention():
    q, k, v = torch.randn(3, 1, 9, 2, 16)
    mask = torch.rand(9, 9) > 0.3
    assert torch.equal(long_context_attention(q, k, v, attn_mask=mask), attention(q, k, v, attn_mask=mask))


def test_enable_usp_without_a_mesh_says_how_to_make_one():
    model = WanModel(**checks.TINY_DIT)
    with pytest.raises(ValueError, match="create_device_mesh_from_config"):
        model.enable_usp()


def test_merged_halves_are_the_whole_with_rows_that_see_nothing():
    q, k, v = torch.randn(3, 2, 8, 3, 16)
    keep = torch.ones(8, 8, dtype=torch.bool)
    keep[0], keep[1, :4], keep[2, 4:] = False, False, False
    halves = [
        attention(q, k[:, part], v[:, part], attn_mask=keep[:, part], return_lse=True)
        for part in (slice(4), slice(4, 8))
    ]
    out, lse = merge_attn_states(*halves[0], *halves[1])
    want_out, want_lse = attention(q, k, v, attn_mask=keep, return_lse=True)
    assert rel_error(out, want_out) <= 1e-6
    assert torch.equal(lse[..., 0], want_lse[..., 0])
    assert rel_error(lse, want_lse) <= 1e-6
