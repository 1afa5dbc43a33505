"""Metrics in the lines that a script prints, and the type of a found metric."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from dray.input.patterns import compile_pattern
from dray.train.reporting import MAX_KEY_CHARS, MAX_STEP, RESERVED_KEY

SEARCHES_PER_S = 20_000
"""Maximum number of searches per second, each of which takes a few microseconds. A script that
prints more lines than can be searched must not be delayed."""
SEARCH_SHARE = 0.25
"""Maximum fraction of each second that all searches together may take: with some patterns and
lines, a single search takes a tenth of a second."""
MAX_DICT_CHARS = 4096
Found = TypeVar("Found")
__all__ = ["MAX_KEY_CHARS", "MAX_STEP", "FoundPoint", "is_key", "number_in", "step_in"]


class SearchBudget:
    """Limits the number of searches per second, and the time that they take."""

    def __init__(
        self,
        per_s: float,
        share: float,
        clock: Callable[[], float] = time.monotonic,
        timer: Callable[[], float] = time.thread_time,
    ) -> None:
        """timer: measures the time of a search. The timer doesn't advance while the thread waits
        for a processor, so that an overloaded machine does not cause lines to be skipped."""
        self._per_s, self._share = per_s, share
        self._clock, self._timer = clock, timer
        self._left, self._since = per_s, clock()
        self._left_s = share

    def take(self, searches: int) -> bool:
        """Return whether this many searches are allowed now. Unused searches expire after a
        second."""
        now = self._clock()
        passed_s = now - self._since
        self._since = now
        self._left = min(self._per_s, self._left + passed_s * self._per_s)
        self._left_s = min(self._share, self._left_s + passed_s * self._share)
        if self._left < searches or self._left_s <= 0.0:
            return False
        self._left -= searches
        return True

    def run(self, search: Callable[[str], Found], text: str) -> Found | None:
        """Return the result of a search. If the time is used up, return None without searching."""
        if self._left_s <= 0.0:
            return None
        began = self._timer()
        try:
            return search(text)
        finally:
            self._left_s -= self._timer() - began


class LinePatterns:
    """Searches one line after another for a job document's metrics."""

    def __init__(
        self, metrics: Sequence[Mapping[str, Any]], budget: SearchBudget | None = None
    ) -> None:
        """metrics: `dray.spec.Metric` objects with patterns, as JSON data."""
        self._patterns = [
            _LinePattern(metric["name"], metric["pattern"], metric["step"]) for metric in metrics
        ]
        self._budget = budget or SearchBudget(SEARCHES_PER_S, SEARCH_SHARE)
        self.num_skipped = 0
        """Number of lines that were not searched for every pattern, because too many were printed
        at once or a search took too long."""

    def take(self, line: str) -> list[FoundPoint]:
        """Return the metrics in a line, or in one state of a progress bar."""
        found: list[FoundPoint] = []
        if not self._budget.take(len(self._patterns)):
            self.num_skipped += 1
            return found
        for pattern in self._patterns:
            points = self._budget.run(pattern.take, line)
            if points is None:
                self.num_skipped += 1
                break
            found += points
        return found


class _LinePattern:
    def __init__(self, key: str, pattern: str, step: str | None) -> None:
        self._key = key
        self._value = compile_pattern(pattern)
        self._step: Any = compile_pattern(step) if step is not None else None
        self._newest = 0

    def take(self, line: str) -> tuple[FoundPoint, ...]:
        if self._step is not None:
            found = self._step.search(line)
            step = step_in(found.group(1) or "") if found else None
            self._newest = self._newest if step is None else step
        found = self._value.search(line)
        value = number_in(found.group(1) or "") if found else None
        if value is None:
            return ()
        if self._step is None:
            self._newest += 1
        return (FoundPoint(self._key, self._newest, value),)


_ENTRY = re.compile(r"'([^']{1,100})': '?([^',{}]{1,40})")
CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Sequences that move a terminal's cursor or change its colours."""
_BAR = re.compile(r"\s*\d{1,3}%\|[^|]*\| (\d{1,15})/(\d{1,15}) \[")
"""A tqdm bar without a description, such as the Trainer's."""


class TrainerLines:
    """Metrics from the Trainer of transformers, which prints each record as a dict.

    A record doesn't contain a step, but the Trainer's progress bar does. The bar is redrawn after
    each record, so each record is held until then. If there is no bar, training records are
    numbered from 1. If nothing is printed between evaluations, the evaluations are also numbered
    from 1.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, float] | None = None
        self._total: str | None = None
        """Total number of steps in the training bar, once known. The bars of evaluations have
        different totals."""
        self._newest = 0
        self._newest_of: dict[str, int] = {}
        """The latest step of each metric."""

    def take(self, part: str) -> list[FoundPoint]:
        """Return the metrics in a line, or in one state of a progress bar."""
        return list(self._take(part))

    def _take(self, part: str) -> Iterator[FoundPoint]:
        part = CONTROLS.sub("", part)
        text = part.strip()
        if text.startswith("{'") and text.endswith("}") and len(text) <= MAX_DICT_CHARS:
            entries = dict(_ENTRY.findall(text))
            if "epoch" in entries:
                yield from self.finish()
                self._waiting = _named(entries)
        elif self._waiting is not None or self._total is None:
            found = _BAR.match(part)
            if found and (self._total in (None, found.group(2)) or self._is_of_training):
                self._total = found.group(2)
                if self._waiting is not None:
                    yield from self._points_at(int(found.group(1)))

    def finish(self) -> list[FoundPoint]:
        """Return the record that is still waiting for its step."""
        if self._waiting is None:
            return []
        return self._points_at(self._newest + self._is_of_training)

    @property
    def _is_of_training(self) -> bool:
        """Whether a training record is waiting for its step. No evaluation bar is drawn while a
        training record is waiting."""
        return any(key.startswith("train/") for key in self._waiting or ())

    def _points_at(self, step: int) -> list[FoundPoint]:
        assert self._waiting is not None
        step = max(self._newest, step)
        # If the bar has not been redrawn since the previous record, it still shows that record's
        # step.
        is_taken = any(self._newest_of.get(key) == step for key in self._waiting)
        self._newest = step + is_taken
        points = [FoundPoint(key, self._newest, value) for key, value in self._waiting.items()]
        self._newest_of |= dict.fromkeys(self._waiting, self._newest)
        self._waiting = None
        return points


def _named(entries: dict[str, str]) -> dict[str, float]:
    """Return the numbers, keyed by the names that the Trainer uses in TensorBoard: `train/loss`,
    `eval/loss`."""
    named: dict[str, float] = {}
    for name, text in entries.items():
        value = number_in(text)
        kind, _, rest = name.partition("_")
        key = f"{kind}/{rest}" if kind in ("eval", "test") and rest else f"train/{name}"
        if value is not None and name != "epoch" and is_key(key):
            named[key] = value
    return named


class FoundPoint(NamedTuple):
    key: str
    step: int
    value: float


def number_in(text: str) -> float | None:
    """Return the number if the text is a number, possibly followed by punctuation; otherwise None.
    NaN and infinities count as numbers."""
    try:
        return float(text.strip().rstrip(".,;:%"))
    except ValueError:
        return None


def step_in(text: str) -> int | None:
    """Return the step if the string is a step, such as `12` or `12.0`; otherwise None."""
    number = number_in(text)
    return step_of(number) if number is not None else None


def step_of(number: float) -> int | None:
    is_step = 0 <= number <= MAX_STEP and number == int(number)
    return int(number) if is_step else None


def is_key(text: str) -> bool:
    """Return whether a metric may have this name."""
    return 0 < len(text) <= MAX_KEY_CHARS and text.isprintable() and text != RESERVED_KEY
