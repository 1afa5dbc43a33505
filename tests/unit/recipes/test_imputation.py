"""Missing values are replaced as by scikit-learn, in training and in prediction."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.impute import SimpleImputer

from ray_workers import recipes
from ray_workers.recipes import imputation
from ray_workers.training.core.errors import DataError
from ray_workers.training.core.workload import Workload
from tests.unit.recipes.test_tabular import build


class LikeNA:
    """Stands for pandas.NA, which can't be compared; pandas is no dependency."""

    def __ne__(self, other: object) -> Any:
        return self

    def __bool__(self) -> bool:
        raise TypeError("boolean value of NA is ambiguous")


COLUMNS = ("age", "rooms", "colour", "y")
FEATURES = COLUMNS[:-1]


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    """Every third age and every fourth colour is missing."""
    rng = np.random.default_rng(0)
    return [
        {
            "age": "" if at % 3 == 0 else round(float(rng.normal(40, 9)), 2),
            "rooms": int(rng.integers(1, 5)),
            "colour": "NA" if at % 4 == 0 else ("red", "blue", "blue")[rng.integers(3)],
            "y": ("cheap", "dear")[rng.integers(2)],
        }
        for at in range(200)
    ]


def trained(rows: list[dict[str, Any]], folder: Path, **data: Any) -> tuple[Workload, Any]:
    """(a workload, its loaded model)."""
    path = folder / "table.csv"
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        table.writerows(rows)
    work = build("tabular_classification", data={"source": path.as_uri(), "target": "y", **data})
    work.write_results(work.model, {}, 1, folder)
    return work, recipes.load(folder)


def training_rows(work: Workload, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [rows[at] for at in work.train.rows]


@pytest.mark.parametrize("way", ["mean", "median", "most_frequent"])
def test_the_values_are_those_of_scikit_learn_over_the_training_split(
    way: str, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    work, loaded = trained(rows, tmp_path, missing=way)
    training = training_rows(work, rows)
    ages = np.array([[row["age"] or math.nan, row["rooms"]] for row in training], dtype=np.float64)
    names = np.array([[None if row["colour"] == "NA" else row["colour"]] for row in training])
    numbers = SimpleImputer(strategy=way).fit(ages).statistics_
    (name,) = SimpleImputer(missing_values=None, strategy="most_frequent").fit(names).statistics_
    fill = loaded.model.fill.tolist()
    assert fill[:2] == pytest.approx(numbers.tolist(), rel=1e-6)
    assert fill[2] == loaded.form.categories["colour"][name]


@pytest.mark.parametrize("way", ["mean", "median", "most_frequent"])
def test_what_is_filled_in_counts_as_if_it_had_been_there(
    way: str, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    """In training and in prediction alike, in every notation of a missing value."""
    work, loaded = trained(rows, tmp_path, missing=way)
    inputs, _ = work.train.take(torch.arange(len(work.train)))
    assert inputs.isnan().any()
    filled = torch.where(inputs.isnan(), work.model.fill, inputs)
    assert torch.equal(work.model.eval()(inputs), work.model(filled))
    ages = filled[:, 0].double()
    torch.testing.assert_close(work.model.mean[0].double(), ages.mean(), rtol=1e-5, atol=0)
    deviation = ages.std(correction=0)
    torch.testing.assert_close(work.model.deviation[0].double(), deviation, rtol=1e-4, atol=0)
    age, _, code = loaded.model.fill.tolist()
    names = {number: name for name, number in loaded.form.categories["colour"].items()}
    whole = loaded.predict_proba({"age": age, "rooms": 2, "colour": names[int(code)]})
    for nothing in (None, "", "NaN", math.nan, LikeNA()):
        partial = loaded.predict_proba({"age": nothing, "rooms": 2, "colour": nothing})
        np.testing.assert_array_equal(partial, whole)


def test_an_indicator_marks_missing_values(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """Numbers get an additional input, only if some are missing; categories get another code."""
    work, loaded = trained(rows, tmp_path, missing="indicator")
    first = next(part for part in work.model.modules() if isinstance(part, torch.nn.Linear))
    (embedding,) = work.model.embeddings
    assert embedding.num_embeddings == 1 + 2 + 1
    assert first.in_features == 2 + embedding.embedding_dim + 1
    age = work.model.fill[0].item()
    there = loaded.predict_proba({"age": age, "rooms": 2, "colour": "red"})
    assert not np.array_equal(
        loaded.predict_proba({"age": None, "rooms": 2, "colour": "red"}), there
    )
    assert not np.array_equal(loaded.predict_proba({"age": age, "rooms": 2, "colour": ""}), there)
    # A column without missing values in training is still imputed.
    assert np.isfinite(loaded.predict_proba({"age": age, "rooms": None, "colour": "red"})).all()


def test_a_row_to_predict_must_have_what_training_dropped_rows_for(
    rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    work, loaded = trained(rows, tmp_path, missing="drop")
    inputs, _ = work.train.take(torch.arange(len(work.train)))
    assert inputs.isfinite().all()
    with pytest.raises(ValueError, match="row 0: the column 'age' has no value"):
        loaded.predict({"age": None, "rooms": 2, "colour": "red"})


def test_an_array_with_a_missing_number_is_refused_where_none_is_filled_in(
    rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    """The answer would be NaN."""
    array = np.array([[30.0, 2.0], [30.0, math.nan]])
    numbers = {"features": ["age", "rooms"]}
    ways = {"age": "mean"}
    _, loaded = trained(rows, tmp_path, **numbers, missing_columns=ways)
    with pytest.raises(ValueError, match="row 1: the column 'rooms' has no value"):
        loaded.predict(array)
    assert len(loaded.predict(array[:, ::-1][1:])) == 1


def test_a_column_without_a_value_in_the_training_split_is_refused(
    rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    work, _ = trained(rows, tmp_path, features=["rooms"])
    training = set(work.train.rows.tolist())
    gone = [{**row, "age": "" if at in training else 1.0} for at, row in enumerate(rows)]
    for way in ("mean", "median"):
        with pytest.raises(DataError, match="'age' has no value in any row of the training split"):
            trained(gone, tmp_path, features=["rooms", "age"], missing=way)


def test_a_column_that_is_almost_empty_is_found_in_a_large_table(
    rows: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The median is computed from a sample of the rows."""
    monkeypatch.setattr(imputation, "SAMPLE_VALUES", 20)
    work, _ = trained(rows, tmp_path, features=["rooms"])
    (known,) = work.train.rows[1:2]
    rare = [{**row, "age": 7.5 if at == known else ""} for at, row in enumerate(rows)]
    work, _ = trained(rare, tmp_path, features=["rooms", "age"], missing="median")
    assert work.model.fill.tolist()[1] == 7.5
