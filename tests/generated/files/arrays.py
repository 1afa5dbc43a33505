"""Drawn archives of numpy arrays."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Self

import numpy as np

from dray.spec import Data
from ray_workers.datasets import open_table
from ray_workers.shared.node_needs import DataPolicy
from tests.generated.files import tables
from tests.generated.files.cases import Refusal, outcome, without
from tests.generated.files.tables import Truth, Value

DTYPES = ("?", *(f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)), "f2", "f4", "f8")
REFUSED = ("O", "c16", "S3", "M8[s]", "V4")


@dataclass(frozen=True)
class ArrayCase:
    rows: tuple[tuple[Any, ...], ...]
    """The numbers: the target, then the inputs."""
    dtype: str
    target_dtype: str
    order: str
    is_fortran: bool
    is_packed: bool
    classifies: bool
    is_flat: bool = False
    """The inputs are (N,) and not (N, 1), and the target (N, 1)."""

    def arrays(self) -> tuple[Any, Any]:
        inputs = np.array([row[1:] for row in self.rows], dtype=object)
        target = np.array([row[0] for row in self.rows], dtype=object)
        x = _cast(inputs, self.dtype, self.order, is_fortran=self.is_fortran)
        y = _cast(target, self.target_dtype, self.order)
        return (x[:, 0], y[:, None]) if self.is_flat else (x, y)

    def refusals(self) -> list[Refusal]:
        found = [Refusal("array 'x'", "contains Python objects")] * (self.dtype == "O")
        found += [Refusal("array 'x'", "the type")] * (self.dtype in REFUSED and self.dtype != "O")
        if found:
            return found
        x, y = self.arrays()
        bad = _not_finite(x.reshape(len(x), -1))
        if bad is not None:
            found.append(Refusal("array 'x'", f"sample {bad}:", "missing or not finite"))
        most = math.inf if self.classifies else float(tables.LARGEST)  # classes are names
        bad = _not_finite(y.reshape(len(y), -1), most)
        if bad is not None and not self.classifies:
            found.append(Refusal("array 'y'", f"sample {bad}:", "missing or not finite"))
        if bad is not None and self.classifies:
            found.append(Refusal("array 'y'", "missing or not finite"))
        if self.classifies and len({*y.reshape(-1).tolist()}) == 1:
            found.append(Refusal("only one class"))
        return found

    def fault(self, folder: Path, policy: DataPolicy) -> str | None:
        path = folder / "table.npz"
        x, y = self.arrays()
        (np.savez_compressed if self.is_packed else np.savez)(path, x=x, y=y)
        table, fault = outcome(
            lambda: open_table(Data(source=path.as_uri()), policy, classifies=self.classifies),
            self.refusals(),
        )
        if table is None:
            return fault
        inputs, targets = x.reshape(len(x), -1), y.reshape(-1)
        truths = {
            f"x{at}": Truth("number", tuple(map(_exact, inputs[:, at].tolist())))
            for at in range(inputs.shape[1])
        }
        is_text = self.target_dtype.startswith("U")
        values = tuple(targets.tolist() if is_text else map(_exact, targets.tolist()))
        truth = Truth("name" if is_text else "number", values)
        return tables.difference(table, truths, ("y", truth))

    def smaller(self) -> Iterator[Self]:
        for change in ({"is_fortran": False}, {"is_packed": False}, {"order": "<"}):
            less = replace(self, **change)
            if less != self:
                yield less
        for at in range(len(self.rows) if len(self.rows) > 2 else 0):
            yield replace(self, rows=without(self.rows, at))
        for at in range(1, len(self.rows[0]) if len(self.rows[0]) > 2 else 0):
            yield replace(self, rows=tuple(without(row, at) for row in self.rows))


def _cast(values: Any, dtype: str, order: str, *, is_fortran: bool = False) -> Any:
    if dtype == "V4":
        return np.zeros(values.shape, "V4")
    kind = np.dtype(dtype) if dtype in ("O", "?") or dtype[0] in "SUM" else np.dtype(order + dtype)
    found = values.astype(kind)
    return np.asfortranarray(found) if is_fortran else found


def _not_finite(rows: Any, most: float = float(tables.LARGEST)) -> int | None:
    if rows.dtype.kind != "f":
        return None
    bad = [not all(math.isfinite(v) and abs(v) <= most for v in row) for row in rows.tolist()]
    return bad.index(True) if True in bad else None


def _exact(value: Any) -> Value:
    return Fraction(value)


def _number(dice: random.Random, dtype: str, offset: int) -> Any:
    kind = np.dtype(dtype).kind
    if kind == "b":
        return dice.random() < 0.5
    if kind == "f":
        value = dice.choice((dice.gauss(0, 30), dice.randint(-9, 9)))
        return (
            dice.choice((math.nan, math.inf, 1e300 if dtype == "f8" else 1.0))
            if dice.random() < 0.01
            else value
        )
    info = np.iinfo(dtype)
    return max(info.min, min(info.max, offset + dice.randint(-100, 100)))


def draw(seed: int) -> ArrayCase:
    dice = random.Random(f"arrays {seed}")
    num_rows, width = dice.choice((2, 5, 20)), dice.choice((1, 1, 2, 4))
    dtype = dice.choice(REFUSED) if dice.random() < 0.08 else dice.choice(DTYPES)
    classifies = dice.random() < 0.4
    target_dtype = dice.choice((*DTYPES, "U5")) if classifies else dice.choice(DTYPES)
    plain = "i8" if dtype in REFUSED else dtype
    offsets = [
        dice.choice((0, 0, 2**31, 2**53, 2**60, -(2**62), 2**63, 2**64)) for _ in range(width + 1)
    ]
    rows = tuple(
        (
            dice.choice(("ant", "bee", "é"))
            if target_dtype == "U5"
            else _number(dice, target_dtype, offsets[0]),
            *(_number(dice, plain, offset) for offset in offsets[1:]),
        )
        for _ in range(num_rows)
    )
    return ArrayCase(
        rows,
        dtype,
        target_dtype,
        dice.choice("<>"),
        dice.random() < 0.3,
        dice.random() < 0.5,
        classifies,
        is_flat=width == 1 and dice.random() < 0.5,
    )
