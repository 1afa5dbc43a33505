"""Formatting of output: text for people, JSON for programs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from dray.cli.display import terminal
from dray.csv_rows import csv_row
from dray.input.names import DIRECTION
from dray.input.units import money
from dray.ranks import ranks_by_role, role_names

if TYPE_CHECKING:
    from pydantic import BaseModel

    from dray import views


_FRAME = re.compile(r'^\s*File "(.+?)", line (\d+) in (\S+)')
_RUNNER = re.compile(r"/ray_workers/training/[a-z]+/(script|fresh_main|rank_main)\.py$")
_RUNPY = re.compile(r"(^<frozen runpy>|/runpy\.py)$")
_NOT_THE_USERS = re.compile(
    r"^<|/(site|dist)-packages/|/lib(64)?/python3\.\d+/|/ray_workers/|/dray/train/"
)
_THREAD = re.compile(r"^(Current )?(Thread|thread|Stack) ?.*\(most recent call first\):$")


class ReaderGone(Exception):
    """The reader closed the pipe, as in `dray logs JOB | head`."""


def write(line: str, *, colours: bool = False) -> None:
    """Write one line to standard output without control characters.

    With `colours`, colour sequences in the line are kept if the output is a terminal.
    """
    _emit(terminal.clean(line, colours=colours and terminal.has_colours()))


def write_text(text: str, *, indent: str = "") -> None:
    """Write a sentence; on a terminal, wrap it between words."""
    text = terminal.clean(text)
    lines = terminal.wrapped(text, terminal.width(), indent) if sys.stdout.isatty() else [text]
    for line in lines:
        _emit(line)


def write_drawn(line: str) -> None:
    """Write a line unchanged. The caller must first remove control characters from text that dray
    did not create."""
    _emit(line)


def _emit(line: str) -> None:
    try:
        sys.stdout.write(line + "\n")
    except BrokenPipeError:
        raise ReaderGone from None


def flush() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise ReaderGone from None


def warn(text: str) -> None:
    """Write lines to standard error."""
    columns = terminal.width() if sys.stderr.isatty() else None
    for line in map(terminal.clean, text.split("\n")):
        for part in terminal.wrapped(line, columns) if columns else [line]:
            sys.stderr.write(part + "\n")


def _inert(document: str) -> str:
    """Replace control characters in JSON with escapes. The meaning of the JSON does not change."""
    return re.sub(
        f"[\x7f-\x9f\u2028\u2029{DIRECTION}]",
        lambda match: f"\\u{ord(match[0]):04x}",
        document,
    )


def write_data(data: Any) -> None:
    """Write one indented JSON document."""
    _emit(_inert(json.dumps(data, indent=2, ensure_ascii=False)))


def write_json(value: BaseModel | Sequence[BaseModel]) -> None:
    """Write one or several responses as one indented JSON document."""
    if isinstance(value, Sequence):
        write_data([item.model_dump(mode="json") for item in value])
    else:
        write_data(value.model_dump(mode="json"))


def write_json_line(value: BaseModel | Mapping[str, Any]) -> None:
    """Write one JSON document on one line, for streams."""
    if isinstance(value, Mapping):
        _emit(_inert(json.dumps(value, ensure_ascii=False)))
    else:
        _emit(_inert(value.model_dump_json()))
    flush()


def write_csv_row(cells: Sequence[object]) -> None:
    """Write one line of CSV. Text that a spreadsheet would read as a formula gets a leading `'`."""
    write(csv_row(cells))


def number(value: float | str | None) -> str:
    """Format a metric with four significant digits. NaN and infinities are already strings."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{float(f'{value:.4g}'):,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def size(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def duration(seconds: float) -> str:
    """Format a duration: `4.2 s`, `3m05s`, `2h04m`, `3d07h`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours_left = divmod(hours, 24)
    if days:
        return f"{days}d{hours_left:02d}h"
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"


def age(moment: datetime) -> str:
    """Format a time as its age on a terminal, and as a timestamp in a pipe."""
    if not sys.stdout.isatty():
        return cell(moment)
    return duration(max(0.0, (datetime.now(UTC) - moment).total_seconds()))


def time_left(moment: datetime) -> str:
    """Format the time until a deadline: `42.0 s left`."""
    left_s = (moment - datetime.now(UTC)).total_seconds()
    return f"{duration(left_s)} left until the deadline" if left_s > 0 else "after the deadline"


def cell(value: object) -> str:
    """Format a value for people."""
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    return number(value) if isinstance(value, float) else str(value)


def steps(job: views.Job) -> str:
    if job.progress is None:
        return "-"
    return f"{job.progress.step}/{job.progress.total_steps or '?'}"


def show_job(job: views.Job) -> None:
    """Write one job, with a line for each field."""
    ranks = ranks_by_role(role_names(job.spec))
    lines: list[tuple[str, object]] = [
        ("id", job.id),
        *([("array", f"{job.array_id}, index {job.array_index}")] if job.array_id else []),
        *([("schedule", _run(job))] if job.schedule_id else []),
        ("name", job.title),
        ("owner", f"{job.owner}, project {job.project}"),
        ("state", job.state),
        ("reason", f"{job.reason.message} ({job.reason.code})"),
        *(("warning", warning.message) for warning in job.warnings),
        ("queue", _queue_position(job)),
        *([] if job.begin_at is None else [("begins", job.begin_at)]),
        *([] if job.reservation is None else [("reservation", job.reservation)]),
        *([] if job.max_runtime_s is None else [("run time", _limit(job, job.max_runtime_s))]),
        *([] if job.deadline is None else [("deadline", job.deadline)]),
        ("attempt", job.attempt),
        ("workers", job.world_size),
        *([("spares", f"{job.spares_ready} of {job.spares} ready")] if job.spares else []),
        *([("in memory", _memory_copies(job.memory_copies))] if job.memory_copies else []),
        *([("ranks", ranks)] if ranks else []),
        ("step", _how_far(job)),
        ("goodput", goodput(job)),
        *([] if job.cost is None else [("cost", cost(job.cost))]),
        ("created", job.created_at),
        ("started", job.started_at),
        ("finished", job.finished_at),
        ("labels", ", ".join(f"{key}={value}" for key, value in job.labels.items()) or None),
        *([("tags", ", ".join(job.tags))] if job.tags else []),
        ("metrics", summary(job) or None),
        ("dashboard", job.links.ray_dashboard),
    ]
    for name, value in lines:
        write_text(f"{name:<10} {cell(value)}", indent=" " * 11)


def _memory_copies(copies: views.MemoryCopies) -> str:
    return f"step {copies.step}, {size(copies.state_bytes)}"


def _run(job: views.Job) -> str:
    at = "" if job.scheduled_at is None else f" for {job.scheduled_at.isoformat()}"
    return f"submitted by {job.schedule_id}{at}"


def show_array(array: views.JobArray) -> None:
    """Write one array, with a line for each field."""
    lines: list[tuple[str, object]] = [
        ("id", array.id),
        ("name", array.name),
        ("owner", f"{array.owner}, project {array.project}"),
        ("jobs", array.size),
        ("at a time", array.max_running or "no limit"),
        ("states", array.state),
        ("queue", array.queue),
        ("created", array.created_at),
    ]
    for name, value in lines:
        write_text(f"{name:<10} {cell(value)}", indent=" " * 11)


def _limit(job: views.Job, limit_s: int) -> str:
    of_queue = ", the default of its queue" if job.max_runtime_from == "queue" else ""
    return f"at most {duration(limit_s)}{of_queue}"


def _queue_position(job: views.Job) -> str:
    position = "" if job.position is None else f", position {job.position}"
    return f"{job.queue}, priority {job.priority}{position}"


def _how_far(job: views.Job) -> str:
    parts = [steps(job)]
    progress = job.progress
    if progress is not None and not job.state.is_terminal:
        if progress.samples_per_s is not None:
            parts.append(f"{progress.samples_per_s:,.0f} samples/s")
        parts += ends_in(progress)
    return ", ".join(parts)


def ends_in(progress: views.Progress) -> list[str]:
    """Return `ETA 1h12m-1h30m`, or nothing if there is no forecast of the end or the forecast time
    has passed."""
    earliest, latest = progress.earliest_end_at, progress.latest_end_at
    now = datetime.now(UTC)
    if earliest is None or latest is None or latest <= now:
        return []
    least, most = (duration(max(0.0, (at - now).total_seconds())) for at in (earliest, latest))
    return [f"ETA {least}" if least == most else f"ETA {least}-{most}"]


def local(moment: datetime) -> str:
    """Format a time in the reader's time zone: `14:20 CET`, with the date unless it is today."""
    there, today = moment.astimezone(), datetime.now().astimezone()
    day = "" if there.date() == today.date() else f"{there:%Y-%m-%d} "
    return f"{day}{there:%H:%M} {there:%Z}"


def goodput(job: views.Job) -> str | None:
    """Return a string such as `93.6% of 44.0 slot-seconds useful: starting 1.1; recovered once`."""
    parts = []
    if job.goodput is not None:
        used = job.goodput
        share = "unknown share (no steps were reported)"
        if used.useful_share is not None:
            share = f"{used.useful_share:.1%}"
        others = ", ".join(
            f"{name.replace('_', ' ')} {seconds:.1f}"
            for name, seconds in used.slot_seconds
            if name != "useful" and seconds >= 0.05
        )
        whole = f"{share} of {used.total:.1f} slot-seconds useful"
        parts.append(f"{whole}: {others}" if others else whole)
    if job.recoveries:
        parts.append(
            "recovered once" if job.recoveries == 1 else f"recovered {job.recoveries} times"
        )
    return "; ".join(parts) or None


def cost(spent: views.Cost) -> str:
    """Return a string such as `12.50 EUR: useful 11.20, wasted 1.30`."""
    parts = [("useful", spent.useful), ("wasted", spent.wasted), ("unreported", spent.unreported)]
    divided = ", ".join(f"{name} {amount:,.2f}" for name, amount in parts if amount >= 0.005)
    whole = money(spent.total, spent.currency)
    return f"{whole}: {divided}" if divided else whole


def summary(job: views.Job) -> str:
    return ", ".join(f"{key} {number(value)}" for key, value in sorted(job.summary.items()))


def of_the_program(stack: str) -> str:
    """Return the stack without the main thread's frames that belong to dray and called the user's
    program."""
    lines = stack.splitlines()
    end = next((at for at, line in enumerate(lines) if at and _THREAD.match(line)), len(lines))
    cut = next((at for at in range(end) if _RUNNER.search(_path(lines[at]))), end)
    while cut and _RUNPY.search(_path(lines[cut - 1])):
        cut -= 1
    if not any(_path(line) for line in lines[:cut]):
        return stack  # the program is not running user code
    remarks = [line for line in lines[cut:end] if not _path(line)]
    return "\n".join([*lines[:cut], *remarks, *lines[end:]])


def innermost_of_user(stack: str) -> str | None:
    """Return the innermost frame of the main thread in the user's code: `train.py, line 7 in
    step`."""
    for number, line in enumerate(stack.splitlines()):
        if number and _THREAD.match(line):
            return None
        frame = _FRAME.match(line)
        if frame is not None and not _NOT_THE_USERS.search(frame[1]):
            return f"{frame[1]}, line {frame[2]} in {frame[3]}"
    return None


def _path(line: str) -> str:
    frame = _FRAME.match(line)
    return "" if frame is None else frame[1]
