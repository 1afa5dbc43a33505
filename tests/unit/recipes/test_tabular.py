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
from ray_workers.datasets.formats.number_texts import NumberStyle
from ray_workers.recipes.table_inputs import TableForm, UnseenCategoryWarning
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.workload import Workload
from ray_workers.training.parallel.meta_init import materialise

COLOURS = ["red", "green", "blue"]


def build(recipe: str, **fields: Any) -> Workload:
    document = JobSpec.model_validate({"recipe": recipe, **fields})
    work = recipes.RECIPES[recipe].build(document, DataPolicy.open())
    materialise(work.model, torch.device("cpu"), document.train.seed)
    return work


@pytest.fixture
def table(tmp_path: Path) -> str:
    """Numbers on very different scales, a column of text, and two targets that depend on them."""
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
    with pytest.warns(UnseenCategoryWarning) as warned:
        predicted = predictor.predict([row, unknown])
    assert warned[0].filename == __file__, "it points at the caller's line"
    assert set(predicted) <= {"heavy", "light"}
    with pytest.warns(
        UnseenCategoryWarning, match="'ultraviolet', which did not occur in training"
    ):
        inputs = predictor.form.tensor([row, unknown])
    assert inputs[1, -1] == 0.0
    expected = work.model.eval()(inputs).argmax(dim=1).tolist()
    assert predicted == [predictor.labels[i] for i in expected]


def test_a_number_is_predicted_in_its_own_unit(table: str, tmp_path: Path) -> None:
    work = build("tabular_regression", data={"source": table, "target": "price"})
    inputs, targets = work.validation.take(torch.arange(10))
    assert targets.dtype == torch.float64
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
    rows[:, -1] = torch.tensor([0.0, 1.0, 2.0, 3.0])  # an unknown colour, and each known one
    outputs = work.model.eval()(rows)
    assert len({tuple(row) for row in outputs.tolist()}) == 4
    outputs[2].sum().backward()
    learned = work.model.embeddings[0].weight.grad.abs().sum(dim=1) > 0
    assert learned.tolist() == [False, False, True, False]


@pytest.mark.parametrize(("asked", "size"), [(None, 2), (1, 1), (7, 7)])
def test_an_embedding_has_the_size_that_was_asked_for(
    table: str, tmp_path: Path, asked: int | None, size: int
) -> None:
    """Three colours and the unknown one; by default more than half as many dimensions."""
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
    assert predictor.form.tensor({"kind": asked, "size": 1})[0, -1] != 0.0
    with pytest.warns(UnseenCategoryWarning, match="'never seen'"):
        assert predictor.form.tensor({"kind": "never seen", "size": 1})[0, -1] == 0.0


FORM = TableForm(["size", "weight"], {"colour": {"red": 1, "blue": 2}})
ROWS = [{"size": 1.5, "weight": 2, "colour": "red"}, {"size": 3, "weight": 4, "colour": "blue"}]


class PandasLike:
    """The part of a frame of pandas that is used; pandas is no dependency."""

    columns = ("size", "weight", "colour")

    def to_dict(self, orient: str) -> list[dict[str, Any]]:
        assert orient == "records"
        return ROWS


@pytest.mark.parametrize(
    "rows",
    [
        ROWS,
        iter(ROWS),
        PandasLike(),
        pyarrow.Table.from_pylist(ROWS),
        {"size": [1.5, 3], "weight": np.array([2, 4]), "colour": ["red", "blue"]},
        [{**row, "size": str(row["size"]), "more": None} for row in ROWS],
    ],
    ids=["rows", "iterator", "pandas", "arrow", "columns", "text"],
)
def test_rows_are_taken_as_people_have_them(rows: Any) -> None:
    assert FORM.tensor(rows).tolist() == [[1.5, 2.0, 1.0], [3.0, 4.0, 2.0]]


def test_a_single_row_and_an_array_are_rows_too() -> None:
    assert FORM.tensor(ROWS[0]).tolist() == [[1.5, 2.0, 1.0]]
    assert TableForm(["a", "b"], {}).tensor(np.ones((3, 2))).shape == (3, 2)
    assert TableForm(["a"], {}, style=NumberStyle(decimal=",")).tensor(
        [{"a": "-1,5"}, {"a": 2.5}]
    ).tolist() == [
        [-1.5],
        [2.5],
    ]
    assert FORM.tensor([]).shape == (0, 3)


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ([ROWS[0], {"Size": 1, "weight": 2, "colour": "red"}], "row 1: there is no column 'size'"),
        ({**ROWS[0], "size": None}, "row 0: the column 'size' has no value"),
        ({**ROWS[0], "size": float("nan")}, "row 0: the column 'size' has no value"),
        ({**ROWS[0], "colour": None}, "row 0: the column 'colour' has no value"),
        (
            {**ROWS[0], "size": "big"},
            "row 0: the column 'size' has the value 'big', which is not a number",
        ),
        ({"size": [1, 2], "weight": [1], "colour": ["red", "red"]}, "the same number of values"),
        (np.ones((2, 3)), "'colour': an array can't contain dates or categories"),
    ],
)
def test_errors_name_the_fault_of_a_row(rows: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        FORM.tensor(rows)


def test_probabilities_are_of_the_labels(table: str, tmp_path: Path) -> None:
    work = build("tabular_classification", data={"source": table, "target": "kind"})
    work.write_results(work.model, {}, 1, tmp_path)
    predictor = recipes.load(tmp_path)
    row = {"size": 0.001, "weight": 2e6, "colour": "blue", "price": 4e6}
    (chances,) = predictor.predict_proba(row)
    assert chances.sum() == pytest.approx(1.0)
    assert predictor.labels[chances.argmax()] == predictor.predict(row)[0]
