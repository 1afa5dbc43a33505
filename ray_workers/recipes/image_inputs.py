"""Conversion of images in various forms to the inputs of a trained model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ray_workers.datasets.formats import image_decoding
from ray_workers.datasets.sources.source import SourceFile
from ray_workers.recipes.models.images import Shape

WHITE = 255


@dataclass(frozen=True)
class ImageForm:
    """The images that a model accepts."""

    shape: Shape
    """(channels, height, width) of the training images."""
    size: tuple[int, int] | None
    """(height, width) to which files and Pillow images are scaled; None disables scaling."""
    is_fixed: bool
    """Whether arrays must also have this `shape`."""

    def tensor(self, images: Any) -> Tensor:
        """Convert images to float32 (N, channels, height, width), in 0..1.

        `images` is an image or a sequence of images, each a path, a Pillow image or an array. An
        array can also be a batch, with channels first or last; integers are in 0..255, floats in
        0..1. Raises DataError for a file that is not an image, and ValueError for an array of the
        wrong shape.
        """
        batch = self._batch(images)
        if self.is_fixed and tuple(batch.shape[1:]) != self.shape:
            raise ValueError(
                f"the images are {_described(batch.shape[1:])}, but the model was trained on "
                f"{_described(self.shape)}. Only files and Pillow images are scaled automatically"
            )
        return batch

    def _batch(self, images: Any) -> Tensor:
        if _is_one_image(images):
            return self._of_pillow(images)[None]
        if not isinstance(images, Sequence):
            return self._of_array(images)
        if not images:
            return torch.empty(0, *self.shape)
        every = [self._batch(one) for one in images]
        sizes = {tuple(one.shape[1:]) for one in every}
        if len(sizes) > 1:
            found = ", ".join(sorted(map(_described, sizes)))
            raise ValueError(f"the images of a call must have the same size, but these are {found}")
        return torch.cat(every)

    def _of_pillow(self, image: Any) -> Tensor:
        channels = self.shape[0]
        if isinstance(image, str | os.PathLike):
            path = Path(image)
            with image_decoding.opened(SourceFile(path.name, path, str(path))) as opened:
                return _scaled(image_decoding.pixels_of(opened, self.size, channels))
        return _scaled(image_decoding.pixels_of(image, self.size, channels))

    def _of_array(self, images: Any) -> Tensor:
        array = images if isinstance(images, Tensor) else torch.from_numpy(np.array(images))
        channels = self.shape[0]
        given = tuple(array.shape)
        if array.ndim == 2 and channels == 1:
            array = array[None, None]
        elif array.ndim == 3 and array.shape[0] == channels:
            array = array[None]
        elif array.ndim == 3 and array.shape[2] == channels:
            array = array.permute(2, 0, 1)[None]
        elif array.ndim == 3 and channels == 1:
            array = array[:, None]
        elif array.ndim == 4 and array.shape[1] != channels and array.shape[3] == channels:
            array = array.permute(0, 3, 1, 2)
        if array.ndim != 4 or array.shape[1] != channels:
            raise ValueError(
                f"an array of shape {given} does not contain images with {channels} channels: "
                f"expected the shape (N, {channels}, height, width) or "
                f"(N, height, width, {channels}), or a single image"
            )
        return _scaled(array)


def _is_one_image(images: Any) -> bool:
    """Whether the argument is a path or a Pillow image. Does not import Pillow."""
    return isinstance(images, str | os.PathLike) or hasattr(images, "getexif")


def _scaled(pixels: Any) -> Tensor:
    tensor = pixels if isinstance(pixels, Tensor) else torch.from_numpy(np.array(pixels))
    if tensor.is_floating_point():
        return tensor.float()
    return tensor.float() / (1 if tensor.dtype == torch.bool else WHITE)


def _described(shape: Sequence[int]) -> str:
    channels, height, width = shape
    return f"{height} x {width} pixels with {channels} channel{'' if channels == 1 else 's'}"
