"""Groups frames of metrics into runs, because most frames of a reply are consecutive and have the
same form.

A rank reports the same names step after step, so its values are checked and stored in columns.
Frames of other forms are checked one by one, which also finds their errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ray_workers.shared.contracts import Frame, FrameKind

COUNTS = ("total_steps", "epoch")
SPEED = "samples_per_s"


@dataclass(frozen=True)
class Run:
    """Consecutive frames of one rank and incarnation, one for each step."""

    steps: list[int]
    columns: dict[str, tuple[float, ...]]
    """The values of each metric, one for each step."""
    progress: dict[str, Any]
    """The last reported value of each part of the progress."""
    is_found: bool


def runs(frames: Sequence[Frame]) -> Iterator[list[Frame]]:
    """Yield the frames in order, grouped into consecutive frames of the same form that can become
    one `Run`."""
    for _, alike in groupby(frames, key=_form):
        yield list(alike)


def _form(frame: Frame) -> tuple[Any, ...]:
    if frame.kind is not FrameKind.METRICS:
        return (frame.kind,)
    values = frame.body.get("values")
    names = tuple(values) if type(values) is dict else None
    return frame.kind, frame.rank, frame.incarnation, names, frame.body.get("found", False)


def run_of(frames: Sequence[Frame], max_step: int) -> Run | None:
    """Return the frames, which must all have the same form, as a `Run`; None if their form is not
    the usual one. In the usual form, steps and counts are ints from 0 to `max_step`, and other
    values are floats."""
    bodies = [frame.body for frame in frames]
    steps: list[Any] = [body.get("step") for body in bodies]
    found = [body.get("found", False) for body in bodies]
    if set(map(type, found)) != {bool}:
        return None
    if not _are_counts(steps, max_step) or type(bodies[0].get("values")) is not dict:
        return None
    names = tuple(bodies[0]["values"])
    columns = list(zip(*[body["values"].values() for body in bodies], strict=True))
    if any(set(map(type, column)) != {float} for column in columns):
        return None
    progress = _progress(bodies, max_step) if max(map(len, bodies)) > 2 else {}
    if progress is None:
        return None
    return Run(steps, dict(zip(names, columns, strict=True)), progress, found[0])


def _are_counts(values: Sequence[Any], limit: int) -> bool:
    return set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= limit


def _progress(bodies: Sequence[Any], max_step: int) -> dict[str, Any] | None:
    progress: dict[str, Any] = {}
    for name in COUNTS:
        counts = [count for body in bodies if (count := body.get(name)) is not None]
        if counts:
            if not _are_counts(counts, max_step):
                return None
            progress[name] = counts[-1]
    speeds = [speed for body in bodies if (speed := body.get(SPEED)) is not None]
    if speeds:
        if set(map(type, speeds)) != {float}:
            return None
        progress[SPEED] = speeds[-1] if math.isfinite(speeds[-1]) else None
    return progress
