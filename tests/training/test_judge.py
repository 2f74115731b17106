"""The judge against drawn truth: right clips pass, each kind of wrong one fails, and blur or noise changes nothing."""

import pytest
import torch
import torch.nn.functional as F

from training.wan_tiny.clips import draw, sample_scenes
from training.wan_tiny.judge import judge
from training.wan_tiny.prompts import grid


def truth(stride: int, offset: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attributes [V, 4], videos [V, 3, F, H, W] and coverage of every `stride`-th clip of the grid."""
    attributes = torch.tensor(grid())[offset::stride]
    video, coverage = draw(sample_scenes(attributes, torch.Generator().manual_seed(offset)))
    return attributes, video, coverage


def to_frames(video: torch.Tensor) -> torch.Tensor:
    return ((video.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 4, 1)


def test_drawn_clips_are_all_right():
    attributes, video, _ = truth(7)
    verdict = judge(to_frames(video))
    assert verdict.right(attributes).all()
    assert verdict.iou.min() > 0.98


def test_the_wrong_shapes_fit_clearly_worse():
    attributes, video, _ = truth(13)
    verdict = judge(to_frames(video))
    others = verdict.shape_iou.scatter(1, attributes[:, 1:2], 0.0)
    assert others.max() < 0.87


@pytest.mark.parametrize("degrade", ["blur", "noise", "quantised"])
def test_slight_damage_changes_no_verdict(degrade):
    attributes, video, _ = truth(19)
    if degrade == "blur":
        video = F.avg_pool3d(video, (1, 3, 3), 1, (0, 1, 1), count_include_pad=False)
    elif degrade == "noise":
        video = video + 0.05 * torch.randn(video.shape, generator=torch.Generator().manual_seed(0))
    else:
        video = (video * 8).round() / 8
    verdict = judge(to_frames(video))
    assert verdict.right(attributes).all()
    assert verdict.iou.mean() > 0.97


def test_each_attribute_asked_wrongly_is_found():
    attributes, video, _ = truth(31)
    verdict = judge(to_frames(video))
    for column, size in enumerate((6, 3, 6, 2)):
        asked = attributes.clone()
        asked[:, column] = (asked[:, column] + 1) % size
        right = verdict.right(asked)
        assert not right[:, column].any()
        assert right.sum(1).eq(3).all()
    asked = attributes.clone()
    asked[:, 3] = -1
    assert verdict.right(asked).all()


def test_a_blob_is_no_shape_and_lowers_the_iou():
    _, video, coverage = truth(54)
    ground = video[:, :, :, :1, :1]
    ragged = (F.interpolate(torch.rand(len(video), 1, 17, 16, 16), (17, 128, 128)) > 0.35).float()
    verdict = judge(to_frames(ground + (video - ground) * ragged * (coverage > 0)))
    assert (verdict.seen[:, 1] == -1).all()
    assert verdict.iou.mean() < 0.85


def test_a_two_pixel_wobble_of_the_outline_costs_more_than_the_limit_allows():
    """The target of 0.93 has to tell clean outlines from wobbly ones."""
    _, video, _ = truth(43)
    rows = torch.arange(128)
    shift = (2.5 * torch.sin(rows / 3)).round().long()
    columns = (rows[None, :] + shift[:, None]).clamp(0, 127)
    wobbly = video.gather(4, columns.expand_as(video))
    assert judge(to_frames(wobbly)).iou.mean() < 0.95 < judge(to_frames(video)).iou.mean()


@pytest.mark.parametrize("case", ["still", "reversed", "teleport", "empty", "colour change", "ground change"])
def test_wrong_clips_by_hand(case):
    attributes, video, _ = truth(74, offset=2)  # moving shapes
    assert (attributes[:, 2] < 4).all()
    if case == "still":
        video = video[:, :, :1].expand_as(video)
    elif case == "reversed":
        video = video.flip(2)
    elif case == "teleport":
        video = torch.cat((video[:, :, :1].expand(-1, -1, 8, -1, -1), video[:, :, -1:].expand(-1, -1, 9, -1, -1)), 2)
    elif case == "empty":
        video = torch.where(torch.arange(17).view(1, 1, -1, 1, 1) == 9, video[:, :, :, :1, :1], video)
    elif case == "colour change":
        video = torch.cat((video[:, :, :8], video.roll(1, dims=1)[:, :, 8:]), dim=2)
    else:
        video = torch.cat((video[:, :, :8], -video[:, :, 8:]), dim=2)
    assert not judge(to_frames(video)).right(attributes).all(1).any()
