"""The data of a federated job's client, in the form that the job's model accepts.

The data are encoded in the same way as rows and images for a prediction, with all of the job's
columns, categories and classes, even if only some of them occur in the client's data.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dray import spec
from ray_workers.datasets.core.errors import broken, listed, shortened
from ray_workers.datasets.core.types import is_data
from ray_workers.datasets.formats.columns import EMPTY
from ray_workers.datasets.formats.image_decoding import SUFFIXES
from ray_workers.datasets.formats.number_texts import number_name, relative
from ray_workers.recipes import measures
from ray_workers.recipes.table_inputs import exact_number
from ray_workers.training.core.errors import DataError
from ray_workers.training.core.workload import LossSum

if TYPE_CHECKING:
    from ray_workers.recipes.image_classification import Classifier
    from ray_workers.recipes.tabular import Predictor

Row = Mapping[str, Any]


@dataclass(frozen=True)
class PrivateData:
    """A client's samples, and the losses of the job's recipe."""

    inputs: Tensor
    targets: Tensor
    """Targets (N,): int64 class numbers, or float64 numbers."""
    loss_sum: LossSum
    validation_loss_sum: LossSum


def of_table(model: Predictor, document: spec.JobSpec, path: Path) -> PrivateData:
    """Read a CSV or Parquet file with the columns of the job's data. Raises DataError."""
    data, target = document.data, document.data.target
    assert target is not None
    wanted = (*model.numeric, *model.dates, *model.categories, target)
    dropping = [name for name in wanted if data.missing_in(name) == "drop"]
    rows, answers = [], []
    for number, row in enumerate(_rows(path, data)):
        if any(_is_missing(row.get(name)) for name in dropping):
            continue
        if target not in row:
            raise broken(
                str(path), f"has no column {shortened(target)}, which is the column to predict"
            )
        rows.append(row)
        answers.append(_answer(row[target], model, f"{path}, row {number + 1}"))
    if not rows:
        raise broken(str(path), "has no rows to train on")
    try:
        inputs = model.form.tensor(rows)
    except ValueError as error:
        raise broken(str(path), str(error)) from None
    if model.labels is not None:
        losses = _losses_of_classes(document)
        return PrivateData(inputs, torch.tensor(answers, dtype=torch.int64), *losses)
    from ray_workers.recipes.tabular import squared_error

    deviation = float(model.model.get_buffer("model.target_deviation"))
    loss_sum = squared_error(deviation)
    return PrivateData(inputs, torch.tensor(answers, dtype=torch.float64), loss_sum, loss_sum)


def of_images(model: Classifier, document: spec.JobSpec, path: Path) -> PrivateData:
    """Read a folder that has a subfolder of images for each class. Raises DataError."""
    images, answers = [], []
    for folder in sorted(path.iterdir() if path.is_dir() else []):
        found = [
            one
            for one in sorted(folder.rglob("*"))
            if one.suffix.lower() in SUFFIXES and all(map(is_data, one.relative_to(path).parts))
        ]
        if found:
            answers += [_class_of(folder.name, model.labels, str(folder))] * len(found)
            images += found
    if not images:
        raise broken(str(path), "is not a folder with a subfolder of images for each class")
    inputs = model.form.tensor(images)
    targets = torch.tensor(answers, dtype=torch.int64)
    return PrivateData(inputs, targets, *_losses_of_classes(document))


def _losses_of_classes(document: spec.JobSpec) -> tuple[LossSum, LossSum]:
    smoothing = document.train.label_smoothing
    return measures.cross_entropy(smoothing), measures.cross_entropy(0.0)


def _rows(path: Path, data: spec.Data) -> Iterator[Row]:
    if path.suffix.lower() in (".parquet", ".pq"):
        yield from _parquet_rows(path)
        return
    delimiter = data.known_delimiter
    if data.delimiter is None and path.suffix.lower() == ".tsv":
        delimiter = "\t"
    encoding = "utf-8-sig" if data.encoding == "utf-8" else data.encoding
    try:
        with path.open(encoding=encoding, newline="") as file:
            for row in csv.DictReader(file, delimiter=delimiter, strict=True):
                if None in row or None in row.values():
                    raise broken(str(path), "has a line with more or fewer fields than its header")
                yield row
    except (OSError, UnicodeError, csv.Error) as error:
        raise broken(str(path), f"can't be read: {error}") from None


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise DataError(
            f"{path}: reading a Parquet file requires pyarrow: install it, or use a CSV file"
        ) from None
    for batch in parquet.ParquetFile(path).iter_batches():
        yield from batch.to_pylist()


def _answer(value: Any, model: Predictor, location: str) -> float:
    if model.labels is not None:
        return _class_of(value, model.labels, location)
    try:
        number = relative(exact_number(value, model.form.style), model.target_base)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise broken(location, f"the value to predict is {shortened(value)}, not a finite number")
    return number


def _class_of(value: Any, labels: Any, location: str) -> int:
    """Return the index of a class. A class whose name is a number can be written as 1 or 1.0."""
    names = [str(value).strip()]
    try:
        names.append(number_name(float(names[0])))
    except ValueError:
        names.append(names[0].lower())
    for name in names:
        if name in labels:
            return int(labels.index(name))
    raise broken(
        location,
        f"has the class {shortened(value)}, but the job's classes are {listed(labels)}",
    )


def _is_missing(value: Any) -> bool:
    if value is None or (isinstance(value, str) and value.strip().lower() in EMPTY):
        return True
    return isinstance(value, float) and math.isnan(value)
