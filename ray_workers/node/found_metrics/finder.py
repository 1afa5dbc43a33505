"""Finds a script's metrics in what it prints and writes, and leaves them on a spool."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from dray.train.spool import SpoolWriter
from ray_workers.node.found_metrics.files import MetricFiles
from ray_workers.node.found_metrics.lines import LinePatterns, TrainerLines
from ray_workers.node.found_metrics.points import FoundPoint
from ray_workers.node.found_metrics.stored_names import StoredNames
from ray_workers.shared.contracts import FrameKind, RankTask
from ray_workers.shared.folders.script_paths import output_dir

STREAM: Final = ".found"
"""Suffix of the spool, beside those of the reports and of the log."""
FILES: Final = ("tensorboard", "csv")
"""Sources that are read, of rank 0, where a document names none."""
MAX_KEYS = 1000
FILES_PERIOD_S = 2.0
LEAST_SHARE = 100
"""Pauses between two looks at the files are so many times as long as a look."""
END_LIMIT_S = 10.0
"""How long the files may take to be read once the process is gone."""


class MetricFinder:
    """The metrics of one rank, each step and key once.

    Its methods are called on one event loop; files are read in a thread.
    """

    def __init__(self, task: RankTask, *, since: float) -> None:
        """since: Unix seconds; files that were last written before have nothing of this
        process."""
        given = task.spec.get("metrics", ())
        sources = sources_of(given, task.rank)
        self._spool_dir = Path(task.spool_dir).with_suffix(STREAM)
        self._limit_bytes = task.spool_limit_bytes
        self._spool: SpoolWriter | None = None
        self._newest: dict[str, int] = {}
        self._refused_keys: set[str] = set()
        patterns = [metric for metric in _of_rank(given, task.rank) if metric["pattern"]]
        self._patterns = LinePatterns(patterns) if patterns else None
        self._trainer = TrainerLines() if "transformers" in sources else None
        folders = [Path(task.work_dir), output_dir(Path(task.folders_dir))]
        names = StoredNames(task.series_names_url)
        has_files = bool(sources & set(FILES))
        self._files = MetricFiles(folders, sources, since, names) if has_files else None
        self._reading: asyncio.Task[None] | None = None
        self._has_ended = asyncio.Event()

    def begin(self) -> None:
        """Begin to look for files."""
        if self._files is not None:
            self._reading = asyncio.ensure_future(self._read_until_the_end(self._files))

    def saw(self, line: str) -> None:
        """Look at a line that the process printed."""
        if self._patterns is not None:
            self._report(self._patterns.take(line))
        if self._trainer is not None:
            self._report(self._trainer.take(line))

    async def finish(self) -> str | None:
        """Report the rest, once the process is gone; a line for its log if something was not
        searched or taken."""
        if self._trainer is not None:
            self._report(self._trainer.finish())
        self._has_ended.set()
        if self._reading is not None:
            await self._reading
        if self._spool is not None:
            self._spool.close()
        skipped = 0 if self._patterns is None else self._patterns.num_skipped
        passed_over = 0 if self._files is None else self._files.num_passed_over
        reasons = [
            skipped and f"{skipped} lines were not searched for metrics: too many came at once",
            passed_over and f"{passed_over} files of loggers were not read: there are too many",
            self._refused_keys
            and f"{len(self._refused_keys)} metrics were not taken: there are more than {MAX_KEYS}",
        ]
        said = "; ".join(reason for reason in reasons if isinstance(reason, str))
        return f"dray: {said}" if said else None

    async def _read_until_the_end(self, files: MetricFiles) -> None:
        while not self._has_ended.is_set():
            began = time.monotonic()
            self._report(await asyncio.to_thread(files.read))
            pause_s = max(FILES_PERIOD_S, LEAST_SHARE * (time.monotonic() - began))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.0 if files.has_more else pause_s):
                    await self._has_ended.wait()
        deadline = time.monotonic() + END_LIMIT_S
        while True:
            self._report(await asyncio.to_thread(files.read))
            if not files.has_more or time.monotonic() > deadline:
                return

    def _report(self, points: Iterable[FoundPoint]) -> None:
        new = [point for point in points if self._is_new(point)]
        if not new:
            return
        if self._spool is None:
            try:
                self._spool = SpoolWriter(self._spool_dir, limit_bytes=self._limit_bytes)
            except OSError:
                return  # the disk is full: metrics are not vital
        for step, of_step in groupby(new, key=lambda point: point.step):
            values = {point.key: float(point.value) for point in of_step}
            self._spool.append(FrameKind.METRICS, {"step": step, "values": values})

    def _is_new(self, point: FoundPoint) -> bool:
        """Whether the step is above those before it, as steps of a key must rise."""
        newest = self._newest.get(point.key)
        if newest is None and len(self._newest) >= MAX_KEYS:
            if len(self._refused_keys) < MAX_KEYS:
                self._refused_keys.add(point.key)
            return False
        if newest is not None and point.step <= newest:
            return False
        self._newest[point.key] = point.step
        return True


Metrics = Sequence[Mapping[str, Any]]
"""`metrics` of a job document, as JSON data."""


def sources_of(metrics: Metrics, rank: int) -> frozenset[str]:
    """The loggers whose metrics are taken from a rank."""
    named = [metric for metric in metrics if metric["source"]]
    if not named:
        return frozenset(FILES if rank == 0 else ())
    return frozenset(metric["source"] for metric in _of_rank(named, rank))


def _of_rank(metrics: Metrics, rank: int) -> list[Mapping[str, Any]]:
    return [metric for metric in metrics if metric["rank"] in (rank, "all")]
