"""Metrics that dray reads from the output of a script and from the files of its loggers."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from dray.input.patterns import MAX_PATTERN_CHARS, compile_pattern
from dray.spec.fields import Document, Int
from dray.spec.training.parallel import MAX_WORKERS

Source = Literal["tensorboard", "csv", "transformers", "none"]


def _checked_pattern(pattern: str) -> str:
    try:
        groups = compile_pattern(pattern).groups
    except ImportError:
        try:
            groups = re.compile(pattern).groups
        except (re.error, OverflowError, RecursionError):
            return pattern  # RE2's syntax differs slightly, so the server decides
    if groups != 1:
        raise ValueError(
            f"must have exactly one capturing group, around the number, but has {groups}; use "
            "(?:...) for other groups"
        )
    return pattern


Pattern = Annotated[
    str,
    StringConstraints(min_length=1, max_length=MAX_PATTERN_CHARS),
    AfterValidator(_checked_pattern),
]


def _checked_key(key: str) -> str:
    if not key.isprintable():
        raise ValueError("must not contain control characters or other unprintable characters")
    return key


MetricKey = Annotated[
    str, StringConstraints(min_length=1, max_length=128), AfterValidator(_checked_key)
]


class Metric(Document):
    """A metric that a script prints (`name` and `pattern`), or a logger from which metrics are read
    (`source`)."""

    name: MetricKey | None = None
    """Name of the metric, such as `train/loss`."""
    pattern: Pattern | None = None
    """Regular expression (RE2) that is searched for in each line of the output. The expression has
    one group, which matches the value."""
    step: Pattern | None = None
    """Regular expression with one group, which matches the step, on the same or an earlier line.
    If unset, the values are numbered from 1."""
    source: Source | None = None
    """Logger from which metrics are read: `tensorboard` and `csv` read files in the job's
    directory, `transformers` reads the output of its Trainer. If no entry has a source,
    `tensorboard` and `csv` are read; `none` disables both."""
    rank: Annotated[Int, Field(ge=0, lt=MAX_WORKERS)] | Literal["all"] = 0
    """Rank whose output is read. Files are read on the node of this rank."""

    @model_validator(mode="after")
    def _one_of_the_two(self) -> Self:
        if self.source is not None:
            if self.name is not None or self.pattern is not None or self.step is not None:
                raise ValueError(
                    "has a source, and the source names its metrics: omit name, pattern and step"
                )
        elif self.name is None or self.pattern is None:
            raise ValueError("requires a name and a pattern, or a source")
        return self
