"""Names of the series that several runs of one process write, each run into its own folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from ray_workers.node.found_metrics.points import MAX_KEY_CHARS, FoundPoint

Run = tuple[str, ...]
"""The parts of a run's path; the first names the folder that was searched."""


class RunNames:
    """Gives each metric of each run a name of its own, which never changes.

    A metric that one run has keeps its name. A metric of several runs is named after the run's
    folder, by the shortest end of its path that no other run has. The run whose points were
    reported before a second run appeared keeps the short name.
    """

    def __init__(self) -> None:
        self._runs: dict[Run, None] = {}
        self._names: dict[tuple[Run, str], str] = {}
        self._owners: dict[str, tuple[Run, str]] = {}
        """The run and metric that each name was given to."""
        self._shared: set[str] = set()
        """Metrics of several runs."""

    def add(self, run: Run) -> None:
        """Take a run into account, which may have no points yet."""
        self._runs[run] = None

    def named(self, read: Sequence[tuple[Run, Sequence[FoundPoint]]]) -> list[FoundPoint]:
        """The points of some runs, which were read together, under their names."""
        runs_of: dict[str, set[Run]] = {}
        for run, points in read:
            self.add(run)
            for point in points:
                runs_of.setdefault(point.key, set()).add(run)
        self._shared |= {key for key, runs in runs_of.items() if len(runs) > 1}
        return [
            point._replace(key=self._name(run, point.key))
            for run, points in read
            for point in points
        ]

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


def _joined(path: str, key: str) -> str:
    """`path/key`, as a name that a metric may have; one that is shortened has a digest."""
    whole = f"{path}/{key}"
    printable = "".join(one if one.isprintable() else "?" for one in path)
    if printable == path and len(whole) <= MAX_KEY_CHARS:
        return whole
    digest = hashlib.sha256(whole.encode(errors="surrogatepass")).hexdigest()[:10]
    room = MAX_KEY_CHARS - len(digest) - len("~/")
    key = key[-room:]
    end = printable[-(room - len(key)) :] if len(key) < room else ""
    return f"{end}~{digest}/{key}"
