"""Metrics that a dead rank 0 had committed but not yet reported."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ray_workers.shared import spool_reader
from ray_workers.shared.contracts import FrameKind
from ray_workers.shared.heartbeat import UnreportedStep


def unreported_steps(
    spools: Path, kept: Iterable[UnreportedStep], last_step: int
) -> list[UnreportedStep]:
    """The figures of steps up to `last_step` that are on no spool of rank 0, in order.

    spools: the attempt's folder on this node. kept: the figures of the last steps that the other
    ranks have. Where rank 0 ran on another node, its spools can't be read here, and all of `kept`
    is returned: the service stores once what is reported twice.
    """
    reported = max(map(_last_reported, spools.glob("r0.*.metrics")), default=0)
    found = {figures.step: figures for figures in kept}
    return [found[step] for step in sorted(found) if reported < step <= last_step]


def _last_reported(directory: Path) -> int:
    """The last step whose figures are on a spool, delivered or not; 0 for none."""
    frames = spool_reader.decode(directory.name, spool_reader.tail(directory))
    steps = [
        int(frame.body["step"])
        for frame in frames
        if frame.kind is FrameKind.METRICS and "train/loss" in frame.body["values"]
    ]
    return max(steps, default=0)
