from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dray.spec import JobSpec
from ray_workers import recipes
from ray_workers.recipes.models import images as networks
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.errors import DataError
from ray_workers.training.core.workload import Workload
from ray_workers.training.parallel.meta_init import materialise

MODELS = [
    {"name": "cnn", "width": 12},
    {"name": "mlp", "width": 12},
    {"name": "resnet", "depth": 8},
]
by_name = pytest.mark.parametrize("model", MODELS, ids=[str(model["name"]) for model in MODELS])


def build(**fields: object) -> Workload:
    document = JobSpec.model_validate({"recipe": "image_classification", **fields})
    work = recipes.RECIPES["image_classification"].build(document, DataPolicy.open())
    materialise(work.model, torch.device("cpu"), document.train.seed)
    return work


def first_images(work: Workload, count: int) -> tuple[Tensor, Tensor]:
    return work.validation.take(torch.arange(count))


def test_pixels_are_scaled_to_between_0_and_1() -> None:
    work = build()
    images, labels = work.train.take(torch.arange(len(work.train)))
    assert images.shape[1:] == (1, 8, 8)
    assert (images.min(), images.max()) == (0.0, 1.0)
    assert sorted(set(labels.tolist())) == list(range(10))
    assert len(work.train) + len(work.validation) == 1797


@by_name
def test_a_model_begins_the_same_for_the_same_seed(model: dict[str, object]) -> None:
    def weights(seed: int) -> Tensor:
        built = build(model=model, train={"seed": seed}).model
        return torch.cat([p.detach().flatten() for p in built.parameters()])

    assert torch.equal(weights(5), weights(5))
    assert not torch.equal(weights(5), weights(6))


@by_name
def test_a_samples_result_does_not_depend_on_its_batch(model: dict[str, object]) -> None:
    work = build(model=model)
    images, _ = first_images(work, 6)
    with torch.no_grad():
        together = work.model(images)
        alone = torch.cat([work.model(image[None]) for image in images])
    torch.testing.assert_close(together, alone)


@by_name
def test_the_result_is_rebuilt_from_its_files_and_predicts_the_same(
    tmp_path: Path, model: dict[str, object]
) -> None:
    work = build(model=model)
    work.write_results(work.model, {"val/loss": 1.0}, 3, tmp_path)
    classifier = recipes.load(tmp_path)
    images, _ = first_images(work, 20)
    expected = work.model(images).argmax(dim=1)
    assert classifier.predict(images) == [str(label) for label in expected.tolist()]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["config.json", "labels.json", "metrics.json", "model.safetensors"]


def test_a_resnet_has_the_depth_it_is_named_for() -> None:
    model = build(model={"name": "resnet", "depth": 20}).model
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    assert len([m for m in layers if getattr(m, "kernel_size", (3, 3)) != (1, 1)]) == 20


def test_images_too_small_for_the_cnn_are_the_datas_fault() -> None:
    options = JobSpec.model_validate({"recipe": "image_classification"}).model
    with pytest.raises(DataError, match="3 x 9 pixels are too small"):
        networks.build(options, (1, 3, 9), 2)


def test_label_smoothing_is_for_training_alone() -> None:
    smoothed = build(train={"label_smoothing": 0.5})
    images, labels = first_images(smoothed, 8)
    logits = smoothed.model(images)
    plain = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    assert torch.equal(smoothed.validation_loss_sum(logits, labels), plain)
    uniform = -logits.log_softmax(dim=1).mean(dim=1).sum()
    torch.testing.assert_close(smoothed.loss_sum(logits, labels), 0.5 * plain + 0.5 * uniform)
