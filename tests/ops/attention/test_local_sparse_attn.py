"""The local block mask against its rule written out token by token."""

import itertools

import pytest
import torch

from telefuser.ops.attention.local_sparse_attn import local_block_mask


def by_tokens(grid, seq_len, block, window):
    """A block is kept when one of its pairs of tokens is near enough; text is near everything."""
    frames, rows, columns = grid
    video = frames * rows * columns
    place = torch.cartesian_prod(torch.arange(frames), torch.arange(rows), torch.arange(columns))
    near = ((place[:, None] - place).abs() <= torch.tensor(window)).all(-1)
    blocks = -(-seq_len // block)
    padded = torch.zeros(blocks * block, blocks * block, dtype=torch.bool)
    padded[:seq_len, :seq_len] = True
    padded[:video, :video] = near
    return padded.view(blocks, block, blocks, block).any(3).any(1)


CASES = [
    ((4, 8, 10), 320, 64, (1, 2, 3)),  # B74: 4 frames of 80 tokens
    ((4, 8, 10), 320, 128, (1, 2, 3)),
    ((3, 5, 70), 1050, 64, (0, 1, 5)),
    ((2, 3, 200), 1200, 64, (1, 0, 20)),
    ((5, 7, 9), 315 + 77, 64, (1, 1, 1)),
    ((6, 4, 4), 96, 64, (0, 0, 0)),
    ((20, 8, 1), 160, 64, (2, 1, 0)),
    ((2, 2, 128), 512, 128, (1, 1, 100)),
    ((1, 1, 500), 500, 64, (6, 6, 6)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_mask_equals_the_rule_token_by_token(case):
    grid, seq_len, block, window = case
    mask = local_block_mask(grid, seq_len, block, window)
    assert torch.equal(mask, by_tokens(*case))
    assert mask.diagonal().all()


def test_one_number_is_the_window_on_all_three_axes_and_six_by_default():
    grid = (12, 9, 16)
    assert torch.equal(local_block_mask(grid), local_block_mask(grid, window=(6, 6, 6)))
    assert not local_block_mask(grid).all()


def test_a_larger_window_only_adds_blocks():
    masks = [local_block_mask((9, 10, 12), None, 64, w) for w in (0, 1, 2, 4, 8)]
    for smaller, larger in itertools.pairwise(masks):
        assert not (smaller & ~larger).any()
        assert smaller.sum() < larger.sum()
    assert masks[-1].all()


def test_fine_blocks_cover_no_more_tokens_than_coarse_ones():
    """B72."""
    fine, coarse = (local_block_mask((4, 8, 20), None, b, 1) for b in (64, 128))
    assert not (fine & ~coarse.repeat_interleave(2, 0).repeat_interleave(2, 1)).any()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (((4, 8, 20), None, 96), "96; the sparse kernels take 64 or 128"),
        (((4, 8, 20), None, 0), "0; the sparse kernels take 64 or 128"),
        (((4, 160),), "grid is"),
        (((4, 8, 0),), "grid is"),
        (((4, 8, 20), 100), "100 tokens and the mask is for 640"),
        (((4, 8, 20), None, 64, (1, 2)), "local window is"),
        (((4, 8, 20), None, 64, -1), "local window is"),
    ],
)
def test_wrong_arguments_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        local_block_mask(*arguments)
