"""Recipes: predict a class or a number from the other columns of a table."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dray import spec
from ray_workers.datasets import Table, open_table
from ray_workers.datasets.core.alignment import table_like
from ray_workers.datasets.core.types import sources_of
from ray_workers.datasets.formats.columns import NO_CODE
from ray_workers.datasets.formats.dates import PARTS
from ray_workers.recipes import imputation, measures, results, splits, table_report
from ray_workers.recipes.export import export
from ray_workers.recipes.imputation import Imputation
from ray_workers.recipes.inference import chances_of, outputs_of
from ray_workers.recipes.models import imported
from ray_workers.recipes.models.tables import UNKNOWN, OwnTableModel, TableMlp, TableModel
from ray_workers.recipes.table_inputs import TableForm
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.workload import LossSum, Workload
from ray_workers.training.data.device_dataset import Rows, Samples

BLOCK = 65_536
"""Rows that are looked at together where a whole column is summed up."""


def build_classification(
    document: spec.JobSpec, policy: DataPolicy, own: spec.Data | None = None
) -> Workload:
    """own: where the rows come from, if not from the document's data. Raises DataError."""
    table = open_table(document.data, policy, classifies=True)
    assert table.classes is not None

    def divided(rows: Table) -> tuple[Rows, Rows]:
        fraction, seed = document.data.validation_fraction, document.train.seed
        return splits.by_class(rows.target, fraction, seed)

    training, validation = divided(table)
    num_classes = len(table.classes)
    filling = imputation.chosen(table, document.data)
    model = _model(document, table, filling, num_classes)
    _learn_inputs(model, table, training, filling)
    rows = table
    if own is not None:
        rows = table_like(table, open_table(own, policy, classifies=True))
        training, validation = divided(rows)
    return Workload(
        model=model,
        train=_samples(rows, training),
        validation=_samples(rows, validation),
        loss_sum=measures.cross_entropy(document.train.label_smoothing),
        validation_loss_sum=measures.cross_entropy(0.0),
        metrics=lambda: measures.of_classes(num_classes, len(validation)),
        fingerprint=table.fingerprint,
        write_results=results.writer(document, _config(table, filling)),
        about=table_report.lines(table, filling, model.fill),
    )


def build_regression(
    document: spec.JobSpec, policy: DataPolicy, own: spec.Data | None = None
) -> Workload:
    """The loss is the squared error in units of the target's variance. own: where the rows come
    from, if not from the document's data. Raises DataError."""
    table = open_table(document.data, policy, classifies=False)

    def divided(rows: Table) -> tuple[Rows, Rows]:
        fraction, seed = document.data.validation_fraction, document.train.seed
        return splits.at_random(len(rows.target), fraction, seed)

    training, validation = divided(table)
    filling = imputation.chosen(table, document.data)
    model = _model(document, table, filling, num_outputs=1)
    _learn_inputs(model, table, training, filling)
    mean, deviation = _mean_and_deviation(table.target[:, None], training)
    model.target_mean.copy_(mean[0])
    model.target_deviation.copy_(deviation[0])
    loss_sum = squared_error(float(deviation[0]))
    rows = table
    if own is not None:
        rows = table_like(table, open_table(own, policy, classifies=False))
        training, validation = divided(rows)
    return Workload(
        model=_OneNumber(model),
        train=_samples(rows, training),
        validation=_samples(rows, validation),
        loss_sum=loss_sum,
        validation_loss_sum=loss_sum,
        metrics=measures.of_numbers,
        fingerprint=table.fingerprint,
        write_results=results.writer(document, _config(table, filling)),
        about=table_report.lines(table, filling, model.fill),
    )


def _model(
    document: spec.JobSpec, table: Table, filling: Imputation, num_outputs: int
) -> TableModel:
    options = document.model
    assert isinstance(options, spec.Mlp | spec.Imported)
    numeric = table.numeric_sources
    if isinstance(options, spec.Imported):
        num_features = len(numeric) + len(table.category_names) + len(filling.indicated)
        form = "(batch, 1)" if table.classes is None else "(batch, classes)"
        seed = document.train.seed
        network = imported.build(options, seed, (num_features,), (num_outputs,), form)
        return _own(network, numeric, len(table.category_names), filling)
    sizes = {
        name: len(vocabulary)
        for name, vocabulary in zip(table.category_names, table.vocabularies, strict=True)
    }
    with torch.device("meta"):
        return _mlp(options, numeric, sizes, filling, num_outputs)


def _mlp(
    options: spec.Mlp,
    numeric: Sequence[str],
    sizes: Mapping[str, int],
    filling: Imputation,
    num_outputs: int,
) -> TableMlp:
    """sizes: how many values each column of categories has."""
    return TableMlp(
        options,
        len(numeric),
        [size + (name in filling.own_category) for name, size in sizes.items()],
        num_outputs,
        fills=bool(filling.filled),
        indicated=[numeric.index(name) for name in filling.indicated],
    )


def _own(
    network: nn.Module, numeric: Sequence[str], num_categories: int, filling: Imputation
) -> OwnTableModel:
    return OwnTableModel(
        network,
        len(numeric),
        num_categories,
        fills=bool(filling.filled),
        indicated=[numeric.index(name) for name in filling.indicated],
    )


def _learn_inputs(model: TableModel, table: Table, training: Rows, filling: Imputation) -> None:
    """The statistics that standardise the numbers, and the values that replace missing ones."""
    numeric = table.numeric
    if model.fill is None:
        mean, deviation = _mean_and_deviation(numeric, training)
    else:
        model.fill.copy_(imputation.learn(table, training, filling))
        fill = model.fill[: model.num_numeric].numpy()
        mean, deviation = _mean_and_deviation(numeric, training, fill)
    model.mean.copy_(mean)
    model.deviation.copy_(deviation)


def _mean_and_deviation(
    columns: npt.NDArray[Any], rows: Rows, fill: npt.NDArray[np.float32] | None = None
) -> tuple[Tensor, Tensor]:
    """float32 (F,) each, over the given rows, which may be more than fit in memory. A column that
    never changes has the deviation 1. fill: (F,) for the values that are NaN."""

    def blocks() -> Iterator[npt.NDArray[Any]]:
        for start in range(0, len(rows), BLOCK):
            block = columns[rows[start : start + BLOCK]]
            yield block if fill is None else np.where(np.isnan(block), fill, block)

    total = np.zeros(columns.shape[1])
    for block in blocks():
        total += block.sum(axis=0, dtype=np.float64)
    mean = total / len(rows)
    squares = np.zeros(columns.shape[1])
    for block in blocks():
        squares += np.square(block - mean).sum(axis=0)
    deviation = np.sqrt(squares / len(rows))
    deviation[deviation < np.finfo(np.float32).tiny] = 1.0
    return torch.from_numpy(mean).float(), torch.from_numpy(deviation).float()


def _samples(table: Table, rows: Rows) -> Samples:
    def fetch(at: Rows) -> tuple[Tensor, Tensor]:
        codes = np.take(table.categories, at, axis=0)
        known = (codes + (UNKNOWN + 1)).astype(np.float32)
        known[codes == NO_CODE] = np.nan
        inputs = np.concatenate([np.take(table.numeric, at, axis=0), known], axis=1)
        return torch.from_numpy(inputs), torch.from_numpy(table.target[at])

    return Samples(rows, fetch, None if table.classes is None else table.target[rows])


def squared_error(deviation: float) -> LossSum:
    """In units of the target's variance."""

    def loss_sum(outputs: Tensor, targets: Tensor) -> Tensor:
        return ((outputs - targets) / deviation).square().sum()

    return loss_sum


class _OneNumber(nn.Module):
    """A model of one output, without its second dimension."""

    def __init__(self, model: TableModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, rows: Tensor) -> Tensor:
        outputs: Tensor = self.model(rows)
        return outputs.squeeze(1)


def _config(table: Table, filling: Imputation) -> dict[str, Any]:
    config: dict[str, Any] = {
        "target": table.target_name,
        "numeric": list(table.numeric_names),
        "dates": list(table.date_names),
        "categorical": [
            {"name": name, "values": list(values)}
            for name, values in zip(table.category_names, table.vocabularies, strict=True)
        ],
        "imputation": asdict(filling),
    }
    return config if table.classes is None else {**config, "labels": list(table.classes)}


@dataclass(frozen=True)
class Predictor:
    """A trained model with the names of its columns and of its classes, if there are any.
    `TableForm.tensor` describes its inputs."""

    model: nn.Module
    form: TableForm
    labels: Sequence[str] | None

    @property
    def numeric(self) -> Sequence[str]:
        return self.form.numeric

    @property
    def dates(self) -> Sequence[str]:
        return self.form.dates

    @property
    def categories(self) -> Mapping[str, Mapping[str, int]]:
        return self.form.categories

    def predict(self, rows: Any) -> list[str] | list[float]:
        """The likeliest class, or the number, for each row."""
        outputs = outputs_of(self.model, self.form.tensor(rows))
        if self.labels is None:
            numbers: list[float] = outputs.tolist()
            return numbers
        return [self.labels[i] for i in outputs.argmax(dim=1).tolist()]

    def predict_proba(self, rows: Any) -> npt.NDArray[np.float32]:
        """(N, classes): how likely each class is, in the order of `labels`. ValueError for a model
        that predicts numbers."""
        if self.labels is None:
            raise ValueError("the model predicts a number, which has no probabilities")
        found: npt.NDArray[np.float32] = chances_of(self.model, self.form.tensor(rows)).numpy()
        return found

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Write a file `.onnx` or `.pt2` that runs without dray, as `export.export` says. It takes
        `rows`, float32 (N, columns), as `TableForm.tensor` makes them."""
        about = {
            "numeric": list(self.numeric),
            "dates": dict.fromkeys(self.dates, PARTS),
            "categories": self.categories,
            "labels": self.labels,
        }
        return export(self.model, "rows", torch.zeros(2, self.form.width), path, about)


def load(folder: Path) -> Predictor:
    """Rebuild the model from the folder of a job's artifacts."""
    config = results.read_config(folder)
    document = spec.JobSpec.model_validate(config["spec"])
    options = document.model
    assert isinstance(options, spec.Mlp | spec.Imported)
    categories = {
        column["name"]: {value: code for code, value in enumerate(column["values"], UNKNOWN + 1)}
        for column in config["categorical"]
    }
    labels = config.get("labels")
    filling = Imputation(**config.get("imputation", {}))
    dates = config.get("dates", ())
    numeric = sources_of(config["numeric"], dates)
    table: TableModel
    if isinstance(options, spec.Imported):
        table = _own(imported.at_hand(options), numeric, len(categories), filling)
    else:
        sizes = {name: len(known) for name, known in categories.items()}
        table = _mlp(options, numeric, sizes, filling, 1 if labels is None else len(labels))
    model = results.restore(_OneNumber(table) if labels is None else table, folder)
    filled, decimal = frozenset(filling.filled), document.data.decimal
    form = TableForm(config["numeric"], categories, filled, decimal, dates)
    return Predictor(model, form, labels)
