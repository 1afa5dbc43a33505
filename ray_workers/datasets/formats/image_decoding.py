"""Find image files in a folder or an archive, validate them, and decode them."""

from __future__ import annotations

import os
import re
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
GREY_MODES = ("1", "L", "LA", "La")
DEEP_MODES = ("F", "I", "I;16", "I;16B", "I;16L", "I;16N")
WHITE = 255.0
IMAGES_VERSION = 4
"""Part of the cache key of all image sets. Change this version whenever the decoded pixels or the
accepted folders change."""
_DEEP_RAW = re.compile(r";1[26]|;32")
"""Pattern of Pillow's names for layouts with more than 8 bits."""


def files_by_path(shop: Workshop) -> Iterator[tuple[SourceFile, tuple[str, ...]]]:
    """Yield every image with the components of its path within the set, ordered by path."""
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
        raise broken(
            archive.location, f"contains no images: no file name ends with {', '.join(SUFFIXES)}"
        )
    return tuple(
        SourceFile(name, folder / name, f"{archive.location}, member {name}") for name in names
    )


def _common_depth(names: list[str]) -> int:
    """Return the number of nested folders that enclose the entire data set. For
    `set-main/set/cat/1.png` and `set-main/set/dog/1.png`, this is 2, because all files are in
    `set-main/set`."""
    paths = [PurePosixPath(name).parts for name in names]
    shortest = min(map(len, paths))
    depth = 0
    while depth < shortest - 2 and len({parts[depth] for parts in paths}) == 1:
        depth += 1
    return depth


def common_form(files: Sequence[SourceFile], size: tuple[int, int] | None) -> tuple[int, int, int]:
    """Return the (height, width, channels) that all images have when they are stored, based only on
    their headers."""
    first: tuple[int, int] | None = None
    is_grey = True
    for file in files:
        with opened(file) as image:
            _refuse_deep(image, file.location)
            is_grey &= image.mode in GREY_MODES
            found = upright_size(image)
        if first is None:
            first = found
        if size is None and found != first:
            raise broken(
                file.location,
                f"is {found[0]} x {found[1]} pixels (height x width), but {files[0].name} is "
                f"{first[0]} x {first[1]}; set data.image_size to resize all images",
            )
    assert first is not None
    return (*(size or first), 1 if is_grey else 3)


def decoded(file: SourceFile, height: int, width: int, channels: int) -> npt.NDArray[np.uint8]:
    """Decode to uint8 (channels, height, width), rotated according to the EXIF orientation."""
    with opened(file) as image:
        return pixels_of(image, (height, width), channels, file.location)


def pixels_of(
    image: Any, size: tuple[int, int] | None, channels: int, location: str = "the image"
) -> npt.NDArray[np.uint8]:
    """Convert a Pillow image to uint8 (channels, height, width), on a white background if it is
    transparent. size: (height, width); None keeps the image's size. Raises DataError if information
    would be lost."""
    from PIL import Image, ImageOps

    _refuse_deep(image, location)
    refuse_pages(image, location)
    opaque = _on_white(ImageOps.exif_transpose(image), location)
    ready = opaque.convert("L" if channels == 1 else "RGB")
    if size is not None and ready.size != size[::-1]:
        ready = ready.resize(size[::-1], Image.Resampling.BILINEAR)
    pixels = np.asarray(ready, dtype=np.uint8)
    return pixels[None] if channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def refuse_pages(image: Any, location: str) -> None:
    """Raise DataError for images with several pages or frames. The additional images in a camera's
    MPO file are previews and views of the same scene, and are ignored."""
    count = getattr(image, "n_frames", 1)
    if count > 1 and image.format != "MPO":
        raise broken(
            location, f"has {count:,} pages or frames; save each of them in a separate file"
        )


def raw_mode(image: Any) -> tuple[str, int]:
    """Return Pillow's name for the file's layout, and the number that stands for white in a PGM or
    PPM file (0 for other files). The name is empty for an image that is already in memory."""
    if not getattr(image, "tile", None):
        return "", 0
    codec, _, _, args = image.tile[0]
    args = (args,) if isinstance(args, str) else tuple(args or ("",))
    is_pnm = codec in ("ppm", "ppm_plain") and len(args) > 1
    return str(args[0]), int(args[1]) if is_pnm else 0


def _refuse_deep(image: Any, location: str) -> None:
    layout, white = raw_mode(image)
    if image.mode in DEEP_MODES:
        raise broken(location, f"has pixels of mode {image.mode}; only 8-bit images are supported")
    if _DEEP_RAW.search(layout) or white > WHITE:
        raise broken(location, "has 16-bit channels; only 8-bit images are supported")


def _on_white(image: Any, location: str) -> Any:
    """Return the image on a white background. Raises DataError if nothing would be visible, because
    all invisible images would be equal."""
    from PIL import Image

    if not image.has_transparency_data:
        return image
    if image.mode == "La":
        image = image.convert("LA")
    rgba = image.convert("RGBA")
    least, most = rgba.getchannel("A").getextrema()
    if least == WHITE:
        return image
    shown = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    pixels = np.asarray(shown)
    if most == 0 or (least < most and bool((pixels == pixels[0, 0]).all())):
        raise broken(
            location,
            "has only one colour after its transparency is replaced by a white background: save "
            "the image without transparency, on a background of a different colour",
        )
    return shown


def upright_size(image: Any) -> tuple[int, int]:
    """Return (height, width) after rotating the image according to its EXIF orientation."""
    from PIL import ExifTags

    width, height = image.size
    if image.format == "TIFF":  # some versions of Pillow swap the size when opening the file
        width, height = (
            image.tag_v2[tag] for tag in (ExifTags.Base.ImageWidth, ExifTags.Base.ImageLength)
        )
    is_turned = image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
    return (width, height) if is_turned else (height, width)


@contextmanager
def opened(file: SourceFile) -> Iterator[Any]:
    """Open an image without decoding the pixels. Raises DataError if Pillow can't open it."""
    from PIL import Image, UnidentifiedImageError

    with reading(file.location, "is a damaged or truncated image"), warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            # Given a path, Pillow would memory-map TIFF files, and scramble the pixels of rotated
            # images.
            with open(file.path, "rb") as content, Image.open(content) as image:
                yield image
        except UnidentifiedImageError:
            raise broken(file.location, "is not a readable image") from None
        except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
            raise broken(file.location, f"is too large: {error}") from None
