"""The block mask of radial attention (arXiv 2506.19852): a query sees fewer tokens of a frame the farther away it is.

`sparse_attention.MaskMap` asks for it once a shape. The rule is written for token masks of one frame against another;
those are bands |column - row| <= window, so what a block of one holds is counted in closed form, and no token-level
mask is ever made. Shape letters: F frames, T tokens a frame, B tokens a side of a block, N = ceil(tokens / B) blocks.
"""

import functools
import math

import torch

MODEL_TYPES = ("wan", "hunyuan")
BLOCK_SIZES = (64, 128)
# Frame pairs whose halved window would fall below this many tokens are kept only at every so many frames' distance.
_THINNING = 128


def radial_block_mask(
    video_tokens: int,
    num_frame: int,
    seq_len: int | None = None,
    block_size: int = 128,
    decay_factor: float = 1.0,
    model_type: str = "wan",
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Which blocks of queries (rows) see which blocks of keys (columns): bool [N, N], N = ceil(seq_len / block_size).

    The first `video_tokens` of the sequence are `num_frame` frames of equally many tokens, the rest (if `seq_len` is
    larger) text. Blocks from `video_tokens // block_size` on are kept whole as rows and as columns: they hold text, or
    the end of a video that the block size does not divide.
    model_type: "wan" lets every query see the whole first frame, "hunyuan" does not.
    A row may come out empty where a frame is shorter than about 0.6 blocks; `MaskMap` opens such rows.

    The result is cached and shared: do not write to it. Raises ValueError for sizes that do not fit together.
    """
    seq_len = video_tokens if seq_len is None else seq_len
    check_tokens(video_tokens, num_frame, seq_len)
    check_block_size(block_size)
    if model_type not in MODEL_TYPES:
        raise ValueError(f"model_type is {model_type!r}; choose one of {', '.join(MODEL_TYPES)}")
    if not (decay_factor > 0 and math.isfinite(decay_factor)):
        raise ValueError(f"decay_factor is {decay_factor!r}; give a finite number above 0, such as 0.2 to 1.0")
    return _build(video_tokens, num_frame, seq_len, block_size, decay_factor, model_type, torch.device(device))


def frame_window(
    distance: int, tokens_per_frame: int, block_size: int = 128, decay_factor: float = 1.0
) -> tuple[float, bool]:
    """The window in tokens between two frames `distance` apart, and whether such a pair is kept at all.

    The window is a frame up to distance 1; then 2^bits(T) / 2^bits(distance) * decay, at least one block. Pairs whose
    undecayed window is below 128 tokens are thinned to every 128 / window-th distance.
    """
    halved = 2 ** tokens_per_frame.bit_length() / 2 ** distance.bit_length()
    is_kept = halved >= _THINNING or distance % int(_THINNING / halved) == 0
    if distance <= 1:
        return float(tokens_per_frame), is_kept
    return max(halved * decay_factor, float(block_size)), is_kept


def clear_cache() -> None:
    """Forget every mask; they take N x N bytes each, and at most 16 are kept."""
    _build.cache_clear()


@functools.lru_cache(maxsize=16)
def _build(video_tokens, num_frame, seq_len, block_size, decay_factor, model_type, device):
    # A mask cached out of inference mode serves a training step too, which must be able to save it for backward.
    with torch.inference_mode(False):
        blocks = -(-seq_len // block_size)
        size = video_tokens // num_frame
        span = -(-size // block_size)
        start = torch.arange(num_frame, device=device) * size
        first = start // block_size  # the block in which each frame begins
        inside = torch.arange(span, device=device) * block_size - (start % block_size)[:, None]
        low, high = inside.clamp_min(0), (inside + block_size).clamp_max(size)  # [F, span], tokens of the frame
        kept, window = _pairs(num_frame, size, block_size, decay_factor, model_type, device)

        rows, columns = ([t.view(shape) for t in (low, high)] for shape in ((-1, 1, span, 1), (1, -1, 1, span)))
        kept, window = (t.view(num_frame, num_frame, 1, 1) for t in (kept, window))
        seen = _columns_with(1, rows, columns, window)  # [F, F, span, span]
        full = _columns_with(block_size // 3 + 1, rows, columns, window)
        # full / seen > 0.6 in whole numbers.
        chosen = kept & (5 * full > 3 * seen)

        # A frame that is not aligned may touch one block more than `span`; the rule leaves that part out. The last
        # frame may reach beyond the sequence, so the grid is built with room and cut.
        side = max(blocks, (num_frame - 1) * size // block_size + span)
        place = first[:, None] + torch.arange(span, device=device)
        index = place.view(-1, 1, span, 1) * side + place.view(1, -1, 1, span)
        mask = torch.zeros(side * side, dtype=torch.bool, device=device)
        mask[index[chosen]] = True
        mask = mask.view(side, side)[:blocks, :blocks].contiguous()
        mask[video_tokens // block_size :] = True
        mask[:, video_tokens // block_size :] = True
        return mask


def _pairs(num_frame, size, block_size, decay_factor, model_type, device):
    """kept [F, F] and window [F, F] in whole tokens, of query frame by key frame."""
    windows, kept = zip(*(frame_window(d, size, block_size, decay_factor) for d in range(num_frame)))
    frames = torch.arange(num_frame, device=device)
    distance = (frames[:, None] - frames).abs()
    window = torch.tensor([math.floor(w) for w in windows], device=device)[distance]
    kept = torch.tensor(kept, device=device)[distance]
    if model_type == "wan":
        # The attention sink: a window of a whole frame sees all of the first one.
        window[:, 0] = size
        kept[:, 0] = True
    return kept, window


def _columns_with(least, rows, columns, window):
    """How many columns of each block have at least `least` entries of the band |column - row| <= window.

    Column c meets rows max(r0, c - window) up to min(r1, c + window + 1), so the ones that meet `least` of them are
    an interval.
    """
    (r0, r1), (c0, c1) = rows, columns
    begin = torch.maximum(c0, r0 + least - 1 - window)
    end = torch.minimum(c1, r1 - least + window + 1)
    possible = (r1 - r0 >= least) & (2 * window + 1 >= least)
    return torch.where(possible, (end - begin).clamp_min(0), 0)


def check_tokens(video_tokens: int, num_frame: int, seq_len: int) -> None:
    """Raise ValueError unless `seq_len` tokens can hold `num_frame` equal frames that make up `video_tokens`."""
    if num_frame < 1 or video_tokens < 1 or video_tokens % num_frame:
        raise ValueError(
            f"{video_tokens} video tokens are not {num_frame} frames of equally many tokens; give the latent frames "
            "as num_frame and frames x rows x columns as video_token_num"
        )
    if seq_len < video_tokens:
        raise ValueError(
            f"the sequence has {seq_len} tokens and the mask is for {video_tokens} of video; "
            "make the MaskMap for this video's size"
        )


def check_block_size(block_size: int) -> None:
    """Raise ValueError for a block size that no sparse kernel has."""
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size is {block_size!r}; the sparse kernels take 64 or 128")
