"""Whether a half-precision result was rounded once."""

import torch


def assert_rounded_once(out: torch.Tensor, wanted: torch.Tensor) -> None:
    """`out` (float16 or bfloat16) is `wanted` rounded once: 97 of 100 elements equal bit for bit, none over a step off.

    The rest is float32 arithmetic, 1e-6 of the largest value, which decides near ties and where terms cancel (the tail
    of gelu). A second rounding on the way changes a quarter of the elements.
    """
    nearest = wanted.to(out.dtype)
    changed = (out != nearest).sum().item()
    assert changed <= max(0.03 * out.numel(), 2), f"{changed} of {out.numel()} elements are not the nearest value"
    wanted = wanted.double()
    limit = torch.finfo(out.dtype).eps * wanted.abs() + 1e-6 * wanted.abs().max()
    worst = ((out.double() - wanted).abs() - limit).max().item()
    assert worst <= 0, f"an element is {worst:.2e} further than one step of {out.dtype} from its value"
