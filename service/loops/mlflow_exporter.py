"""The exporter: a loop that writes each job to an MLflow run.

A separate process calls MLflow (`service.tracking.mlflow.client`). The progress is stored in the
database after each part of a job that MLflow has accepted, so after any failure the same part is
sent again. The loop only reads stored reports of attempts, so no job waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Protocol

from sqlalchemy.orm import Session

from service.db.repositories.catalog import mlflow_exports as repository
from service.db.repositories.catalog import tracking
from service.loops.shared.fencing import LoopDatabase
from service.loops.shared.timings import LoopTimings
from service.tracking.mlflow.parts import ArtifactFile, JobPart, next_part, versions_of
from service.tracking.mlflow.process import MLFLOW_CALLS, MlflowAway, MlflowRefused

logger = logging.getLogger(__name__)

CALL_LIMIT_S = 120.0
"""Time limit for a call to MLflow, in addition to the time for its points or its file."""
POINTS_PER_S = 30.0
"""Minimum rate at which MLflow must accept points. If MLflow is slower, the call is abandoned."""
UPLOAD_BYTES_PER_S = 1 << 20
"""Minimum rate at which artifacts must be uploaded. If the upload is slower, the call is
abandoned."""
NEW_JOBS = 500
"""Maximum number of new jobs that one round adds to the export."""
PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Pauses of the whole export, in seconds, while MLflow does not respond."""
AWAY_PAUSES_S: Sequence[float] = (1.0, 5.0, 30.0)
"""Pauses in seconds before a job is tried again after consecutive calls without a response. Calls
for other jobs might succeed."""
REFUSED_PAUSES_S: Sequence[float] = (5.0, 30.0, 120.0, 600.0, 3600.0)
"""Pauses in seconds before a job is tried again after consecutive refusals."""


class MlflowCalls(Protocol):
    """The interface of `service.tracking.mlflow.process.MlflowProcess`."""

    async def call(self, method: str, *arguments: Any, limit_s: float) -> Any: ...

    async def stop(self) -> None: ...


class MlflowExporter:
    """The loop that exports jobs to MLflow."""

    def __init__(self, database: LoopDatabase, mlflow: MlflowCalls, timings: LoopTimings) -> None:
        self._database = database
        self._mlflow = mlflow
        self._timings = timings
        self._seen: dict[str, Any] = {}
        """The row of each job as it was when the job was last completely exported."""
        self._num_failures = 0
        """Number of consecutive calls to which MLflow did not respond."""
        self.is_away = False
        """Whether MLflow did not respond to the last call."""

    async def run(self) -> None:
        """Run until cancelled."""
        try:
            while True:
                has_more = False
                try:
                    has_more = await self.run_once()
                except Exception:
                    logger.exception("a round of the export to MLflow failed; the loop continues")
                if not has_more:
                    await asyncio.sleep(self._pause_s())
        finally:
            await self._mlflow.stop()

    def _pause_s(self) -> float:
        if self._num_failures < MLFLOW_CALLS:
            return self._timings.export_period_s
        return PAUSES_S[min(self._num_failures // MLFLOW_CALLS, len(PAUSES_S)) - 1]

    async def run_once(self) -> bool:
        """Export one part of each job that might not be completely exported. Stops early if MLflow
        doesn't respond. Returns whether more parts can be exported without a pause."""
        new = await self._database.read(lambda s, _: repository.new_jobs(s, NEW_JOBS))
        if new:
            await self._database.write(lambda s, _: repository.add(s, new))
        found = await self._database.read(repository.incomplete)
        now = {row.id: tuple(row) for row in found}
        self._seen = {job_id: was for job_id, was in self._seen.items() if job_id in now}
        waiting = iter([job_id for job_id in now if self._seen.get(job_id) != now[job_id]])
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._export_from(waiting, now)) for _ in range(MLFLOW_CALLS)
            ]
        has_more = len(new) == NEW_JOBS or any(task.result() for task in tasks)
        return has_more and not self.is_away

    async def _export_from(self, waiting: Iterator[str], now: Mapping[str, Any]) -> bool:
        """Export one part of each job in `waiting`, which several tasks share. Returns whether any
        of the jobs has more parts to export."""
        has_more = False
        for job_id in waiting:
            try:
                part = await self._export(job_id)
                if part is not None and part.has_more:
                    has_more = True
                elif part is None or not part.is_over:
                    self._seen[job_id] = now[job_id]
                self.is_away, self._num_failures = False, 0
            except Exception as error:  # the cause can also be an error in this job's data
                await self._note_failure(job_id, error)
            if self._num_failures >= MLFLOW_CALLS:
                break
        return has_more

    async def _export(self, job_id: str) -> JobPart | None:
        """Export and return the next part of the job; None if the job no longer exists."""
        part = await self._database.read(lambda s, _: next_part(s, job_id))
        if part is None:
            return None
        run_id = part.run_id
        if run_id is None:
            run_id = await self._call("begin", *astuple(part.run))
            await self._database.write(lambda s, _: _note_run(s, job_id, run_id))
        shows = part.is_changed and not part.has_more
        tags = part.tags if shows else {}
        limit_s = CALL_LIMIT_S + len(part.metrics) / POINTS_PER_S
        await self._call("log", run_id, part.metrics, tags, limit_s=limit_s)
        refused = await self._add_files(job_id, run_id, part) if part.completes else None
        if shows:
            await self._call("set_status", run_id, part.status, part.end_time_ms)
        if refused is not None:
            raise refused
        await self._database.write(lambda s, _: _note_part(s, job_id, part))
        return part

    async def _add_files(self, job_id: str, run_id: str, part: JobPart) -> MlflowRefused | None:
        """Upload the artifacts, describe the model and register its versions. Returns the last
        refusal. A refusal delays neither the other files nor the job's status."""
        refused = None
        for file in part.artifacts:
            try:
                await self._upload(run_id, file)
            except MlflowRefused as error:
                refused = error
            else:
                await self._database.write(partial(_note_file, job_id, file))
        if part.model is not None:
            try:
                await self._call("describe_model", run_id, part.model.url)
            except MlflowRefused as error:
                refused = error
        for version in part.versions:
            try:
                await self._call("register", run_id, *astuple(version))
            except MlflowRefused as error:
                refused = error
        return refused

    async def _upload(self, run_id: str, file: ArtifactFile) -> None:
        limit_s = CALL_LIMIT_S + file.size_bytes / UPLOAD_BYTES_PER_S
        arguments = (run_id, file.path, file.url, file.size_bytes)
        await self._call("upload", *arguments, limit_s=limit_s)

    async def _call(self, method: str, *arguments: Any, limit_s: float = CALL_LIMIT_S) -> Any:
        return await self._mlflow.call(method, *arguments, limit_s=limit_s)

    async def _note_failure(self, job_id: str, error: Exception) -> None:
        """Log and store the failure. Raises an exception if the database doesn't respond."""
        why, pauses_s = _without_password(f"{error}"), REFUSED_PAUSES_S
        is_known = isinstance(error, MlflowAway | MlflowRefused)
        logger.warning(
            "the job %s can't be written to MLflow: %s",
            *(job_id, why),
            exc_info=None if is_known else error,
        )
        if isinstance(error, MlflowAway):
            self._num_failures += 1
            self.is_away, pauses_s = True, AWAY_PAUSES_S
        await self._database.write(lambda s, now: _note_problem(s, job_id, why, pauses_s, now))


def _without_password(text: str) -> str:
    return re.sub(r"//[^/\s]+@", "//", text)


def _note_run(session: Session, job_id: str, run_id: str) -> None:
    row = repository.get(session, job_id)
    if row is not None:  # otherwise, the job has been deleted in the meantime
        row.run_id = run_id


def _note_file(job_id: str, file: ArtifactFile, session: Session, _: datetime) -> None:
    row = repository.get(session, job_id)
    if row is not None:
        row.artifacts = {**row.artifacts, file.id: file.sha256}


def _note_part(session: Session, job_id: str, part: JobPart) -> None:
    row = repository.get(session, job_id, lock=True)
    if row is not None:
        row.after_step, row.last_steps = part.after_step, part.last_steps
        if not part.has_more:
            row.event_seq, row.revision = part.event_seq, part.revision
        row.failures, row.not_before, row.problem = 0, None, None
        annotation = tracking.annotation(session, job_id)
        is_current = part.revision == (0 if annotation is None else annotation.revision)
        is_current = is_current and part.versions == versions_of(session, job_id)
        row.is_complete = part.completes and is_current


def _note_problem(
    session: Session, job_id: str, problem: str, pauses_s: Sequence[float], now: datetime
) -> None:
    row = repository.get(session, job_id)
    if row is not None:
        pause_s = pauses_s[min(row.failures, len(pauses_s) - 1)]
        row.failures += 1
        row.not_before = now + timedelta(seconds=pause_s)
        row.problem = problem[:1000]
