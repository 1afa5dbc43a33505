"""Images by class: a folder of folders, or an archive of one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from dray import spec
from ray_workers.contracts import DataPolicy
from ray_workers.training.datasets import matrices
from ray_workers.training.datasets.faults import broken, shortened
from ray_workers.training.datasets.kinds import Images
from ray_workers.training.datasets.prepared import ArrayWriter, Workshop, prepare
from ray_workers.training.datasets.sources import SourceFile
from ray_workers.training.datasets.unpacking import unpack_archive

SUFFIXES = (
    ".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp",
)  # fmt: skip
GREY_MODES = ("1", "L")
DEEP_MODES = ("F", "I", "I;16", "I;16B", "I;16L", "I;16N")
WHITE = 255.0


@dataclass(frozen=True)
class _Sample:
    label: str
    file: SourceFile


def open_images(data: spec.Data, policy: DataPolicy) -> Images:
    """Raises DataError."""
    how: dict[str, Any] = {"kind": "images", "size": data.image_size}
    suffixes: tuple[str, ...] | None = SUFFIXES
    if data.known_format == "npz":
        how = {"kind": "image arrays", "target": data.target, "features": data.features}
        suffixes = None

    def build(shop: Workshop) -> Mapping[str, Any]:
        if data.known_format == "npz":
            return matrices.build_images(shop, data)
        return _build(shop, data.image_size)

    prepared = prepare(data, policy, how, build, suffixes=suffixes)
    return Images(
        pixels=prepared.array("pixels"),
        max_value=prepared.meta["max_value"],
        labels=np.array(prepared.array("labels")),
        classes=tuple(prepared.meta["classes"]),
        fingerprint=prepared.fingerprint,
    )


def _build(shop: Workshop, size: tuple[int, int] | None) -> Mapping[str, Any]:
    samples = list(_samples(shop))
    classes = tuple(sorted({sample.label for sample in samples}))
    if len(classes) < 2:
        raise broken(
            shop.place, f"has one class only, the folder {shortened(classes[0])}; it takes two"
        )
    height, width, channels = _common_form(samples, size)
    codes = {label: code for code, label in enumerate(classes)}
    with ExitStack() as files:
        pixels = files.enter_context(
            ArrayWriter(shop.output, "pixels", (channels, height, width), np.uint8, shop.budget)
        )
        labels = files.enter_context(ArrayWriter(shop.output, "labels", (), np.int64, shop.budget))
        for sample in samples:
            pixels.append(_decoded(sample.file, height, width, channels)[None])
            labels.append(np.array([codes[sample.label]]))
    return {"classes": classes, "max_value": WHITE}


def _samples(shop: Workshop) -> Iterator[_Sample]:
    """Every image with its class: the first folder of its path. In the order of the paths."""
    if shop.is_folder:
        files, depth = shop.files, 0
    else:
        files = _unpacked(shop)
        depth = _common_depth([file.name for file in files])
    for file in files:
        parts = PurePosixPath(file.name).parts[depth:]
        if len(parts) < 2:
            raise broken(
                file.place,
                "lies in no folder of its class: each class has a folder with its images",
            )
        yield _Sample(parts[0], file)


def _unpacked(shop: Workshop) -> tuple[SourceFile, ...]:
    (archive,) = shop.files
    folder = shop.scratch / "unpacked"
    folder.mkdir()
    unpack_archive(archive, folder, shop.budget, SUFFIXES)
    names = sorted(
        Path(parent, name).relative_to(folder).as_posix()
        for parent, _, found in os.walk(folder)
        for name in found
    )
    if not names:
        raise broken(archive.place, f"holds no image: none of its files ends {', '.join(SUFFIXES)}")
    return tuple(
        SourceFile(name, folder / name, f"{archive.place}, member {name}") for name in names
    )


def _common_depth(names: list[str]) -> int:
    """1 if the archive holds one folder, which holds those of the classes; else 0."""
    paths = [PurePosixPath(name).parts for name in names]
    return int(len({parts[0] for parts in paths}) == 1 and all(len(p) > 2 for p in paths))


def _common_form(samples: list[_Sample], size: tuple[int, int] | None) -> tuple[int, int, int]:
    """(height, width, channels) that all images are stored in, told by their headers alone."""
    first: tuple[int, int] | None = None
    is_grey = True
    for sample in samples:
        with _opened(sample.file) as image:
            if image.mode in DEEP_MODES:
                raise broken(
                    sample.file.place, f"has pixels of the mode {image.mode}; 8 bits are read"
                )
            is_grey &= image.mode in GREY_MODES
            found = _upright_size(image)
        if first is None:
            first = found
        if size is None and found != first:
            raise broken(
                sample.file.place,
                f"is {found[0]} x {found[1]} pixels (height x width), but "
                f"{samples[0].file.name} is {first[0]} x {first[1]}; give data.image_size to "
                "scale all to one size",
            )
    assert first is not None
    return (*(size or first), 1 if is_grey else 3)


def _decoded(file: SourceFile, height: int, width: int, channels: int) -> npt.NDArray[np.uint8]:
    """uint8 (channels, height, width), turned upright as its camera noted."""
    from PIL import Image, ImageOps

    with _opened(file) as image:
        ready = ImageOps.exif_transpose(image).convert("L" if channels == 1 else "RGB")
        if ready.size != (width, height):
            ready = ready.resize((width, height), Image.Resampling.BILINEAR)
        pixels = np.asarray(ready, dtype=np.uint8)
    return pixels[None] if channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _upright_size(image: Any) -> tuple[int, int]:
    """(height, width) once the image is turned as its EXIF orientation says."""
    from PIL import ExifTags

    width, height = image.size
    lies = image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
    return (width, height) if lies else (height, width)


@contextmanager
def _opened(file: SourceFile) -> Iterator[Any]:
    """The image, its pixels not yet decoded. Whatever Pillow finds wrong is a DataError."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file.path) as image:
                yield image
    except UnidentifiedImageError:
        raise broken(file.place, "is no image that can be read") from None
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise broken(file.place, f"is too large for an image: {error}") from None
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise broken(file.place, f"is a broken or truncated image: {error}") from None
