"""Gradient compression as in MXNet: gradients are rounded to fewer bits, and the rounding errors
are added to later gradients."""

from __future__ import annotations

import torch
from torch import Tensor


class TwoBit:
    """Rounds each element to -threshold, 0 or threshold, and adds the rounding error to the next
    gradient."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._rests: dict[str, Tensor] = {}

    def packed(self, key: str, gradient: Tensor) -> Tensor:
        """Return the rounded gradient, with four elements in each byte."""
        total = gradient + self._rests[key] if key in self._rests else gradient.clone()
        codes = (total >= self._threshold).to(torch.uint8)
        codes += 2 * (total <= -self._threshold).to(torch.uint8)
        self._rests[key] = total - _values_of(codes, self._threshold)
        flat = codes.reshape(-1)
        padded = torch.cat([flat, flat.new_zeros(-len(flat) % 4)]).view(-1, 4)
        return padded[:, 0] | padded[:, 1] << 2 | padded[:, 2] << 4 | padded[:, 3] << 6


def unpacked_two_bit(packed: Tensor, shape: torch.Size, threshold: float) -> Tensor:
    """Unpack a gradient that `TwoBit.packed` returned."""
    codes = torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], dim=1).reshape(-1)
    return _values_of(codes[: shape.numel()], threshold).view(shape)


def _values_of(codes: Tensor, threshold: float) -> Tensor:
    return threshold * ((codes == 1).float() - (codes == 2).float())
