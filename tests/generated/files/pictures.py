"""Generated images and masks: the bytes of a file, and the pixels that it shows."""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

SIZE = (6, 5)
"""(width, height) of an image after it is turned upright."""
FORMS = {
    "png": ("1", "L", "LA", "P", "P+t", "RGB", "RGBA", "I;16", "P;2"),
    "bmp": ("1", "L", "P", "RGB"),
    "gif": ("L", "P", "P+t", "frames"),
    "tif": ("1", "L", "RGB", "RGBA", "CMYK", "I;16", "F", "I", "frames", "LA"),
    "jpg": ("L", "RGB", "CMYK"),
    "webp": ("RGB", "RGBA", "frames"),
    "ppm": ("RGB", "L"),
}
ODD_FORMS = ("I;16", "F", "I", "frames")
FORMATS = {"tif": "TIFF", "jpg": "JPEG"}
"""Pillow's names for formats with different names."""
TURNED_SUFFIXES = ("png", "tif", "jpg", "webp")
TURNED_FORMS = ("L", "RGB", "RGBA", "LA")
BROKEN = ("empty", "truncated", "no image")
ORIENTATION = 0x0112
"""The EXIF tag."""
MASK_FORMS = {
    **{f"L{bits}": ".png" for bits in (1, 2, 4, 8, 16)},
    **{f"P{bits}": ".png" for bits in (1, 2, 4, 8)},
    "white": ".png",
    "stray 255": ".png",
    "pgm 3": ".pgm",
    "pgm 200": ".pgm",
    "RGB": ".png",
    "JPEG": ".jpg",
    "white is 0": ".tif",
}
"""The suffix of each format."""
REFUSED_MASKS = {
    "L16": "mode I;16",
    "RGB": "mode RGB",
    "JPEG": "is a JPEG",
    "white is 0": "stores white as 0",
}


@dataclass(frozen=True)
class Picture:
    path: str
    form: str
    seed: int
    fault: str = ""
    turned: int = 1
    """The orientation, numbered as in EXIF."""
    size: tuple[int, int] = SIZE
    """(width, height) once it is upright."""

    def content(self) -> bytes:
        whole = _encoded(self)
        match self.fault:
            case "empty":
                return b""
            case "truncated":
                return whole[: len(whole) * 2 // 3]
            case "no image":
                return b"<html>not found</html>"
        return whole

    def image(self) -> tuple[Any, dict[str, Any]]:
        """(an image of Pillow's, options to save it with)."""
        dice = np.random.default_rng(self.seed)
        shape = self._stored_shape
        options: dict[str, Any] = {}
        match self.form:
            case "1":
                return Image.fromarray(dice.integers(0, 2, shape, np.uint8) * 255).convert("1"), {}
            case "I;16":
                return Image.fromarray(dice.integers(0, 65_536, shape, np.uint16)), {}
            case "F":
                return Image.fromarray(dice.random(shape, np.float32)), {}
            case "I":
                return Image.fromarray(dice.integers(0, 65_536, shape, np.int32)), {}
            case "P" | "P+t" | "P;2":
                image = Image.fromarray(dice.integers(0, 4, shape, np.uint8), "P")
                image.putpalette([*dice.integers(0, 256, 12).tolist()])
                if self.form == "P+t":
                    options["transparency"] = 1
                if self.form == "P;2":
                    options["bits"] = 2
                return image, options
            case "frames":
                options |= {"save_all": True, "append_images": [self._plain(dice, "RGB")]}
                return self._plain(dice, "RGB"), options
        image = self._plain(dice, self.form)
        if self.turned != 1:
            exif = image.getexif()
            exif[ORIENTATION] = self.turned
            options["exif"] = exif
        return image, options

    def _plain(self, dice: Any, mode: str) -> Any:
        bands = len(Image.new(mode, (1, 1)).getbands())
        pixels = dice.integers(0, 256, (*self._stored_shape, bands), np.uint8)
        return Image.merge(mode, [Image.fromarray(pixels[..., at]) for at in range(bands)])

    @property
    def _stored_shape(self) -> tuple[int, int]:
        width, height = self.size
        return (width, height) if self.turned > 4 else (height, width)

    @property
    def is_deep(self) -> bool:
        return self.form in ("I;16", "F", "I")

    @property
    def is_grey(self) -> bool:
        return self.form in ("1", "L", "LA")

    def shown(self, *, grey: bool) -> Any:
        """Return (channels, height, width) of integers: upright, with each pixel blended over white
        by its alpha."""
        if self.path.lower().endswith((".tif", ".tiff")):  # which Pillow turns when it loads them
            return upright(_on_white(self.image()[0], grey=grey), self.turned)
        with Image.open(io.BytesIO(_encoded(self))) as image:
            image.load()
            return upright(_on_white(image, grey=grey), self.turned)


@lru_cache(4096)
def _encoded(one: Picture) -> bytes:
    data = io.BytesIO()
    image, options = one.image()
    suffix = PurePosixPath(one.path).suffix[1:].lower()
    image.save(data, FORMATS.get(suffix, suffix.upper()), **options)
    return data.getvalue()


def upright(pixels: Any, turned: int) -> Any:
    """Return the pixels (..., height, width) that a file stores with an EXIF orientation."""
    if turned > 4:
        pixels = pixels.swapaxes(-1, -2)
    if turned in (2, 3, 6, 7):
        pixels = pixels[..., ::-1]
    if turned in (3, 4, 7, 8):
        pixels = pixels[..., ::-1, :]
    return pixels


def doubled(pixels: Any, *, smooth: bool) -> Any:
    """Return the pixels (..., height, width) at twice the size, interpolated or nearest."""
    for axis in (-1, -2):
        pixels = np.repeat(pixels, 2, axis)
        if smooth:  # a pixel's two halves are a quarter of the way to its neighbours
            moved = np.moveaxis(pixels.astype(float), axis, -1)
            padded = np.concatenate([moved[..., :1], moved, moved[..., -1:]], -1)
            mixed = (padded[..., :-2] + 2 * padded[..., 1:-1] + padded[..., 2:]) / 4
            pixels = np.moveaxis(mixed, -1, axis)
    return pixels


def _on_white(image: Any, *, grey: bool) -> Any:
    rgba = np.asarray(image.convert("RGBA")).astype(float)
    alpha = rgba[..., 3:] / 255
    shown = np.rint(rgba[..., :3] * alpha + 255 * (1 - alpha)).astype(int)
    if not image.has_transparency_data:
        shown = np.asarray(image.convert("RGB")).astype(int)
    return shown[..., 0][None] if grey else shown.transpose(2, 0, 1)


@dataclass(frozen=True)
class Mask:
    """The mask of the picture of the same name."""

    stem: str
    form: str
    seed: int
    turned: int = 1

    @property
    def path(self) -> str:
        return f"masks/{self.stem}{MASK_FORMS[self.form]}"

    def numbers(self) -> Any:
        """(height, width) as they are stored, upright."""
        dice = np.random.default_rng(self.seed)
        bits = int(self.form[1:]) if self.form[1:].isdigit() else 4
        pixels = dice.integers(0, min(2**bits, 16), SIZE[::-1], np.uint8)
        if self.form.startswith("pgm"):
            pixels %= int(self.form[4:]) + 1
        pixels[0, :2] = (0, 1)
        if self.form == "white":
            return pixels % 2 * 255
        if self.form == "stray 255":
            pixels[1, 1:3] = (7, 255)
        return pixels

    def content(self) -> bytes:
        pixels = upright(self.numbers(), {6: 8, 8: 6}.get(self.turned, self.turned))
        match self.form:
            case "RGB" | "JPEG":
                data = io.BytesIO()
                mode = "RGB" if self.form == "RGB" else "L"
                Image.fromarray(pixels).convert(mode).save(data, MASK_FORMATS[self.form])
                return data.getvalue()
            case "white is 0":
                return _inverted_tiff(pixels)
            case "pgm 3" | "pgm 200":
                height, width = pixels.shape
                return f"P5 {width} {height} {self.form[4:]}\n".encode() + pixels.tobytes()
        bits = int(self.form[1:]) if self.form[1:].isdigit() else 8
        return _png(pixels, bits, self.turned, has_palette=self.form.startswith("P"))


MASK_FORMATS = {"RGB": "PNG", "JPEG": "JPEG"}


def _png(pixels: Any, bits: int, turned: int, *, has_palette: bool) -> bytes:
    """Return a PNG file with 1, 2, 4, 8 or 16 bits per sample, not all of which Pillow can
    write."""
    height, width = pixels.shape
    shifts = np.arange(bits - 1, -1, -1)
    planes = (pixels.astype(int)[..., None] >> shifts & 1).reshape(height, -1).astype(np.uint8)
    rows = b"".join(b"\0" + np.packbits(row).tobytes() for row in planes)
    header = struct.pack(">IIBBBBB", width, height, bits, 3 if has_palette else 0, 0, 0, 0)
    palette = bytes(range(256)) * 3
    chunks = [(b"IHDR", header)]
    if has_palette:
        chunks.append((b"PLTE", palette[: 3 * 2**bits]))
    if turned != 1:
        chunks.append((b"eXIf", b"II*\0\x08\0\0\0" + _tags((ORIENTATION, 3, turned))))
    chunks += [(b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


def _inverted_tiff(pixels: Any) -> bytes:
    """A grey TIFF file of 8 bits in which 0 is white."""
    height, width = pixels.shape
    tags = ((256, 4, width), (257, 4, height), (258, 3, 8), (259, 3, 1), (262, 3, 0), (273, 4, 8))
    tags += ((277, 3, 1), (278, 4, height), (279, 4, pixels.size))
    first = 8 + pixels.size
    return b"II*\0" + struct.pack("<I", first) + pixels.tobytes() + _tags(*tags)


def _tags(*tags: tuple[int, int, int]) -> bytes:
    """A directory of TIFF. tags: (number, 3 for two bytes or 4 for four, value)."""
    entries = b"".join(struct.pack("<HHII", number, kind, 1, value) for number, kind, value in tags)
    return struct.pack("<H", len(tags)) + entries + bytes(4)
