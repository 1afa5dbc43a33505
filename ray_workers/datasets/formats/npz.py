"""NumPy archives (`.npz`): tables, images and masks that are already arrays."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dray import spec
from ray_workers.datasets.core.errors import broken, no_such_name, reading, shortened
from ray_workers.datasets.formats import class_ids
from ray_workers.datasets.formats.archives import unpack_member
from ray_workers.datasets.formats.columns import (
    EXACT_WHOLE,
    MAX_CLASSES,
    MAX_FRACTIONAL_CLASSES,
    base_of,
    differences,
    in_order,
)
from ray_workers.datasets.formats.number_texts import number_name
from ray_workers.datasets.formats.prepared import ArrayWriter, Workshop

BLOCK_BYTES = 8 << 20
DEFAULT_INPUTS = "x"
DEFAULT_TARGET = "y"
CHANNELS = ((1, 3), (4,))
"""Common numbers of channels, most likely first."""
_MEMBER = ".npy"
WHITE_OF_BYTES = 255.0
WHITE_OF_FLOATS = 1.0

Array = npt.NDArray[Any]


def build_table(shop: Workshop, data: spec.Data, *, classifies: bool) -> Mapping[str, Any]:
    """Write a table with (N,) or (N, F) numeric inputs and N targets. Raises DataError."""
    inputs, target, names = _arrays(shop, data)
    target = _one_each(target, f"{shop.location}, array {shortened(names[1])}")
    location = f"{shop.location}, array {shortened(names[0])}"
    if inputs.ndim not in (1, 2) or inputs.dtype.kind not in "biuf" or inputs.size == 0:
        raise broken(
            location,
            f"has the shape {inputs.shape} and the type {inputs.dtype}; a table must be a numeric "
            "array of shape (samples, features)",
        )
    rows = inputs.reshape(len(inputs), -1)
    width = rows.shape[1]
    names_of_columns = [f"{names[0]}{at}" for at in range(width)]
    bases, rounded = _bases(rows), np.zeros(width, dtype=np.int64)
    dtype = np.float32 if np.can_cast(rows.dtype, np.float32) else np.float64
    with ArrayWriter(shop.output, "numeric", (width,), dtype, shop.budget) as numeric:
        for first, block in _blocks(rows):
            _finite(block, location, first)
            written = np.empty(block.shape)
            for at, base in enumerate(bases):
                written[:, at], num_rounded = differences(np.array(block[:, at]), base)
                rounded[at] += num_rounded
            numeric.append(written)
    with ArrayWriter(shop.output, "categories", (0,), np.int32, shop.budget) as categories:
        categories.append(np.empty((len(rows), 0), dtype=np.int32))
    base = 0 if classifies else _bases(target[:, None])[0]
    classes = None
    if classifies:
        classes = _write_classes(shop, target, names[1], "target")
    else:
        rounded = np.append(rounded, _write_numbers(shop, target, names[1], base))
    counted = zip([*names_of_columns, names[1]], rounded.tolist(), strict=False)
    return {
        "numeric_names": names_of_columns,
        "category_names": [],
        "vocabularies": [],
        "classes": classes,
        "target_name": names[1],
        "bases": {
            name: base
            for name, base in zip([*names_of_columns, names[1]], [*bases, base], strict=True)
            if base
        },
        "num_rounded": {name: count for name, count in counted if count},
    }


def _bases(rows: Array) -> list[int]:
    """Return the offset to subtract from each column of (N, F) numbers. The offset is 0 unless
    float64 can't represent the column's integers."""
    if rows.dtype.kind not in "iu" or rows.dtype.itemsize < 8:
        return [0] * rows.shape[1]
    extremes = [(block.min(axis=0), block.max(axis=0)) for _, block in _blocks(rows)]
    lowest = np.min([low for low, _ in extremes], axis=0).tolist()
    highest = np.max([high for _, high in extremes], axis=0).tolist()
    return [
        base_of(low) if max(-low, high) > EXACT_WHOLE else 0
        for low, high in zip(lowest, highest, strict=True)
    ]


def build_images(shop: Workshop, data: spec.Data) -> Mapping[str, Any]:
    """Write inputs of shape (N, H, W), (N, C, H, W) or (N, H, W, C), and N classes. Raises
    DataError."""
    inputs, target, names = _arrays(shop, data)
    target = _one_each(target, f"{shop.location}, array {shortened(names[1])}")
    _, white = _write_pixels(shop, inputs, names[0])
    classes = _write_classes(shop, target, names[1], "labels")
    return {"classes": classes, "max_value": white}


def build_masks(shop: Workshop, data: spec.Data) -> Mapping[str, Any]:
    """Write inputs as `build_images` does, and N masks with the inputs' height and width. Raises
    DataError."""
    inputs, target, names = _arrays(shop, data)
    location = f"{shop.location}, array {shortened(names[1])}"
    masks = _without_channel(target, location)
    size, white = _write_pixels(shop, inputs, names[0])
    if masks.shape[1:] != size:
        raise broken(
            location,
            f"has masks of {masks.shape[1]} x {masks.shape[2]} pixels (height x width), but the "
            f"images are {size[0]} x {size[1]}",
        )
    seen: dict[int, str] = {}
    with ArrayWriter(shop.output, "masks", size, np.uint8, shop.budget) as written:
        for first, block in _blocks(masks):
            for number, mask in enumerate(block, first):
                class_ids.note(seen, mask, f"{location}, sample {number}")
            written.append(block.astype(np.uint8))
    return {"classes": class_ids.settle(shop, seen, data.classes), "max_value": white}


def _write_pixels(shop: Workshop, inputs: Array, name: str) -> tuple[tuple[int, int], float]:
    """Write the images. Returns (height, width) and the number that stands for white."""
    location = f"{shop.location}, array {shortened(name)}"
    pixels = _channels_first(inputs, location)
    is_float = pixels.dtype.kind == "f"
    dtype = np.float32 if is_float else np.uint8
    with ArrayWriter(shop.output, "pixels", pixels.shape[1:], dtype, shop.budget) as written:
        for first, block in _blocks(pixels):
            if not is_float and (block.min() < 0 or block.max() > WHITE_OF_BYTES):
                raise broken(location, "has integers outside 0 to 255, which can't be pixels")
            written.append(_finite(block, location, first) if is_float else block.astype(np.uint8))
    white = 1.0 if pixels.dtype.kind == "b" else WHITE_OF_FLOATS if is_float else WHITE_OF_BYTES
    return (pixels.shape[2], pixels.shape[3]), white


def _arrays(shop: Workshop, data: spec.Data) -> tuple[Array, Array, tuple[str, str]]:
    """Return (inputs, target, names of both arrays). The arrays are memory-mapped from files.
    Raises DataError if the arrays don't match."""
    (file,) = shop.files
    wanted = (data.features[0] if data.features else DEFAULT_INPUTS, data.target or DEFAULT_TARGET)
    with (
        reading(file.location, "is not an npz file, or is incomplete"),
        zipfile.ZipFile(file.path) as archive,
    ):
        members = [name for name in archive.namelist() if name.endswith(_MEMBER)]
        present = [name.removesuffix(_MEMBER) for name in members]
    for option, name in zip(("data.features", "data.target"), wanted, strict=True):
        if name not in present:
            raise broken(file.location, f"{option}: {no_such_name('array', name, present)}")
    inputs, target = (
        _mapped(
            unpack_member(file, f"{name}{_MEMBER}", shop.scratch / f"{at}.npy", shop.budget),
            f"{file.location}, array {shortened(name)}",
        )
        for at, name in enumerate(wanted)
    )
    location = f"{file.location}, array {shortened(wanted[1])}"
    counts = [len(array) if array.ndim else 1 for array in (inputs, target)]
    if inputs.ndim == 0 or counts[0] != counts[1]:
        raise broken(location, f"has {counts[1]} values, but {wanted[0]!r} has {counts[0]} samples")
    if counts[1] == 0:
        raise broken(location, "is empty: it has no samples")
    return inputs, target, wanted


def _one_each(target: Array, location: str) -> Array:
    """Return the target as (N,), or raise DataError."""
    if target.ndim == 2 and target.shape[1] == 1:
        target = target[:, 0]
    if target.ndim != 1 or target.dtype.kind not in "biufU":
        raise broken(
            location,
            f"has the shape {target.shape} and the type {target.dtype}; there must be one target "
            "per sample, either a number or a string",
        )
    return target


def _without_channel(target: Array, location: str) -> Array:
    """Return the masks as (N, H, W), or raise DataError."""
    masks = target
    if target.ndim == 4 and 1 in (target.shape[1], target.shape[3]):
        masks = target[:, 0] if target.shape[1] == 1 else target[..., 0]
    if masks.ndim != 3 or masks.dtype.kind not in "biu":
        raise broken(
            location,
            f"has the shape {target.shape} and the type {target.dtype}; masks must be integers "
            "of shape (samples, height, width)",
        )
    return masks


def _mapped(path: Path, location: str) -> Array:
    """Memory-map the array in a `.npy` file. Raises DataError if the header does not match the
    file."""
    with reading(location, "is not a readable array"):
        try:
            array: Array = np.lib.format.open_memmap(path, mode="r")
        except ValueError as error:
            if "object" in str(error).lower():
                fault = "contains Python objects; only numbers and text are supported"
                raise broken(location, fault) from None
            raise
        return array


def _channels_first(inputs: Array, location: str) -> Array:
    """Return (N, C, H, W) without a copy, or raise DataError."""
    if inputs.dtype.kind in "biuf" and inputs.size:
        if inputs.ndim == 3:
            return inputs[:, None]
        if inputs.ndim == 4:
            for channels in CHANNELS:
                if inputs.shape[1] in channels:
                    return inputs
                if inputs.shape[3] in channels:
                    return inputs.transpose(0, 3, 1, 2)
    raise broken(
        location,
        f"has the shape {inputs.shape} and the type {inputs.dtype}; images must be numbers of "
        "shape (samples, height, width), optionally with 1, 3 or 4 channels, first or last",
    )


def _blocks(rows: Array) -> Iterator[tuple[int, Array]]:
    """Yield blocks that fit in memory, each as (index of the first row, rows)."""
    step = max(1, BLOCK_BYTES // max(1, rows[0].nbytes))
    for first in range(0, len(rows), step):
        yield first, rows[first : first + step]


def _finite(block: Array, location: str, first: int) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):
        found = block.astype(np.float32)
    bad = ~np.isfinite(found).reshape(len(found), -1).all(axis=1)
    if bad.any():
        sample = first + int(np.flatnonzero(bad)[0])
        raise broken(f"{location}, sample {sample}", "has a value that is missing or not finite")
    return found


def _write_numbers(shop: Workshop, target: Array, name: str, base: int) -> int:
    """Write the target's numbers, with `base` subtracted. Returns the number of rounded values."""
    location = f"{shop.location}, array {shortened(name)}"
    if target.dtype.kind == "U":
        raise broken(
            location,
            "is text, but regression predicts numbers; to predict names, use "
            "tabular_classification",
        )
    num_rounded = 0
    with ArrayWriter(shop.output, "target", (), np.float64, shop.budget) as written:
        for first, block in _blocks(target):
            _finite(block, location, first)
            numbers, rounded = differences(np.array(block), base)
            written.append(numbers)
            num_rounded += rounded
    return num_rounded


def _write_classes(shop: Workshop, target: Array, name: str, name_of_file: str) -> tuple[str, ...]:
    """Write the class indices of the targets. Returns the classes."""
    location = f"{shop.location}, array {shortened(name)}"
    different = _different(target)
    if target.dtype.kind == "f":
        if not np.isfinite(different).all():
            raise broken(location, "has a value that is missing or not finite")
        if np.count_nonzero(different % 1) > MAX_FRACTIONAL_CLASSES:
            raise broken(
                location,
                f"has more than {MAX_FRACTIONAL_CLASSES} different fractional values, so they are "
                "not classes; to predict numbers, use tabular_regression",
            )
    if len(different) > MAX_CLASSES:
        raise broken(location, f"has more than {MAX_CLASSES:,} different values")
    if len(different) == 1:
        raise broken(location, f"has only one class, {shortened(different[0])}, but needs two")
    names = [_class_name(value) for value in different.tolist()]
    classes = in_order(set(names))
    codes = np.array([classes.index(one) for one in names], dtype=np.int64)
    with ArrayWriter(shop.output, name_of_file, (), np.int64, shop.budget) as coded:
        for _, block in _blocks(target):
            coded.append(codes[np.searchsorted(different, block)])
    return classes


def _different(target: Array) -> Array:
    """Return the distinct values in order. If there are more classes than the maximum, some values
    may be missing."""
    found: Array = target[:0]
    for _, block in _blocks(target):
        found = np.union1d(found, block)
        if len(found) > MAX_CLASSES:
            break
    return found


def _class_name(value: str | bool | int | float) -> str:
    return number_name(value) if isinstance(value, float) else str(value)
