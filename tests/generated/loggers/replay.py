"""Recorded programs, replayed for the code that finds their metrics."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray_workers.node.found_metrics.finder import MetricFinder
from ray_workers.shared import spool_reader
from ray_workers.supervision.rules.redraws import Redraws
from tests.generated.loggers.record import RECORDED
from tests.wire import rank_task

Series = dict[str, list[tuple[int, float]]]
NOT_FILES = ("truth.json", "output.json")


def truth_of(name: str) -> Series:
    found = json.loads((RECORDED / name / "truth.json").read_text())
    return {key: [(step, value) for step, value in points] for key, points in found.items()}


def output_of(name: str) -> list[tuple[float, str]]:
    """(second, text) of each piece of a recorded program's output."""
    return [(at, text) for at, text in json.loads((RECORDED / name / "output.json").read_text())]


async def series_of(
    name: str, folder: Path, *sources: str, output: Sequence[tuple[float, str]] | None = None
) -> Series:
    """The series found in a recorded program's files, and in its own or another output."""
    work_dir = folder / "work"
    shutil.copytree(RECORDED / name, work_dir, ignore=shutil.ignore_patterns(*NOT_FILES))
    empty: dict[str, Any] = {"name": None, "pattern": None, "step": None, "rank": 0}
    task = rank_task(
        spool_dir=str(folder / "r0.0.metrics"),
        work_dir=str(work_dir),
        folders_dir=str(folder / "folders"),
        folder_url=str(folder / "job" / "checkpoint-folder"),
        spec={
            "metrics": [{**empty, "source": one} for one in sources],
            "script": {"guesses": True},
        },
    )
    finder = MetricFinder(task, since=0.0)
    finder.begin()
    redraws = Redraws()
    for at, text in output_of(name) if output is None else output:
        lines = redraws.feed(text.encode(), at)
        for line in lines:
            finder.logged(line.text)
        for drawn in redraws.drawn:
            finder.saw(drawn)
        redraws.drawn = []
    for line in redraws.finish():
        finder.logged(line.text)
    for drawn in redraws.drawn:
        finder.saw(drawn)
    await finder.finish()
    return _spooled(folder)


def _spooled(folder: Path) -> Series:
    if not (folder / "r0.0.found").exists():
        return {}
    data = spool_reader.read(folder / "r0.0.found", 0, 1 << 24)
    found: Series = {}
    for frame in spool_reader.decode("r0.0.found", data):
        for key, value in frame.body["values"].items():
            found.setdefault(key, []).append((frame.body["step"], value))
    return found
