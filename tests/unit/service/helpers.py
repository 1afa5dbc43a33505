"""Helpers for tests of the service: a clock set by the test, jobs, frames, and supervisor
replies."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session

from dray import views
from dray.queue_requests import QueueRequest
from dray.requests import JobChangeRequest
from dray.spec import JobSpec
from ray_workers.shared.contracts import (
    SUPERVISOR_RANK,
    AttemptSpec,
    Cause,
    Frame,
    FrameKind,
    Outcome,
    Phase,
    PollReply,
)
from ray_workers.shared.names import attempt_prefix
from ray_workers.shared.slices import Slice
from service.config.settings import Settings
from service.costs.prices_file import PricesFile
from service.costs.reports import Costs
from service.db.repositories import attempts, jobs
from service.db.session import Database
from service.domain.costs.prices import Prices
from service.ingest import attempt_results
from service.ingest.attempt_results import Received, Recorded
from service.jobs.changes import JobChanges
from service.jobs.faults import FaultService
from service.jobs.queries import Queries
from service.jobs.service import Jobs
from service.lifecycle import claims
from service.loops.shared import queue_view
from service.loops.shared.queue_view import FollowedAttempt
from service.queues.service import Queues
from service.storage.storage import Storage
from service.telemetry.known_attempts import KnownAttempts

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


def told(kind: FrameKind, body: Mapping[str, Any], *, at: datetime = START) -> Frame:
    """Return a frame from the supervisor itself."""
    return frame(kind, body, rank=SUPERVISOR_RANK, at=at)


def regrouping(*ranks: int, generation: int = 1, message: str = "rank 1 was killed") -> Frame:
    body = {"generation": generation, "ranks": list(ranks), "code": "killed", "message": message}
    return told(FrameKind.REGROUPING, body)


def regrouped(
    *ranks: int, generation: int = 1, step: int = 50, world_size: int = 2, steps_lost: int = 0
) -> Frame:
    body = {
        "generation": generation,
        "ranks": list(ranks),
        "step": step,
        "steps_lost": steps_lost,
        "recovery_s": 0.414,
        "world_size": world_size,
    }
    return told(FrameKind.REGROUPED, body)


def hang(*culprits: int, num_ranks: int = 2, stack: str = "File x, line 1", **more: Any) -> Frame:
    ranks = [
        {"rank": n, "step": 50, "phase": "forward", "collective": 7, "since_s": 9.5, "stack": stack}
        for n in range(num_ranks)
    ]
    body = {"culprits": list(culprits), "step": 50, "phase": "data_wait", "waited_s": 12.34}
    return told(FrameKind.HANG, {**body, "limit_s": 4.0, "ranks": ranks, **more})


def drilled(drill_id: str, state: str, *, at: datetime = START, **more: Any) -> Frame:
    return told(FrameKind.DRILL, {"id": drill_id, "state": state, **more}, at=at)


def spent(*, at: datetime = START, **seconds: float) -> Frame:
    return told(FrameKind.LEDGER, {"slot_seconds": seconds}, at=at)


def used(
    at: datetime, values: Mapping[str, float], *, ranks: Sequence[int] = (0,), clock_s: float = 0.0
) -> Frame:
    """Return system metrics that are the same for each rank. clock_s: seconds by which the node's
    clock is ahead."""
    columns = [{"ranks": list(ranks), "values": {k: [v] * len(ranks) for k, v in values.items()}}]
    body = {"time": int(at.timestamp() + clock_s), "columns": columns}
    return told(FrameKind.SYSTEM_METRICS, body, at=at)


class Service:
    """The use cases, with the work of the loops done manually, on a clock controlled by the
    test."""

    def __init__(self, database: Database, storage: Storage, home: Path, **settings: Any) -> None:
        self.database = database
        self.storage = storage
        self.settings = Settings(home=home, **settings)
        self.deployment = claims.Deployment("d", "session-1", self.settings)
        self.now = START
        self.jobs = Jobs(database, storage, database.signals, self.settings, clock=lambda: self.now)
        self.queries = Queries(database, storage, database.signals, self.settings)
        self.changes = JobChanges(database, self.settings, clock=lambda: self.now)
        self.prices = PricesFile(self.settings.prices_file)
        self.queues = Queues(database, self.prices, clock=lambda: self.now)
        self.costs = Costs(database, self.prices, clock=lambda: self.now)
        self.faults = FaultService(database, self.settings, clock=lambda: self.now)
        self.known = KnownAttempts()
        self._cursors: dict[tuple[str, int], int] = {}

    def advance(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    async def submit(self, **fields: Any) -> str:
        job, created = await self.jobs.submit(spec(**fields), owner="ann", project="vision")
        assert created
        return job.id

    async def queue(self, name: str, **rules: Any) -> views.Queue:
        """Create a queue, or replace its rules."""
        return await self.queues.put(name, QueueRequest.model_validate(rules))

    async def change(self, job_id: str, *, is_admin: bool = False, **changes: Any) -> views.Job:
        wanted = JobChangeRequest.model_validate(changes)
        return await self.changes.change(job_id, wanted, actor="ann", is_admin=is_admin)

    def claim(
        self, job_id: str, attempt_seen: int = 0, *, workers: int = 1, queue: str | None = None
    ) -> AttemptSpec | None:
        def work(session: Session) -> list[AttemptSpec | None]:
            row = jobs.get(session, job_id)
            seen = queue or (row.queue if row else "")
            slices = (Slice("node-a", workers),)
            wanted = claims.Wanted(job_id, attempt_seen, seen, slices, {"CPU": 1.0})
            return claims.claim(session, [wanted], self.deployment, self.now)

        (claimed,) = self.database.write_sync(work)
        return claimed

    async def running(self, **fields: Any) -> str:
        """Return a job whose first attempt is training."""
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
        """Return the supervisor's next reply; each one advances the cursor."""
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
        return PollReply(
            {"rank-0": cursor}, phase, times, tuple(frames), more=False, outcome=outcome, silent=()
        )

    def followed(self, job_id: str) -> FollowedAttempt:
        """Return the live attempt of a job, as the reconciler sees it."""
        attempts = self.database.read_sync(lambda s: queue_view.followed(s, self.now))
        (found,) = [attempt for attempt in attempts if attempt.job_id == job_id]
        return found

    def cursor(self, job_id: str, attempt: int) -> Mapping[str, int]:
        """Return the stored cursor."""
        return self.database.read_sync(
            lambda s: attempts.get(s, job_id, attempt).cursor  # type: ignore[union-attr]
        )

    def store(
        self,
        job_id: str,
        attempt: int,
        reply: PollReply,
        *,
        prices: Prices | None = None,
        **more: Any,
    ) -> Recorded:
        received = Received(job_id, attempt, reply, **more)
        (recorded,) = self.database.write_sync(
            lambda session: attempt_results.record(
                session,
                self.storage,
                [received],
                self.now,
                prices=prices or self.prices.current(),
                known=self.known,
            )
        )
        return recorded

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
        *,
        slowness: float = 1.0,
        ran_s: float | None = None,
        left_behind: str = "",
    ) -> Recorded:
        outcome = Outcome.of(cause, message)
        outcome = replace(outcome, slowness=slowness, ran_s=ran_s, left_behind=left_behind)
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


async def two_ranks(service: Service, **fields: Any) -> str:
    """Return a job at step 10 of 100, with two ranks by default."""
    fields = {"resources": {"num_workers": 2}, **fields}
    job_id = await service.submit(**fields)
    service.claim(job_id, workers=fields["resources"]["num_workers"])
    at_10 = metrics(10, {"x": 1.0}, total_steps=100)
    service.report(job_id, 1, [resumed(0), metrics(9, {"x": 1.0}), at_10])
    return job_id


async def events_of(service: Service, job_id: str, *types: str) -> list[views.Event]:
    """Return all events of a job, or only the given types."""
    items = (await service.queries.events(job_id)).items
    return [event for event in items if not types or event.type in types]
