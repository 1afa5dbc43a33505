"""What a process that died in this rank had still to tell."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from ray_workers import pages, spool
from ray_workers.contracts import FrameKind, Predecessor
from ray_workers.pages import Untold


def untold(
    predecessors: Sequence[Predecessor], survivors: Iterable[Untold], last_step: int
) -> list[Untold]:
    """Figures of steps up to `last_step` that rank 0's predecessors or a survivor have kept, and
    that lie on none of the predecessors' spools, in order.

    Where the spools are gone with their node, all of them: told twice, they are stored once.
    """
    told = max((_last_told(Path(one.spool_dir)) for one in predecessors), default=0)
    found = {figures.step: figures for figures in survivors}
    for one in predecessors:
        with contextlib.suppress(FileNotFoundError):  # it died before its first line
            data = pages.page_path(one.page_prefix).read_bytes()
            found |= {figures.step: figures for figures in pages.untold(data)}
    return [found[step] for step in sorted(found) if told < step <= last_step]


def _last_told(directory: Path) -> int:
    """The last step whose figures are on a spool, delivered or not."""
    frames = spool.decode(directory.name, spool.tail(directory))
    steps = [
        int(frame.body["step"])
        for frame in frames
        if frame.kind is FrameKind.METRICS and "train/loss" in frame.body["values"]
    ]
    return max(steps, default=0)
