"""The lines of the log about a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ray_workers.recipes.table_report import MAX_COLUMNS
from tests.marks import SOAK
from tests.unit.recipes.test_tabular import build

ROWS = "age,rooms,colour,kind,note,y\n" + "".join(
    f"{'' if at % 4 == 0 else 30},{at % 3},{'NA' if at % 5 == 0 else 'red'},"
    f"{'AB'[at % 2]},free text {at},{('no', 'yes')[at % 2]}\n"
    for at in range(40)
)
FEATURES = ["age", "rooms", "colour", "kind"]


def about(tmp_path: Path, recipe: str = "tabular_classification", **data: Any) -> list[str]:
    path = tmp_path / "table.csv"
    path.write_text(ROWS)
    source = {"source": path.as_uri(), "target": "y", "features": FEATURES}
    return [*build(recipe, data=source | data).about]


def test_each_column_has_a_line(tmp_path: Path) -> None:
    assert about(tmp_path, missing="median", missing_columns={"colour": "indicator"}) == [
        "the table has 40 rows and, in addition to the target, these columns: 2 of numbers, 2 of "
        "categories, 1 ignored",
        "  'y': target, 2 classes: 'no', 'yes'",
        "  'age': number, missing in 10 rows, replaced by 30 (median)",
        "  'rooms': number",
        "  'colour': category with 1 value, missing in 8 rows, treated as a separate category",
        "  'kind': category with 2 values",
        "  'note': ignored, because data.features does not list it",
    ]


@pytest.mark.parametrize(
    ("way", "age", "colour"),
    [
        (
            "indicator",
            "replaced by 30 (mean), with an additional input that marks missing values",
            "treated as a separate category",
        ),
        ("mean", "replaced by 30 (mean)", "replaced by 'red' (most_frequent)"),
        ("drop", "which were dropped", "which were dropped"),
    ],
)
def test_the_treatment_of_missing_values_is_reported(
    way: str, age: str, colour: str, tmp_path: Path
) -> None:
    log = about(tmp_path, missing=way)
    assert f"  'age': number, missing in 10 rows, {age}" in log
    assert f"  'colour': category with 1 value, missing in 8 rows, {colour}" in log
    assert ("(16 with missing values were dropped)" in log[0]) == (way == "drop")


def test_a_number_to_predict(tmp_path: Path) -> None:
    log = about(tmp_path, "tabular_regression", target="rooms", features=["kind"])
    assert "  'rooms': target, a number" in log


@SOAK
def test_two_thousand_columns_have_no_two_thousand_lines(tmp_path: Path) -> None:
    names = [f"c{at}" for at in range(2_000)]
    path = tmp_path / "wide.csv"
    rows = [",".join(map(str, range(at, at + 2_000))) + f",{'ab'[at % 2]}" for at in range(6)]
    path.write_text("\n".join([",".join([*names, "y"]), *rows]))
    data = {"source": path.as_uri(), "target": "y", "validation_fraction": 0.4}
    log = build("tabular_classification", data=data).about
    assert len(log) == 1 + MAX_COLUMNS + 1
    assert log[-1] == f"  and {2_001 - MAX_COLUMNS:,} more columns"
    assert "2,000 of numbers" in log[0]
