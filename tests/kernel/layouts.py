"""Tensors of [2, 3, 2, width] values that lie in memory in every way a caller may leave them."""

import torch


def strided(name: str, width: int, dtype: torch.dtype, device, seed: int = 0) -> torch.Tensor:
    """A view with the strides that `name` says; its values are standard normal."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

    return {
        "contiguous": lambda: randn(2, 3, 2, width),
        "transposed heads": lambda: randn(2, 2, 3, width).transpose(1, 2),
        "transposed width": lambda: randn(2, 3, width, 2).transpose(2, 3),
        "every second column": lambda: randn(2, 3, 2, 2 * width)[..., ::2],
        "every third row": lambda: randn(2, 9, 2, width)[:, ::3],
        "one of q, k, v": lambda: randn(2, 3, 3, 2, width).unbind(2)[1],
        "expanded": lambda: randn(1, 3, 2, width).expand(2, -1, -1, -1),
        "offset": lambda: randn(2, 3, 2, width + 3)[..., 3:],
    }[name]()


LAYOUTS = (
    "contiguous",
    "transposed heads",
    "transposed width",
    "every second column",
    "every third row",
    "one of q, k, v",
    "expanded",
    "offset",
)
