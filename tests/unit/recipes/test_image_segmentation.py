from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from dray import spec
from dray.spec import JobSpec
from ray_workers import recipes
from ray_workers.recipes import measures
from ray_workers.recipes.models.unet import Unet
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.errors import DataError
from ray_workers.training.core.workload import Workload
from ray_workers.training.parallel.meta_init import materialise
from tests.marks import SOAK, soak
from tests.unit.training.jobs import series, weights
from tests.unit.training.ranks import run_ranks

NAMES = ["background", "disc", "box"]


def draw(folder: Path, count: int, size: int = 24) -> str:
    """Draw a disc and a box, equally bright, on noise; returns the URL of the folder."""
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[:size, :size]
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True)
    for number in range(count):
        mask = np.zeros((size, size), dtype=np.uint8)
        row, column = rng.integers(4, size - 4, 2)
        mask[(rows - row) ** 2 + (columns - column) ** 2 <= 16] = 1
        top, left = rng.integers(0, size - 6, 2)
        mask[top : top + 6, left : left + 6] = 2
        pixels = (mask > 0) * 120 + rng.integers(0, 100, mask.shape)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / "images" / f"{number:03}.png")
        Image.fromarray(mask).save(folder / "masks" / f"{number:03}.png")
    return folder.as_uri()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return draw(tmp_path_factory.mktemp("shapes"), 100)


def document(source: str, num_workers: int = 1, **train: Any) -> dict[str, Any]:
    return {
        "recipe": "image_segmentation",
        "model": {"width": 8, "depth": 2},
        "data": {"source": source, "classes": NAMES},
        "train": {
            "epochs": 12,
            "global_batch_size": 8,
            "optimizer": {"lr": 0.02},
            "schedule": {"name": "cosine", "warmup_steps": 5},
            **train,
        },
        "resources": {"num_workers": num_workers},
        "checkpoint": {"best": "val/dice"},
    }


def build(fields: dict[str, Any]) -> Workload:
    given = JobSpec.model_validate(fields)
    work = recipes.RECIPES["image_segmentation"].build(given, DataPolicy.open())
    materialise(work.model, torch.device("cpu"), given.train.seed)
    return work


def unet(channels: int = 1, size: tuple[int, int] = (16, 16), **options: Any) -> Unet:
    torch.manual_seed(0)
    return Unet(spec.Unet(**{"width": 4, "depth": 2, **options}), (channels, *size), 3).eval()


@pytest.mark.parametrize("size", [(16, 16), (8, 30), (13, 17), (9, 8)])
def test_a_mask_is_as_large_as_its_image_whatever_the_size(size: tuple[int, int]) -> None:
    images = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert unet(channels=3)(images).shape == (2, 3, *size)


def test_a_side_is_filled_up_with_its_last_pixels() -> None:
    model = unet()
    images = torch.rand(1, 1, 14, 16, generator=torch.Generator().manual_seed(0))
    filled = torch.cat([images, images[:, :, -1:], images[:, :, -1:]], dim=2)
    with torch.no_grad():
        torch.testing.assert_close(model(images), model(filled)[:, :, :14])


def test_a_samples_result_does_not_depend_on_its_batch() -> None:
    model = unet()
    images = torch.rand(6, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        alone = torch.cat([model(image[None]) for image in images])
        torch.testing.assert_close(model(images), alone)


def test_each_level_halves_the_image_and_doubles_the_channels() -> None:
    model = unet(width=4, depth=3)
    seen = []
    for level in model.down:
        level.register_forward_hook(lambda _, __, output: seen.append(tuple(output.shape[1:])))
    with torch.no_grad():
        model(torch.zeros(1, 1, 32, 16))
    assert seen == [(4, 32, 16), (8, 16, 8), (16, 8, 4), (32, 4, 2)]
    kinds = {type(part) for part in model.modules()}
    assert nn.GroupNorm in kinds
    assert nn.BatchNorm2d not in kinds


def test_the_way_up_sees_what_the_way_down_saw_at_the_same_size() -> None:
    """Without values from lower levels, pixels still differ."""
    model = unet()
    for up in model.up:
        nn.init.zeros_(up.grow.weight)
        nn.init.zeros_(up.grow.bias)
    images = torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert model(images).std(dim=(2, 3)).min() > 1e-3


def test_images_too_small_for_the_depth_are_the_datas_fault() -> None:
    assert unet(size=(8, 8))
    with pytest.raises(
        DataError, match=r"too small for a unet of depth 2, which requires at least 8 x"
    ):
        unet(size=(7, 9))


def test_samples_are_pixels_between_0_and_1_and_class_numbers(source: str) -> None:
    work = build(document(source))
    images, masks = work.train.take(torch.arange(len(work.train)))
    assert images.shape == (80, 1, 24, 24)
    assert 0.0 <= images.min() < images.max() <= 1.0
    assert masks.shape == (80, 24, 24)
    assert masks.dtype == torch.int64
    assert set(masks.unique().tolist()) == {0, 1, 2}
    bright = images[:, 0][masks > 0].mean() - images[:, 0][masks == 0].mean()
    assert bright > 0.3, "an image has a mask of another"


def test_the_loss_of_a_batch_is_the_sum_of_its_images_losses(source: str) -> None:
    work = build(document(source))
    images, masks = work.train.take(torch.arange(5))
    logits = work.model(images)
    alone = sum(work.loss_sum(logits[i : i + 1], masks[i : i + 1]) for i in range(5))
    torch.testing.assert_close(work.loss_sum(logits, masks), alone)


def test_the_loss_is_cross_entropy_and_what_the_dice_lacks() -> None:
    """Two pixels of class 1 and two of the background, each with half of the probability."""
    logits, masks = torch.zeros(1, 2, 1, 4), torch.tensor([[[0, 0, 1, 1]]])
    dice = (2 * 1.0 + 1) / (2.0 + 2.0 + 1)
    expected = torch.tensor(2.0).log() + 1 - dice
    torch.testing.assert_close(measures.cross_entropy_and_dice(logits, masks), expected)
    sure = torch.where(torch.stack([masks == 0, masks == 1], dim=1), 50.0, -50.0)
    assert measures.cross_entropy_and_dice(sure, masks) < 1e-6
    nothing = torch.zeros_like(masks)
    absent = torch.stack([torch.full((1, 1, 4), 50.0), torch.full((1, 1, 4), -50.0)], dim=1)
    assert measures.cross_entropy_and_dice(absent, nothing) < 1e-6, "no class, none predicted"


def test_the_result_is_rebuilt_from_its_files_and_predicts_the_same(
    source: str, tmp_path: Path
) -> None:
    work = build(document(source))
    work.write_results(work.model, {"val/dice": 0.5}, 3, tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["config.json", "labels.json", "metrics.json", "model.safetensors"]
    segmenter = recipes.load(tmp_path)
    assert segmenter.labels == NAMES
    images, _ = work.validation.take(torch.arange(4))
    masks = segmenter.predict(images)
    assert masks.dtype == torch.uint8
    assert torch.equal(masks.long(), work.model(images).argmax(dim=1))
    assert segmenter.predict(images[:, :, :21, :19]).shape == (4, 21, 19)


@SOAK
def test_it_learns_to_distinguish_discs_from_boxes(source: str, tmp_path: Path) -> None:
    assert run_ranks(tmp_path, document(source), world_size=1) == [0]
    dice, iou = (list(series(tmp_path, f"val/{name}").values()) for name in ("dice", "iou"))
    assert dice[-1] > 0.85
    assert dice[0] < dice[-1]
    assert all(less < more for less, more in zip(iou, dice, strict=True))


@pytest.fixture(scope="module")
def short(source: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A few steps of one rank, and their settings: batches of 12, the last of an epoch with 8."""
    optimizer = {"name": "sgd", "lr": 0.01, "momentum": 0.9}
    train = {"global_batch_size": 12, "max_steps": 11, "optimizer": optimizer}
    home = tmp_path_factory.mktemp("short")
    assert run_ranks(home, document(source, **train), world_size=1) == [0]
    return home, train


@SOAK
@pytest.mark.parametrize("parallel", [{}, soak({"shard": 2})], ids=["replicas", "shards"])
def test_two_ranks_learn_what_one_learns(
    parallel: dict[str, Any], source: str, short: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """A share of 6 is computed as 4 and 2."""
    one, train = short
    fields = document(source, 2, micro_batch_size=4, **train) | {"parallel": parallel}
    assert run_ranks(tmp_path, fields, world_size=2) == [0, 0]
    for name, tensor in weights(one).items():
        torch.testing.assert_close(weights(tmp_path)[name], tensor, rtol=0, atol=1e-5)
    for key in ("train/loss", "val/loss"):
        assert series(tmp_path, key) == pytest.approx(series(one, key), rel=1e-5), key
    for key in ("val/dice", "val/iou", "val/accuracy"):  # a pixel near the threshold may flip
        assert series(tmp_path, key) == pytest.approx(series(one, key), abs=1e-3), key
