"""How answers look: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import BaseModel

    from dray import views

Item = TypeVar("Item", bound="BaseModel")


class ReaderGone(Exception):
    """Whoever read the output has enough of it: `dray logs JOB | head`."""


def write(line: str) -> None:
    """One line to standard output, as it is: nothing in it is markup."""
    try:
        sys.stdout.write(line + "\n")
    except BrokenPipeError:
        raise ReaderGone from None


def flush() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise ReaderGone from None


def warn(line: str) -> None:
    sys.stderr.write(line + "\n")


def write_json(value: BaseModel | Sequence[BaseModel]) -> None:
    """One indented document."""
    if isinstance(value, Sequence):
        data: Any = [item.model_dump(mode="json") for item in value]
    else:
        data = value.model_dump(mode="json")
    write(json.dumps(data, indent=2, ensure_ascii=False))


def write_json_line(value: BaseModel) -> None:
    """One document on one line, for what comes as a stream."""
    write(value.model_dump_json())
    flush()


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Columns as wide as their content; on a terminal no wider than it."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        texts = [[_cell(value) for value in row] for row in (headings, *rows)]
        widths = [max(len(row[i]) for row in texts) for i in range(len(headings))]
        for line in texts:
            cells = (text.ljust(width) for text, width in zip(line, widths, strict=True))
            write("  ".join(cells).rstrip())
        return
    drawn = Table(*headings, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        drawn.add_row(*(Text(_cell(value)) for value in row))
    console.print(drawn)


def listing(
    found: Sequence[Item],
    as_json: bool,
    headings: Sequence[str],
    row: Callable[[Item], Sequence[object]],
) -> None:
    """A list of answers: a table with a row for each, or one JSON document."""
    if as_json:
        write_json(found)
    else:
        table(headings, map(row, found))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    return number(value) if isinstance(value, float) else str(value)


def number(value: float | str | None) -> str:
    """A metric to four figures; NaN and infinities come as words already."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.4g}"


def size(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def duration(seconds: float) -> str:
    """`4.2 s`, `3m05s`, `2h04m`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"


def steps(job: views.Job) -> str:
    if job.progress is None:
        return "-"
    return f"{job.progress.step}/{job.progress.total_steps or '?'}"


def show_job(job: views.Job) -> None:
    """All that matters of one job, a line each."""
    lines: list[tuple[str, object]] = [
        ("id", job.id),
        ("name", job.name),
        ("state", job.state),
        ("reason", f"{job.reason.message} ({job.reason.code})"),
        ("queue", f"{job.queue}, priority {job.priority}"),
        ("attempt", job.attempt),
        ("workers", job.world_size),
        ("step", steps(job)),
        ("created", job.created_at),
        ("started", job.started_at),
        ("finished", job.finished_at),
        ("labels", ", ".join(f"{key}={value}" for key, value in job.labels.items()) or None),
        ("metrics", summary(job) or None),
        ("dashboard", job.links.ray_dashboard),
    ]
    for name, value in lines:
        write(f"{name:<10} {_cell(value)}")


def summary(job: views.Job) -> str:
    return ", ".join(f"{key} {number(value)}" for key, value in sorted(job.summary.items()))
