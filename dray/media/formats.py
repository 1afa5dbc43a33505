"""Recognises the files that jobs report by their content: PNG, JPEG, WebP and WAV.

Only headers are read, and nothing is decompressed. SVG is refused, because an SVG file can contain
scripts. A picture's declared size is limited, because a small file can declare a size whose pixels
don't fit into memory.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from dray.media.kinds import MAX_FILE_BYTES, MAX_PIXELS, MAX_SIDE

_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8\xff"
_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xD8)})
_FRAME_HEADERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""JPEG markers of segments that contain the picture's size."""
_WAV_FORMATS = frozenset({1, 3, 0xFFFE})
"""Uncompressed integers, floats, and the extensible form of both."""


@dataclass(frozen=True)
class PictureHeader:
    media_type: str
    width: int
    height: int


@dataclass(frozen=True)
class SoundHeader:
    media_type: str
    sample_rate: int
    """Samples per second of each channel."""
    channels: int
    seconds: float


def picture(content: bytes) -> PictureHeader:
    """Return the format and size of a picture. Raises ValueError if the content is not a complete
    PNG, JPEG or WebP file, or is too large."""
    _check_size(content)
    if content.startswith(_PNG):
        found = PictureHeader("image/png", *_png_size(content))
    elif content.startswith(_JPEG):
        found = PictureHeader("image/jpeg", *_jpeg_size(content))
    elif content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        found = PictureHeader("image/webp", *_webp_size(content))
    else:
        raise ValueError("the picture is not a PNG, JPEG or WebP file")
    if not (0 < found.width <= MAX_SIDE and 0 < found.height <= MAX_SIDE):
        raise ValueError(
            f"the picture has {found.width} x {found.height} pixels; each side must have 1 to "
            f"{MAX_SIDE} pixels"
        )
    if found.width * found.height > MAX_PIXELS:
        raise ValueError(
            f"the picture has {found.width} x {found.height} pixels, but at most {MAX_PIXELS:,} "
            "are stored: make it smaller"
        )
    return found


def sound(content: bytes) -> SoundHeader:
    """Return the format of a WAV file. Raises ValueError if the content is not an uncompressed WAV
    file, or is too large."""
    _check_size(content)
    if content[:4] != b"RIFF" or content[8:12] != b"WAVE":
        raise ValueError("the audio is not a WAV file")
    form: tuple[int, ...] | None = None
    for name, start, size in _riff_chunks(content, "WAV"):
        if name == b"fmt " and size >= 16:
            form = struct.unpack_from("<HHIIHH", content, start)
        elif name == b"data" and form is not None:
            code, channels, rate, _, block, bits = form
            if code not in _WAV_FORMATS or bits not in (8, 16, 24, 32, 64):
                raise ValueError("the WAV file is compressed")
            if not (0 < channels <= 8 and 0 < rate <= 384_000 and block == channels * bits // 8):
                raise ValueError("the WAV file declares an invalid number of channels or samples")
            return SoundHeader("audio/wav", rate, channels, size // block / rate)
    raise ValueError("the WAV file is incomplete")


def _check_size(content: bytes) -> None:
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(
            f"the file has {len(content):,} bytes, but at most {MAX_FILE_BYTES:,} are stored"
        )


def _png_size(content: bytes) -> tuple[int, int]:
    at = len(_PNG)
    if content[at : at + 8] != b"\0\0\0\x0dIHDR" or len(content) < at + 25:
        raise ValueError("the PNG file has no header")
    width, height = struct.unpack_from(">II", content, at + 8)
    name = b""
    while name != b"IEND":
        if at + 12 > len(content):
            raise ValueError("the PNG file is incomplete")
        size, name = struct.unpack_from(">I4s", content, at)
        end = at + 12 + size
        if end > len(content):
            raise ValueError("the PNG file is incomplete")
        (checksum,) = struct.unpack_from(">I", content, end - 4)
        if zlib.crc32(content[at + 4 : end - 4]) != checksum:
            raise ValueError("the PNG file is damaged: a checksum does not match")
        at = end
    if at != len(content):
        raise ValueError("the PNG file has data after its end")
    return width, height


def _jpeg_size(content: bytes) -> tuple[int, int]:
    at = 2
    while at + 4 <= len(content):
        if content[at] != 0xFF:
            break
        marker = content[at + 1]
        if marker == 0xFF:  # padding
            at += 1
            continue
        if marker in _WITHOUT_LENGTH:
            at += 2
            continue
        if marker in _FRAME_HEADERS and at + 9 <= len(content):
            if not content.endswith(b"\xff\xd9"):
                raise ValueError("the JPEG file is incomplete, or has data after its end")
            height, width = struct.unpack_from(">HH", content, at + 5)
            return width, height
        at += 2 + struct.unpack_from(">H", content, at + 2)[0]
    raise ValueError("the JPEG file has no size")


def _webp_size(content: bytes) -> tuple[int, int]:
    for name, start, size in _riff_chunks(content, "WebP"):
        data = content[start : start + 10]
        if name == b"VP8X" and size >= 10:
            width, height = (int.from_bytes(data[at : at + 3], "little") for at in (4, 7))
            return width + 1, height + 1
        if name == b"VP8 " and size >= 10 and data[3:6] == b"\x9d\x01\x2a":
            width, height = struct.unpack_from("<HH", data, 6)
            return width & 0x3FFF, height & 0x3FFF
        if name == b"VP8L" and size >= 5 and data[0] == 0x2F:
            bits = int.from_bytes(data[1:5], "little")
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        break
    raise ValueError("the WebP file has no size")


def _riff_chunks(content: bytes, what: str) -> Iterator[tuple[bytes, int, int]]:
    """Yield the (name, offset, size) of each chunk. Raises ValueError if the size in the header
    differs from the size of the file."""
    (declared,) = struct.unpack_from("<I", content, 4)
    if declared + 8 not in (len(content), len(content) - 1):
        raise ValueError(f"the {what} file is incomplete, or has data after its end")
    at = 12
    while at + 8 <= len(content):
        name, size = struct.unpack_from("<4sI", content, at)
        if at + 8 + size > len(content):
            raise ValueError(f"the {what} file is incomplete")
        yield name, at + 8, size
        at += 8 + size + size % 2
