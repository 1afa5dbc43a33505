"""Images with masks: folders `images` and `masks`, an archive of these folders, or arrays."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from dray import spec
from ray_workers.datasets.core.errors import broken
from ray_workers.datasets.core.types import MaskedImages
from ray_workers.datasets.formats import class_ids, folder_splits, image_decoding, npz
from ray_workers.datasets.formats.folder_splits import SplitFile, SplitName
from ray_workers.datasets.formats.prepared import ArrayWriter, Workshop, prepare
from ray_workers.datasets.sources.source import SourceFile
from ray_workers.shared.node_needs import DataPolicy

MASK_MODES = ("1", "L", "P")
"""Pillow's modes with one channel of at most 8 bits. If an image has a palette, the indices are
used instead of the colours."""
_NARROW = re.compile(r"L;([24])R?")
_INVERTED = re.compile(r"L(;[24]?I[R]?)")
"""Pattern of Pillow's names for greyscale layouts in which white is 0."""


@dataclass(frozen=True)
class _Pair:
    image: SourceFile
    mask: SourceFile


def open_masked_images(data: spec.Data, policy: DataPolicy) -> MaskedImages:
    """Open images with masks. Raises DataError."""
    is_npz = data.known_format == "npz"
    how: dict[str, Any] = {
        "kind": "masks",
        "size": data.image_size,
        "classes": data.classes,
        "version": image_decoding.IMAGES_VERSION,
    }
    if is_npz:
        how = {
            "kind": "mask arrays",
            "size": data.image_size,
            "classes": data.classes,
            "target": data.target,
            "features": data.features,
        }

    def build(shop: Workshop) -> Mapping[str, Any]:
        if is_npz:
            return {**npz.build_masks(shop, data), "division": folder_splits.NONE}
        return _build(shop, data)

    prepared = prepare(
        data, policy, how, build, suffixes=None if is_npz else image_decoding.SUFFIXES
    )
    is_validation, num_left_out = folder_splits.read(prepared)
    return MaskedImages(
        pixels=prepared.array("pixels"),
        max_value=prepared.meta["max_value"],
        masks=prepared.array("masks"),
        classes=tuple(prepared.meta["classes"]),
        fingerprint=prepared.fingerprint,
        is_validation=is_validation,
        num_left_out=num_left_out,
    )


def _build(shop: Workshop, data: spec.Data) -> Mapping[str, Any]:
    every = folder_splits.members(image_decoding.files_by_path(shop), shop.location)
    pairs = _pairs(folder_splits.kept(every))
    for pair in pairs:
        _check_sizes(pair)
    height, width, channels = image_decoding.common_form(
        [pair.image for pair in pairs], data.image_size
    )
    shape = (channels, height, width)
    seen: dict[int, str] = {}
    with (
        ArrayWriter(shop.output, "pixels", shape, np.uint8, shop.budget) as pixels,
        ArrayWriter(shop.output, "masks", shape[1:], np.uint8, shop.budget) as masks,
    ):
        for pair in pairs:
            mask = _decoded_mask(pair.mask, height, width)
            class_ids.note(seen, mask, pair.mask.location)
            pixels.append(image_decoding.decoded(pair.image, height, width, channels)[None])
            masks.append(mask[None])
    classes = class_ids.settle(shop, seen, data.classes)
    images = [member for member in every if member.parts[0] == "images"]
    division = folder_splits.write(images, shop)
    return {"classes": classes, "max_value": image_decoding.WHITE, "division": division}


def _pairs(members: Sequence[SplitFile]) -> list[_Pair]:
    """Pair every image with the mask whose path differs only in its suffix, in the order of the
    images."""
    found: dict[str, dict[tuple[SplitName | None, str], SourceFile]]
    found = {"images": {}, "masks": {}}
    for member in members:
        file, parts = member.file, member.parts
        if len(parts) < 2 or parts[0] not in found:
            raise broken(file.location, "is neither in the folder images nor in the folder masks")
        name = member.role, PurePosixPath(*parts[1:]).with_suffix("").as_posix()
        if other := found[parts[0]].get(name):
            raise broken(file.location, f"has the same name as {other.name} except for its suffix")
        found[parts[0]][name] = file
    images, masks = found["images"], found["masks"]
    for name, file in images.items():
        if name not in masks:
            raise broken(file.location, f"has no mask: masks/{name[1]}.png does not exist")
    for name, file in masks.items():
        if name not in images:
            raise broken(
                file.location, f"has no image: the folder images contains no image named {name[1]}"
            )
    return [_Pair(file, masks[name]) for name, file in images.items()]


def _check_sizes(pair: _Pair) -> None:
    """Compare the sizes of the image and its mask, reading only their headers. Raises DataError."""
    size, found = _size(pair.image), _size(pair.mask)
    if found != size:
        raise broken(
            pair.mask.location,
            f"is {found[0]} x {found[1]} pixels (height x width), but its image "
            f"{pair.image.name} is {size[0]} x {size[1]}",
        )


def _size(file: SourceFile) -> tuple[int, int]:
    with image_decoding.opened(file) as image:
        return image_decoding.upright_size(image)


def _decoded_mask(file: SourceFile, height: int, width: int) -> npt.NDArray[np.uint8]:
    """Decode to uint8 (height, width), rotated like the images."""
    from PIL import Image, ImageOps

    with image_decoding.opened(file) as image:
        if image.format == "JPEG":
            raise broken(
                file.location, "is a JPEG, whose compression changes class indices; use PNG"
            )
        if image.mode not in MASK_MODES:
            raise broken(
                file.location,
                f"has pixels of mode {image.mode}; a mask must have one 8-bit channel",
            )
        image_decoding.refuse_pages(image, file.location)
        layout, white = image_decoding.raw_mode(image)
        if _INVERTED.fullmatch(layout):
            raise broken(
                file.location, "stores white as 0, so its pixel values are not class indices"
            )
        ready = ImageOps.exif_transpose(image)
        if ready.size != (width, height):
            ready = ready.resize((width, height), Image.Resampling.NEAREST)
        pixels = np.asarray(ready).astype(np.uint8)
    return _as_stored(pixels, layout, white)


def _as_stored(pixels: npt.NDArray[np.uint8], layout: str, white: int) -> npt.NDArray[np.uint8]:
    """Return the pixel values as stored in the file. Pillow scales 2-bit and 4-bit values to
    0..255, and also the values of a PGM file whose header gives a maximum other than 255."""
    if found := _NARROW.fullmatch(layout):
        white = (1 << int(found[1])) - 1
    if white in (0, 255):
        return pixels
    return ((pixels.astype(np.int64) * white + 127) // 255).astype(np.uint8)
