from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from dray.spec import JobSpec
from ray_workers import recipes
from ray_workers.contracts import DataPolicy
from ray_workers.training.initialising import materialise
from ray_workers.training.workload import Workload

COLOURS = ["red", "green", "blue"]


def build(recipe: str, **fields: Any) -> Workload:
    document = JobSpec.model_validate({"recipe": recipe, **fields})
    work = recipes.RECIPES[recipe].build(document, DataPolicy())
    materialise(work.model, torch.device("cpu"), document.train.seed)
    return work


@pytest.fixture
def table(tmp_path: Path) -> str:
    """Numbers on scales far apart, a text column, and two targets that follow from them."""
    rng = np.random.default_rng(0)
    path = tmp_path / "table.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["size", "weight", "colour", "kind", "price"])
        for size, weight in rng.normal([0.001, 1e6], [0.0002, 3e5], (400, 2)):
            colour = COLOURS[rng.integers(3)]
            heavy = "heavy" if weight > 1e6 else "light"
            rows.writerow([size, weight, colour, heavy, weight + 1e6 * COLOURS.index(colour)])
    return path.as_uri()


def test_numbers_are_standardised_by_the_training_split(table: str) -> None:
    work = build(
        "tabular_classification",
        data={"source": table, "target": "kind", "features": ["size", "weight", "colour"]},
    )
    inputs, _ = work.train.take(torch.arange(len(work.train)))
    assert inputs.shape == (len(work.train), 3)
    numbers = inputs[:, :2].double()
    torch.testing.assert_close(work.model.mean.double(), numbers.mean(dim=0), rtol=1e-5, atol=0)
    deviation = numbers.std(dim=0, correction=0)
    torch.testing.assert_close(work.model.deviation.double(), deviation, rtol=1e-4, atol=0)
    assert set(inputs[:, 2].tolist()) == {1.0, 2.0, 3.0}


def test_a_class_is_predicted_from_rows_as_they_are_in_the_table(
    table: str, tmp_path: Path
) -> None:
    work = build("tabular_classification", data={"source": table, "target": "kind"})
    work.write_results(work.model, {}, 1, tmp_path)
    predictor = recipes.load(tmp_path)
    row = {"size": 0.001, "weight": 2e6, "colour": "blue", "price": 4e6}
    unknown = {**row, "colour": "ultraviolet"}
    predicted = predictor.predict([row, unknown])
    assert set(predicted) <= {"heavy", "light"}
    inputs = torch.tensor([predictor._encoded(row), predictor._encoded(unknown)])
    assert inputs[1, -1] == 0.0
    expected = work.model.eval()(inputs).argmax(dim=1).tolist()
    assert predicted == [predictor.labels[i] for i in expected]


def test_a_number_is_predicted_in_its_own_unit(table: str, tmp_path: Path) -> None:
    work = build("tabular_regression", data={"source": table, "target": "price"})
    inputs, targets = work.validation.take(torch.arange(10))
    assert targets.dtype == torch.float32
    outputs = work.model.eval()(inputs)
    assert outputs.shape == (10,)
    training = work.train.take(torch.arange(len(work.train)))[1].double()
    expected = ((outputs - targets).double() / training.std(correction=0)).square().sum()
    torch.testing.assert_close(work.loss_sum(outputs, targets).double(), expected)
    work.write_results(work.model, {}, 1, tmp_path)
    row = {"size": 0.001, "weight": 2e6, "colour": "blue", "kind": "heavy"}
    (price,) = recipes.load(tmp_path).predict([row])
    assert price == pytest.approx(training.mean().item(), abs=4 * training.std().item())


def test_a_category_changes_the_output_and_learns_by_itself(table: str) -> None:
    work = build("tabular_classification", data={"source": table, "target": "kind"})
    rows = work.train.take(torch.zeros(4, dtype=torch.int64))[0]
    rows[:, -1] = torch.tensor([0.0, 1.0, 2.0, 3.0])  # an unknown colour, and each that there is
    outputs = work.model.eval()(rows)
    assert len({tuple(row) for row in outputs.tolist()}) == 4
    outputs[2].sum().backward()
    learned = work.model.embeddings[0].weight.grad.abs().sum(dim=1) > 0
    assert learned.tolist() == [False, False, True, False]


@pytest.mark.parametrize(("asked", "size"), [(None, 2), (1, 1), (7, 7)])
def test_an_embedding_has_the_size_that_was_asked_for(
    table: str, tmp_path: Path, asked: int | None, size: int
) -> None:
    """Of three colours and one that is unknown; by default more than half as large."""
    model = {"name": "mlp", "width": 5} | ({} if asked is None else {"embedding_dim": asked})
    features = ["size", "weight", "colour"]
    data = {"source": table, "target": "kind", "features": features}
    work = build("tabular_classification", model=model, data=data)
    (embedding,) = work.model.embeddings
    assert embedding.weight.shape == (4, size)
    first = next(part for part in work.model.modules() if isinstance(part, torch.nn.Linear))
    assert first.weight.shape == (5, 2 + size)
    work.write_results(work.model, {}, 1, tmp_path)
    (loaded,) = recipes.load(tmp_path).model.embeddings
    assert torch.equal(loaded.weight, embedding.weight)


@pytest.mark.parametrize("name", ["iris", "wine", "breast_cancer"])
def test_scikit_learns_tables_are_read(name: str) -> None:
    work = build("tabular_classification", data={"source": f"sklearn://{name}"})
    inputs, labels = work.validation.take(torch.arange(len(work.validation)))
    assert work.model.eval()(inputs).shape == (len(labels), int(labels.max()) + 1)


def test_a_column_that_never_changes_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    inputs = np.random.default_rng(0).normal(size=(50, 3))
    inputs[:, 1] = 7.0
    np.savez(path, x=inputs, y=inputs[:, 0] > 0)
    work = build("tabular_classification", data={"source": path.as_uri()})
    taken, _ = work.train.take(torch.arange(10))
    assert work.model.eval()(taken).isfinite().all()


@pytest.mark.parametrize(
    ("values", "asked"),
    [([True, False], True), ([3.0, 4.5], 3.0), ([7, 8], 7), (["3", "x"], 3)],
    ids=["booleans", "fractions", "numbers", "text"],
)
def test_a_category_is_found_by_the_value_it_has_in_the_table(
    tmp_path: Path, values: list[Any], asked: Any
) -> None:
    path = tmp_path / "table.parquet"
    rows = {"kind": values * 20, "size": list(range(40)), "price": [1.0, 2.0] * 20}
    pyarrow.parquet.write_table(pyarrow.table(rows), path)
    data = {"source": path.as_uri(), "target": "price", "categorical": ["kind"]}
    work = build("tabular_regression", data=data)
    work.write_results(work.model, {}, 1, tmp_path)
    predictor = recipes.load(tmp_path)
    assert predictor._encoded({"kind": asked, "size": 1})[-1] != 0.0
    assert predictor._encoded({"kind": "never seen", "size": 1})[-1] == 0.0
