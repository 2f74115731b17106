"""`QuantizedRows`: what an operator hands to a linear layer in place of a tensor when it has quantised already."""

from typing import NamedTuple

import torch


class QuantizedRows(NamedTuple):
    """A tensor in FP8 with one scale a row: x ≈ values * scales.

    values: [..., K] in FP8, the `rows_dtype` of the layer they meet.  scales: [..., 1] float32, as `quantize_rows`
    gives them. `LinearFP8` takes it as its input, so that quantising costs no pass of its own; `takes_rows` says where.
    """

    values: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """That of the tensor it stands for."""
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """values * scales [..., K] in `dtype`, multiplied in float32 and rounded once."""
        return (self.values.float() * self.scales).to(dtype)
