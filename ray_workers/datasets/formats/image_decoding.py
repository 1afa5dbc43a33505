"""Files that are images: found in a folder or an archive, checked, and decoded."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from ray_workers.datasets.core.errors import broken, reading
from ray_workers.datasets.formats.archives import unpack_archive
from ray_workers.datasets.formats.prepared import Workshop
from ray_workers.datasets.sources.source import SourceFile

SUFFIXES = (
    ".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp",
)  # fmt: skip
GREY_MODES = ("1", "L")
DEEP_MODES = ("F", "I", "I;16", "I;16B", "I;16L", "I;16N")
WHITE = 255.0


def files_by_path(shop: Workshop) -> Iterator[tuple[SourceFile, tuple[str, ...]]]:
    """Every image with the parts of its path within the set, in the order of the paths."""
    if shop.is_folder:
        files, depth = shop.files, 0
    else:
        files = _unpacked(shop)
        depth = _common_depth([file.name for file in files])
    for file in files:
        yield file, PurePosixPath(file.name).parts[depth:]


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
    """1 if the archive holds one folder, which holds those of the set; else 0."""
    paths = [PurePosixPath(name).parts for name in names]
    return int(len({parts[0] for parts in paths}) == 1 and all(len(p) > 2 for p in paths))


def common_form(files: Sequence[SourceFile], size: tuple[int, int] | None) -> tuple[int, int, int]:
    """(height, width, channels) that all images are stored in, by their headers alone."""
    first: tuple[int, int] | None = None
    is_grey = True
    for file in files:
        with opened(file) as image:
            if image.mode in DEEP_MODES:
                raise broken(file.place, f"has pixels of the mode {image.mode}; 8 bits are read")
            is_grey &= image.mode in GREY_MODES
            found = upright_size(image)
        if first is None:
            first = found
        if size is None and found != first:
            raise broken(
                file.place,
                f"is {found[0]} x {found[1]} pixels (height x width), but "
                f"{files[0].name} is {first[0]} x {first[1]}; give data.image_size to "
                "scale all to one size",
            )
    assert first is not None
    return (*(size or first), 1 if is_grey else 3)


def decoded(file: SourceFile, height: int, width: int, channels: int) -> npt.NDArray[np.uint8]:
    """uint8 (channels, height, width), turned upright as its camera noted."""
    with opened(file) as image:
        return pixels_of(image, (height, width), channels)


def pixels_of(image: Any, size: tuple[int, int] | None, channels: int) -> npt.NDArray[np.uint8]:
    """The same of an image of Pillow's. size: (height, width); None leaves it as it is."""
    from PIL import Image, ImageOps

    ready = ImageOps.exif_transpose(image).convert("L" if channels == 1 else "RGB")
    if size is not None and ready.size != size[::-1]:
        ready = ready.resize(size[::-1], Image.Resampling.BILINEAR)
    pixels = np.asarray(ready, dtype=np.uint8)
    return pixels[None] if channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def upright_size(image: Any) -> tuple[int, int]:
    """(height, width) once the image is turned as its EXIF orientation says."""
    from PIL import ExifTags

    width, height = image.size
    is_turned = image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
    return (width, height) if is_turned else (height, width)


@contextmanager
def opened(file: SourceFile) -> Iterator[Any]:
    """The image, its pixels not yet decoded. DataError for a file that Pillow can't open."""
    from PIL import Image, UnidentifiedImageError

    with reading(file.place, "is a broken or truncated image"), warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(file.path) as image:
                yield image
        except UnidentifiedImageError:
            raise broken(file.place, "is no image that can be read") from None
        except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
            raise broken(file.place, f"is too large for an image: {error}") from None
