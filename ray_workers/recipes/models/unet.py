"""U-Net: (N, channels, height, width) in 0..1 -> (N, num_classes, height, width) logits.

Follows Ronneberger et al. 2015 (arXiv:1505.04597), with two changes: the convolutions use padding,
so that the mask is as large as the image, and they are followed by GroupNorm, for the reason given
in `images`.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from dray import spec
from ray_workers.recipes.models.images import Shape, convolution
from ray_workers.training.core.errors import DataError


class Unet(nn.Module):
    """U-Net for images of any size. If a side can't be halved `depth` times, it is padded with
    copies of the last row or column, and the predictions for the padding are discarded."""

    def __init__(self, options: spec.Unet, shape: Shape, num_classes: int) -> None:
        """`shape` is the shape of the training images. Raises DataError if the images are too
        small."""
        super().__init__()
        channels, height, width = shape
        if min(height, width) < options.least_side:
            raise DataError(
                f"images of {height} x {width} pixels are too small for a unet of depth "
                f"{options.depth}, which requires at least {options.least_side} x "
                f"{options.least_side}"
            )
        widths = [options.width * 2**level for level in range(options.depth + 1)]
        self.down = nn.ModuleList(
            _twice(inputs, outputs)
            for inputs, outputs in zip([channels, *widths], widths, strict=False)
        )
        self.dropout = nn.Dropout(options.dropout)
        self.up = nn.ModuleList(Up(outputs) for outputs in reversed(widths[:-1]))
        self.head = nn.Conv2d(options.width, num_classes, kernel_size=1)
        self._step = 2**options.depth

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        filling = (0, -width % self._step, 0, -height % self._step)
        values = F.pad(images, filling, mode="replicate") if any(filling) else images
        levels: list[Tensor] = []
        for number, level in enumerate(self.down):
            values = level(F.max_pool2d(values, 2) if number else values)
            levels.append(values)
        values = self.dropout(levels.pop())
        for up in self.up:
            values = up(values, levels.pop())
        return cast(Tensor, self.head(values))[..., :height, :width]


class Up(nn.Module):
    """Doubles the image size, halves the number of channels, and concatenates the features from the
    contracting path."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.grow = nn.ConvTranspose2d(2 * outputs, outputs, kernel_size=2, stride=2)
        self.body = _twice(2 * outputs, outputs)

    def forward(self, values: Tensor, skip: Tensor) -> Tensor:
        return cast(Tensor, self.body(torch.cat((skip, self.grow(values)), dim=1)))


def _twice(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(*convolution(inputs, outputs), *convolution(outputs, outputs))
