"""Image files: found in a folder or an archive, checked, and decoded."""

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
IMAGES_VERSION = 3
"""Part of the key of all image files. Change it with any change of their decoded pixels."""
_DEEP_RAW = re.compile(r";1[26]|;32")
"""Matches Pillow's names of layouts of more than 8 bits."""


def files_by_path(shop: Workshop) -> Iterator[tuple[SourceFile, tuple[str, ...]]]:
    """Yield every image with the parts of its path within the set, ordered by path."""
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
        raise broken(archive.place, f"holds no image: no file ends in {', '.join(SUFFIXES)}")
    return tuple(
        SourceFile(name, folder / name, f"{archive.place}, member {name}") for name in names
    )


def _common_depth(names: list[str]) -> int:
    """The number of folders above the set, each of which contains one folder and nothing else. The
    last folder of `set-main/set/cat/1.png` and `set-main/set/dog/1.png` is `set-main`."""
    paths = [PurePosixPath(name).parts for name in names]
    shortest = min(map(len, paths))
    depth = 0
    while depth < shortest - 2 and len({parts[depth] for parts in paths}) == 1:
        depth += 1
    return depth


def common_form(files: Sequence[SourceFile], size: tuple[int, int] | None) -> tuple[int, int, int]:
    """(height, width, channels) in which all images are stored, from their headers alone."""
    first: tuple[int, int] | None = None
    is_grey = True
    for file in files:
        with opened(file) as image:
            _refuse_deep(image, file.place)
            is_grey &= image.mode in GREY_MODES
            found = upright_size(image)
        if first is None:
            first = found
        if size is None and found != first:
            raise broken(
                file.place,
                f"is {found[0]} x {found[1]} pixels (height x width), but "
                f"{files[0].name} is {first[0]} x {first[1]}; set data.image_size to "
                "scale all images to one size",
            )
    assert first is not None
    return (*(size or first), 1 if is_grey else 3)


def decoded(file: SourceFile, height: int, width: int, channels: int) -> npt.NDArray[np.uint8]:
    """uint8 (channels, height, width), rotated by the EXIF orientation."""
    with opened(file) as image:
        return pixels_of(image, (height, width), channels, file.place)


def pixels_of(
    image: Any, size: tuple[int, int] | None, channels: int, place: str = "the image"
) -> npt.NDArray[np.uint8]:
    """uint8 (channels, height, width) of an image of Pillow, on white if it is transparent. size:
    (height, width); None keeps the image's own. Raises DataError if a part would be lost."""
    from PIL import Image, ImageOps

    _refuse_deep(image, place)
    refuse_pages(image, place)
    opaque = _on_white(ImageOps.exif_transpose(image), place)
    ready = opaque.convert("L" if channels == 1 else "RGB")
    if size is not None and ready.size != size[::-1]:
        ready = ready.resize(size[::-1], Image.Resampling.BILINEAR)
    pixels = np.asarray(ready, dtype=np.uint8)
    return pixels[None] if channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def refuse_pages(image: Any, place: str) -> None:
    """Raise DataError for an image of several pages or frames. The additional images of a camera's
    MPO are previews and views of the same scene, and are ignored."""
    count = getattr(image, "n_frames", 1)
    if count > 1 and image.format != "MPO":
        raise broken(
            place, f"has {count:,} pages or frames; save each of them in a file of its own"
        )


def raw_mode(image: Any) -> tuple[str, int]:
    """(Pillow's name of the layout in the file, the value of white in a PGM or PPM file or 0). Both
    are empty for an image that is already in memory."""
    if not getattr(image, "tile", None):
        return "", 0
    codec, _, _, args = image.tile[0]
    args = (args,) if isinstance(args, str) else tuple(args or ("",))
    is_pnm = codec in ("ppm", "ppm_plain") and len(args) > 1
    return str(args[0]), int(args[1]) if is_pnm else 0


def _refuse_deep(image: Any, place: str) -> None:
    layout, white = raw_mode(image)
    if image.mode in DEEP_MODES:
        raise broken(place, f"has pixels of the mode {image.mode}; only 8 bits are read")
    if _DEEP_RAW.search(layout) or white > WHITE:
        raise broken(place, "has channels of 16 bits; only 8 bits are read")


def _on_white(image: Any, place: str) -> Any:
    """The image as it looks on white. Raises DataError if nothing would be visible, since such
    images would all be equal."""
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
            place,
            "is of one colour on white, the background of transparent images: its content is in "
            "its transparency alone; save it without, on a background of another colour",
        )
    return shown


def upright_size(image: Any) -> tuple[int, int]:
    """(height, width) after the image is rotated by its EXIF orientation."""
    from PIL import ExifTags

    width, height = image.size
    if image.format == "TIFF":  # some versions of Pillow swap its size when they open the file
        width, height = (
            image.tag_v2[tag] for tag in (ExifTags.Base.ImageWidth, ExifTags.Base.ImageLength)
        )
    is_turned = image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
    return (width, height) if is_turned else (height, width)


@contextmanager
def opened(file: SourceFile) -> Iterator[Any]:
    """Open an image without decoding its pixels. Raises DataError if Pillow can't open it."""
    from PIL import Image, UnidentifiedImageError

    with reading(file.place, "is a broken or truncated image"), warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            # Given a path, Pillow would map a TIFF file, and mix up the pixels of a rotated one.
            with open(file.path, "rb") as content, Image.open(content) as image:
                yield image
        except UnidentifiedImageError:
            raise broken(file.place, "is not a readable image") from None
        except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
            raise broken(file.place, f"is too large for an image: {error}") from None
