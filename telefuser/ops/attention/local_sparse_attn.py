"""The block mask of local attention: a token sees those near it in the video, so many frames, rows and columns away.

`sparse_attention.MaskMap` asks for it once a shape. Shape letters: F H W the grid of tokens, N blocks.
"""

import functools

import torch

from telefuser.ops.attention.radial_attention_core import check_block_size, check_tokens


def local_block_mask(
    grid: tuple[int, int, int],
    seq_len: int | None = None,
    block_size: int = 128,
    window: int | tuple[int, int, int] = 6,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Which blocks of queries (rows) see which blocks of keys (columns): bool [N, N], N = ceil(seq_len / block_size).

    grid: (frames, rows, columns) of the video's tokens, which come first in the sequence, columns fastest; what follows
        them up to `seq_len` is text, which sees and is seen by everything.
    window: how far a token sees to each side, in (frames, rows, columns); one number stands for all three.
    A block is kept when any of its pairs of tokens lies within the window. Blocks follow the order of the sequence, so
    one that is longer than a row of tokens spans all columns: there the columns' window narrows nothing.

    The result is cached and shared: do not write to it. Raises ValueError for sizes that do not fit together.
    """
    grid = check_grid(grid)
    video_tokens = grid[0] * grid[1] * grid[2]
    seq_len = video_tokens if seq_len is None else seq_len
    check_tokens(video_tokens, grid[0], seq_len)
    check_block_size(block_size)
    window = (window,) * 3 if isinstance(window, int) else tuple(window)
    if len(window) != 3 or min(window) < 0:
        raise ValueError(f"the local window is {window!r}; give (frames, rows, columns) of at least 0 each")
    return _build(grid, seq_len, block_size, window, torch.device(device))


def check_grid(grid: tuple[int, int, int]) -> tuple[int, int, int]:
    """`grid` as three positive numbers, or ValueError."""
    grid = tuple(grid)
    if len(grid) != 3 or not all(isinstance(size, int) and size > 0 for size in grid):
        raise ValueError(f"grid is {grid!r}; give (frames, rows, columns) of the video's tokens")
    return grid


def clear_cache() -> None:
    """Forget every mask; they take N x N bytes each, and at most 16 are kept."""
    _build.cache_clear()


@functools.lru_cache(maxsize=16)
def _build(grid, seq_len, block_size, window, device):
    # A mask cached out of inference mode serves a training step too, which must be able to save it for backward.
    with torch.inference_mode(False):
        video_tokens = grid[0] * grid[1] * grid[2]
        near = _near(grid, video_tokens, block_size, window, device)
        blocks = -(-seq_len // block_size)
        mask = torch.zeros(blocks, blocks, dtype=torch.bool, device=device)
        mask[: len(near), : len(near)] = near
        if seq_len > video_tokens:
            mask[video_tokens // block_size :] = True
            mask[:, video_tokens // block_size :] = True
        return mask


def _near(grid, video_tokens, block_size, window, device):
    """[Nv, Nv] over the blocks with video tokens. A block is a few segments, each a piece of one row of tokens."""
    _, height, width = grid
    start = torch.arange(0, video_tokens, block_size, device=device)
    end = (start + block_size).clamp_max(video_tokens)
    count = (block_size + width - 2) // width + 1
    row = (start // width)[:, None] + torch.arange(count, device=device)  # [Nv, segments], rows counted over all frames
    low = (start[:, None] - row * width).clamp_min(0)
    high = (end[:, None] - row * width).clamp_max(width)
    frame, line, is_there = row // height, row % height, high > low
    near = torch.zeros(len(start), len(start), dtype=torch.bool, device=device)
    for i in range(count):
        within = is_there[:, i, None, None] & is_there
        within &= (frame[:, i, None, None] - frame).abs() <= window[0]
        within &= (line[:, i, None, None] - line).abs() <= window[1]
        within &= low - (high[:, i, None, None] - 1) <= window[2]
        within &= low[:, i, None, None] - (high - 1) <= window[2]
        near |= within.any(dim=-1)
    return near
