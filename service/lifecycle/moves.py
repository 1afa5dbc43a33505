"""Handles the consequences of every change of a job's state: counts ended jobs, and writes messages
for webhooks.

The messages are written in the transaction of the change, so that no message is lost. The loop
`webhook_sender` sends the messages. Without webhooks, the only cost is one query at the end of the
transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import chain
from typing import Any

from sqlalchemy import Row
from sqlalchemy.orm import Session

from dray.views import DeliveryStatus, JobState
from service.db.notifications import WEBHOOKS
from service.db.repositories import jobs as jobs_repository
from service.db.repositories import surroundings
from service.db.repositories import webhooks as repository
from service.db.repositories.bulk import CHUNK, in_chunks
from service.db.repositories.scheduling import queues as queues_repository
from service.db.session import at_end, measure, notify
from service.domain import meter
from service.domain.scheduling.rules.tree import QueueTree
from service.domain.webhooks import MAX_REASON, final_metrics, is_notified, type_of
from service.lifecycle import usage

Move = Mapping[str, Any]
"""The columns of an event that records a change of state."""

_NOTED = "moves"


def note(session: Session, moves: Iterable[Move]) -> None:
    """Keep the moves until the end of the transaction; then write messages if webhooks exist."""
    session.info.setdefault(_NOTED, []).append(moves)
    at_end(session, _write_messages)


def ended(session: Session, rows: Sequence[Any], state: JobState, now: datetime) -> None:
    """Count jobs that have ended in this state. Each row has an `owner` and a `queue`."""
    measure(session, meter.JOB_ENDS, len(rows), state.value)
    usage.jobs_ended(session, rows, state, now)


def _write_messages(session: Session) -> None:
    """Write a message for each move and each webhook that is notified about it."""
    noted = session.info.pop(_NOTED)
    if surroundings.seen(session).webhook is None:
        return
    session.flush()
    for some in in_chunks(list(chain.from_iterable(noted)), CHUNK):
        rows = _messages(session, some)
        if rows:
            repository.add_deliveries(session, rows)
            notify(session, WEBHOOKS)


def _messages(session: Session, moves: Iterable[Move]) -> list[dict[str, Any]]:
    job_ids = {move["job_id"] for move in moves}
    rows = repository.owners_of_jobs(session, job_ids)
    hooks = repository.enabled_for(session, {row.owner for row in rows.values()})
    states = {state for hook in hooks for state in hook.states}
    wanted = [move for move in moves if move["to_state"] in states]
    if not wanted:
        return []
    labels = jobs_repository.labels(session, sorted(job_ids))
    by_queue = any(hook.queue is not None for hook in hooks)
    tree = QueueTree(queues_repository.every(session) if by_queue else ())
    pairs = [
        (hook, move)
        for move in wanted
        for hook in hooks
        if hook.all_users or hook.owner == rows[move["job_id"]].owner
        if is_notified(
            hook.states,
            hook.queue,
            hook.labels,
            of=move["to_state"],
            in_queues=tree.path(rows[move["job_id"]].queue),
            with_labels=labels[move["job_id"]],
        )
    ]
    jobs = repository.columns_of_jobs(session, {move["job_id"] for _, move in pairs})
    return [
        {
            "webhook_id": hook.id,
            "job_id": move["job_id"],
            "type": type_of(move["to_state"]),
            "data": _data(jobs[move["job_id"]], move, labels[move["job_id"]]),
            "status": DeliveryStatus.WAITING.value,
            "tries": 0,
            "created_at": move["time"],
            "next_try_at": move["time"],
        }
        for hook, move in pairs
    ]


def _data(job: Row[Any], move: Move, labels: Mapping[str, str]) -> dict[str, Any]:
    state: JobState = move["to_state"]
    return {
        "id": job.id,
        "seq": move["seq"],
        "name": job.name,
        "state": state.value,
        "from_state": None if move["from_state"] is None else move["from_state"].value,
        "reason": {"code": str(move["code"]), "message": move["message"][:MAX_REASON]},
        "owner": job.owner,
        "queue": job.queue,
        "labels": dict(labels),
        "attempt": move["attempt"],
        "time": _as_text(move["time"]),
        "created_at": _as_text(job.created_at),
        "started_at": _as_text(job.started_at),
        "first_step_at": _as_text(job.first_step_at),
        # Omit `finished_at` from a message about a job's start, even if the job has ended before
        # the message is sent.
        "finished_at": _as_text(job.finished_at) if state.is_terminal else None,
        "metrics": final_metrics(job.summary),
        "link": f"/#/jobs/{job.id}",
    }


def _as_text(time: datetime | None) -> str | None:
    return None if time is None else time.isoformat().replace("+00:00", "Z")
