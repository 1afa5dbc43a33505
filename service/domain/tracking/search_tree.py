"""Parsed search expressions: fields of jobs, and conditions on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

EXPERIMENT = "experiment"
"""The label that groups jobs. As a field in a search, it is short for `labels.experiment`."""


class ColumnKind(StrEnum):
    """The kind of a column's values, and of the literals that it is compared with."""

    TEXT = "a string"
    STATE = "a state"
    NUMBER = "a number"
    TIME = "a time"


COLUMNS = {
    **dict.fromkeys(("id", "name", "owner", "project", "queue"), ColumnKind.TEXT),
    "state": ColumnKind.STATE,
    **dict.fromkeys(("priority", "world_size"), ColumnKind.NUMBER),
    **dict.fromkeys(("created_at", "started_at", "finished_at"), ColumnKind.TIME),
}
"""Columns of a job that can be used in a search."""


class Of(StrEnum):
    """The value of a series that is compared: the newest value, the best value, or an extreme."""

    LAST = "last"
    BEST = "best"
    MIN = "min"
    MAX = "max"


class Order(StrEnum):
    LESS = "<"
    AT_MOST = "<="
    MORE = ">"
    AT_LEAST = ">="


@dataclass(frozen=True)
class JobColumn:
    name: str


@dataclass(frozen=True)
class LabelField:
    key: str


@dataclass(frozen=True)
class DocumentField:
    pointer: str


@dataclass(frozen=True)
class MetricField:
    key: str
    of: Of = Of.LAST


SearchField = JobColumn | LabelField | DocumentField | MetricField
Literal = bool | float | str | datetime


@dataclass(frozen=True)
class Exists:
    field: SearchField


@dataclass(frozen=True)
class IsOneOf:
    field: SearchField
    literals: Sequence[Literal]


@dataclass(frozen=True)
class Compared:
    field: SearchField
    order: Order
    literal: float | datetime


@dataclass(frozen=True)
class HasTag:
    tag: str


@dataclass(frozen=True)
class Negated:
    inner: SearchNode


@dataclass(frozen=True)
class AllOf:
    items: Sequence[SearchNode]


@dataclass(frozen=True)
class AnyOf:
    items: Sequence[SearchNode]


SearchNode = Exists | IsOneOf | Compared | HasTag | Negated | AllOf | AnyOf
