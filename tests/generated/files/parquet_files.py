"""Generated Parquet files."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from dray.spec import Data
from ray_workers.datasets import open_table
from ray_workers.shared.node_needs import DataPolicy
from tests.generated.files import tables
from tests.generated.files.cases import Refusal, outcome, without
from tests.generated.files.columns import Kind
from tests.generated.files.csv_drawing import NAMES
from tests.generated.files.csv_files import replace_rows
from tests.generated.files.tables import Truth, Value

WIDE = Context(prec=100)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
Read = tuple[Any, Value]
"""(a cell as a Python value, its meaning)."""


@dataclass(frozen=True)
class TypedColumn:
    name: str
    kind: Kind | None
    """None for a type that is refused."""
    type: Any
    cells: tuple[Read, ...]

    @property
    def values(self) -> tuple[Value, ...]:
        return tuple(value for _, value in self.cells)


def _whole(bits: int, signed: bool) -> Callable[[random.Random], Read]:
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)

    def cell(dice: random.Random, low: int = low, high: int = high) -> Read:
        value = dice.choice((dice.randint(low, high), max(low, high - dice.randrange(100))))
        return value, Fraction(value)

    return cell


def _float(form: str) -> Callable[[random.Random], Read]:
    def cell(dice: random.Random) -> Read:
        kind = np.dtype(form).type
        value = float(
            kind(dice.choice((dice.gauss(0, 1), dice.randint(-50, 50), dice.gauss(0, 900))))
        )
        value = math.nan if dice.random() < 0.05 else value
        return value, None if math.isnan(value) else Fraction(value)

    return cell


def _decimal(precision: int, scale: int) -> Callable[[random.Random], Read]:
    def cell(dice: random.Random) -> Read:
        digits = dice.choice((precision, precision // 2, 1))
        number = dice.randint(-(10**digits) + 1, 10**digits - 1)
        return Decimal(number).scaleb(-scale, WIDE), Fraction(number, 1) / Fraction(10) ** scale

    return cell


def _bool(dice: random.Random) -> Read:
    value = dice.random() < 0.5
    return value, Fraction(int(value))


def _text(dice: random.Random) -> Read:
    value = dice.choice(("ant", "bee", "日本", "two words", " lead", "other"))
    return value, value


def _day(dice: random.Random) -> Read:
    days = dice.choice((dice.randint(-30_000, 40_000), 2_932_896, -719_162))
    return date(1970, 1, 1) + timedelta(days=days), days * 86_400_000_000


def _time(unit: str, zone: str | None) -> Callable[[random.Random], Read]:
    per_s = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]

    def cell(dice: random.Random) -> Read:
        seconds = dice.choice((dice.randint(-(10**9), 4 * 10**9), 1_750_000_000))
        ticks = seconds * per_s + (dice.randrange(per_s) if per_s > 1 else 0)
        micro = ticks * 10**6 // per_s
        return ticks, micro

    return cell


TYPES: list[tuple[Kind | None, Any, Callable[[random.Random], Read]]] = [
    *(("number", pa.from_numpy_dtype(f"int{n}"), _whole(n, True)) for n in (8, 16, 32, 64)),
    *(("number", pa.from_numpy_dtype(f"uint{n}"), _whole(n, False)) for n in (8, 16, 32, 64)),
    ("number", pa.float16(), _float("f2")),
    ("number", pa.float32(), _float("f4")),
    ("number", pa.float64(), _float("f8")),
    ("number", pa.decimal128(9, 2), _decimal(9, 2)),
    ("number", pa.decimal128(15, 6), _decimal(15, 6)),
    ("number", pa.decimal128(15, 0), _decimal(15, 0)),
    ("number", pa.decimal128(38, 4), _decimal(30, 4)),
    ("number", pa.decimal256(50, 20), _decimal(40, 20)),
    ("truth", pa.bool_(), _bool),
    ("name", pa.string(), _text),
    ("name", pa.large_string(), _text),
    ("name", pa.dictionary(pa.int8(), pa.string()), _text),
    ("date", pa.date32(), _day),
    ("date", pa.date64(), _day),
    *(
        ("date", pa.timestamp(unit, zone), _time(unit, zone))
        for unit in ("s", "ms", "us", "ns")
        for zone in (None, "UTC", "Europe/Berlin")
    ),
    (None, pa.binary(), lambda dice: (b"x", None)),
    (None, pa.list_(pa.int64()), lambda dice: ([1, 2], None)),
    (None, pa.struct([("a", pa.int64())]), lambda dice: ({"a": 1}, None)),
    (None, pa.time64("us"), lambda dice: (5, None)),
    (None, pa.duration("s"), lambda dice: (5, None)),
    (None, pa.null(), lambda dice: (None, None)),
]


@dataclass(frozen=True)
class ParquetCase:
    columns: tuple[TypedColumn, ...]
    """The first column is the target."""
    classifies: bool
    missing: str
    options: tuple[tuple[str, Any], ...]
    """Options of the writer."""

    @property
    def num_rows(self) -> int:
        return len(self.columns[0].cells)

    def table(self) -> Any:
        arrays = [pa.array([cell for cell, _ in c.cells], c.type) for c in self.columns]
        return pa.table(arrays, [column.name for column in self.columns])

    def kept(self) -> list[int]:
        def is_missing(row: int) -> bool:
            return any(column.values[row] is None for column in self.columns)

        return [r for r in range(self.num_rows) if self.missing != "drop" or not is_missing(r)]

    def refusals(self) -> list[Refusal]:
        found = []
        for at, column in enumerate(self.columns):
            name = column.name[:50] if "'" not in column.name else ""
            if column.kind is None:
                return [
                    Refusal("column", one.name[:50]) for one in self.columns if one.kind is None
                ]
            values = column.values
            how = self.missing if at else {"drop": "drop"}.get(self.missing, "error")
            if all(value is None for value in values):
                found.append(Refusal("has no values", name))
            if None in values and how == "error":
                found.append(Refusal(f"row {values.index(None) + 1}:", "has no value", name))
        kept = self.kept()
        if not kept:
            found.append(Refusal("has missing values in every row"))
        if self.classifies and len({self.columns[0].values[row] for row in kept}) == 1:
            found.append(Refusal("only one class"))
        return found

    def fault(self, folder: Path, policy: DataPolicy) -> str | None:
        path = folder / "table.parquet"
        parquet.write_table(self.table(), path, **dict(self.options))
        target = self.columns[0]
        data = Data(source=path.as_uri(), target=target.name, missing=self.missing)
        table, fault = outcome(
            lambda: open_table(data, policy, classifies=self.classifies), self.refusals()
        )
        if table is None:
            return fault
        kept = self.kept()
        truths = {
            column.name: Truth(column.kind, tuple(column.values[row] for row in kept))
            for column in self.columns
            if column.kind is not None
        }
        truth = truths.pop(target.name)
        fault = tables.difference(table, truths, (target.name, truth))
        if fault:
            return fault
        rows = self.table().take(kept).to_pylist()
        return tables.prediction_differs(replace_rows(table, len(rows)), rows)

    def smaller(self) -> Iterator[Self]:
        if self.options:
            yield replace(self, options=())
        for at in range(1, len(self.columns) if len(self.columns) > 2 else 0):
            yield replace(self, columns=without(self.columns, at))
        for row in range(self.num_rows if self.num_rows > 2 else 0):
            columns = tuple(replace(c, cells=without(c.cells, row)) for c in self.columns)
            yield replace(self, columns=columns)


def draw(seed: int) -> ParquetCase:
    dice = random.Random(f"parquet {seed}")
    num_rows = dice.choice((2, 3, 8, 30))
    classifies = dice.random() < 0.4
    columns: list[TypedColumn] = []
    for at, name in enumerate(dice.sample(NAMES, dice.randint(2, 6))):
        while True:
            kind, form, cell = dice.choice(TYPES)
            if kind is None and (at == 0 or dice.random() < 0.8):
                continue
            if at == 0 and kind not in (("number", "name") if classifies else ("number",)):
                continue
            break
        rate = dice.choice((0, 0, 0, 0.2))
        cells = [(None, None) if dice.random() < rate else cell(dice) for _ in range(num_rows)]
        columns.append(TypedColumn(name, kind, form, tuple(cells)))
    options: dict[str, Any] = {
        "compression": dice.choice(("none", "snappy", "zstd", "gzip")),
        "row_group_size": dice.choice((1, 3, 100)),
        "data_page_version": dice.choice(("1.0", "2.0")),
        "use_dictionary": dice.random() < 0.5,
        "store_schema": dice.random() < 0.7,
    }
    if any(column.type == pa.timestamp("ns") for column in columns):
        options["version"] = "2.6"
    if any(pa.types.is_duration(column.type) for column in columns):
        options["store_schema"] = True  # without it, the file has whole numbers
    missing = dice.choice(("error", "error", "drop", "indicator", "mean"))
    return ParquetCase(tuple(columns), classifies, missing, tuple(options.items()))
