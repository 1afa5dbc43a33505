"""Watch a job: a live progress bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

from dray import errors
from dray.cli.display import terminal
from dray.cli.display.output import duration, ends_in, flush, number, summary, write, write_text
from dray.cli.display.tables import shortened
from dray.views import Job, JobState

if TYPE_CHECKING:
    from rich.console import Console

    from dray.client import Client

REFRESH_S = 0.5
PLAIN_EVERY_S = 5.0
_BAR = 30
_BESIDES = 9
"""Width, in columns, of the spinner, the percentage, and the gaps between them."""


class Screen(Protocol):
    def show(self, job: Job) -> None: ...


def watch(client: Client, job_id: str, *, console: Console | None = None) -> Job:
    """Show the job's progress until it ends, then its outcome. Return the finished job.

    Waits up to a minute for an unreachable server. Raises the same errors as `Client.wait`.
    """
    from rich.console import Console

    console = console or Console()
    screen: AbstractContextManager[Screen]
    screen = _bar(console) if console.is_terminal else nullcontext(_Lines())
    job = client.get(job_id)
    if console.is_terminal:
        write_text(f"{job.id} {job.name}")
    with screen as shown:
        shown.show(job)
        while not job.state.is_terminal:
            job = _refreshed(client, job)
            shown.show(job)
    for line in ending(job):
        write_text(line, indent="  ")
    return job


def _refreshed(client: Client, job: Job) -> Job:
    try:
        return client.wait(job.id, REFRESH_S)
    except errors.WaitTimeout as timeout:
        return timeout.job


def is_training(job: Job) -> bool:
    """Whether the job has progress to show, rather than a reason for waiting."""
    return job.progress is not None and job.state in (JobState.RUNNING, JobState.SUCCEEDED)


def status(job: Job) -> str:
    """Return one line with the job's progress, or the reason why it is waiting."""
    progress = job.progress
    if progress is None or not is_training(job):
        return f"{job.state}: {job.reason.message}"
    parts = [f"step {progress.step}/{progress.total_steps or '?'}"]
    if "train/loss" in job.summary:
        parts.append(f"loss {number(job.summary['train/loss'])}")
    if progress.samples_per_s is not None:
        parts.append(f"{progress.samples_per_s:,.0f} samples/s")
    if not job.state.is_terminal:
        parts += ends_in(progress)
    return ", ".join(parts)


def ending(job: Job) -> list[str]:
    """Return lines that describe the job's outcome: state, duration, metrics, and the command to
    run next."""
    took = ""
    if job.finished_at is not None:
        seconds = (job.finished_at - (job.started_at or job.created_at)).total_seconds()
        took = f" after {duration(seconds)}"
    lines = [f"{job.id} {job.state}{took}: {job.reason.message}"]
    lines += [f"  warning: {warning.message}" for warning in job.warnings]
    if job.progress is not None:
        lines.append(f"  step {job.progress.step}/{job.progress.total_steps or '?'}")
    if job.summary:
        lines.append(f"  {summary(job)}")
    if job.state is JobState.SUCCEEDED:
        lines.append(f"  get the results with: dray download {job.id} DEST")
    elif job.state is JobState.FAILED and job.attempt:
        lines.append(f"  see why with: dray logs {job.id}")
    return lines


class _Lines:
    """Output without a terminal: a line for each change of state, and a line every few seconds
    during training."""

    def __init__(self) -> None:
        self._state: JobState | None = None
        self._last = ""
        self._due = 0.0

    def show(self, job: Job) -> None:
        now = time.monotonic()
        line = f"{job.id} {status(job)} ({job.name})"
        if line == self._last or (job.state is self._state and now < self._due):
            return
        self._state, self._last, self._due = job.state, line, now + PLAIN_EVERY_S
        write(line)
        flush()


def _bar(console: Console) -> AbstractContextManager[Screen]:
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn

    bar = BarColumn(bar_width=_BAR)

    class Bar(Progress):
        def show(self, job: Job) -> None:
            progress = job.progress if is_training(job) else None
            if not self.task_ids:
                self.add_task("", total=None, state="", status="")
            text = terminal.clean(status(job) if progress else job.reason.message)
            # The bar shrinks to make space for the text, and the text is truncated at the
            # terminal's edge.
            width = console.width - len(job.state) - _BESIDES
            bar.bar_width = max(1, min(_BAR, width - terminal.display_width(text)))
            self.update(
                self.task_ids[0],
                state=str(job.state),
                completed=progress.step if progress else 0,
                total=(progress.total_steps if progress else None),
                status=shortened(text, max(1, width - bar.bar_width)),
            )

    return Bar(
        SpinnerColumn(),
        TextColumn("{task.fields[state]}", style="bold", markup=False),
        bar,
        TaskProgressColumn(),
        TextColumn("{task.fields[status]}", markup=False),
        console=console,
    )
