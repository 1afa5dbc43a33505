"""Images by class, from folders, archives and arrays."""

from __future__ import annotations

import io
import struct
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dray.spec import Data
from ray_workers.datasets import Images, open_images
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.errors import DataError


def picture(value: Any = 0, size: tuple[int, int] = (3, 2), mode: str = "L") -> bytes:
    """A PNG of one colour; size is (width, height)."""
    buffer = io.BytesIO()
    Image.new(mode, size, value).save(buffer, "png")
    return buffer.getvalue()


def lay(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def read(path: Path, policy: DataPolicy, **options: Any) -> Images:
    return open_images(Data(source=path.as_uri(), **options), policy)


TWO = {"cat/1.png": picture(10), "cat/2.png": picture(20), "dog/1.png": picture(30)}


def test_a_folder_for_each_class(tmp_path: Path, policy: DataPolicy) -> None:
    images = read(lay(tmp_path / "set", TWO | {"dog/.hidden.png": b"", "README": b"x"}), policy)
    assert images.classes == ("cat", "dog")
    assert images.labels.tolist() == [0, 0, 1]
    assert images.pixels.shape == (3, 1, 2, 3)
    assert images.pixels[:, 0, 0, 0].tolist() == [10, 20, 30]
    assert images.max_value == 255


def test_one_coloured_image_makes_all_three_channels(tmp_path: Path, policy: DataPolicy) -> None:
    coloured = {"dog/2.png": picture((1, 2, 3), mode="RGB")}
    images = read(lay(tmp_path / "set", TWO | coloured), policy)
    assert images.pixels.shape == (4, 3, 2, 3)
    assert images.pixels[3, :, 0, 0].tolist() == [1, 2, 3]
    assert images.pixels[0, :, 0, 0].tolist() == [10, 10, 10]


def test_images_are_scaled_when_asked(tmp_path: Path, policy: DataPolicy) -> None:
    folder = lay(tmp_path / "set", TWO | {"dog/2.png": picture(40, size=(9, 9))})
    images = read(folder, policy, image_size=(4, 5))
    assert images.pixels.shape == (4, 1, 4, 5)
    assert images.pixels[3].max() == images.pixels[3].min() == 40
    with pytest.raises(DataError, match=r"2\.png: is 9 x 9 pixels .* set data\.image_size"):
        read(folder, policy)


def zipped(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def tarred(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def test_archives_hold_what_a_folder_holds(tmp_path: Path, policy: DataPolicy) -> None:
    folder = read(lay(tmp_path / "set", TWO), policy)
    inside = {f"pets/{name}": content for name, content in TWO.items()}
    for path in (
        zipped(tmp_path / "a.zip", TWO),
        tarred(tmp_path / "b.tar.gz", TWO),
        zipped(tmp_path / "c.zip", inside | {"__MACOSX/pets/cat/._1.png": b"x"}),
    ):
        images = read(path, policy)
        assert images.classes == folder.classes
        assert np.array_equal(images.pixels, folder.pixels)
        assert np.array_equal(images.labels, folder.labels)


@pytest.mark.parametrize("top", ["set", "set-main/set", "a/b/c/d"])
def test_single_folders_around_the_set_in_an_archive_are_left_out(
    top: str, tmp_path: Path, policy: DataPolicy
) -> None:
    inside = {f"{top}/train/{name}": content for name, content in TWO.items()}
    inside |= {f"{top}/val/dog/9.png": picture(40), f"{top}/README.md": b"x"}
    images = read(zipped(tmp_path / "a.zip", inside), policy)
    assert images.classes == ("cat", "dog")
    assert images.is_validation is not None
    assert images.is_validation.tolist() == [False, False, False, True]


def test_the_folder_of_one_class_is_not_left_out(tmp_path: Path, policy: DataPolicy) -> None:
    inside = {f"set-main/set/{name}": picture() for name in ("cat/1.png", "cat/2.png")}
    with pytest.raises(DataError, match="has only one class, the folder 'cat'"):
        read(zipped(tmp_path / "a.zip", inside), policy)


@pytest.mark.parametrize("cut", [100, 512, 700, 1024])
def test_an_archive_without_its_end_is_refused(
    cut: int, tmp_path: Path, policy: DataPolicy
) -> None:
    """tarfile stops at an unreadable header, as if the archive ended there."""
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, content in (TWO | {"dog/2.png": picture(40)}).items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        ends = archive.offset
    whole = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(whole[: ends - cut])
    with pytest.raises(DataError, match="is not a zip or tar archive, or is incomplete"):
        read(tmp_path / "a.tar", policy)


def test_a_member_with_a_backslash_is_refused_for_that(tmp_path: Path, policy: DataPolicy) -> None:
    path = zipped(tmp_path / "a.zip", TWO | {"cat\\3.png": picture()})
    with pytest.raises(DataError, match="has a backslash in its name: pack the archive with /"):
        read(path, policy)


@pytest.mark.parametrize(
    ("suffix", "mode"),
    [("tif", "L"), ("tif", "RGB"), ("tif", "RGBA"), ("jpg", "L"), ("jpg", "RGB")],
)
@pytest.mark.parametrize("orientation", [3, 6, 8])
def test_an_image_is_turned_upright(
    orientation: int, suffix: str, mode: str, tmp_path: Path, policy: DataPolicy
) -> None:
    upright = np.zeros((16, 24), np.uint8)
    upright[:8, :8] = 200
    turns = {3: 2, 6: 1, 8: 3}[orientation]  # by 90 degrees, counterclockwise
    image = Image.fromarray(np.ascontiguousarray(np.rot90(upright, turns))).convert(mode)
    exif = image.getexif()
    exif[0x0112] = orientation
    for name in ("cat", "dog"):
        (tmp_path / "set" / name).mkdir(parents=True)
        image.save(tmp_path / "set" / name / f"1.{suffix}", exif=exif)
    images = read(tmp_path / "set", policy)
    assert images.pixels.shape[2:] == (16, 24)
    assert np.abs(images.pixels[0, 0].astype(int) - upright).max() < 12


@pytest.mark.parametrize("make", [zipped, tarred])
@pytest.mark.parametrize("name", ["../cat/1.png", "/cat/1.png", "cat/../../1.png"])
def test_no_member_leads_out_of_an_archive(
    make: Any, name: str, tmp_path: Path, policy: DataPolicy
) -> None:
    path = make(tmp_path / "set.zip", TWO | {name: picture()})
    with pytest.raises(DataError, match="would be written outside the target folder"):
        read(path, policy)
    assert not list(tmp_path.rglob("1.png"))


def test_links_in_archives_are_refused(tmp_path: Path, policy: DataPolicy) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        member = tarfile.TarInfo("cat/1.png")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(member)
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as zipped_file:
        info = zipfile.ZipInfo("cat/1.png")
        info.external_attr = 0o120777 << 16
        zipped_file.writestr(info, "/etc/passwd")
    for name in ("a.tar", "b.zip"):
        with pytest.raises(DataError, match=r"the member 'cat/1\.png' is a link"):
            read(tmp_path / name, policy)


def test_an_archive_can_not_fill_the_disk(tmp_path: Path) -> None:
    policy = replace(DataPolicy.open(str(tmp_path / "cache")), cache_limit_bytes=1 << 20)
    path = zipped(tmp_path / "bomb.zip", {"cat/1.png": b"\0" * (64 << 20), "dog/1.png": picture()})
    assert path.stat().st_size < 1 << 20
    with pytest.raises(DataError, match="the unpacked size exceeds 1,048,576 bytes"):
        read(path, policy)
    assert list((tmp_path / "cache" / "scratch").iterdir()) == []


def huge_png() -> bytes:
    """A PNG whose header promises 60,000 x 60,000 pixels."""
    content = bytearray(picture())
    content[16:24] = struct.pack(">II", 60_000, 60_000)
    return bytes(content)


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({}, "is a folder without"),
        ({"1.png": picture()}, "1.png: is not in a class folder"),
        ({"cat/1.png": picture()}, "has only one class, the folder 'cat', but needs two"),
        (TWO | {"dog/2.png": picture()[:40]}, "dog/2.png: is not a readable image"),
        (TWO | {"dog/2.png": b""}, "dog/2.png: is not a readable image"),
        (TWO | {"dog/2.png": b"GIF? no"}, "dog/2.png: is not a readable image"),
        (TWO | {"dog/2.png": picture(0, mode="I;16")}, "dog/2.png: has pixels of mode I;16"),
        (TWO | {"dog/2.png": huge_png()}, "dog/2.png: is "),
    ],
)
def test_errors_name_the_fault_of_a_folder(
    files: dict[str, bytes], fault: str, tmp_path: Path, policy: DataPolicy
) -> None:
    (tmp_path / "set").mkdir()
    with pytest.raises(DataError) as raised:
        read(lay(tmp_path / "set", files), policy)
    assert fault in str(raised.value)


def test_a_truncated_image_of_many_is_named(tmp_path: Path, policy: DataPolicy) -> None:
    """Its header is whole, so only decoding finds it."""
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (64, 64), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, "png")
    half = buffer.getvalue()[: len(buffer.getvalue()) // 2]
    folder = lay(tmp_path / "set", {"a/1.png": buffer.getvalue(), "b/7.png": half})
    with pytest.raises(DataError, match=r"b/7\.png: is a damaged or truncated image"):
        read(folder, policy)


def test_a_missing_source(tmp_path: Path, policy: DataPolicy) -> None:
    with pytest.raises(DataError, match="this file or folder does not exist on this node"):
        read(tmp_path / "nothing", policy, format="images")


def arrays(path: Path, **values: Any) -> Path:
    np.savez(path, **values)
    return path


@pytest.mark.parametrize("shape", [(4, 5, 6), (4, 1, 5, 6), (4, 5, 6, 1)])
def test_arrays_of_pixels_in_any_usual_order(
    shape: tuple[int, ...], tmp_path: Path, policy: DataPolicy
) -> None:
    pixels = np.arange(120, dtype=np.uint8).reshape(4, 5, 6)
    path = arrays(tmp_path / "a.npz", x=pixels.reshape(shape), y=np.array([0, 1, 0, 1]))
    images = read(path, policy)
    assert images.pixels.shape == (4, 1, 5, 6)
    assert np.array_equal(images.pixels[:, 0], pixels)
    assert images.max_value == 255


def test_arrays_of_floats_keep_their_values(tmp_path: Path, policy: DataPolicy) -> None:
    path = arrays(tmp_path / "a.npz", images=np.full((2, 4, 4, 3), 0.25), label=np.array([3, 5]))
    images = read(path, policy, features=["images"], target="label")
    assert images.pixels.shape == (2, 3, 4, 4)
    assert images.pixels.dtype == np.float32
    assert images.max_value == 1.0
    assert images.classes == ("3", "5")


@pytest.mark.parametrize(
    ("x", "fault"),
    [
        (np.ones((2, 5)), "has the shape (2, 5)"),
        (np.ones((2, 5, 5, 7)), "has the shape (2, 5, 5, 7)"),
        (np.full((2, 5, 5), 999), "has integers outside 0 to 255"),
        (np.full((2, 5, 5), np.nan), "sample 0: has a value that is missing or not finite"),
    ],
)
def test_arrays_that_are_no_images(x: Any, fault: str, tmp_path: Path, policy: DataPolicy) -> None:
    with pytest.raises(DataError) as raised:
        read(arrays(tmp_path / "a.npz", x=x, y=np.array([0, 1])), policy)
    assert fault in str(raised.value)
