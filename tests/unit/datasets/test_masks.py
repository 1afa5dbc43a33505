"""Images with a mask each, from folders, archives and arrays."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dray.spec import Data
from ray_workers.datasets import MaskedImages, open_masked_images
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.errors import DataError
from tests.unit.datasets.test_images import arrays, lay, picture, zipped

SIZE = (3, 2)
"""(width, height) of every picture here, unless stated otherwise."""


def mask(*values: int, mode: str = "L", size: tuple[int, int] = SIZE, kind: str = "png") -> bytes:
    """A picture of these values, row by row; the remaining values are 0."""
    image = Image.new(mode, size)
    image.putdata(values)
    if mode == "P":
        image.putpalette([200, 0, 0, 0, 200, 0, 0, 0, 200])
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


TWO = {
    "images/1.png": picture(10),
    "images/2.png": picture(20),
    "masks/1.png": mask(0, 1, 2),
    "masks/2.png": mask(1),
}


def read(path: Path, policy: DataPolicy, **options: Any) -> MaskedImages:
    return open_masked_images(Data(source=path.as_uri(), **options), policy)


def test_files_of_the_same_name_are_a_pair(tmp_path: Path, policy: DataPolicy) -> None:
    files = TWO | {"images/ward/3.jpg": picture(30), "masks/ward/3.png": mask(2, 2)}
    images = read(lay(tmp_path / "set", files | {"masks/.hidden.png": b"", "README": b""}), policy)
    assert images.pixels.shape == (3, 1, 2, 3)
    assert images.pixels[:, 0, 0, 0].tolist() == [10, 20, 30]
    assert images.masks.reshape(3, 6).tolist() == [
        [0, 1, 2, 0, 0, 0],
        [1, *[0] * 5],
        [2, 2, *[0] * 4],
    ]
    assert images.classes == ("0", "1", "2")
    assert images.max_value == 255


def test_images_and_masks_have_a_subfolder_for_each_patient(
    tmp_path: Path, policy: DataPolicy
) -> None:
    files = {f"images/{name}/1.png": picture(10) for name in ("ann", "bob")}
    files |= {f"masks/{name}/1.png": mask(0, 1) for name in ("ann", "bob")}
    assert len(read(lay(tmp_path / "set", files), policy).masks) == 2


def test_the_classes_may_have_names_and_be_more_than_the_masks_show(
    tmp_path: Path, policy: DataPolicy
) -> None:
    folder = lay(tmp_path / "set", TWO)
    names = ["background", "liver", "kidney", "spleen"]
    assert read(folder, policy, classes=names).classes == tuple(names)


@pytest.mark.parametrize("names", [None, ["background", "cell"]])
def test_white_on_black_is_the_second_class_of_two(
    names: list[str] | None, tmp_path: Path, policy: DataPolicy
) -> None:
    files = TWO | {"masks/1.png": mask(0, 255, 255), "masks/2.png": mask(255)}
    images = read(lay(tmp_path / "set", files), policy, classes=names)
    assert images.masks.reshape(2, 6).tolist() == [[0, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]]
    assert images.classes == tuple(names or ("0", "1"))


def test_bits_and_the_indices_of_a_palette_are_class_numbers(
    tmp_path: Path, policy: DataPolicy
) -> None:
    files = TWO | {"masks/1.png": mask(0, 255, mode="1"), "masks/2.png": mask(2, 1, mode="P")}
    images = read(lay(tmp_path / "set", files), policy)
    assert images.masks[:, 0].tolist() == [[0, 1, 0], [2, 1, 0]]


def test_a_scaled_mask_has_no_class_that_it_did_not_have(
    tmp_path: Path, policy: DataPolicy
) -> None:
    files = {"images/1.png": picture(10, size=(4, 4)), "masks/1.png": mask(0, 2, 0, 2, size=(4, 4))}
    folder = lay(tmp_path / "set", TWO | files)
    images = read(folder, policy, image_size=(9, 7))
    assert images.pixels.shape == (2, 1, 9, 7)
    assert images.masks.shape == (2, 9, 7)
    assert set(images.masks[0].ravel().tolist()) == {0, 2}
    with pytest.raises(DataError, match=r"images/2\.png: is 2 x 3 pixels .* set data\.image_size"):
        read(folder, policy)


def test_an_archive_holds_what_a_folder_holds(tmp_path: Path, policy: DataPolicy) -> None:
    folder = read(lay(tmp_path / "set", TWO), policy)
    inside = {f"study/{name}": content for name, content in TWO.items()}
    for path in (zipped(tmp_path / "a.zip", TWO), zipped(tmp_path / "b.zip", inside)):
        images = read(path, policy)
        assert np.array_equal(images.pixels, folder.pixels)
        assert np.array_equal(images.masks, folder.masks)


def noise(kind: str) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 2, (64, 64), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


BIG = {"images/1.png": picture(0, size=(64, 64)), "masks/1.png": noise("png")}


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({}, "is a folder without"),
        (
            TWO | {"images/3.png": picture()},
            "images/3.png: has no mask: masks/3.png does not exist",
        ),
        (TWO | {"masks/3.png": mask(1)}, "masks/3.png: has no image: the folder images contains"),
        (TWO | {"3.png": picture()}, "3.png: is neither in the folder images nor in the folder"),
        (TWO | {"labels/1.png": mask(1)}, "labels/1.png: is neither in the folder images nor"),
        (
            TWO | {"masks/2.tif": mask(1, kind="tiff")},
            "masks/2.tif: has the same name as masks/2.png except for its suffix",
        ),
        (
            TWO | {"masks/2.png": mask(1, size=(4, 4))},
            "masks/2.png: is 4 x 4 pixels (height x width), but its image images/2.png is 2 x 3",
        ),
        (
            TWO | {"masks/2.png": mask(7, 255)},
            "masks/2.png: has a pixel with the value 255; the pixels of",
        ),
        (
            {**TWO, "masks/1.png": mask(), "masks/2.png": mask()},
            "has only one class, but needs two: every pixel of its masks is 0",
        ),
        (
            TWO | {"masks/2.png": picture((1, 1, 1), mode="RGB")},
            "masks/2.png: has pixels of mode RGB; a mask must have one 8-bit channel",
        ),
        (
            TWO | {"masks/2.png": mask(1, mode="I;16")},
            "masks/2.png: has pixels of mode I;16; a mask must have one 8-bit channel",
        ),
        (
            TWO | {"masks/2.png": mask(1, kind="jpeg")},
            "masks/2.png: is a JPEG, whose compression changes class indices; use PNG",
        ),
        (TWO | {"images/2.png": b"no"}, "images/2.png: is not a readable image"),
        (TWO | {"masks/2.png": b""}, "masks/2.png: is not a readable image"),
        (
            BIG | {"masks/1.png": noise("png")[:-200]},
            "masks/1.png: is a damaged or truncated image",
        ),
    ],
)
def test_errors_name_the_fault_of_a_folder(
    files: dict[str, bytes], fault: str, tmp_path: Path, policy: DataPolicy
) -> None:
    (tmp_path / "set").mkdir()
    with pytest.raises(DataError) as raised:
        read(lay(tmp_path / "set", files), policy)
    assert fault in str(raised.value)


def test_an_error_names_the_mask_with_a_number_beyond_the_named_classes(
    tmp_path: Path, policy: DataPolicy
) -> None:
    folder = lay(tmp_path / "set", TWO)
    fault = r"masks/1\.png: has a pixel with the value 2, but data\.classes lists 2 classes, 0 to 1"
    with pytest.raises(DataError, match=fault):
        read(folder, policy, classes=["background", "cell"])


MASKS = np.array([[[0, 1], [2, 0]], [[0, 0], [0, 1]]])


@pytest.mark.parametrize("shape", [(2, 2, 2), (2, 1, 2, 2), (2, 2, 2, 1)])
def test_arrays_of_masks_with_or_without_a_channel(
    shape: tuple[int, ...], tmp_path: Path, policy: DataPolicy
) -> None:
    pixels = np.random.default_rng(0).random((2, 2, 2, 3))
    path = arrays(tmp_path / "a.npz", scan=pixels, seg=MASKS.reshape(shape))
    images = read(path, policy, features=["scan"], target="seg")
    assert images.pixels.shape == (2, 3, 2, 2)
    assert images.max_value == 1.0
    assert np.array_equal(images.masks, MASKS)
    assert images.classes == ("0", "1", "2")


@pytest.mark.parametrize("y", [MASKS.astype(bool), MASKS.astype(bool) * np.uint8(255)])
def test_arrays_of_two_classes(y: Any, tmp_path: Path, policy: DataPolicy) -> None:
    images = read(arrays(tmp_path / "a.npz", x=np.zeros((2, 2, 2)), y=y), policy)
    assert np.array_equal(images.masks, MASKS > 0)


@pytest.mark.parametrize(
    ("y", "fault"),
    [
        (np.array([0, 1]), "has the shape (2,) and the type int64; masks must be integers of"),
        (
            MASKS.astype(float),
            "and the type float64; masks must be integers of shape (samples, height",
        ),
        (MASKS[:1], "has 1 values, but 'x' has 2 samples"),
        (MASKS[:, :1], "has masks of 1 x 2 pixels (height x width), but the images are 2 x 2"),
        (MASKS - 1, "array 'y', sample 0: has a pixel with the value -1"),
        (MASKS * 200, "array 'y', sample 0: has a pixel with the value 400"),
        (MASKS * 0, "has only one class, but needs two: every pixel of its masks is 0"),
    ],
)
def test_arrays_that_are_no_masks(y: Any, fault: str, tmp_path: Path, policy: DataPolicy) -> None:
    with pytest.raises(DataError) as raised:
        read(arrays(tmp_path / "a.npz", x=np.zeros((2, 2, 2)), y=y), policy)
    assert fault in str(raised.value)
