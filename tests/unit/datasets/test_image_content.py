"""The content of an image is kept, or the image is refused: transparency, pages, depth, masks.

The references are computed by numpy from the written bytes.
"""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dray.spec import Data
from ray_workers.datasets import open_images, open_masked_images
from ray_workers.recipes.image_inputs import ImageForm
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.errors import DataError
from tests.unit.datasets.test_images import lay, picture

RNG = np.random.default_rng(7)
SIDE = 8


def saved(image: Any, kind: str = "png", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png(bits: int, colour: int, rows: list[list[int]]) -> bytes:
    """A PNG with samples of this many bits, made by the specification alone."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + check

    channels = {0: 1, 2: 3, 4: 2, 6: 4}[colour]
    packed = b""
    for row in rows:
        text = "".join(f"{value:0{bits}b}" for value in row)
        text += "0" * (-len(text) % 8)
        packed += b"\0" + int(text, 2).to_bytes(len(text) // 8, "big")
    header = struct.pack(">IIBBBBB", len(rows[0]) // channels, len(rows), bits, colour, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(packed)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def read(first: bytes, tmp_path: Path, policy: DataPolicy, ending: str = "png") -> Any:
    """The pixels of an image next to another image of its size, and the pixels of a prediction."""
    files = {f"a/1.{ending}": first, "b/1.png": picture(7, (SIDE, SIDE))}
    folder = lay(tmp_path / "set", files)
    images = open_images(Data(source=folder.as_uri(), format="images"), policy)
    form = ImageForm(images.pixels.shape[1:], (SIDE, SIDE), is_fixed=True)
    taken = form.tensor(folder / f"a/1.{ending}") * 255
    np.testing.assert_allclose(taken[0].numpy(), images.pixels[0], atol=1e-4)
    return images.pixels[0]


def on_white(colours: Any, alpha: Any) -> Any:
    """(channels, height, width) of (height, width, channels)."""
    share = alpha[..., None] / 255
    return np.rint(colours * share + 255 * (1 - share)).transpose(2, 0, 1)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparency_is_put_on_white(mode: str, tmp_path: Path, policy: DataPolicy) -> None:
    alpha = RNG.integers(0, 256, (SIDE, SIDE)).astype(np.uint8)
    if mode == "P":
        image = Image.fromarray((alpha % 4).astype(np.uint8)).convert("P")
        palette = [0, 0, 0, 200, 10, 10, 0, 0, 0, 9, 9, 90]
        image.putpalette(palette)
        content = saved(image, transparency=bytes([0, 255, 128, 40]))
        colours = np.array(palette).reshape(4, 3)[alpha % 4]
        alpha = np.array([0, 255, 128, 40])[alpha % 4]
    else:
        channels = 3 if mode == "RGBA" else 1
        colours = np.zeros((SIDE, SIDE, channels), np.uint8)
        content = saved(Image.fromarray(np.concatenate([colours, alpha[..., None]], axis=2), mode))
    found = read(content, tmp_path, policy)
    np.testing.assert_allclose(found, on_white(colours, alpha), atol=1)
    assert found.min() < found.max()


@pytest.mark.parametrize("alpha", [0, "drawn"])
def test_content_that_white_hides_is_refused(
    alpha: Any, tmp_path: Path, policy: DataPolicy
) -> None:
    pixels = np.full((SIDE, SIDE, 4), 255, np.uint8)
    pixels[..., 3] = RNG.integers(0, 256, (SIDE, SIDE)) if alpha == "drawn" else 0
    with pytest.raises(DataError, match=r"1\.png: has only one colour after"):
        read(saved(Image.fromarray(pixels)), tmp_path, policy)


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_alpha_that_hides_nothing_changes_nothing(
    mode: str, tmp_path: Path, policy: DataPolicy
) -> None:
    channels = len(mode)
    pixels = RNG.integers(0, 256, (SIDE, SIDE, channels)).astype(np.uint8)
    pixels[..., -1] = 255
    found = read(saved(Image.fromarray(pixels, mode)), tmp_path, policy)
    assert np.array_equal(found, pixels[..., :-1].transpose(2, 0, 1))


@pytest.mark.parametrize("kind", ["gif", "tiff", "png", "webp"])
def test_further_pages_are_refused(kind: str, tmp_path: Path, policy: DataPolicy) -> None:
    pages = [Image.new("L", (SIDE, SIDE), 40 * at) for at in range(3)]
    content = saved(pages[0], kind, save_all=True, append_images=pages[1:])
    with pytest.raises(DataError, match=rf"1\.{kind}: has 3 pages or frames"):
        read(content, tmp_path, policy, kind)
    form = ImageForm((1, SIDE, SIDE), (SIDE, SIDE), is_fixed=True)
    with pytest.raises(DataError, match="has 3 pages or frames"):
        form.tensor(tmp_path / "set" / f"a/1.{kind}")


@pytest.mark.parametrize("colour", [0, 2, 4, 6])
def test_sixteen_bits_are_refused(colour: int, tmp_path: Path, policy: DataPolicy) -> None:
    channels = {0: 1, 2: 3, 4: 2, 6: 4}[colour]
    content = png(16, colour, [[300] * SIDE * channels] * SIDE)
    with pytest.raises(DataError, match="only 8-bit images are supported"):
        read(content, tmp_path, policy)
    form = ImageForm((1, SIDE, SIDE), (SIDE, SIDE), is_fixed=True)
    with pytest.raises(DataError, match="only 8-bit images are supported"):
        form.tensor(tmp_path / "set" / "a/1.png")


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_grey_of_few_bits_goes_from_black_to_white(
    bits: int, tmp_path: Path, policy: DataPolicy
) -> None:
    values = RNG.integers(0, 2**bits, (SIDE, SIDE))
    found = read(png(bits, 0, values.tolist()), tmp_path, policy)
    assert np.array_equal(found[0], values * (255 // (2**bits - 1)))


def masks_of(content: bytes, tmp_path: Path, policy: DataPolicy, ending: str = "png") -> Any:
    files = {"images/1.png": picture(7, (SIDE, SIDE)), f"masks/1.{ending}": content}
    folder = lay(tmp_path / "set", files)
    return open_masked_images(Data(source=folder.as_uri()), policy).masks[0]


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_a_masks_numbers_are_those_in_the_file(
    bits: int, tmp_path: Path, policy: DataPolicy
) -> None:
    values = RNG.integers(0, min(2**bits, 200), (SIDE, SIDE))
    assert np.array_equal(masks_of(png(bits, 0, values.tolist()), tmp_path, policy), values)


@pytest.mark.parametrize("white", [3, 7, 100, 255])
@pytest.mark.parametrize("kind", ["P2", "P5"])
def test_a_masks_numbers_in_a_pgm(
    kind: str, white: int, tmp_path: Path, policy: DataPolicy
) -> None:
    values = RNG.integers(0, min(white + 1, 200), (SIDE, SIDE))
    body = bytes(values.flatten().tolist())
    if kind == "P2":
        body = " ".join(map(str, values.flatten().tolist())).encode()
    content = f"{kind}\n{SIDE} {SIDE}\n{white}\n".encode() + body
    assert np.array_equal(masks_of(content, tmp_path, policy, "pgm"), values)


def test_a_mask_with_white_as_0_is_refused(tmp_path: Path, policy: DataPolicy) -> None:
    entries = (
        *((256, 3, SIDE), (257, 3, SIDE), (258, 3, 8), (259, 3, 1), (262, 3, 0), (273, 4, 122)),
        *((277, 3, 1), (278, 3, SIDE), (279, 4, SIDE * SIDE)),
    )
    tags = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in entries)
    header = b"II*\0" + struct.pack("<IH", 8, len(entries))
    content = header + tags + struct.pack("<I", 0) + bytes([0, 1] * (SIDE * SIDE // 2))
    with pytest.raises(DataError, match="stores white as 0"):
        masks_of(content, tmp_path, policy, "tif")
