"""Metrics in the lines that a script prints."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dray.input.patterns import compile_pattern
from ray_workers.node.found_metrics.points import FoundPoint, is_key, number_in, step_in

SEARCHES_PER_S = 20_000
"""Most searches of a second, each of some microseconds: a script that prints more than can be
looked at must not wait for it."""
SEARCH_SHARE = 0.25
"""Most time of a second that all searches take together: there are patterns and lines of which one
search takes a tenth of a second."""
MAX_DICT_CHARS = 4096


class LinePatterns:
    """Looks for the metrics of a document in one line after the other."""

    def __init__(
        self,
        metrics: Sequence[Mapping[str, Any]],
        clock: Callable[[], float] = time.monotonic,
        timer: Callable[[], float] = time.thread_time,
    ) -> None:
        """metrics: `dray.spec.Metric` of patterns, as JSON data. timer: for what a search takes; it
        stands still while the thread waits for a processor, so an overloaded machine drops no
        lines."""
        self._patterns = [
            _LinePattern(metric["name"], metric["pattern"], metric["step"]) for metric in metrics
        ]
        self._clock = clock
        self._timer = timer
        self._allowed, self._since = float(SEARCHES_PER_S), clock()
        self._allowed_s = SEARCH_SHARE
        self.num_skipped = 0
        """Lines that were not looked at, or not for all patterns, because too many came at once or
        a search takes too long."""

    def take(self, line: str) -> list[FoundPoint]:
        """The metrics in a line. Parts that a carriage return separates, as those of a progress
        bar, are looked at one by one."""
        found: list[FoundPoint] = []
        for part in line.split("\r") if "\r" in line else (line,):
            if not self._may_look():
                self.num_skipped += 1
                break
            if not self._look(part, found):
                self.num_skipped += 1
                break
        return found

    def _look(self, part: str, found: list[FoundPoint]) -> bool:
        """Whether there was time for all patterns."""
        began = self._timer()
        for pattern in self._patterns:
            if self._allowed_s <= 0.0:
                return False
            point = pattern.take(part)
            if point is not None:
                found.append(point)
            ended = self._timer()
            self._allowed_s -= ended - began
            began = ended
        return True

    def _may_look(self) -> bool:
        """Whether there is time for all patterns; what was not used of a second is gone after
        it."""
        now = self._clock()
        passed_s = now - self._since
        self._since = now
        self._allowed = min(SEARCHES_PER_S, self._allowed + passed_s * SEARCHES_PER_S)
        self._allowed_s = min(SEARCH_SHARE, self._allowed_s + passed_s * SEARCH_SHARE)
        if self._allowed < len(self._patterns):
            return False
        self._allowed -= len(self._patterns)
        return True


class _LinePattern:
    def __init__(self, key: str, pattern: str, step: str | None) -> None:
        self._key = key
        self._value = compile_pattern(pattern)
        self._step: Any = compile_pattern(step) if step is not None else None
        self._newest = 0

    def take(self, line: str) -> FoundPoint | None:
        if self._step is not None:
            found = self._step.search(line)
            step = step_in(found.group(1) or "") if found else None
            self._newest = self._newest if step is None else step
        found = self._value.search(line)
        value = number_in(found.group(1) or "") if found else None
        if value is None:
            return None
        if self._step is None:
            self._newest += 1
        return FoundPoint(self._key, self._newest, value)


_ENTRY = re.compile(r"'([^']{1,100})': '?([^',{}]{1,40})")
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Sequences by which a terminal moves its cursor, or changes colours."""
_BAR = re.compile(r"\s*\d{1,3}%\|[^|]*\| (\d{1,15})/(\d{1,15}) \[")
"""A bar of tqdm that has no description, as that of the Trainer."""


class TrainerLines:
    """Metrics of the Trainer of transformers, which prints each record as a dict.

    A record says no step. The Trainer's progress bar does, which it draws anew after each record; a
    record waits for that. Without a bar the records of the training are numbered from 1.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, float] | None = None
        self._total: str | None = None
        """Steps of the first bar, which is that of the training; evaluations have others."""
        self._newest = 0

    def take(self, line: str) -> list[FoundPoint]:
        return [point for part in line.split("\r") for point in self._take(part)]

    def _take(self, part: str) -> Iterator[FoundPoint]:
        part = _CONTROLS.sub("", part)  # tqdm moves the cursor up before others print
        text = part.strip()
        if text.startswith("{'") and text.endswith("}") and len(text) <= MAX_DICT_CHARS:
            entries = dict(_ENTRY.findall(text))
            if "epoch" in entries:
                yield from self.finish()
                self._waiting = _named(entries)
        elif self._waiting is not None or self._total is None:
            found = _BAR.match(part)
            if found and self._total in (None, found.group(2)):
                self._total = found.group(2)
                if self._waiting is not None:
                    yield from self._place(int(found.group(1)))

    def finish(self) -> list[FoundPoint]:
        """The record that still waits for its step."""
        if self._waiting is None:
            return []
        is_of_training = any(key.startswith("train/") for key in self._waiting)
        return self._place(self._newest + 1 if is_of_training else self._newest)

    def _place(self, step: int) -> list[FoundPoint]:
        assert self._waiting is not None
        self._newest = max(self._newest, step)
        points = [FoundPoint(key, self._newest, value) for key, value in self._waiting.items()]
        self._waiting = None
        return points


def _named(entries: dict[str, str]) -> dict[str, float]:
    """The numbers, by the names that the Trainer gives them for TensorBoard: `train/loss`,
    `eval/loss`."""
    named: dict[str, float] = {}
    for name, text in entries.items():
        value = number_in(text)
        kind, _, rest = name.partition("_")
        key = f"{kind}/{rest}" if kind in ("eval", "test") and rest else f"train/{name}"
        if value is not None and name != "epoch" and is_key(key):
            named[key] = value
    return named
