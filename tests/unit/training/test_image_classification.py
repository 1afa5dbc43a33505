from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dray.spec import JobSpec
from ray_workers.recipes import RECIPES, image_classification
from ray_workers.training.errors import DataError


def document(**fields: object) -> JobSpec:
    return JobSpec.model_validate({"recipe": "image_classification", **fields})


def test_digits_are_whole_and_scaled() -> None:
    images, labels = image_classification.load_digits()
    assert images.shape == (1797, 1, 8, 8)
    assert images.min() == 0.0
    assert images.max() == 1.0
    assert sorted(set(labels.tolist())) == list(range(10))


def test_the_split_is_stratified_complete_and_drawn_from_the_seed() -> None:
    _, labels = image_classification.load_digits()
    training, validation = image_classification.split(labels, 0.2, seed=0)
    assert sorted([*training.tolist(), *validation.tolist()]) == list(range(1797))
    for label in range(10):
        part = np.mean(labels[validation] == label) - np.mean(labels == label)
        assert abs(part) < 0.005
    again, other = (image_classification.split(labels, 0.2, seed)[1] for seed in (0, 1))
    assert np.array_equal(validation, again)
    assert not np.array_equal(validation, other)


def test_a_split_that_leaves_nothing_is_the_datas_fault() -> None:
    _, labels = image_classification.load_digits()
    with pytest.raises(DataError, match="validation_fraction"):
        image_classification.split(labels, 1e-6, seed=0)


@pytest.mark.parametrize("name", ["cnn", "mlp"])
def test_a_model_begins_the_same_for_the_same_seed(name: str) -> None:
    def weights(seed: int) -> torch.Tensor:
        job = document(model={"name": name, "width": 12}, train={"seed": seed})
        model = RECIPES["image_classification"].build(job).model
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights(5), weights(5))
    assert not torch.equal(weights(5), weights(6))


@pytest.mark.parametrize("name", ["cnn", "mlp"])
def test_a_samples_result_does_not_depend_on_its_batch(name: str) -> None:
    work = RECIPES["image_classification"].build(document(model={"name": name}))
    images = work.validation.inputs[:6]
    with torch.no_grad():
        together = work.model(images)
        alone = torch.cat([work.model(image[None]) for image in images])
    torch.testing.assert_close(together, alone)


def test_the_result_is_rebuilt_from_its_files_and_predicts_the_same(tmp_path: Path) -> None:
    work = RECIPES["image_classification"].build(document(model={"width": 8}))
    work.write_results(work.model, {"val/loss": 1.0}, 3, tmp_path)
    classifier = image_classification.load(tmp_path)
    images = work.validation.inputs[:20]
    expected = work.model(images).argmax(dim=1)
    assert classifier.predict(images) == [str(label) for label in expected.tolist()]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["config.json", "labels.json", "metrics.json", "model.safetensors"]
