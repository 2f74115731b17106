"""Synthetic clips drawn on the device: one anti-aliased shape, moving or changing size on a plain background.

Shapes are upright and described by signed distances in pixels, so a whole batch is a few elementwise operations.
"""

import functools
import math
from dataclasses import dataclass

import torch

from training.wan_tiny.prompts import BACKGROUNDS, COLOURS, MOTIONS, SHAPES

SIZE = 128
NUM_FRAMES = 17

# 8-bit RGB. Closest pair: yellow and orange, 80 apart; every colour is at least 183 away from both backgrounds.
PALETTE = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (40, 80, 220),
    "yellow": (245, 200, 30),
    "purple": (150, 50, 190),
    "orange": (245, 125, 20),
}
GROUNDS = {"black": (0, 0, 0), "white": (255, 255, 255)}

# Half the width and half the height of each shape's bounding box, in units of its radius. The triangle is equilateral.
SQUARE_HALF = 0.9
TRIANGLE_HALF_WIDTH = 1.15
TRIANGLE_HALF_HEIGHT = TRIANGLE_HALF_WIDTH * math.sqrt(3) / 2
HALF_EXTENTS = {
    "circle": (1.0, 1.0),
    "square": (SQUARE_HALF, SQUARE_HALF),
    "triangle": (TRIANGLE_HALF_WIDTH, TRIANGLE_HALF_HEIGHT),
}

# Pixels at 128x128. A travel of 34 over 17 frames or half the radius more cannot be taken for standing still.
MOVING_RADIUS = (24.0, 30.0)
TRAVEL = (34.0, 44.0)
SMALL_RADIUS = (17.0, 20.0)
LARGE_RADIUS = (31.0, 35.0)
MARGIN = 3.0
JITTER = 18.0


@dataclass
class Scenes:
    """A batch of clips before drawing: `attributes` [B, 4] long (colour, shape, motion, background), `centre` [B, F, 2]
    (x, y) of the bounding box and `radius` [B, F], both in pixels of the 128x128 frame."""

    attributes: torch.Tensor
    centre: torch.Tensor
    radius: torch.Tensor


def sample_attributes(count: int, generator: torch.Generator) -> torch.Tensor:
    """`count` random clips as [B, 4] long on the generator's device."""
    sizes = (len(COLOURS), len(SHAPES), len(MOTIONS), len(BACKGROUNDS))
    columns = [torch.randint(size, (count,), generator=generator, device=generator.device) for size in sizes]
    return torch.stack(columns, dim=1)


def sample_scenes(attributes: torch.Tensor, generator: torch.Generator, num_frames: int = NUM_FRAMES) -> Scenes:
    """Draw sizes, places and speeds for the clips of `attributes` [B, 4]; the shape never leaves the frame."""
    device = attributes.device
    u = torch.rand(len(attributes), 6, generator=generator, device=device)
    motion, shape = attributes[:, 2], attributes[:, 1]
    time = torch.linspace(0, 1, num_frames, device=device)

    def between(bounds: tuple[float, float], column: int) -> torch.Tensor:
        return bounds[0] + (bounds[1] - bounds[0]) * u[:, column]

    moving, small, large = between(MOVING_RADIUS, 0), between(SMALL_RADIUS, 0), between(LARGE_RADIUS, 1)
    growing, shrinking = motion == 4, motion == 5
    first = torch.where(growing, small, torch.where(shrinking, large, moving))
    last = torch.where(growing, large, torch.where(shrinking, small, moving))
    radius = first[:, None] + (last - first)[:, None] * time  # [B, F]

    # left, right, up, down, growing, shrinking; y grows downwards.
    directions = ((-1.0, 0.0), (1.0, 0.0), (0.0, -1.0), (0.0, 1.0), (0.0, 0.0), (0.0, 0.0))
    travel = _constant(directions, device)[motion] * between(TRAVEL, 2)[:, None]  # [B, 2]
    extents = _constant(tuple(HALF_EXTENTS[name] for name in SHAPES), device)[shape]  # [B, 2]
    room = SIZE / 2 - MARGIN - extents * torch.maximum(first, last)[:, None] - travel.abs() / 2
    offset = (2 * u[:, 3:5] - 1) * room.clamp(0, JITTER)
    centre = SIZE / 2 + offset[:, None] + travel[:, None] * (time - 0.5)[None, :, None]  # [B, F, 2]
    return Scenes(attributes, centre, radius)


def draw(scenes: Scenes, corner: torch.Tensor | None = None, size: int = SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    """Render the `size` x `size` window whose top-left pixel is `corner` [B, 2] (x, y; default 0, the whole frame).

    Returns video [B, 3, F, size, size] fp32 in [-1, 1] and the shape's coverage [B, 1, F, size, size] in [0, 1].
    """
    attributes, radius = scenes.attributes, scenes.radius
    device = radius.device
    pixel = torch.arange(size, device=device, dtype=torch.float32) + 0.5
    origin = scenes.centre if corner is None else scenes.centre - corner[:, None]
    x = (pixel - origin[..., 0, None])[:, :, None, :]  # [B, F, 1, W]
    y = (pixel - origin[..., 1, None])[:, :, :, None]  # [B, F, H, 1]
    distance = _distance(x, y, radius[..., None, None], attributes[:, 1])
    coverage = (0.5 - distance).clamp(0, 1).unsqueeze(1)  # [B, 1, F, H, W]
    palette = _constant(tuple(PALETTE[name] for name in COLOURS), device) / 127.5 - 1
    grounds = _constant(tuple(GROUNDS[name] for name in BACKGROUNDS), device) / 127.5 - 1
    colour = palette[attributes[:, 0]][..., None, None, None]
    ground = grounds[attributes[:, 3]][..., None, None, None]
    return ground + (colour - ground) * coverage, coverage


@functools.cache
def _constant(values: tuple, device: torch.device) -> torch.Tensor:
    """A table on the device, copied once: each copy would make the host wait for the training step in flight."""
    return torch.tensor(values, device=device)


def _distance(x: torch.Tensor, y: torch.Tensor, radius: torch.Tensor, shape: torch.Tensor) -> torch.Tensor:
    """Signed distance in pixels to the outline, negative inside; polygons by their farthest side: sharp corners."""
    circle = torch.sqrt(x * x + y * y) - radius
    square = torch.maximum(x.abs(), y.abs()) - SQUARE_HALF * radius
    half_height = TRIANGLE_HALF_HEIGHT * radius
    # The slanted sides of an equilateral triangle have the outward normals (±sqrt(3)/2, -1/2) and meet at the apex,
    # (0, -half_height).
    slanted = x.abs() * (math.sqrt(3) / 2) - (y + half_height) / 2
    triangle = torch.maximum(slanted, y - half_height)
    index = shape[:, None, None, None]
    return torch.where(index == 0, circle, torch.where(index == 1, square, triangle))
