"""Write the metrics of jobs to TensorBoard event files while the jobs are running.

Each job has one file, in a separate folder. The file itself shows which metrics have been written:
a later call reads the scalars in the file and continues after them, even if the previous call was
killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import re
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Self

from dray.tensorboard import event_files

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dray.aio import AsyncClient
    from dray.views import Job, Point

FILE = "events.out.tfevents.0.dray"
DOCUMENT = "job\N{NO-BREAK SPACE}document"
"""The tag of the job's document. No metric can have this tag, because metric names can't contain
this kind of space. If texts and scalars had the same tag, TensorBoard would show only one of the
two kinds."""
FLUSH_S = 1.0
_PIECE_BYTES = 4 << 20


class LogdirInUse(OSError):
    """Another process is writing the event file of the same job."""


async def write_jobs(client: AsyncClient, job_ids: Sequence[str], logdir: Path) -> None:
    """Write the metrics of rank 0 until all jobs have ended. Raises LogdirInUse, and the errors of
    `follow_metrics`."""
    tasks = [asyncio.create_task(_write_job(client, job_id, logdir)) for job_id in job_ids]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _write_job(client: AsyncClient, job_id: str, logdir: Path) -> None:
    job = await client.get(job_id)
    with EventFile(logdir / folder_of(job)) as file:
        if file.is_new:
            file.write_document(job)
        tasks = {
            asyncio.create_task(_write_points(client, job_id, file)),
            asyncio.create_task(
                _flush(file)
            ),  # ends only with an error, for example because the disk is full
        }
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()


async def _write_points(client: AsyncClient, job_id: str, file: EventFile) -> None:
    async for point in client.follow_metrics(job_id, after=file.last_steps):
        file.write(point)


async def _flush(file: EventFile) -> None:
    while True:
        await asyncio.sleep(FLUSH_S)
        file.flush()


def folder_of(job: Job) -> str:
    """Return the name of a job's folder in the logdir, which TensorBoard shows as the name of the
    run."""
    return f"{re.sub('[^A-Za-z0-9._-]+', '_', job.name).lstrip('.')}-{job.id[-8:]}"


class EventFile:
    """The event file of one job, which only one process can write at a time."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # Don't follow links, because the code below would truncate a target that is not an event
        # file.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        self._file: BinaryIO = os.fdopen(os.open(folder / FILE, flags, 0o666), "a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise LogdirInUse(
                f"another `dray tensorboard` is writing {folder / FILE}: use that process, or a "
                "different --logdir"
            ) from None
        self.last_steps: dict[str, int] = {}
        """The last step of each series in the file, keyed by the name of the series."""
        self._waiting: tuple[int, float, dict[str, float]] | None = None
        """Values with the same step and time that have not been written yet, and will be written as
        one event."""
        end = self._read()
        self._file.truncate(end)  # remove a partial record written by a process that was killed
        self.is_new = end == 0
        if self.is_new:
            self._append(event_files.version(time.time()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with contextlib.closing(self._file):
            self.flush()

    def _read(self) -> int:
        """Read the last steps, and return the end of the last complete record."""
        self._file.seek(0)
        start, data, end = 0, b"", 0
        with contextlib.suppress(event_files.Damaged):
            while piece := self._file.read(_PIECE_BYTES):
                start, data, end = start + end, data[end:] + piece, 0
                for after, event in event_files.records(data):
                    if after > len(data):
                        break
                    event_files.check(event, data[end:after])
                    self.last_steps.update(event_files.last_steps(event))
                    end = after
        return start + end

    def write_document(self, job: Job) -> None:
        text = json.dumps({"job": job.id, **job.spec}, indent=2)
        at = job.created_at.timestamp()
        self._append(event_files.text_event(at, DOCUMENT, f"```json\n{text}\n```"))

    def write(self, point: Point) -> None:
        at = time.time() if point.time is None else point.time
        if self._waiting is None or self._waiting[:2] != (point.step, at):
            self._write_waiting()
            self._waiting = point.step, at, {}
        self._waiting[2][point.key] = float(point.value)

    def flush(self) -> None:
        self._write_waiting()
        self._file.flush()

    def _write_waiting(self) -> None:
        if self._waiting is not None:
            step, at, values = self._waiting
            self._waiting = None
            self._append(event_files.scalars_event(at, step, values))

    def _append(self, event: bytes) -> None:
        self._file.write(event_files.record(event))
