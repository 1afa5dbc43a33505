"""Recipe: classify small images.

Data: `sklearn://digits`, 1,797 hand-written digits of 8 x 8 pixels (the test part of UCI's
Optical Recognition of Handwritten Digits), which comes with scikit-learn and needs no network.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import sklearn.datasets
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dray import spec
from ray_workers.training.data import derive_seed
from ray_workers.training.errors import DataError
from ray_workers.training.workload import Samples, Workload

DIGITS_MAX_PIXEL = 16.0
GROUPS = 8


class Cnn(nn.Module):
    """Three 3x3 convolutions, the image halved after each of the last two, and one linear layer.

    GroupNorm (Wu & He 2018, arXiv:1803.08494), not BatchNorm: a sample's result must not depend
    on which others share its batch, or the world size would change the numbers.
    """

    def __init__(self, shape: tuple[int, int, int], num_classes: int, options: spec.Model) -> None:
        super().__init__()
        channels, height, width = shape
        self.body = nn.Sequential(
            *_conv(channels, options.width),
            *_conv(options.width, 2 * options.width),
            nn.MaxPool2d(2),
            *_conv(2 * options.width, 2 * options.width),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(options.dropout),
        )
        self.head = nn.Linear(2 * options.width * (height // 4) * (width // 4), num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """(N, channels, height, width) pixels in 0..1 -> (N, num_classes) logits."""
        return cast(Tensor, self.head(self.body(images)))


class Mlp(nn.Module):
    """Two hidden layers."""

    def __init__(self, shape: tuple[int, int, int], num_classes: int, options: spec.Model) -> None:
        super().__init__()
        channels, height, width = shape
        self.body = nn.Sequential(
            nn.Flatten(),
            nn.Linear(channels * height * width, options.width),
            nn.ReLU(),
            nn.Dropout(options.dropout),
            nn.Linear(options.width, options.width),
            nn.ReLU(),
            nn.Dropout(options.dropout),
        )
        self.head = nn.Linear(options.width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """(N, channels, height, width) pixels in 0..1 -> (N, num_classes) logits."""
        return cast(Tensor, self.head(self.body(images)))


MODELS: Mapping[str, type[Cnn] | type[Mlp]] = {"cnn": Cnn, "mlp": Mlp}


@lru_cache(maxsize=1)
def load_digits() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """((N, 1, 8, 8) pixels in 0..1, (N,) labels). Raises DataError if they can't be read."""
    try:
        data = sklearn.datasets.load_digits()
    except (OSError, ValueError) as error:
        raise DataError(f"sklearn://digits cannot be read: {error}") from error
    images = (data.images[:, None] / DIGITS_MAX_PIXEL).astype(np.float32)
    return images, data.target.astype(np.int64)


def split(
    labels: npt.NDArray[np.int64], validation_fraction: float, seed: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Indices for (training, validation), each in rising order, every class cut alike.

    Raises DataError if one of the two would be empty.
    """
    generator = np.random.default_rng(derive_seed("split", seed))
    is_validation = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        count = round(validation_fraction * len(members))
        is_validation[generator.permutation(members)[:count]] = True
    training, validation = np.flatnonzero(~is_validation), np.flatnonzero(is_validation)
    if len(training) == 0 or len(validation) == 0:
        raise DataError(
            f"data.validation_fraction {validation_fraction} leaves {len(training)} samples for "
            f"training and {len(validation)} for validation; each needs at least one"
        )
    return training, validation


def build(document: spec.JobSpec) -> Workload:
    """The workload of a job: the same model and split for the same seed, on every rank."""
    images, labels = load_digits()
    training, validation = split(labels, document.data.validation_fraction, document.train.seed)
    shape = cast(tuple[int, int, int], images.shape[1:])
    num_classes = int(labels.max()) + 1
    torch.default_generator.manual_seed(derive_seed("model", document.train.seed))
    model = MODELS[document.model.name](shape, num_classes, document.model)

    def write_results(
        trained: nn.Module, metrics: Mapping[str, float], step: int, folder: Path
    ) -> None:
        state = {key: value.cpu().contiguous() for key, value in trained.state_dict().items()}
        save_file(state, folder / "model.safetensors")
        config = {
            "recipe": document.recipe,
            "model": document.model.model_dump(mode="json"),
            "input_shape": list(shape),
            "input_range": [0.0, 1.0],
            "num_classes": num_classes,
            "step": step,
            "spec": document.model_dump(mode="json"),
        }
        _write_json(folder / "config.json", config)
        _write_json(folder / "labels.json", [str(label) for label in range(num_classes)])
        _write_json(folder / "metrics.json", {"step": step, **metrics})

    return Workload(
        model=model,
        train=_samples(images, labels, training),
        validation=_samples(images, labels, validation),
        loss_sum=_loss_sum,
        metric_sums={"accuracy": _num_correct},
        write_results=write_results,
    )


@dataclass(frozen=True)
class Classifier:
    """A trained model with the names of its classes."""

    model: nn.Module
    labels: list[str]

    def predict(self, images: Tensor) -> list[str]:
        """The likeliest label of each image: float (N, channels, height, width), in 0..1."""
        with torch.no_grad():
            return [self.labels[i] for i in self.model(images).argmax(dim=1).tolist()]


def load(folder: Path) -> Classifier:
    """Rebuild the classifier from the folder of a job's artifacts."""
    config = json.loads((folder / "config.json").read_text())
    options = spec.Model.model_validate(config["model"])
    shape = cast(tuple[int, int, int], tuple(config["input_shape"]))
    model = MODELS[options.name](shape, config["num_classes"], options)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return Classifier(model.eval(), json.loads((folder / "labels.json").read_text()))


def _conv(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    groups = next(count for count in range(GROUPS, 0, -1) if outputs % count == 0)
    return (
        nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False),
        nn.GroupNorm(groups, outputs),
        nn.ReLU(),
    )


def _samples(
    images: npt.NDArray[np.float32], labels: npt.NDArray[np.int64], at: npt.NDArray[np.int64]
) -> Samples:
    return Samples(torch.from_numpy(images[at]), torch.from_numpy(labels[at]))


def _loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="sum")


def _num_correct(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits.argmax(dim=1) == targets).sum()


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
