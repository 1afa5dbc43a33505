"""Files of pictures and audio, written by Pillow and `wave`, and files that only look like them."""

from __future__ import annotations

import io
import random
import struct
import wave
import zlib

from PIL import Image as Pictures

MODES = ("L", "LA", "RGB", "RGBA")


def picture(
    form: str = "PNG", width: int = 5, height: int = 3, mode: str = "RGB", seed: int = 0
) -> bytes:
    channels = len(mode)
    pixels = random.Random(seed).randbytes(width * height * channels)
    target = io.BytesIO()
    options = {"lossless": bool(seed % 2)} if form == "WEBP" else {}
    Pictures.frombytes(mode, (width, height), pixels).save(target, form, **options)
    return target.getvalue()


def sound(num_frames: int = 8, channels: int = 1, rate: int = 8000, width: int = 2) -> bytes:
    target = io.BytesIO()
    with wave.open(target, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(bytes(num_frames * channels * width))
    return target.getvalue()


def png_of(width: int, height: int, *, after: bytes = b"") -> bytes:
    """A PNG that declares this size, whose pixels are missing."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*part) for part in parts) + after


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def wav_of(code: int = 1, channels: int = 1, rate: int = 8000, block: int = 2) -> bytes:
    """A WAV file with this header."""
    form = struct.pack("<HHIIHH", code, channels, rate, rate * block, block, 16)
    body = (
        b"WAVE" + b"fmt " + struct.pack("<I", 16) + form + b"data" + struct.pack("<I", 4) + b"1234"
    )
    return b"RIFF" + struct.pack("<I", len(body)) + body


NO_PICTURES = {
    "nothing": b"",
    "text": b"hello",
    "html": b"<html><script>alert(1)</script></html>",
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>',
    "gif": b"GIF89a\x01\0\x01\0\0\0\0;",
    "only a signature": b"\x89PNG\r\n\x1a\n",
    "a JPEG signature": b"\xff\xd8\xff",
    "a JPEG with markup at its end": picture("JPEG") + b"<script>alert(1)</script>",
    "a PNG with markup at its end": picture() + b"<script>alert(1)</script>",
    "a PNG bomb": png_of(60_000, 60_000),
    "too many pixels": png_of(8192, 8192),
    "no pixels": png_of(0, 5),
    "a damaged PNG": picture().replace(b"IDAT", b"IDAT\0", 1)[:-1],
    "a wrong checksum": picture()[:-1] + b"\0",
    "a WebP with more at its end": picture("WEBP") + b"<script>",
    "too many bytes": png_of(5, 5, after=bytes(3 << 20)),
    "audio": sound(),
}
NO_SOUNDS = {
    "nothing": b"",
    "a picture": picture(),
    "a WebP": picture("WEBP"),
    "compressed": wav_of(code=2),
    "no channels": wav_of(channels=0, block=0),
    "no samples per second": wav_of(rate=0),
    "a wrong block": wav_of(block=7),
    "no data": wav_of()[:-12],
    "more at its end": wav_of() + b"<script>",
}
