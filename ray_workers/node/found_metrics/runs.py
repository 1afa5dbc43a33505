"""Assigns names to the series of a script's runs. Each run writes to a separate folder."""

from __future__ import annotations

import hashlib
import re
import socket
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from ray_workers.node.found_metrics.lines import MAX_KEY_CHARS, FoundPoint

Run = tuple[str, ...]
"""The parts of a run's path. The first part is the name of the folder that was searched."""
_DATE = re.compile(
    r"\d{4}-?\d\d-?\d\d(?:[T_ -]?\d\d[-_:]?\d\d(?:[-_:]?\d\d)?)?"
    r"|(?<![A-Za-z])[A-Z][a-z]{2}\d\d_\d\d-\d\d-\d\d"  # SummaryWriter of TensorBoard
)
_NUMBERED = re.compile(r"version_\d+|\d\d-\d\d-\d\d|\d{10}")
"""Folders numbered by lightning, or named after the current time by hydra and other tools."""
_OF_ULTRALYTICS = re.compile(r"(train|val|exp)(-?\d+)?")
"""`train2` (older versions) or `train-2`."""


class SeriesName(NamedTuple):
    """The name of a metric of a run."""

    run: Run
    form: str
    """The run's path without the numbers and dates that a logger adds."""
    key: str
    name: str


class RunNames:
    """Assigns each metric of each run a unique name, which never changes.

    A metric found in only one run keeps its name. If several runs have a metric, its name also
    contains the run's folder: the shortest suffix of the run's path that no other run has. If
    points of a run were reported before a second run appeared, the first run keeps the short name.

    Runs keep the names that earlier processes of the job chose. If a script restarts a run, its
    logger may use another folder, such as `version_1` after `version_0`. If there is exactly one
    earlier run whose path differs only in this way, the new run continues its series; otherwise, it
    is a separate run.
    """

    def __init__(self, earlier: Iterable[SeriesName] = ()) -> None:
        self._runs: dict[Run, None] = {}
        self._names: dict[tuple[Run, str], str] = {}
        self._owners: dict[str, tuple[Run, str]] = {}
        """The run and metric of each name."""
        self._shared: set[str] = set()
        """Metrics that several runs have."""
        self._forms: dict[Run, str] = {}
        """The form (`form_of`) of each run of an earlier process."""
        self._carried_on: dict[Run, Run] = {}
        """For each run of this process, the run whose series it continues, usually the run
        itself."""
        for run, form, key, name in earlier:
            self.add(run)
            self._forms[run] = form
            self._names[run, key] = name
            self._owners[name] = run, key
            self._shared.add(key)

    def given(self, most: int) -> list[SeriesName]:
        """Return the first `most` names."""
        return [
            SeriesName(run, self._forms.get(run) or form_of(run), key, name)
            for (run, key), name in islice(self._names.items(), most)
        ]

    def add(self, run: Run) -> None:
        """Record a run, which may not have any points yet."""
        self._runs[run] = None

    def named(self, read: Sequence[tuple[Run, Sequence[FoundPoint]]]) -> list[FoundPoint]:
        """Return the points of runs that were read together, each under its assigned name."""
        runs_of: dict[str, set[Run]] = {}
        for run, points in read:
            self.add(run)
            for point in points:
                runs_of.setdefault(point.key, set()).add(run)
        self._shared |= {key for key, runs in runs_of.items() if len(runs) > 1}
        return [
            point._replace(key=self._name(self._series_of(run), point.key))
            for run, points in read
            for point in points
        ]

    def _series_of(self, run: Run) -> Run:
        """Return the run whose series this run continues, which is usually the run itself."""
        if run not in self._carried_on:
            taken = set(self._carried_on.values())
            form = form_of(run)
            alike = [one for one, its_form in self._forms.items() if its_form == form]
            if run in taken:  # another run has continued its series
                found = (*run, "again")
            elif run not in self._forms and len(alike) == 1 and alike[0] not in taken:
                found = alike[0]
            else:
                found = run
            self._carried_on[run] = found
        return self._carried_on[run]

    def _name(self, run: Run, key: str) -> str:
        known = self._names.get((run, key))
        if known is not None:
            return known
        candidates = self._candidates(run, key)
        name = next(name for name in candidates if name not in self._owners)
        self._names[run, key] = name
        self._owners[name] = run, key
        return name

    def _candidates(self, run: Run, key: str) -> Iterable[str]:
        if key not in self._shared:
            self._shared.add(key)
            yield key
        others = [other for other in self._runs if other != run]
        for length in range(1, len(run) + 1):
            end = run[-length:]
            if length == len(run) or all(other[-length:] != end for other in others):
                yield _joined("/".join(end), key)
        whole = "/".join(run)
        for number in range(len(self._owners) + 1):
            yield _joined(f"{whole}~{number}", key)


def form_of(run: Run) -> str:
    """Return the path of a run without the numbers, dates and host name that loggers add."""
    host = socket.gethostname()
    parts = [
        "*" if _NUMBERED.fullmatch(part) else _DATE.sub("*", part).replace(host, "*")
        for part in run
    ]
    if "runs" in run[:-1] and (found := _OF_ULTRALYTICS.fullmatch(run[-1])):
        parts[-1] = f"{found.group(1)}*"
    return "/".join(parts)


def _joined(path: str, key: str) -> str:
    """Return `path/key` as a valid name of a metric. A shortened name contains a digest."""
    whole = f"{path}/{key}"
    printable = "".join(one if one.isprintable() else "?" for one in path)
    if printable == path and len(whole) <= MAX_KEY_CHARS:
        return whole
    digest = hashlib.sha256(whole.encode(errors="surrogatepass")).hexdigest()[:10]
    num_chars = MAX_KEY_CHARS - len(digest) - len("~/")
    key = key[-num_chars:]
    end = printable[-(num_chars - len(key)) :] if len(key) < num_chars else ""
    return f"{end}~{digest}/{key}"
