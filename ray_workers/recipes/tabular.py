"""Recipes for predicting a class or a number from the other columns of a table."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
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
from ray_workers.datasets.core.errors import listed
from ray_workers.datasets.core.types import sources_of
from ray_workers.datasets.formats.columns import NO_CODE
from ray_workers.datasets.formats.dates import PARTS
from ray_workers.datasets.formats.number_texts import NumberStyle
from ray_workers.recipes import (
    column_statistics,
    imputation,
    measures,
    merging,
    results,
    splits,
    table_report,
)
from ray_workers.recipes.column_statistics import ColumnStatistics
from ray_workers.recipes.export import export
from ray_workers.recipes.imputation import Imputation
from ray_workers.recipes.inference import chances_of, outputs_of
from ray_workers.recipes.models import imported
from ray_workers.recipes.models.tables import (
    UNKNOWN,
    ExportedTable,
    OwnTableModel,
    TableMlp,
    TableModel,
)
from ray_workers.recipes.table_inputs import TableForm
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.workload import LossSum, Workload
from ray_workers.training.data.device_dataset import Rows, Samples


def build_classification(
    document: spec.JobSpec, policy: DataPolicy, own: spec.Data | None = None
) -> Workload:
    """Build a classification. If `own` is given, it replaces the document's data. Raise
    DataError."""
    table = open_table(document.data, policy, classifies=True)
    assert table.classes is not None

    def divided(rows: Table) -> tuple[Rows, Rows]:
        fraction, seed = document.data.validation_fraction, document.train.seed
        return splits.by_class(rows.target, fraction, seed)

    training, validation = divided(table)
    num_classes = len(table.classes)
    filling = imputation.chosen(table, document.data)
    learned = column_statistics.learn(table, training, filling)
    model = _model(document, table, filling, num_classes, learned)
    about = _about(table, training, filling, learned, model)
    rows = table
    if own is not None:
        rows = table_like(table, open_table(own, policy, classifies=True))
        training, validation = divided(rows)
    return Workload(
        model=model,
        train=_samples(rows, training, learned),
        validation=_samples(rows, validation, learned),
        loss_sum=measures.cross_entropy(document.train.label_smoothing),
        validation_loss_sum=measures.cross_entropy(0.0),
        metrics=lambda: measures.of_classes(num_classes, len(validation)),
        fingerprint=table.fingerprint,
        write_results=results.writer(document, _config(table, filling, learned)),
        about=about,
    )


def build_regression(
    document: spec.JobSpec, policy: DataPolicy, own: spec.Data | None = None
) -> Workload:
    """Build a regression, whose loss is the squared error in units of the target's variance. If
    `own` is given, it replaces the document's data. Raises DataError."""
    table = open_table(document.data, policy, classifies=False)

    def divided(rows: Table) -> tuple[Rows, Rows]:
        fraction, seed = document.data.validation_fraction, document.train.seed
        return splits.at_random(len(rows.target), fraction, seed)

    training, validation = divided(table)
    filling = imputation.chosen(table, document.data)
    learned = column_statistics.learn(table, training, filling)
    model = _model(document, table, filling, 1, learned)
    about = _about(table, training, filling, learned, model)
    loss_sum = squared_error(float(model.target_deviation))
    rows = table
    if own is not None:
        rows = table_like(table, open_table(own, policy, classifies=False))
        training, validation = divided(rows)
    return Workload(
        model=_OneNumber(model),
        train=_samples(rows, training, learned),
        validation=_samples(rows, validation, learned),
        loss_sum=loss_sum,
        validation_loss_sum=loss_sum,
        metrics=measures.of_numbers,
        fingerprint=table.fingerprint,
        write_results=results.writer(document, _config(table, filling, learned)),
        about=about,
    )


def _model(
    document: spec.JobSpec,
    table: Table,
    filling: Imputation,
    num_outputs: int,
    learned: ColumnStatistics,
) -> TableModel:
    """Build the model, with the statistics of its inputs."""
    options = document.model
    assert isinstance(options, spec.Mlp | spec.Imported)
    numeric, has_offsets = table.numeric_sources, learned.has_offsets
    model: TableModel
    if isinstance(options, spec.Imported):
        num_features = len(numeric) + len(table.category_names) + len(filling.indicated)
        form = "(batch, 1)" if table.classes is None else "(batch, classes)"
        seed = document.train.seed
        network = imported.build(options, seed, (num_features,), (num_outputs,), form)
        model = _own(network, numeric, len(table.category_names), filling, has_offsets)
    else:
        sizes = {
            name: len(vocabulary)
            for name, vocabulary in zip(table.category_names, table.vocabularies, strict=True)
        }
        with torch.device("meta"):
            model = _mlp(options, numeric, sizes, filling, num_outputs, has_offsets)
    learned.write_to(model)
    return model


def _mlp(
    options: spec.Mlp,
    numeric: Sequence[str],
    sizes: Mapping[str, int],
    filling: Imputation,
    num_outputs: int,
    has_offsets: bool,
) -> TableMlp:
    """Build the network. `sizes` contains the number of values of each categorical column."""
    return TableMlp(
        options,
        len(numeric),
        [size + (name in filling.own_category) for name, size in sizes.items()],
        num_outputs,
        fills=bool(filling.filled),
        indicated=[numeric.index(name) for name in filling.indicated],
        has_offsets=has_offsets,
    )


def _own(
    network: nn.Module,
    numeric: Sequence[str],
    num_categories: int,
    filling: Imputation,
    has_offsets: bool,
) -> OwnTableModel:
    return OwnTableModel(
        network,
        len(numeric),
        num_categories,
        fills=bool(filling.filled),
        indicated=[numeric.index(name) for name in filling.indicated],
        has_offsets=has_offsets,
    )


def _about(
    table: Table,
    training: Rows,
    filling: Imputation,
    learned: ColumnStatistics,
    model: TableModel,
) -> Sequence[str]:
    """Return lines about the table for the job's log."""
    fill = None if learned.fill is None else learned.fill.tolist()
    merged = merging.counted(table, training, model)
    return table_report.lines(table, filling, fill, merged)


def _samples(table: Table, rows: Rows, learned: ColumnStatistics) -> Samples:
    dtype = np.float64 if learned.has_offsets else np.float32
    shifts = np.array([table.shifts.get(name, 0.0) for name in table.numeric_sources])
    target_shift = table.shifts.get(table.target_name, 0.0)

    def fetch(at: Rows) -> tuple[Tensor, Tensor]:
        numbers = np.take(table.numeric, at, axis=0)
        if shifts.any():
            numbers = numbers + shifts
        codes = np.take(table.categories, at, axis=0)
        known = (codes + (UNKNOWN + 1)).astype(dtype)
        known[codes == NO_CODE] = np.nan
        inputs = np.concatenate([numbers.astype(dtype), known], axis=1)
        target = table.target[at]
        if target_shift:
            target = target + target_shift
        return torch.from_numpy(inputs), torch.from_numpy(target)

    return Samples(rows, fetch, None if table.classes is None else table.target[rows])


def squared_error(deviation: float) -> LossSum:
    """Return a loss function that sums squared errors in units of the target's variance."""

    def loss_sum(outputs: Tensor, targets: Tensor) -> Tensor:
        return ((outputs - targets) / deviation).square().sum()

    return loss_sum


class _OneNumber(nn.Module):
    """Wraps a model with one output, and removes the second dimension of its output."""

    def __init__(self, model: TableModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, rows: Tensor) -> Tensor:
        """Return float64 (N,), in the target's unit."""
        return self.model.in_units(self.model(rows).squeeze(1))


def _config(table: Table, filling: Imputation, learned: ColumnStatistics) -> dict[str, Any]:
    config: dict[str, Any] = {
        "target": table.target_name,
        "numeric": list(table.numeric_names),
        "dates": list(table.date_names),
        "categorical": [
            {"name": name, "values": list(values)}
            for name, values in zip(table.category_names, table.vocabularies, strict=True)
        ],
        "imputation": asdict(filling),
        "bases": dict(table.bases),
        "has_offsets": learned.has_offsets,
    }
    return config if table.classes is None else {**config, "labels": list(table.classes)}


@dataclass(frozen=True)
class Predictor:
    """A trained model, with the names of its columns and, for a classification, the names of its
    classes. `TableForm.tensor` describes its inputs."""

    model: nn.Module
    form: TableForm
    labels: Sequence[str] | None
    target_base: int = 0
    """If not 0, predictions are rounded to integers, and this number is added to them."""

    @property
    def numeric(self) -> Sequence[str]:
        return self.form.numeric

    @property
    def dates(self) -> Sequence[str]:
        return self.form.dates

    @property
    def categories(self) -> Mapping[str, Mapping[str, int]]:
        return self.form.categories

    def predict(self, rows: Any) -> list[str] | list[float] | list[int]:
        """Return the most likely class or the predicted number for each row. If the table's targets
        are integers beyond 2**53, predictions are also integers, because a float would round
        them."""
        outputs = outputs_of(self.model, self.form.tensor(rows))
        if self.labels is None and self.target_base:
            return [round(number) + self.target_base for number in outputs.tolist()]
        if self.labels is None:
            numbers: list[float] = outputs.tolist()
            return numbers
        return [self.labels[i] for i in outputs.argmax(dim=1).tolist()]

    def predict_proba(self, rows: Any) -> npt.NDArray[np.float64]:
        """Return (N, classes) probabilities, in the order of `labels`. Raises ValueError for a
        regression."""
        if self.labels is None:
            raise ValueError("the model predicts a number, so there are no probabilities")
        found: npt.NDArray[np.float64] = chances_of(self.model, self.form.tensor(rows)).numpy()
        return found

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Write a `.onnx` or `.pt2` file that runs without dray; see `export.export`. The input of
        the exported model is `rows` (N, columns) as returned by `TableForm.tensor`: float32, or
        float64 if float32 would round the table's numbers. Raises ValueError if the table has
        integers that float64 can't represent."""
        if bases := [*self.form.bases, *(["the target"] if self.target_base else [])]:
            raise ValueError(
                f"{listed(bases)}: the model can't be exported, because float64 can't represent "
                "all integers beyond 2**53: subtract a constant from these values, and train "
                "again"
            )
        model = ExportedTable(self.model)
        about = {
            "numeric": list(self.numeric),
            "dates": dict.fromkeys(self.dates, PARTS),
            "categories": self.categories,
            "labels": self.labels,
            "rows": str(model.dtype).removeprefix("torch."),
        }
        example = torch.zeros(2, self.form.width, dtype=model.dtype)
        return export(model, "rows", example, path, about)


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
    has_offsets, bases = config.get("has_offsets", False), dict(config.get("bases", {}))
    target_base = bases.pop(config["target"], 0)
    table: TableModel
    if isinstance(options, spec.Imported):
        table = _own(imported.at_hand(options), numeric, len(categories), filling, has_offsets)
    else:
        sizes = {name: len(known) for name, known in categories.items()}
        num_outputs = 1 if labels is None else len(labels)
        table = _mlp(options, numeric, sizes, filling, num_outputs, has_offsets)
    model = results.restore(_OneNumber(table) if labels is None else table, folder)
    form = TableForm(
        config["numeric"],
        categories,
        frozenset(filling.filled),
        dates=dates,
        style=NumberStyle.of(document.data),
        bases=bases,
        is_wide=has_offsets,
    )
    return Predictor(model, form, labels, target_base)
