"""Recipes: predict a class or a number from the other columns of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dray import spec
from ray_workers.contracts import DataPolicy
from ray_workers.recipes import measures, results, splits
from ray_workers.recipes.models.tables import UNKNOWN, TableMlp
from ray_workers.training.datasets import Table, open_table
from ray_workers.training.datasets.columns import number_name
from ray_workers.training.samples import Rows, Samples
from ray_workers.training.workload import LossSum, Workload

BLOCK = 65_536
"""Rows that are looked at together where a whole column is summed up."""


def build_classification(document: spec.JobSpec, policy: DataPolicy) -> Workload:
    """Raises DataError."""
    table = open_table(document.data, policy, classifies=True)
    assert table.classes is not None
    training, validation = splits.by_class(
        table.target, document.data.validation_fraction, document.train.seed
    )
    num_classes = len(table.classes)
    model = _model(document, table, num_classes)
    _learn_scale(model, table, training)
    return Workload(
        model=model,
        train=_samples(table, training),
        validation=_samples(table, validation),
        loss_sum=measures.cross_entropy(document.train.label_smoothing),
        validation_loss_sum=measures.cross_entropy(0.0),
        metrics=lambda: measures.of_classes(num_classes, len(validation)),
        fingerprint=table.fingerprint,
        write_results=results.writer(document, _config(table)),
    )


def build_regression(document: spec.JobSpec, policy: DataPolicy) -> Workload:
    """The loss is the squared error in units of the target's variance. Raises DataError."""
    table = open_table(document.data, policy, classifies=False)
    training, validation = splits.at_random(
        len(table.target),
        document.data.validation_fraction,
        document.train.seed,
        least=2,  # R² is not defined of one
    )
    model = _model(document, table, num_outputs=1)
    _learn_scale(model, table, training)
    mean, deviation = _mean_and_deviation(table.target[:, None], training)
    model.target_mean.copy_(mean[0])
    model.target_deviation.copy_(deviation[0])
    loss_sum = _squared_error(float(deviation[0]))
    return Workload(
        model=_OneNumber(model),
        train=_samples(table, training),
        validation=_samples(table, validation),
        loss_sum=loss_sum,
        validation_loss_sum=loss_sum,
        metrics=measures.of_numbers,
        fingerprint=table.fingerprint,
        write_results=results.writer(document, _config(table)),
    )


def _model(document: spec.JobSpec, table: Table, num_outputs: int) -> TableMlp:
    assert isinstance(document.model, spec.Mlp)
    sizes = [len(vocabulary) for vocabulary in table.vocabularies]
    with torch.device("meta"):
        return TableMlp(document.model, table.numeric.shape[1], sizes, num_outputs)


def _learn_scale(model: TableMlp, table: Table, training: Rows) -> None:
    mean, deviation = _mean_and_deviation(table.numeric, training)
    model.mean.copy_(mean)
    model.deviation.copy_(deviation)


def _mean_and_deviation(columns: npt.NDArray[Any], rows: Rows) -> tuple[Tensor, Tensor]:
    """float32 (F,) each, over the given rows, which may be more than fit in memory. A column that
    never changes has the deviation 1."""
    total = np.zeros(columns.shape[1])
    for start in range(0, len(rows), BLOCK):
        total += columns[rows[start : start + BLOCK]].sum(axis=0, dtype=np.float64)
    mean = total / len(rows)
    squares = np.zeros(columns.shape[1])
    for start in range(0, len(rows), BLOCK):
        squares += np.square(columns[rows[start : start + BLOCK]] - mean).sum(axis=0)
    deviation = np.sqrt(squares / len(rows))
    deviation[deviation < np.finfo(np.float32).tiny] = 1.0
    return torch.from_numpy(mean).float(), torch.from_numpy(deviation).float()


def _samples(table: Table, rows: Rows) -> Samples:
    def fetch(at: Rows) -> tuple[Tensor, Tensor]:
        codes = np.take(table.categories, at, axis=0) + (UNKNOWN + 1)
        inputs = np.concatenate([np.take(table.numeric, at, axis=0), codes], axis=1)
        return torch.from_numpy(inputs.astype(np.float32)), torch.from_numpy(table.target[at])

    return Samples(rows, fetch)


def _squared_error(deviation: float) -> LossSum:
    def loss_sum(outputs: Tensor, targets: Tensor) -> Tensor:
        return ((outputs - targets) / deviation).square().sum()

    return loss_sum


class _OneNumber(nn.Module):
    """A model of one output, without its second dimension."""

    def __init__(self, model: TableMlp) -> None:
        super().__init__()
        self.model = model

    def forward(self, rows: Tensor) -> Tensor:
        outputs: Tensor = self.model(rows)
        return outputs.squeeze(1)


def _config(table: Table) -> dict[str, Any]:
    config: dict[str, Any] = {
        "target": table.target_name,
        "numeric": list(table.numeric_names),
        "categorical": [
            {"name": name, "values": list(values)}
            for name, values in zip(table.category_names, table.vocabularies, strict=True)
        ],
    }
    return config if table.classes is None else {**config, "labels": list(table.classes)}


@dataclass(frozen=True)
class Predictor:
    """A trained model with the names of its columns and, for classes, of those."""

    model: nn.Module
    numeric: Sequence[str]
    categories: Mapping[str, Mapping[str, int]]
    """Of each column, the code of each value that training saw."""
    labels: Sequence[str] | None

    def predict(self, rows: Sequence[Mapping[str, Any]]) -> list[str] | list[float]:
        """The likeliest class, or the number, for each row of column -> value.

        A category that training never saw counts as unknown. KeyError for a missing column.
        """
        inputs = torch.tensor([self._encoded(row) for row in rows], dtype=torch.float32)
        with torch.no_grad():
            outputs = self.model(inputs)
        if self.labels is None:
            numbers: list[float] = outputs.tolist()
            return numbers
        return [self.labels[i] for i in outputs.argmax(dim=1).tolist()]

    def _encoded(self, row: Mapping[str, Any]) -> list[float]:
        numbers = [float(row[name]) for name in self.numeric]
        codes = [_code(known, row[name]) for name, known in self.categories.items()]
        return [*numbers, *map(float, codes)]


def _code(known: Mapping[str, int], value: Any) -> int:
    """Of a category as the data set names it: a number without a needless fraction, `true`."""
    names = [str(value)]
    if isinstance(value, bool):
        names.append(str(value).lower())
    elif isinstance(value, float):
        names.append(number_name(value))
    return next((known[name] for name in names if name in known), UNKNOWN)


def load(folder: Path) -> Predictor:
    """Rebuild the model from the folder of a job's artifacts."""
    config = results.read_config(folder)
    document = spec.JobSpec.model_validate(config["spec"])
    assert isinstance(document.model, spec.Mlp)
    categories = {
        column["name"]: {value: code for code, value in enumerate(column["values"], UNKNOWN + 1)}
        for column in config["categorical"]
    }
    labels = config.get("labels")
    table = TableMlp(
        document.model,
        len(config["numeric"]),
        [len(known) for known in categories.values()],
        1 if labels is None else len(labels),
    )
    model = results.restore(_OneNumber(table) if labels is None else table, folder)
    return Predictor(model, config["numeric"], categories, labels)
