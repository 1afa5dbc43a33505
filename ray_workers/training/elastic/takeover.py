"""What a process that died as rank 0 had still to tell."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ray_workers.shared import spool_reader
from ray_workers.shared.contracts import FrameKind
from ray_workers.shared.heartbeat import UnreportedStep


def untold(spools: Path, kept: Iterable[UnreportedStep], last_step: int) -> list[UnreportedStep]:
    """The figures of steps up to `last_step` that lie on no spool of rank 0, in order.

    spools: the attempt's folder on this node. kept: what those who stayed know of the last steps.
    Where rank 0 was on another node, that is all they know: told twice, it is stored once.
    """
    told = max(map(_last_told, spools.glob("r0.*.metrics")), default=0)
    found = {figures.step: figures for figures in kept}
    return [found[step] for step in sorted(found) if told < step <= last_step]


def _last_told(directory: Path) -> int:
    """The last step whose figures are on a spool, delivered or not."""
    frames = spool_reader.decode(directory.name, spool_reader.tail(directory))
    steps = [
        int(frame.body["step"])
        for frame in frames
        if frame.kind is FrameKind.METRICS and "train/loss" in frame.body["values"]
    ]
    return max(steps, default=0)
