"""Numbers of typed files keep their last digit, whatever their type and byte order."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from dray.spec import Data
from ray_workers.datasets import Table, open_table
from ray_workers.shared.node_needs import DataPolicy


def read_parquet(column: Any, folder: Path, policy: DataPolicy) -> Table:
    table = pa.table({"x": column, "y": np.arange(float(len(column)))})
    parquet.write_table(table, folder / "t.parquet", version="2.6")
    data = Data(source=(folder / "t.parquet").as_uri(), target="y")
    return open_table(data, policy, classifies=False)


@pytest.mark.parametrize("dtype", [">i8", "<i8", ">u8", ">i4", ">f8", ">f2"])
def test_arrays_of_either_byte_order(dtype: str, tmp_path: Path, policy: DataPolicy) -> None:
    high = 2**60 if dtype.endswith("8") and "f" not in dtype else 100
    x = np.array([[high + 1], [high + 3], [high + 8]], dtype)
    np.savez(tmp_path / "t.npz", x=x, y=x[:, 0])
    table = open_table(Data(source=(tmp_path / "t.npz").as_uri()), policy, classifies=False)
    wanted = [high + 1, high + 3, high + 8]
    assert [int(one) + table.bases.get("x0", 0) for one in table.numeric[:, 0]] == wanted
    assert [int(one) + table.bases.get("y", 0) for one in table.target] == wanted


def test_decimals_are_the_nearest_floats(tmp_path: Path, policy: DataPolicy) -> None:
    texts = ["-5.737434", "4201220.310000", "0.1", "0.000003"]
    column = pa.array([Decimal(text) for text in texts], pa.decimal128(15, 6))
    table = read_parquet(column, tmp_path, policy)
    assert table.numeric[:, 0].tolist() == [float(text) for text in texts]


def test_whole_numbers_that_are_far_apart_are_rounded_once(
    tmp_path: Path, policy: DataPolicy
) -> None:
    values = [-7046354574524809217, 6515889465191860995, 2**62]
    table = read_parquet(pa.array(values), tmp_path, policy)
    base = table.bases["x"]
    assert table.numeric[:, 0].tolist() == [float(value - base) for value in values]
    assert table.num_rounded["x"] == sum(int(float(v - base)) != v - base for v in values)


def test_nanoseconds_before_1970_belong_to_the_microsecond_they_are_in(
    tmp_path: Path, policy: DataPolicy
) -> None:
    column = pa.array([-1, 1_999, -2_001], pa.timestamp("ns", "Europe/Berlin"))
    table = read_parquet(column, tmp_path, policy)
    days = [micro / 86_400_000_000 for micro in (-1, 1, -3)]
    assert table.numeric[:, 0].tolist() == days
