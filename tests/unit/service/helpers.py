"""What the service's tests share: a clock they set, jobs, frames, and replies of a supervisor."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from dray.spec import JobSpec
from ray_workers.contracts import (
    Cause,
    Frame,
    FrameKind,
    Outcome,
    Phase,
    PollReply,
    attempt_prefix,
)
from service import recording, transitions
from service.db.session import Database
from service.domain import policy
from service.jobs import Jobs
from service.reading import Reading
from service.recording import Recorded
from service.settings import Settings
from service.storage import Storage

START = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
SHA = hashlib.sha256(b"").hexdigest()


def spec(**fields: Any) -> JobSpec:
    return JobSpec.model_validate({"recipe": "image_classification", **fields})


def frame(
    kind: FrameKind,
    body: Mapping[str, Any],
    *,
    rank: int = 0,
    incarnation: int = 0,
    at: datetime = START,
) -> Frame:
    return Frame(rank, incarnation, kind, at.timestamp(), body)


def metrics(
    step: int,
    values: Mapping[str, Any],
    *,
    rank: int = 0,
    incarnation: int = 0,
    at: datetime = START,
    **more: Any,
) -> Frame:
    body = {"step": step, "values": values, **more}
    return frame(FrameKind.METRICS, body, rank=rank, incarnation=incarnation, at=at)


def log(
    line: int, text: str, *, rank: int = 0, incarnation: int = 0, at: datetime = START
) -> Frame:
    body = {"line": line, "text": text}
    return frame(FrameKind.LOG, body, rank=rank, incarnation=incarnation, at=at)


def resumed(step: int) -> Frame:
    return frame(FrameKind.RESUMED, {"step": step, "url": ""})


class Service:
    """The use cases, and the loops' part done by hand, on a clock that the test moves."""

    def __init__(self, database: Database, storage: Storage, home: Path, **settings: Any) -> None:
        self.database = database
        self.storage = storage
        self.settings = Settings(home=home, **settings)
        self.now = START
        self.jobs = Jobs(database, storage, database.signals, self.settings, clock=lambda: self.now)
        self.reading = Reading(database, storage, database.signals, self.settings)
        self._cursors: dict[tuple[str, int], int] = {}

    def advance(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    async def submit(self, **fields: Any) -> str:
        job, created = await self.jobs.submit(spec(**fields), owner="ann", project="vision")
        assert created
        return job.id

    def claim(
        self, job_id: str, attempt_seen: int = 0, *, workers: int = 1
    ) -> transitions.Claimed | None:
        return self.database.write_sync(
            lambda session: transitions.claim(
                session,
                job_id,
                attempt_seen,
                (policy.Slice("node-a", workers),),
                {"CPU": 1.0},
                "session-1",
                self.now,
            )
        )

    async def running(self, **fields: Any) -> str:
        """A job whose first attempt trains."""
        job_id = await self.submit(**fields)
        assert self.claim(job_id) is not None
        self.report(job_id, 1, phase=Phase.RUNNING)
        return job_id

    def reply(
        self,
        job_id: str,
        attempt: int,
        frames: Sequence[Frame] = (),
        *,
        phase: Phase = Phase.RUNNING,
        outcome: Outcome | None = None,
    ) -> PollReply:
        """The supervisor's next answer; each one moves the cursor on."""
        cursor = self._cursors.get((job_id, attempt), 0) + 100
        self._cursors[job_id, attempt] = cursor
        at = self.now.timestamp()
        times = {Phase.ACQUIRING: at}
        if phase is not Phase.ACQUIRING:
            times[Phase.STARTING] = at
        if phase is Phase.RUNNING:
            times[Phase.RUNNING] = at
        if phase is Phase.ENDED:
            times[Phase.ENDED] = at
        return PollReply({"rank-0": cursor}, phase, times, tuple(frames), outcome=outcome)

    def store(self, job_id: str, attempt: int, reply: PollReply, **more: Any) -> Recorded:
        return self.database.write_sync(
            lambda session: recording.record(
                session, self.storage, job_id, attempt, reply, self.now, **more
            )
        )

    def report(
        self,
        job_id: str,
        attempt: int,
        frames: Sequence[Frame] = (),
        *,
        phase: Phase = Phase.RUNNING,
    ) -> Recorded:
        return self.store(job_id, attempt, self.reply(job_id, attempt, frames, phase=phase))

    def end(
        self,
        job_id: str,
        attempt: int,
        cause: Cause = Cause.SUCCEEDED,
        message: str = "it ended",
        frames: Sequence[Frame] = (),
    ) -> Recorded:
        outcome = Outcome(cause, message)
        reply = self.reply(job_id, attempt, frames, phase=Phase.ENDED, outcome=outcome)
        return self.store(job_id, attempt, reply)

    def url(self, job_id: str, attempt: int, name: str) -> str:
        return f"{self.storage.url}/{attempt_prefix(job_id, attempt)}/{name}"

    def checkpoint(self, job_id: str, attempt: int, step: int, **values: float) -> Frame:
        body = {
            "step": step,
            "url": self.url(job_id, attempt, f"checkpoints/step-{step}"),
            "size_bytes": 10,
            "manifest_sha256": SHA,
            "metrics": {key.replace("_", "/", 1): value for key, value in values.items()},
        }
        return frame(FrameKind.CHECKPOINT, body)

    def artifact(self, job_id: str, attempt: int, path: str, url: str | None = None) -> Frame:
        body = {
            "path": path,
            "url": url or self.url(job_id, attempt, f"artifacts/{path}"),
            "size_bytes": 3,
            "sha256": SHA,
        }
        return frame(FrameKind.ARTIFACT, body)
