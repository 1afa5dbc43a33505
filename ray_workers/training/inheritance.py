"""What a process that died in this rank had still to tell."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from ray_workers import pages, spool
from ray_workers.contracts import FrameKind, Predecessor
from ray_workers.pages import Untold


def untold(predecessors: Sequence[Predecessor], last_step: int) -> list[Untold]:
    """Figures of steps up to `last_step` that lie on the pages of rank 0's predecessors and on
    none of their spools, in order."""
    told = max((_last_told(Path(one.spool_dir)) for one in predecessors), default=0)
    found: dict[int, Untold] = {}
    for one in predecessors:
        with contextlib.suppress(FileNotFoundError):  # it died before its first line
            data = pages.page_path(one.page_prefix).read_bytes()
            found |= {f.step: f for f in pages.untold(data, told) if f.step <= last_step}
    return [found[step] for step in sorted(found)]


def _last_told(directory: Path) -> int:
    """The last step whose figures are on a spool, delivered or not."""
    frames = spool.decode(directory.name, spool.tail(directory))
    steps = [
        int(frame.body["step"])
        for frame in frames
        if frame.kind is FrameKind.METRICS and "train/loss" in frame.body["values"]
    ]
    return max(steps, default=0)
