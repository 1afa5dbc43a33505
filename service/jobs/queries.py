"""Queries about jobs and the cluster, answered only from SQL and the storage."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from dray import views
from dray.filters import MAX_POINTS
from dray.views import JobState
from service.checkpoints import catalog
from service.config.settings import Settings
from service.db.models import AttemptRow, CheckpointRow
from service.db.notifications import Signals
from service.db.repositories import attempts as attempts_repository
from service.db.repositories import events as events_repository
from service.db.repositories import faults as faults_repository
from service.db.repositories import jobs as repository
from service.db.repositories.scheduling import cluster as cluster_repository
from service.db.repositories.scheduling import costs as costs_repository
from service.db.repositories.scheduling import planned_jobs
from service.db.session import Database
from service.db.types import storable
from service.domain.attempts.lineage import NO_END
from service.domain.errors import ArtifactNotFound, CodeNotFound
from service.domain.events import SYNC_PLAN
from service.ingest import hangs, open_rounds, silent_processes
from service.jobs import cluster_view, factors, serializers
from service.jobs.deletions import not_found
from service.jobs.service import found
from service.lifecycle import resizing
from service.outlook import answers, decisions, forecasts, shares
from service.storage.storage import Storage, in_storage_thread
from service.telemetry import log_reader, metric_reader, system_metrics
from service.telemetry.series_filters import MetricsFilter, SystemMetricsFilter

MAX_LINES = 10_000
MAX_EVENTS = 1000
MAX_NAMED = 20
"""Maximum number of other jobs that an explanation names."""


class Queries:
    """The queries. Each query raises NotFound if the job does not exist."""

    def __init__(
        self, database: Database, storage: Storage, signals: Signals, settings: Settings
    ) -> None:
        self._database = database
        self._storage = storage
        self._signals = signals
        self._settings = settings
        self._answers = answers.Answers()

    async def metrics(self, job_id: str, query: MetricsFilter | None = None) -> views.Metrics:
        """Return the series of a job. A step that several attempts reported is returned only
        once."""
        wanted = query or MetricsFilter()
        after = -1 if wanted.after_step is None else wanted.after_step

        def work(session: Session) -> views.Metrics:
            state = _must_exist(session, job_id)
            keys = metric_reader.asked_keys(session, job_id, wanted.keys)
            until = NO_END if wanted.until_step is None else wanted.until_step
            part: dict[str, Any] = {
                "keys": keys,
                "rank": wanted.rank,
                "max_points": wanted.max_points,
                "after_step": after,
                "until_step": until,
            }
            end: int | None = None
            if wanted.in_order:
                series, end = metric_reader.read_in_order(session, job_id, **part)
            else:
                series = metric_reader.read(session, job_id, **part)
            at = None
            if wanted.times:
                most = MAX_POINTS if wanted.in_order else wanted.max_points
                at = metric_reader.read_times(session, job_id, series, max_points=most)
            live = not state.is_terminal
            return metric_reader.as_view(series, at, after_step=max(after, 0), end=end, live=live)

        return await self._database.read(work)

    async def system_metrics(
        self, job_id: str, query: SystemMetricsFilter | None = None
    ) -> views.SystemMetrics:
        """Return a rank's usage of processors, memory and other resources."""
        wanted = query or SystemMetricsFilter()

        def work(session: Session) -> views.SystemMetrics:
            _must_exist(session, job_id)
            return system_metrics.read(
                session,
                job_id,
                keys=[key for text in wanted.keys for key in text.split(",") if key] or None,
                rank=wanted.rank,
                after_time=wanted.after_time,
                max_points=wanted.max_points,
            )

        return await self._database.read(work)

    async def newest_system_metrics(self, job_id: str) -> views.SystemSample:
        """Return the newest sample of every rank."""

        def work(session: Session) -> views.SystemSample:
            _must_exist(session, job_id)
            return system_metrics.newest(session, job_id)

        return await self._database.read(work)

    async def logs(
        self,
        job_id: str,
        *,
        rank: int | None = None,
        attempt: int | None = None,
        cursor: str | None = None,
        limit: int = 1000,
        contains: str | None = None,
    ) -> views.LogPage:
        """Return log lines, one attempt after another. The lines of each rank are in order, and the
        ranks are merged by time. With `contains`, search the next `MAX_SEARCHED` lines, and return
        only lines that contain this text, in upper or lower case.

        Raises BadCursor for a cursor of another job's logs.
        """
        begin = log_reader.decode_positions(job_id, cursor)
        limit = max(1, min(limit, MAX_LINES)) if contains is None else log_reader.MAX_SEARCHED

        def work(
            session: Session,
        ) -> tuple[bool, dict[log_reader.Stream, list[log_reader.Chunk]]]:
            over = found(session, job_id).state.is_terminal
            return over, log_reader.find(
                session, job_id, rank=rank, attempt=attempt, begin=begin, limit=limit
            )

        over, chunks = await self._database.read(work)
        lines, positions, more = await in_storage_thread(
            log_reader.page, self._storage, chunks, begin, limit, contains
        )
        return views.LogPage(
            items=lines,
            next_cursor=log_reader.encode_positions(job_id, positions),
            complete=over and not more,
        )

    async def events(
        self, job_id: str, *, after_seq: int = 0, limit: int = MAX_EVENTS
    ) -> views.EventPage:
        """Return the events after number `after_seq`; continue with `after_seq=next_seq`."""

        def work(session: Session) -> views.EventPage:
            found(session, job_id)
            count = max(1, min(limit, MAX_EVENTS))
            rows = events_repository.events_after(session, job_id, after_seq, count)
            return views.EventPage(
                items=[serializers.event(row) for row in rows],
                next_seq=rows[-1].seq if rows else after_seq,
            )

        return await self._database.read(work)

    async def newest_event(self, job_id: str) -> tuple[int, bool]:
        """Return the number of the newest event, and whether the job has ended."""

        def work(session: Session) -> tuple[int, bool]:
            row = found(session, job_id)
            return row.event_seq, row.state.is_terminal

        return await self._database.read(work)

    async def code_of(self, job_id: str) -> tuple[str, str]:
        """Return the owner and id of the job's code. Raises CodeNotFound if no code is stored."""

        def work(session: Session) -> tuple[str, str]:
            row = found(session, job_id)
            remote = ((row.spec.get("script") or {}).get("code")) if row.code is None else None
            if remote:
                url = f"{remote['git']} at {remote['commit']}" if remote["git"] else remote["url"]
                raise CodeNotFound(
                    f"the code of {job_id} is not stored on this server: the job's nodes download "
                    f"the code from {url}"
                )
            if row.code is None:
                raise CodeNotFound(f"the job {job_id} was submitted without code")
            return row.owner, row.code

        return await self._database.read(work)

    async def attempts(self, job_id: str) -> views.AttemptPage:
        def work(session: Session) -> views.AttemptPage:
            found(session, job_id)
            rows = attempts_repository.of_job(session, job_id)
            costs = costs_repository.of_attempts(session, job_id)
            items = [serializers.attempt(row, costs.get(row.attempt)) for row in rows]
            return views.AttemptPage(items=items)

        return await self._database.read(work)

    async def checkpoints(self, job_id: str) -> views.CheckpointPage:
        """Return the kept checkpoints that are still valid, newest first."""

        def work(session: Session) -> views.CheckpointPage:
            row = found(session, job_id)
            metric = catalog.best_metric(row)
            rows, best = catalog.of_job(session, row)
            return views.CheckpointPage(
                items=[
                    serializers.checkpoint(
                        c, is_latest=c is rows[0], is_best=c is best, metric=metric
                    )
                    for c in rows
                ]
            )

        return await self._database.read(work)

    async def checkpoint_files(self, job_id: str, step: int) -> views.CheckpointFilePage:
        """Return the files of the checkpoint of this step. Raises CheckpointNotFound."""
        row = await self._database.read(lambda s: _checkpoint(s, job_id, step))
        found = await in_storage_thread(catalog.files, self._storage, row)
        return views.CheckpointFilePage(items=found)

    async def checkpoint_file(
        self, job_id: str, step: int, path: str
    ) -> tuple[views.CheckpointFile, str]:
        """Return a file of the checkpoint, and its storage key. Raises CheckpointNotFound if the
        checkpoint or the file is missing."""
        row = await self._database.read(lambda s: _checkpoint(s, job_id, step))
        return await in_storage_thread(catalog.locate, self._storage, row, path)

    async def artifacts(self, job_id: str) -> views.ArtifactPage:
        def work(session: Session) -> views.ArtifactPage:
            found(session, job_id)
            rows = attempts_repository.artifacts(session, job_id)
            return views.ArtifactPage(items=[serializers.artifact(row) for row in rows])

        return await self._database.read(work)

    async def artifact(self, job_id: str, artifact_id: str) -> tuple[views.Artifact, str]:
        """Return the artifact and its storage URL. Raises ArtifactNotFound if the artifact does not
        exist."""

        def work(session: Session) -> tuple[views.Artifact, str]:
            found(session, job_id)
            known = storable(artifact_id)
            row = attempts_repository.artifact(session, job_id, artifact_id) if known else None
            if row is None:
                raise ArtifactNotFound(
                    f"the job {job_id} has no artifact {artifact_id}",
                    hint="list the job's artifacts to find their ids",
                )
            return serializers.artifact(row), row.url

        return await self._database.read(work)

    async def explain(self, job_id: str) -> views.Explanation:
        """Return why the job is in its state, and why its group is smaller than requested.

        While the job waits, the explanation includes its position, the jobs that block it, its
        expected start, and changes that would let it start. While the job holds slots, the
        explanation includes its expected end.
        """

        def work(session: Session) -> views.Explanation:
            row = found(session, job_id)
            is_queued = row.state == JobState.QUEUED
            blocked_by = list(row.blocked_by) if is_queued else []
            attempt = attempts_repository.get(session, job_id, row.attempt)
            now = self._database.time(session)
            size, blocking = resizing.why_this_size(row, attempt, now)
            silent = silent_processes.sentence(session, attempt)
            away = _cluster_silence(session, attempt)
            hung = faults_repository.has_hung(session, job_id, row.attempt)
            hang = hangs.how_to_see(job_id) if hung else None
            open_round = open_rounds.of_job(session, row, attempt)
            waits = open_rounds.sentence(row, open_round, now)
            spares = resizing.spares_sentence(row, attempt)
            copies = resizing.copies_sentence(row)
            reasons = row.reason_message, waits, size, spares, copies, silent, away, hang
            message = "; ".join(filter(None, reasons))
            start, end = forecasts.of_job(session, row, serializers.progress(session, row), now)
            position = row.position if is_queued else None
            ahead = [] if position is None else planned_jobs.first_in_queue(session, position)
            waits_for = blocked_by or blocking
            running = (
                planned_jobs.holding_slots(session, waits_for, MAX_NAMED)
                if is_queued or waits_for
                else []
            )
            return views.Explanation(
                state=row.state,
                reason=views.Reason(code=row.reason_code, message=message),
                position=position,
                queue_length=planned_jobs.count_queued(session) if is_queued else None,
                blocked_by=waits_for,
                ahead=[serializers.other_job(other) for other in ahead],
                running=[serializers.other_job(other) for other in running if other.id != job_id],
                favoured=self._answers.favoured(session, row, now) if is_queued else [],
                expected_start_at=start and start.at,
                start=start,
                end=end,
                counterfactuals=(
                    self._answers.counterfactuals(session, row, start, now) if is_queued else []
                ),
                forecast_error=answers.error_of(session, row.state),
                sync=_sync_plan(session, job_id),
                round=open_round,
            )

        return await self._database.read(work)

    async def factors(self, job_id: str) -> views.JobFactors:
        """Return the factors that decide a waiting job's position in the queue."""

        def work(session: Session) -> views.JobFactors:
            row = found(session, job_id)
            return factors.of_job(session, self._answers, row, self._database.time(session))

        return await self._database.read(work)

    async def shares(
        self, *, queue: str | None = None, owner: str | None = None
    ) -> views.ShareReport:
        """Return the usage of queues and users, compared to their shares. Raises QueueNotFound if
        the queue does not exist."""

        def work(session: Session) -> views.ShareReport:
            now = self._database.time(session)
            return shares.report(session, self._answers, now, queue=queue, owner=owner)

        return await self._database.read(work)

    async def decisions(self, *, before: int | None = None, limit: int = 100) -> views.DecisionPage:
        """Return the newest stored rounds of the scheduler, or the rounds with numbers below
        `before`."""
        return await self._database.read(lambda s: decisions.page(s, before, limit))

    async def decision(self, number: int) -> views.ReplayedDecision:
        """Return a round of the scheduler, and the decisions that the current policy would make in
        this round. Raises DecisionNotFound if the round is not stored."""
        return await self._database.read(lambda s: decisions.replay(s, number))

    async def forecast_errors(self) -> views.ForecastErrors:
        """Return the errors of recent forecasts of starts and ends."""
        return await self._database.read(answers.errors)

    async def cluster(self, *, user: str | None = None) -> views.Cluster:
        """Return the last snapshot of the cluster, the jobs on each node, and the reservations of
        each node that concern the user, or all of them if `user` is None."""
        return await self._database.read(
            lambda session: cluster_view.cluster(
                session, self._settings, user=user, now=self._database.time(session)
            )
        )

    async def count_jobs(self) -> dict[JobState, int]:
        """Return the number of jobs in each state, including states without jobs."""
        counts = await self._database.read(repository.count_by_state)
        return {state: counts.get(state, 0) for state in JobState}


def _checkpoint(session: Session, job_id: str, step: int) -> CheckpointRow:
    found(session, job_id)
    return catalog.at_step(session, job_id, step)


def _cluster_silence(session: Session, attempt: AttemptRow | None) -> str:
    """Return why the progress of a live attempt is unknown, or an empty string if the cluster
    responds."""
    cluster = cluster_repository.get(session)
    is_live = attempt is not None and attempt.finished_at is None
    if not is_live or cluster is None or cluster.connected:
        return ""
    return f"the cluster does not respond: {cluster.reason}"


def _sync_plan(session: Session, job_id: str) -> views.SyncPlan | None:
    """Return the plan by which `sync: auto` was resolved, as recorded in the job's first event."""
    first = events_repository.events_after(session, job_id, 0, 1)
    found = first[0].data.get(SYNC_PLAN) if first else None
    return None if found is None else views.SyncPlan.model_validate(found)


def _must_exist(session: Session, job_id: str) -> JobState:
    """Return the state of the job. Raises NotFound if the job does not exist."""
    state = repository.state_of(session, job_id) if storable(job_id) else None
    if state is None:
        raise not_found(job_id)
    return state
