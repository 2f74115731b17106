"""Measures in the pixels what a clip shows: colour, shape, background, motion, and how clean the outline is.

Used by `evaluate.py` on generated videos. It knows the palette and ideal geometry, and nothing of any model.
Letters: V videos, F frames, H W pixels, K candidate fits.
"""

from dataclasses import dataclass

import torch

from training.wan_tiny.clips import GROUNDS, PALETTE, SQUARE_HALF, TRIANGLE_HALF_HEIGHT, TRIANGLE_HALF_WIDTH
from training.wan_tiny.prompts import BACKGROUNDS, COLOURS, SHAPES, Attributes

ATTRIBUTE_NAMES = Attributes._fields

# RGB distances, with each channel in [0, 1]. The palette's closest pair is 0.31 apart.
MAX_COLOUR_ERROR = 0.2
MAX_GROUND_ERROR = 0.2
SHAPE_CONTRAST = 0.3
# Pixels and natural logarithms over the whole clip; true clips travel 34 to 44 or scale by a factor of 1.55 to 2.06.
MIN_TRAVEL = 20.0
MAX_SIDEWAYS = 8.0
MIN_GROWTH = 0.3
MAX_GROWTH_WHILE_MOVING = 0.2
MAX_JITTER = 3.0
MIN_AREA = 100.0
# The best-fitting circle covers 0.85 of a square's union with it, so a lower mean IoU does not tell the shapes apart.
MIN_SHAPE_IOU = 0.87


@dataclass
class Verdict:
    """What was seen: `seen` [V, 4] long in the order of `Attributes` (-1: unclear), `iou` [V, F] with the ideal shape
    that fits that video best, `shape_iou` [V, 3] mean over frames for each ideal shape."""

    seen: torch.Tensor
    iou: torch.Tensor
    shape_iou: torch.Tensor

    def right(self, asked: torch.Tensor) -> torch.Tensor:
        """Which attributes are as asked ([V, 4] long; -1: not said, any clear answer is right): [V, 4] bool."""
        return ((self.seen == asked) | (asked < 0)) & (self.seen >= 0)


def judge(frames: torch.Tensor, chunk: int = 16) -> Verdict:
    """Judge `frames` [V, F, H, W, 3] uint8; the arithmetic runs on their device, `chunk` videos at a time."""
    parts = [_judge(part) for part in frames.split(chunk)]
    return Verdict(*(torch.cat([getattr(part, name) for part in parts]) for name in ("seen", "iou", "shape_iou")))


def _judge(frames: torch.Tensor) -> Verdict:
    pixels = frames.float() / 255
    ground, background = _background(pixels)
    contrast = (pixels - ground[:, None, None, None]).norm(dim=-1)  # [V, F, H, W]
    rough = _masked_mean(pixels, contrast > SHAPE_CONTRAST)
    strength = (rough - ground[:, None]).norm(dim=-1)[..., None, None]
    mask = contrast > (0.5 * strength).clamp_min(SHAPE_CONTRAST / 2)
    colour = _colour(_masked_mean(pixels, contrast > (0.8 * strength).clamp_min(SHAPE_CONTRAST / 2)))
    area = mask.sum((2, 3)).float()  # [V, F]
    present = (area >= MIN_AREA).all(dim=1)
    iou, shape_iou, shape = _shape(mask, area)
    motion = _motion(mask, area)
    seen = torch.stack((colour, shape, motion, background), dim=1)
    return Verdict(torch.where(present[:, None], seen, -1), torch.where(area >= MIN_AREA, iou, 0.0), shape_iou)


def _nearest(colour: torch.Tensor, palette: torch.Tensor, limit: float) -> torch.Tensor:
    """Index of the palette entry [P, 3] nearest to `colour` [..., 3], or -1 where none is within `limit`."""
    distance, index = torch.cdist(colour.reshape(-1, 3), palette).min(dim=-1)
    return torch.where(distance <= limit, index, -1).view(colour.shape[:-1])


def _masked_mean(pixels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean colour [V, F, 3] of `pixels` [V, F, H, W, 3] where `mask` [V, F, H, W]; black where it is empty."""
    total = torch.einsum("vfhwc,vfhw->vfc", pixels, mask.float())
    return total / mask.sum((2, 3)).clamp_min(1)[..., None]


def _background(pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The border's median colour [V, 3] and which background it is [V]; every frame must agree."""
    border = torch.cat((pixels[:, :, :2].flatten(2, 3), pixels[:, :, -2:].flatten(2, 3)), dim=2)
    border = torch.cat((border, pixels[:, :, :, :2].flatten(2, 3), pixels[:, :, :, -2:].flatten(2, 3)), dim=2)
    of_frames = border.median(dim=2).values  # [V, F, 3]
    grounds = torch.tensor([GROUNDS[name] for name in BACKGROUNDS], device=pixels.device) / 255
    index = _nearest(of_frames, grounds, MAX_GROUND_ERROR)
    agreed = (index == index[:, :1]).all(dim=1)
    return of_frames.mean(dim=1), torch.where(agreed, index[:, 0], -1)


def _colour(of_frames: torch.Tensor) -> torch.Tensor:
    """Palette index [V] of the shape's mean colour [V, F, 3]; -1 where a frame is nearer to another or far from all."""
    palette = torch.tensor([PALETTE[name] for name in COLOURS], device=of_frames.device) / 255
    index = _nearest(of_frames, palette, MAX_COLOUR_ERROR)
    agreed = (index == index[:, :1]).all(dim=1)
    return torch.where(agreed, index[:, 0], -1)


def _moments(mask: torch.Tensor, area: torch.Tensor) -> torch.Tensor:
    """Centroid (x, y) [V, F, 2] of the mask in pixels."""
    height, width = mask.shape[-2:]
    x = (mask.sum(2) * (torch.arange(width, device=mask.device) + 0.5)).sum(-1)
    y = (mask.sum(3) * (torch.arange(height, device=mask.device) + 0.5)).sum(-1)
    return torch.stack((x, y), dim=-1) / area.clamp_min(1)[..., None]


def _motion(mask: torch.Tensor, area: torch.Tensor) -> torch.Tensor:
    """Motion index [V] from straight-line fits of centroid and log radius over time; -1 where it is none of the six."""
    frames = area.shape[1]
    time = torch.linspace(-0.5, 0.5, frames, device=area.device)
    track = torch.cat((_moments(mask, area), 0.5 * area.clamp_min(1).log()[..., None]), dim=-1)  # [V, F, 3]
    track = track - track.mean(dim=1, keepdim=True)
    slope = (track * time[:, None]).sum(1) / time.square().sum()  # [V, 3]: change over the clip
    jitter = (track - slope[:, None] * time[:, None])[..., :2].square().sum(-1).mean(1).sqrt()
    dx, dy, growth = slope.unbind(-1)
    sliding = (growth.abs() <= MAX_GROWTH_WHILE_MOVING) & (jitter <= MAX_JITTER)
    sideways = sliding & (dx.abs() >= MIN_TRAVEL) & (dy.abs() <= MAX_SIDEWAYS)
    vertical = sliding & (dy.abs() >= MIN_TRAVEL) & (dx.abs() <= MAX_SIDEWAYS)
    scaling = (growth.abs() >= MIN_GROWTH) & (slope[:, :2].norm(dim=-1) <= MAX_SIDEWAYS) & (jitter <= MAX_JITTER)
    motion = torch.full_like(dx, -1, dtype=torch.long)
    motion = torch.where(sideways, (dx > 0).long(), motion)
    motion = torch.where(vertical, 2 + (dy > 0).long(), motion)
    return torch.where(scaling, 4 + (growth < 0).long(), motion)


def _shape(mask: torch.Tensor, area: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """IoU [V, F] with the video's best shape, mean IoU [V, 3] with each, and the best's index [V] (-1: none fits)."""
    videos, frames = area.shape
    flat = mask.flatten(0, 1)
    prefix = torch.nn.functional.pad(flat.int().cumsum(-1, dtype=torch.int32), (1, 0))  # [V*F, H, W+1]
    centre = _moments(mask, area).flatten(0, 1)
    ious = torch.stack([_best_fit(prefix, area.flatten(), centre, name) for name in SHAPES], dim=-1)
    ious = ious.view(videos, frames, len(SHAPES))
    shape_iou = ious.mean(dim=1)
    best, index = shape_iou.max(dim=-1)
    return (
        ious.gather(2, index[:, None, None].expand(-1, frames, 1))[..., 0],
        shape_iou,
        torch.where(best >= MIN_SHAPE_IOU, index, -1),
    )


def _best_fit(prefix: torch.Tensor, area: torch.Tensor, centroid: torch.Tensor, shape: str) -> torch.Tensor:
    """IoU [N] of each mask with the best-placed and best-sized ideal `shape`, searched from the centroid and area."""
    radius = (area.clamp_min(1) / _rows_area(shape)).sqrt()
    x, y = centroid.unbind(-1)
    if shape == "triangle":
        # The middle of its bounding box lies above the centroid by a sixth of the height.
        y = y - TRIANGLE_HALF_HEIGHT * radius / 3
    fit = torch.stack((x, y, radius), dim=-1)
    ticks = torch.tensor([-1.0, 0.0, 1.0], device=fit.device)
    moves = torch.cartesian_prod(ticks, ticks, ticks)  # [K=27, 3]
    # The pixel-exact IoU is piecewise constant, so it is searched, not differentiated; 0.15 px are 1 % of the area.
    for step in (2.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.15):
        candidates = fit[:, None] + step * moves  # [N, K, 3]
        iou, choice = _row_iou(prefix, area, candidates, shape).max(dim=1)
        fit = candidates.gather(1, choice[:, None, None].expand(-1, 1, 3))[:, 0]
    return iou


def _rows_area(shape: str) -> float:
    """Area of the ideal shape of radius 1."""
    return {
        "circle": torch.pi,
        "square": 4 * SQUARE_HALF**2,
        "triangle": 2 * TRIANGLE_HALF_WIDTH * TRIANGLE_HALF_HEIGHT,
    }[shape]


def _row_iou(prefix: torch.Tensor, area: torch.Tensor, fit: torch.Tensor, shape: str) -> torch.Tensor:
    """Pixel-exact IoU [N, K] of masks with ideal shapes `fit` [N, K, 3] (x, y, radius).

    Every ideal shape covers one run of pixels a row, so running sums of the mask's rows (`prefix` [N, H, W+1]) give the
    intersection without drawing anything: 128 look-ups instead of 16384 pixels.
    """
    count, height, columns = prefix.shape
    x, y, radius = fit.unsqueeze(-1).unbind(-2)  # [N, K, 1]
    dy = torch.arange(height, device=fit.device) + 0.5 - y  # [N, K, H]
    if shape == "circle":
        square = radius.square() - dy.square()
        half, inside = square.clamp_min(0).sqrt(), square > 0
    elif shape == "square":
        half, inside = (SQUARE_HALF * radius).expand_as(dy), dy.abs() <= SQUARE_HALF * radius
    else:
        depth = dy + TRIANGLE_HALF_HEIGHT * radius
        half = depth * (TRIANGLE_HALF_WIDTH / (2 * TRIANGLE_HALF_HEIGHT))
        inside = (depth >= 0) & (dy <= TRIANGLE_HALF_HEIGHT * radius)
    first = (x - half - 0.5).ceil().clamp(0, columns - 1)
    past = torch.maximum((x + half - 0.5).floor().clamp(-1, columns - 2) + 1, first)
    ideal = torch.where(inside, past - first, 0.0).sum(-1)
    rows = torch.arange(height, device=fit.device) * columns
    flat = prefix.view(count, -1)
    covered = flat.gather(1, (rows + past.long()).flatten(1)) - flat.gather(1, (rows + first.long()).flatten(1))
    overlap = torch.where(inside, covered.view(inside.shape), 0).sum(-1).float()
    return overlap / (ideal + area[:, None] - overlap).clamp_min(1)
