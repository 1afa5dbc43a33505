"""Columns of dates are the same inputs of a model in training and in prediction."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from dray.spec import Data
from ray_workers import recipes
from ray_workers.datasets import open_table
from ray_workers.datasets.formats.dates import PARTS
from ray_workers.recipes.table_inputs import TableForm
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.errors import DataError
from tests.unit.recipes.test_tabular import build

WRITTEN = [
    "2026-11-24",
    "1969-12-31",
    " 2024-02-29 06:30",
    "2024-02-29T06:30:15.123456789Z",
    "9999-12-31T23:59:59+02:00",
    "2024-03-01T01:00:00-0230",
]


def parts_by_python(text: str) -> list[float]:
    """The parts of a date as computed by the standard library."""
    when = datetime.fromisoformat(text.strip())
    when = when.replace(tzinfo=UTC) if when.tzinfo is None else when.astimezone(UTC)
    midnight = when.replace(hour=0, minute=0, second=0, microsecond=0)
    since = when - datetime(1970, 1, 1, tzinfo=UTC)
    hour = (when - midnight) / timedelta(hours=1)
    return [since / timedelta(days=1), when.year, when.month, when.day, when.weekday(), hour]


def opened(path: Path, **options: Any) -> Any:
    data = Data(source=path.as_uri(), target="y", **options)
    policy = DataPolicy.open(str(path.parent / "cache"))
    return open_table(data, policy, classifies=True)


def csv_of(texts: list[str], folder: Path) -> Path:
    path = folder / "table.csv"
    path.write_text("when,y\n" + "".join(f"{t},{at % 2}\n" for at, t in enumerate(texts)))
    return path


def test_dates_follow_the_calendar(tmp_path: Path) -> None:
    table = opened(csv_of(WRITTEN, tmp_path))
    assert (table.date_names, table.numeric_names, table.category_names) == (("when",), (), ())
    expected = np.array([parts_by_python(text) for text in WRITTEN])
    np.testing.assert_allclose(table.numeric, expected, rtol=1e-15)


def test_a_row_to_predict_is_taken_as_the_training_took_it(tmp_path: Path) -> None:
    table = opened(csv_of(WRITTEN, tmp_path))
    form = TableForm([], {}, dates=["when"])
    as_float32 = np.float32(table.numeric).tolist()
    assert form.tensor([{"when": text} for text in WRITTEN]).tolist() == as_float32
    plus_two = timezone(timedelta(hours=2))
    for same in (
        date(2024, 2, 29),
        datetime(2024, 2, 29),
        datetime(2024, 2, 29, 2, tzinfo=plus_two),
        np.datetime64("2024-02-29"),
        np.datetime64("2024-02-29T00:00:00", "ns"),
    ):
        assert form.tensor({"when": same}).tolist() == form.tensor({"when": "2024-02-29"}).tolist()


@pytest.mark.parametrize("value", ["yesterday", 20240229, 3.5])
def test_an_error_names_a_value_that_is_not_a_date(value: Any) -> None:
    with pytest.raises(
        ValueError,
        match=r"row 0: the column 'when' has the value .*, which is not an ISO 8601 date",
    ):
        TableForm([], {}, dates=["when"]).tensor({"when": value})
    with pytest.raises(ValueError, match="row 0: the column 'when' has no value"):
        TableForm([], {}, dates=["when"]).tensor({"when": np.datetime64("NaT")})


def test_a_parquet_files_dates_and_times(tmp_path: Path) -> None:
    day = datetime(2024, 2, 29, 6, 30)
    columns = {
        "day": pa.array([day.date(), None], pa.date32()),
        "plain": pa.array([day, day], pa.timestamp("ns")),
        "zoned": pa.array([day, day], pa.timestamp("ms", "Europe/Berlin")),
        "y": [0, 1],
    }
    path = tmp_path / "t.parquet"
    parquet.write_table(pa.table(columns), path)
    table = opened(path, missing="median")
    assert table.date_names == ("day", "plain", "zoned")
    first = table.numeric[0].reshape(3, len(PARTS)).tolist()
    assert first[0][1:] == [2024, 2, 29, 3, 0]
    assert first[1] == first[2] == pytest.approx(parts_by_python(day.isoformat()), rel=1e-7)
    assert np.isnan(table.numeric[1, : len(PARTS)]).all()
    for options in ({"target": "day"}, {"categorical": ["day"]}):
        with pytest.raises(DataError, match="'day' has the type date32"):
            open_table(
                Data(source=path.as_uri(), **{"target": "y", **options}),
                DataPolicy.open(str(tmp_path / "cache")),
                classifies=True,
            )


@pytest.mark.parametrize("odd", ["soon", "2024-02-30", "24.12.2024"])
def test_a_column_with_anything_else_in_it_is_a_category(odd: str, tmp_path: Path) -> None:
    table = opened(csv_of(["2024-02-29", odd], tmp_path))
    assert (table.date_names, table.category_names) == ((), ("when",))


def test_dates_stay_names_if_the_document_lists_them(tmp_path: Path) -> None:
    path = csv_of(["2024-02-29", "2024-03-01"], tmp_path)
    assert opened(path, categorical=["when"]).vocabularies == (("2024-02-29", "2024-03-01"),)
    days = path.read_text().replace("y", "x", 1).replace("when", "y", 1)
    path.write_text(days)
    assert opened(path).classes == ("2024-02-29", "2024-03-01")


def test_a_missing_date_is_filled_in_part_by_part(tmp_path: Path) -> None:
    texts = ["" if at % 4 == 0 else f"20{10 + at % 20}-06-15T12:00" for at in range(60)]
    data = {"source": csv_of(texts, tmp_path).as_uri(), "target": "y", "missing": "indicator"}
    work = build("tabular_classification", data=data)
    inputs, _ = work.train.take(torch.arange(len(work.train)))
    known = inputs[~inputs.isnan().any(dim=1)]
    torch.testing.assert_close(work.model.fill, known.mean(dim=0), rtol=1e-5, atol=0)
    first = next(part for part in work.model.modules() if isinstance(part, torch.nn.Linear))
    assert first.in_features == len(PARTS) + 1
    assert any("'when': date, as days, year" in line for line in work.about)
    work.write_results(work.model, {}, 1, tmp_path)
    loaded = recipes.load(tmp_path)
    assert loaded.dates == ["when"]
    assert np.isfinite(loaded.predict_proba([{"when": None}, {"when": "2020-01-01"}])).all()
