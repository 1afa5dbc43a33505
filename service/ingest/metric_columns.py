"""Frames of metrics by the run: most of the frames of a reply are many alike in a row.

A rank reports the same names step after step, so that its figures are checked and stored by the
column, not by the number. Frames of another form are left to be checked one by one, which also
finds what is wrong with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ray_workers.shared.contracts import Frame, FrameKind

COUNTS_SAID = ("total_steps", "epoch")
SPEED_SAID = "samples_per_s"


@dataclass(frozen=True)
class Run:
    """Some frames of one rank and incarnation, one for each step."""

    steps: list[int]
    columns: dict[str, tuple[float, ...]]
    """By name: a value for each step."""
    said: dict[str, Any]
    """The last report of each part of the progress."""


def runs(frames: Sequence[Frame]) -> Iterator[list[Frame]]:
    """The frames in order, grouped so that one `Run` may be made of each group."""
    for _, alike in groupby(frames, key=_form):
        yield list(alike)


def _form(frame: Frame) -> tuple[Any, ...]:
    if frame.kind is not FrameKind.METRICS:
        return (frame.kind,)
    values = frame.body.get("values")
    names = tuple(values) if type(values) is dict else None
    return frame.kind, frame.rank, frame.incarnation, names


def run_of(frames: Sequence[Frame], max_step: int) -> Run | None:
    """The run that frames of one form make; None unless each is of the usual form.

    In that form steps and counts are ints from 0 to `max_step`, and everything else is a float.
    """
    bodies = [frame.body for frame in frames]
    steps: list[Any] = [body.get("step") for body in bodies]
    if not _are_counts(steps, max_step) or type(bodies[0].get("values")) is not dict:
        return None
    names = tuple(bodies[0]["values"])
    columns = list(zip(*[body["values"].values() for body in bodies], strict=True))
    if any(set(map(type, column)) != {float} for column in columns):
        return None
    said = _said(bodies, max_step) if max(map(len, bodies)) > 2 else {}
    if said is None:
        return None
    return Run(steps, dict(zip(names, columns, strict=True)), said)


def _are_counts(values: Sequence[Any], limit: int) -> bool:
    return set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= limit


def _said(bodies: Sequence[Any], max_step: int) -> dict[str, Any] | None:
    said: dict[str, Any] = {}
    for name in COUNTS_SAID:
        counts = [count for body in bodies if (count := body.get(name)) is not None]
        if counts:
            if not _are_counts(counts, max_step):
                return None
            said[name] = counts[-1]
    speeds = [speed for body in bodies if (speed := body.get(SPEED_SAID)) is not None]
    if speeds:
        if set(map(type, speeds)) != {float}:
            return None
        said[SPEED_SAID] = speeds[-1] if math.isfinite(speeds[-1]) else None
    return said
