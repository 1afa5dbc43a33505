"""Finds a script's metrics in its output and files, and appends them to a spool."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from dray.train.spool import SpoolWriter, segments
from ray_workers.node.found_metrics.files import MetricFiles
from ray_workers.node.found_metrics.guesses import Guesses
from ray_workers.node.found_metrics.lines import FoundPoint, LinePatterns, TrainerLines
from ray_workers.node.found_metrics.stored_names import StoredNames
from ray_workers.shared.contracts import FrameKind, RankTask
from ray_workers.shared.folders.work_dir import output_dir

STREAM: Final = ".found"
"""Suffix of the spool for found metrics, which is next to the spools for reports and the log."""
FILES: Final = ("tensorboard", "csv")
"""Sources that are read for rank 0 if a job document doesn't name any."""
MAX_KEYS = 1000
FILES_PERIOD_S = 2.0
LEAST_SHARE = 100
"""Minimum pause between two scans of the files, as a multiple of the duration of a scan."""
END_LIMIT_S = 10.0
"""Number of seconds for which the files may be read after the process has ended."""
GUESSES_PERIOD_S = 10.0
"""Number of seconds for which guessed metrics are held back. If the script reports a metric or
writes one to a file within this time, the guesses are discarded."""
_METRICS_FRAME = b'{"kind":"metrics"'


class MetricFinder:
    """Finds the metrics of a rank. Each step of each key is found only once.

    Call its methods from a single event loop. Files are read in a thread.
    """

    def __init__(self, task: RankTask, *, since: float) -> None:
        """since: Unix time in seconds. Files that were last written before this time don't contain
        metrics of this process."""
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
        self._guesses = Guesses() if may_guess(task.spec, task.rank) else None
        self._reports_dir = Path(task.spool_dir)
        self._at_work: list[asyncio.Task[None]] = []
        self._has_ended = asyncio.Event()

    def begin(self) -> None:
        """Start to scan files."""
        if self._files is not None:
            self._at_work.append(asyncio.ensure_future(self._read_until_the_end(self._files)))
        if self._guesses is not None:
            self._at_work.append(asyncio.ensure_future(self._release_guesses()))

    def close(self) -> None:
        """Stop scanning. Metrics that have not been found yet are not reported."""
        for task in self._at_work:
            task.cancel()
        if self._spool is not None:
            self._spool.close()

    def logged(self, line: str) -> None:
        """Guess the metrics in a line of the log."""
        if self._guesses is not None:
            self._guesses.take(line)

    def saw(self, line: str) -> None:
        """Search a line that the process printed, or one state of a progress bar."""
        if self._patterns is not None:
            self._report(self._patterns.take(line))
        if self._trainer is not None:
            self._report(self._trainer.take(line))

    async def finish(self) -> str | None:
        """Report the remaining metrics, once the process is gone. Returns a line for the process's
        log if lines were not searched or metrics were not kept, else None."""
        if self._trainer is not None:
            self._report(self._trainer.finish())
        self._has_ended.set()
        await asyncio.gather(*self._at_work)
        await self._leave_guesses()
        if self._spool is not None:
            self._spool.close()
        skipped = 0 if self._patterns is None else self._patterns.num_skipped
        passed_over = 0 if self._files is None else self._files.num_passed_over
        reasons = [
            skipped
            and f"{skipped} lines were not searched for metrics: too many lines were printed at "
            "once",
            passed_over and f"{passed_over} logger files were not read: there are too many",
            self._refused_keys
            and f"{len(self._refused_keys)} metrics were not kept: there are more than "
            f"{MAX_KEYS} metrics",
        ]
        text = "; ".join(reason for reason in reasons if isinstance(reason, str))
        return f"dray: {text}" if text else None

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

    async def _release_guesses(self) -> None:
        while not self._has_ended.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GUESSES_PERIOD_S):
                    await self._has_ended.wait()
                    return
            await self._leave_guesses()

    async def _leave_guesses(self) -> None:
        """Report the guesses made so far, unless the script has metrics of its own."""
        if self._guesses is not None and await asyncio.to_thread(_has_metrics, self._reports_dir):
            self._guesses = None
        if self._guesses is not None:
            self._leave(self._guesses.release())

    def _report(self, points: Sequence[FoundPoint]) -> None:
        """Report the script's own metrics, after which no metrics are guessed."""
        if points:
            self._guesses = None
            self._leave(points)

    def _leave(self, points: Iterable[FoundPoint]) -> None:
        new = [point for point in points if self._is_new(point)]
        if not new:
            return
        if self._spool is None:
            try:
                self._spool = SpoolWriter(self._spool_dir, limit_bytes=self._limit_bytes)
            except OSError:
                return  # the disk is full: the job can do without metrics
        for step, of_step in groupby(new, key=lambda point: point.step):
            values = {point.key: float(point.value) for point in of_step}
            self._spool.append(FrameKind.METRICS, {"step": step, "values": values, "found": True})

    def _is_new(self, point: FoundPoint) -> bool:
        """Return whether the step is greater than all earlier steps of the key. Steps must
        increase."""
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
    """Return the loggers whose metrics are read for a rank."""
    named = [metric for metric in metrics if metric["source"]]
    if not named:
        return frozenset(FILES if rank == 0 else ())
    return frozenset(metric["source"] for metric in _of_rank(named, rank))


def _of_rank(metrics: Metrics, rank: int) -> list[Mapping[str, Any]]:
    return [metric for metric in metrics if metric["rank"] in (rank, "all")]


def may_guess(spec: Mapping[str, Any], rank: int) -> bool:
    """Return whether metrics are guessed: only for rank 0, and only if the job document doesn't
    name any metrics."""
    script = spec.get("script") or {}
    return rank == 0 and bool(script) and script.get("guesses", True) and not spec.get("metrics")


def _has_metrics(spool_dir: Path) -> bool:
    """Return whether a process has reported a metric itself. Blocks."""
    with contextlib.suppress(OSError):
        return any(_METRICS_FRAME in path.read_bytes() for _, path in segments(spool_dir)[-2:])
    return False
