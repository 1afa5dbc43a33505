"""Progress bars for downloads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column

from dray._http.downloads import OnProgress
from dray.cli.display.terminal import clean


@contextmanager
def download_bars(console: Console | None = None) -> Iterator[OnProgress]:
    """Provide a callback that reports the progress of each file. A file's bar appears at the first
    call for this file."""
    name = Column(max_width=30, no_wrap=True, overflow="ellipsis")
    bars = Progress(
        TextColumn("{task.description}", markup=False, table_column=name),
        BarColumn(bar_width=None),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console or Console(stderr=True),
    )
    tasks: dict[str, TaskID] = {}

    def report(path: str, here: int, whole: int) -> None:
        if path not in tasks:
            tasks[path] = bars.add_task(clean(path), total=whole)
        bars.update(tasks[path], completed=here)

    with bars:
        yield report
