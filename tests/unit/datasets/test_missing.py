"""Missing values of a table: which notations count as missing, and which rows stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from dray.spec import Data
from ray_workers.datasets import Table, open_table
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.errors import DataError
from tests.unit.datasets.test_tables import read_csv

PANDAS = (
    *(" ", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN"),
    *("<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"),
)
"""`pandas._libs.parsers.STR_NA_VALUES`, and white space."""


def values(table: Table) -> list[Any]:
    return np.where(np.isnan(table.numeric), None, table.numeric).tolist()


@pytest.mark.parametrize("word", PANDAS)
def test_what_pandas_takes_for_missing_is_missing(
    word: str, tmp_path: Path, policy: DataPolicy
) -> None:
    text = f"x,colour,y\n1,red,a\n{word},{word},b\n3,blue,b\n"
    table = read_csv(text, tmp_path, policy, missing="mean")
    assert values(table) == [[1.0], [None], [3.0]]
    assert table.categories.tolist() == [[1], [-1], [0]]
    assert table.vocabularies == (("blue", "red"),)
    assert table.num_missing == {"x": 1, "colour": 1}


def test_names_of_classes_and_of_categories_are_kept_unless_asked(
    tmp_path: Path, policy: DataPolicy
) -> None:
    """For Namibia, and for people without schooling."""
    text = "x,country,y\n1,NA,none\n2,DE,some\n"
    assert read_csv(text, tmp_path, policy).vocabularies == (("DE", "NA"),)
    table = read_csv(text, tmp_path, policy, missing="drop", missing_columns={"country": "error"})
    assert table.vocabularies == (("DE", "NA"),)
    assert table.classes == ("none", "some")


def test_rows_are_dropped_with_their_names(tmp_path: Path, policy: DataPolicy) -> None:
    text = "x,colour,y\n1,red,a\n,green,b\n3,,b\n4,blue,\n5,blue,b\n"
    table = read_csv(text, tmp_path, policy, missing="drop")
    assert table.numeric.tolist() == [[1.0], [5.0]]
    assert table.vocabularies == (("blue", "red"),)
    assert table.classes == ("a", "b")
    assert table.target.tolist() == [0, 1]
    assert table.num_dropped == 3


def test_a_column_may_have_its_own_way(tmp_path: Path, policy: DataPolicy) -> None:
    text = "x,z,y\n1,1,a\n,2,b\n3,,b\n4,4,b\n"
    ways = {"x": "drop", "z": "median"}
    table = read_csv(text, tmp_path, policy, missing_columns=ways)
    assert values(table) == [[1.0, 1.0], [3.0, None], [4.0, 4.0]]


def test_a_parquet_file_lacks_values_as_null_and_as_nan(tmp_path: Path, policy: DataPolicy) -> None:
    path = tmp_path / "t.parquet"
    columns = {
        "count": pa.array([1, None, 3], pa.int16()),
        "size": [1.5, float("nan"), None],
        "kind": pa.array(["b", None, "a"]).dictionary_encode(),
        "code": pa.array([1.0, 2.0, None]),
        "y": [0, 1, 1],
    }
    parquet.write_table(pa.table(columns), path)
    data = Data(source=path.as_uri(), target="y", categorical=["code"], missing="median")
    table = open_table(data, policy, classifies=True)
    assert values(table) == [[1.0, 1.5], [None, None], [3.0, None]]
    assert table.categories.tolist() == [[1, 0], [-1, 1], [0, -1]]


@pytest.mark.parametrize(
    ("text", "options", "fault"),
    [
        ("x,y\n1,a\n,b\n", {}, "line 3: the column 'x' has no value; set data.missing to"),
        ("x,y\n1,a\n2,\n", {"missing": "mean"}, "line 3: the target 'y' has no value"),
        ("x,y\n1,a\n2,\n", {"missing": "mean"}, "set data.missing to drop"),
        ("x,z,y\n,1,a\nNA,2,b\n", {"missing": "mean"}, "the column 'x' has no values"),
        ("x,z,y\n,1,a\nNA,2,b\n", {"missing": "drop"}, "'x' has no values; leave it out"),
        ("x,z,y\n,1,a\n2,,b\n", {"missing": "drop"}, "has missing values in every row"),
        (
            "x,y\n1,a\ninf,b\n",
            {"missing": "mean"},
            "'x' has the value inf, which is not a finite 32-bit number",
        ),
        (
            f"x,y\n{2**60 + 1},a\n-1e39,b\n",
            {},
            "line 3: the column 'x' has the value -1e39, which is not a finite",
        ),
        (
            "x,y\n1,a\n2,b\n",
            {"missing_columns": {"z": "mean"}},
            "data.missing_columns: there is no feature 'z', only 'x'",
        ),
    ],
)
def test_errors_name_values_that_can_not_be_filled_in(
    text: str, options: dict[str, Any], fault: str, tmp_path: Path, policy: DataPolicy
) -> None:
    with pytest.raises(DataError) as raised:
        read_csv(text, tmp_path, policy, **options)
    assert fault in str(raised.value)


def test_a_missing_value_next_to_a_large_one_is_not_rounded(
    tmp_path: Path, policy: DataPolicy
) -> None:
    text = f"x,y\n{2**63 - 10},a\n,b\n"
    table = read_csv(text, tmp_path, policy, missing="indicator")
    assert table.num_rounded == {}


def test_a_row_that_is_dropped_does_not_round_the_others(
    tmp_path: Path, policy: DataPolicy
) -> None:
    text = f"x,y\n{2**60 + 1},1\n0,\n{2**60 + 2},3\n"
    table = read_csv(text, tmp_path, policy, missing="drop")
    assert table.num_rounded == {}
    assert [int(one) + table.bases["x"] for one in table.numeric[:, 0]] == [2**60 + 1, 2**60 + 2]


def test_a_fault_is_in_its_line_though_rows_before_were_dropped(
    tmp_path: Path, policy: DataPolicy
) -> None:
    text = "x,z,y\n,1,a\n,2,b\n1,inf,b\n2,2,a\n"
    with pytest.raises(DataError, match=r"line 4: the column 'z' has the value inf"):
        read_csv(text, tmp_path, policy, missing="drop")


def test_a_parquet_column_of_nulls_alone(tmp_path: Path, policy: DataPolicy) -> None:
    path = tmp_path / "t.parquet"
    parquet.write_table(pa.table({"x": [None, None], "z": [1, 2], "y": [0, 1]}), path)
    data = Data(source=path.as_uri(), target="y", missing="mean")
    with pytest.raises(DataError, match="the column 'x' has no values"):
        open_table(data, policy, classifies=True)
