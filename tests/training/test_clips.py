"""Drawn clips: inside the frame, anti-aliased, of the stated size and motion, and the same through a window."""

import math

import pytest
import torch

from training.wan_tiny.clips import MARGIN, SIZE, draw, sample_attributes, sample_scenes
from training.wan_tiny.prompts import grid


@pytest.fixture(scope="module")
def scenes():
    return sample_scenes(torch.tensor(grid())[::5], torch.Generator().manual_seed(0))


def test_no_shape_touches_the_border(scenes):
    _, coverage = draw(scenes)
    inner = slice(int(MARGIN) - 1, SIZE - int(MARGIN) + 1)
    outside = coverage.clone()
    outside[..., inner, inner] = 0
    assert outside.max() == 0


def test_covered_area_is_that_of_the_ideal_shape(scenes):
    _, coverage = draw(scenes)
    area = coverage.sum((1, 3, 4))
    radius = scenes.radius
    unit = torch.tensor([math.pi, 4 * 0.9**2, 1.15**2 * math.sqrt(3)])[scenes.attributes[:, 1]]
    assert ((area / (unit[:, None] * radius**2)) - 1).abs().max() < 0.01


def test_the_centre_moves_as_named(scenes):
    moved = scenes.centre[:, -1] - scenes.centre[:, 0]
    growth = scenes.radius[:, -1] / scenes.radius[:, 0]
    for delta, ratio, (_, _, motion, _) in zip(moved, growth, scenes.attributes.tolist()):
        axis, sign = ((0, -1), (0, 1), (1, -1), (1, 1), (None, 0), (None, 0))[motion]
        if axis is None:
            assert delta.abs().max() == 0
            assert ratio > 1.5 if motion == 4 else ratio < 1 / 1.5
        else:
            assert sign * delta[axis] >= 34
            assert delta[1 - axis] == 0
            assert ratio == 1


def test_a_window_shows_the_same_pixels(scenes):
    corner = torch.tensor([[13.0, 40.0]]).expand(len(scenes.radius), 2)
    whole, _ = draw(scenes)
    window, _ = draw(scenes, corner, 64)
    torch.testing.assert_close(window, whole[..., 40:104, 13:77], atol=2e-4, rtol=0)


def test_a_seed_gives_the_same_clips():
    first, second = (sample_attributes(50, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second)
    assert len(first.unique(dim=0)) > 30
