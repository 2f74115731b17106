"""The radial block mask against its rule written out token by token, and what must hold for every setting."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from telefuser.ops.attention.radial_attention_core import clear_cache, frame_window, radial_block_mask


def by_tokens(num_frame, size, block, decay, model, seq_len):
    """The published rule with a token mask for each ordered pair of frames; slow, and the definition."""
    video, blocks, span = num_frame * size, -(-seq_len // block), -(-size // block)
    mask = torch.zeros(blocks + span, blocks + span, dtype=torch.bool)
    column, row = torch.arange(size), torch.arange(size)[:, None]
    for i in range(num_frame):
        for j in range(num_frame):
            window, kept = frame_window(abs(i - j), size, block, decay)
            pair = ((column - row).abs() <= window) & kept
            if j == 0 and model == "wan":
                pair = torch.ones_like(pair)
            area = torch.zeros((span + 1) * block, (span + 1) * block, dtype=torch.bool)
            top, left = i * size % block, j * size % block
            area[top : top + size, left : left + size] = pair
            area = area[: span * block, : span * block].view(span, block, span, block)
            count = area.sum(dim=1)  # [span, span, block] entries a column
            share = (count > block / 3).sum(-1) / ((count > 0).sum(-1) + 1e-9)
            y, x = i * size // block, j * size // block
            mask[y : y + span, x : x + span] |= share > 0.6
    mask = mask[:blocks, :blocks]
    mask[video // block :] = True
    mask[:, video // block :] = True
    return mask


CASES = [
    (4, 80, 64, 1.0, "wan", 320),  # B74
    (4, 80, 128, 1.0, "wan", 320),
    (5, 100, 64, 0.5, "hunyuan", 531),
    (7, 130, 64, 0.3, "wan", 910),
    (6, 256, 128, 0.7, "hunyuan", 1536),
    (9, 333, 64, 0.2, "wan", 3000),
    (3, 61, 128, 1.0, "wan", 200),
    (1, 100, 64, 1.0, "hunyuan", 100),
    (12, 33, 64, 2.0, "hunyuan", 396),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_mask_equals_the_rule_token_by_token(case):
    """B74: also for sizes that the block does not divide, text behind the video, and the last frame cut off."""
    num_frame, size, block, decay, model, seq_len = case
    mask = radial_block_mask(num_frame * size, num_frame, seq_len, block, decay, model)
    assert torch.equal(mask, by_tokens(*case))


def test_a_length_that_the_block_does_not_divide_is_rounded_up():
    """480p, 81 frames: 32,760 tokens have the mask of 32,768, whose last block is then a full one."""
    odd = radial_block_mask(32760, 21, decay_factor=0.2)
    assert torch.equal(odd, radial_block_mask(32760, 21, 32768, decay_factor=0.2))
    assert odd[-1].all()
    assert odd[:, -1].all()


@pytest.mark.parametrize(("frames", "size", "block"), [(4, 80, 64), (21, 1560, 128), (12, 512, 64), (9, 200, 128)])
@pytest.mark.parametrize("model", ["wan", "hunyuan"])
def test_a_larger_decay_factor_only_adds_blocks(frames, size, block, model):
    """B74."""
    masks = [radial_block_mask(frames * size, frames, None, block, d, model) for d in (0.05, 0.2, 0.5, 0.8, 1.0, 3.0)]
    for smaller, larger in itertools.pairwise(masks):
        assert not (smaller & ~larger).any()
    assert masks[0].sum() <= masks[-1].sum()
    assert masks[-1].any(dim=1).all()


def test_density_changes_with_the_decay_factor():
    low, high = (radial_block_mask(21 * 1560, 21, decay_factor=d).float().mean() for d in (0.2, 1.0))
    assert 0.34 < low < 0.345
    assert 0.445 < high < 0.455


def test_the_first_frame_is_a_sink_for_wan_only():
    wan, hunyuan = (radial_block_mask(12 * 512, 12, model_type=m, decay_factor=0.2) for m in ("wan", "hunyuan"))
    assert wan[:, :4].all()
    assert not hunyuan[:, :4].all()
    assert torch.equal(wan[:, 4:], hunyuan[:, 4:])


def test_fine_blocks_cover_no_more_tokens_than_coarse_ones():
    """B72."""
    fine, coarse = (radial_block_mask(640, 4, None, b, decay_factor=1.0) for b in (64, 128))
    assert not (fine & ~coarse.repeat_interleave(2, 0).repeat_interleave(2, 1)).any()


@pytest.mark.parametrize("block", [96, 0, -64, 256])
def test_other_block_sizes_are_refused(block):
    """B72."""
    with pytest.raises(ValueError, match=f"{block}; the sparse kernels take 64 or 128"):
        radial_block_mask(640, 4, None, block)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((641, 4), "641 video tokens are not 4 frames"),
        ((640, 0), "not 0 frames"),
        ((640, 4, 600), "600 tokens and the mask is for 640"),
        ((640, 4, None, 64, 0.0), "decay_factor is 0.0"),
        ((640, 4, None, 64, float("nan")), "decay_factor is nan"),
        ((640, 4, None, 64, 1.0, "flux"), "'flux'; choose one of wan, hunyuan"),
    ],
)
def test_wrong_arguments_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        radial_block_mask(*arguments)


def test_cache_is_bounded_and_keeps_shapes_apart():
    clear_cache()
    first = radial_block_mask(640, 4)
    assert radial_block_mask(640, 4) is first
    for frames in range(1, 40):
        assert len(radial_block_mask(128 * frames, frames)) == frames
    assert radial_block_mask(640, 4) is not first
    assert torch.equal(radial_block_mask(640, 4), first)


def test_a_mask_made_in_inference_mode_serves_training():
    clear_cache()
    with torch.inference_mode():
        mask = radial_block_mask(640, 4)
    scores = torch.randn(len(mask), len(mask), requires_grad=True)
    scores.masked_fill(mask, 0.0).sum().backward()
    assert scores.grad[mask].eq(0).all()


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        self.count += 1
        return operator(*arguments, **(options or {}))


def test_building_costs_as_many_operators_for_forty_frames_as_for_five():
    """No loop over pairs of frames: on a GPU each operator is a launch of about 5 us, and a transfer waits."""
    counts = []
    for frames in (5, 40):
        clear_cache()
        with Operators() as made:
            radial_block_mask(frames * 300, frames, decay_factor=0.2)
        counts.append(made.count)
    assert counts[0] == counts[1] <= 100
