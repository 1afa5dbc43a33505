"""Folders that divide images into training and validation, and folders that only seem to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dray.spec import Data, JobSpec
from ray_workers import recipes
from ray_workers.datasets import Images, open_images, open_masked_images
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.errors import DataError
from tests.unit.datasets.test_images import lay, picture, tarred, zipped
from tests.unit.datasets.test_masks import mask


def laid(root: Path, *folders: str) -> Path:
    """Write two images into each folder, each with another grey."""
    names = [f"{folder}/{at}.png" for folder in folders for at in range(2)]
    return lay(root, {name: picture(10 + number) for number, name in enumerate(names)})


def read(path: Path, policy: DataPolicy) -> Images:
    return open_images(Data(source=path.as_uri(), format="images"), policy)


def parts(images: Images) -> dict[str, list[tuple[str, int]]]:
    """(class, grey) of the images by part."""
    assert images.is_validation is not None
    found: dict[str, list[tuple[str, int]]] = {"train": [], "val": []}
    pixels, labels = images.pixels[:, 0, 0, 0].tolist(), images.labels.tolist()
    for is_val, grey, label in zip(images.is_validation.tolist(), pixels, labels, strict=True):
        found["val" if is_val else "train"].append((images.classes[label], grey))
    return found


@pytest.mark.parametrize("form", ["folder", "zip", "tar"])
@pytest.mark.parametrize(
    ("train", "val", "test"),
    [
        ("train", "val", "test"),
        ("Train", "VALIDATION", "Testing"),
        ("training", "dev", "holdout"),
        ("train", "valid", "eval"),
        ("train", "eval", "test"),
    ],
)
def test_a_division_is_no_class(
    train: str, val: str, test: str, form: str, tmp_path: Path, policy: DataPolicy
) -> None:
    folders = [f"{part}/{kind}" for part in (train, val, test) for kind in ("dark", "light")]
    names = [f"set/{folder}/{at}.png" for folder in folders for at in range(2)]
    files = {name: picture(10 + number) for number, name in enumerate(names)}
    files |= {"set/.DS_Store/x/1.png": b"", "set/@eaDir/1.png": b"", "__MACOSX/set/._1.png": b""}
    if form == "folder":
        path = lay(tmp_path, files) / "set"
    else:
        make = zipped if form == "zip" else tarred
        path = make(tmp_path / f"set.{'zip' if form == 'zip' else 'tar.gz'}", files)
    images = read(path, policy)
    assert images.classes == ("dark", "light")
    assert {name: {kind for kind, _ in found} for name, found in parts(images).items()} == {
        "train": {"dark", "light"},
        "val": {"dark", "light"},
    }
    greys = {name: sorted(grey for _, grey in found) for name, found in parts(images).items()}
    assert greys == {"train": [10, 11, 12, 13], "val": [14, 15, 16, 17]}
    assert images.num_left_out == 4


def test_a_division_within_each_class(tmp_path: Path, policy: DataPolicy) -> None:
    folders = [f"{kind}/{part}" for kind in ("dark", "light") for part in ("train", "val")]
    assert parts(read(laid(tmp_path / "set", *folders), policy)) == {
        "train": [("dark", 10), ("dark", 11), ("light", 14), ("light", 15)],
        "val": [("dark", 12), ("dark", 13), ("light", 16), ("light", 17)],
    }


@pytest.mark.parametrize(
    "folders",
    [
        ("train", "car", "bus"),
        ("train/steam", "train/diesel", "car", "bus"),
        ("train/steam", "car/suv", "bus"),
        ("dark", "light", "test"),
        ("test", "car"),
        ("train/steam", "train/diesel", "car/suv", "car/van"),
        ("train_station/hall", "train_station/platform", "train_interior", "bus"),
        ("cat/indoor", "cat/outdoor", "dog/lawn", "bird"),
        ("cat/images", "dog/images", "bird/photos"),
    ],
)
def test_classes_may_be_called_train_or_have_subfolders(
    folders: tuple[str, ...], tmp_path: Path, policy: DataPolicy
) -> None:
    images = read(laid(tmp_path / "set", *folders), policy)
    assert images.classes == tuple(sorted({folder.partition("/")[0] for folder in folders}))
    assert images.is_validation is None


@pytest.mark.parametrize(
    ("folders", "found"),
    [
        (("train", "val"), "train (2 images), val (2 images)"),
        (("train", "test", "car"), "car (2 images), test (2 images), train (2 images)"),
        (("train/dark", "train/light", "val"), "train (dark, light), val (2 images)"),
        (("train/dark", "extra/dark", "extra/light"), "extra (dark, light), train (dark)"),
        (("val/dark", "test/dark", "test/light"), "test (dark, light), val (dark)"),
        (("train/dark", "Train/light", "val/dark"), "Train (light), train (dark), val (dark)"),
        (("train/a", "val/a", "valid/a", "train/b"), "train (a, b), val (a), valid (a)"),
        (("dark/train", "dark/val", "light"), "dark (train, val), light (2 images)"),
        (("dark/train", "dark/val", "light/old"), "dark (train, val), light (old)"),
    ],
)
def test_what_may_be_either_is_refused_with_what_was_found(
    folders: tuple[str, ...], found: str, tmp_path: Path, policy: DataPolicy
) -> None:
    with pytest.raises(DataError, match="that are named like the parts of a split") as raised:
        read(laid(tmp_path / "set", *folders), policy)
    assert found in str(raised.value)


def below(**folders: str) -> list[str]:
    return [f"{top}/{name}" for top, names in folders.items() for name in names.split()]


@pytest.mark.parametrize("form", ["folder", "zip"])
@pytest.mark.parametrize(
    ("folders", "found"),
    [
        (
            below(train2017="cat dog", val2017="cat dog"),
            "train2017 (cat, dog), val2017 (cat, dog)",
        ),
        (below(site_a="ill well", site_b="ill well"), "site_b (ill, well)"),
        (below(train2017="x y z", val2017="x y"), "train2017 (x, y, z), val2017 (x, y)"),
        (below(train_set="x y", val_set="x"), "train_set (x, y), val_set (x)"),
        (
            below(**{"Training Data": "x y", "Test Data": "x y w"}),
            "Test Data (w, x, y), Training Data (x, y)",
        ),
        (below(site_a="Ill well", site_b="ill"), "site_a (Ill, well), site_b (ill)"),
        (below(site_a="x y", site_b="y z", site_c="q"), "site_b (y, z), site_c (q)"),
        ([*below(site_a="x y", site_b="x"), "other"], "other (2 images), site_a (x, y)"),
    ],
)
def test_folders_that_share_subfolders_are_refused(
    folders: list[str], found: str, form: str, tmp_path: Path, policy: DataPolicy
) -> None:
    path = laid(tmp_path / "set", *folders)
    if form == "zip":
        every = (one for one in path.rglob("*") if one.is_file())
        files = {f"set/{one.relative_to(path)}": one.read_bytes() for one in every}
        path = zipped(tmp_path / "set.zip", files)
    with pytest.raises(DataError, match="the same subfolders in several folders") as raised:
        read(path, policy)
    assert found in str(raised.value)


@pytest.mark.parametrize(
    ("folders", "found"),
    [
        ([*below(train="x y"), "unlabeled"], "train (x, y), unlabeled (2 images)"),
        ([*below(train2017="x y"), "test2017", "other"], "train2017 (x, y)"),
        (below(train_set="x y", test_set="unknown"), "test_set (unknown), train_set (x, y)"),
    ],
)
def test_folders_like_a_split_are_refused(
    folders: list[str], found: str, tmp_path: Path, policy: DataPolicy
) -> None:
    with pytest.raises(DataError, match="named like the parts of a split") as raised:
        read(laid(tmp_path / "set", *folders), policy)
    assert found in str(raised.value)


def test_a_class_that_training_lacks(tmp_path: Path, policy: DataPolicy) -> None:
    folders = ("train/dark", "train/light", "val/dark", "val/grey")
    with pytest.raises(
        DataError, match=r"val/grey/0\.png: is a validation image .* 'grey', which has no"
    ):
        read(laid(tmp_path / "set", *folders), policy)


def test_classes_that_differ_by_case(tmp_path: Path, policy: DataPolicy) -> None:
    with pytest.raises(DataError, match="'Dark', 'dark', which are probably the same class"):
        read(laid(tmp_path / "set", "Dark", "dark", "light"), policy)
    assert read(laid(tmp_path / "letters", "A", "a"), policy).classes == ("A", "a")


@pytest.mark.parametrize("outer", ["{part}/{kind}", "{kind}/{part}"])
def test_masks_are_divided_too(outer: str, tmp_path: Path, policy: DataPolicy) -> None:
    files = {}
    for number, part in enumerate(("train", "val", "test")):
        files[f"{outer.format(part=part, kind='images')}/1.png"] = picture(10 + number)
        files[f"{outer.format(part=part, kind='masks')}/1.png"] = mask(0, 1, number)
    path = lay(tmp_path / "set", files)
    images = open_masked_images(Data(source=path.as_uri()), policy)
    assert images.is_validation is not None
    assert images.is_validation.tolist() == [False, True]
    assert images.pixels[:, 0, 0, 0].tolist() == [10, 11]
    assert images.masks[:, 0, 2].tolist() == [0, 1]
    assert images.num_left_out == 1


def built(path: Path, policy: DataPolicy) -> Any:
    document = {
        "recipe": "image_classification",
        "data": {"source": path.as_uri()},
        "model": {"name": "mlp"},
    }
    spec = JobSpec.model_validate(document)
    return recipes.RECIPES["image_classification"].build(spec, policy)


def test_the_recipe_trains_and_measures_by_the_folders(tmp_path: Path, policy: DataPolicy) -> None:
    folders = [f"{part}/{kind}" for part in ("train", "val", "test") for kind in ("a", "b")]
    work = built(laid(tmp_path / "set", *folders), policy)
    assert (len(work.train), len(work.validation)) == (4, 4)
    assert "4 for training and 4 for validation" in work.about[0]
    assert work.about[1] == "the 4 images in the test folder are ignored"


def test_without_a_folder_for_validation_a_share_is_held_out(
    tmp_path: Path, policy: DataPolicy
) -> None:
    folders = [f"{part}/{kind}" for part in ("train", "test") for kind in ("a", "b")]
    files = {f"{folder}/{at}.png": picture(at) for folder in folders for at in range(10)}
    work = built(lay(tmp_path / "set", files), policy)
    assert (len(work.train), len(work.validation)) == (16, 4)
    assert work.about == ["the 20 images in the test folder are ignored"]
