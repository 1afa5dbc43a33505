"""Changes the document of a job that waits, with the checks of a submission.

A change is made in two steps. `merge` applies the patch and does the checks that need no
transaction. `apply` stores the result. If the job has changed in between, both steps are repeated
with the current document.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from dray.input.validation import Fault, check
from dray.spec import JobSpec
from service.config.settings import Settings
from service.db.models import JobRow
from service.db.notifications import ATTEMPTS
from service.db.repositories import attempts as attempts_repository
from service.db.repositories import jobs as repository
from service.db.repositories.bulk import change
from service.db.repositories.catalog import document_values
from service.db.repositories.submission import sweeps as sweeps_repository
from service.db.session import notify
from service.domain.documents import upcast
from service.domain.errors import InvalidDocument, JobNotWaiting, LimitRaised, Unsatisfiable
from service.domain.scheduling.rules.queues import Queue
from service.domain.tracking.document_values import differing
from service.jobs import new_jobs
from service.lifecycle import dependencies
from service.planning.service import Plans, Resolved
from service.queues import reservations

Document = Mapping[str, Any]
CHANGED = "document_changed"
IN_THE_QUEUE = frozenset({"queue", "priority"})
"""Fields that are also changed without a document, with their own events."""
MAX_SHOWN = 100
"""Maximum number of characters of a value in an event's message."""


@dataclass(frozen=True)
class NewDocument:
    """The result of a patch."""

    before: Document
    """The document to which the patch was applied."""
    patch: Document
    resolved: Resolved

    @property
    def spec(self) -> JobSpec:
        return self.resolved.spec


def current(row: JobRow) -> dict[str, Any]:
    """Return the job's document with its current queue and priority, which may have changed since
    the submission."""
    return {**upcast(row.spec), "queue": row.queue, "priority": row.priority}


async def merge(plans: Plans, before: Document, patch: Document) -> NewDocument:
    """Apply the patch, and do the checks that need no transaction. Raises InvalidDocument."""
    merged = _merged(before, patch)
    try:
        spec = await asyncio.to_thread(check, merged)
    except Fault as fault:
        raise InvalidDocument(
            fault.detail, pointer=f"/document{fault.pointer or ''}", hint=fault.hint
        ) from None
    return NewDocument(before, patch, await plans.resolve(spec))


def _merged(value: Any, patch: Any) -> Any:
    """Apply a merge patch (RFC 7396)."""
    if not isinstance(patch, Mapping):
        return patch
    merged = dict(value) if isinstance(value, Mapping) else {}
    for name, inner in patch.items():
        if inner is None:
            merged.pop(name, None)
        else:
            merged[name] = _merged(merged.get(name), inner)
    return merged


def apply(
    session: Session,
    row: JobRow,
    new: NewDocument,
    settings: Settings,
    now: datetime,
    *,
    is_admin: bool,
) -> tuple[list[dict[str, Any]], Queue]:
    """Store the new document of a locked, waiting job, except for its queue and priority. Returns
    the changed fields, each with its JSON pointer, old value and new value, and the queue.

    Raises the errors of a submission, and JobNotWaiting if only a job that has never started can be
    changed like this.
    """
    spec = new.spec
    _refuse_late(session, row, new)
    moves = spec.queue != row.queue
    limits = moves or "max_runtime_s" in new.patch
    admitted = new_jobs.admit(
        session,
        new.resolved,
        row.owner,
        settings,
        now,
        coming={row.queue: 1} if moves else {},
        checks_runtime=limits,
        used_s=row.runtime_used_s,
        may_exceed_priority=is_admin or not (moves or "priority" in new.patch),
    )
    reservations.refuse_unfit(
        session, spec, row.owner, row.project, now, before=row, changed=new.patch.keys()
    )
    columns = new_jobs.columns_of(spec, admitted)
    if not limits:  # the queue's rules and default may have changed since the job was submitted
        del columns["max_runtime_s"], columns["is_runtime_of_queue"]
    changed = list(_changed(new.before, columns["spec"]))
    if "after" in new.patch:
        dependencies.change(session, row.id, spec)
    if spec.labels != new.before.get("labels"):
        repository.replace_labels(session, row.id, spec.labels)
    document_values.change(session, row.id, differing(columns["spec"], new.before))
    columns["world_size"] = admitted.request.num_ranks
    if columns["bundle"] != row.bundle:
        columns["step_times"] = None  # they were measured with other resources
    change(row, **columns)
    if spec.name != new.before.get("name"):
        dependencies.refuse_circle(session, row.id, pointer="/name")
    return changed, admitted.queue


def _refuse_late(session: Session, row: JobRow, new: NewDocument) -> None:
    """Refuse changes that the job's array or its earlier attempts rule out."""
    if row.array_id is not None:
        if sweeps_repository.parameters(session, [row.id]).get(row.id, {}) is None:
            raise JobNotWaiting(
                f"the trial {row.id} gets its parameter values and its document when it starts, so "
                "the document can't be changed before the start",
                pointer="/document",
            )
        if "after" in new.patch:
            raise InvalidDocument(
                f"can't be changed for a single job of the array {row.array_id}, because all jobs "
                "of an array wait together",
                pointer="/document/after",
            )
    if "after" in new.patch and row.attempt > 0:
        raise JobNotWaiting(
            f"the job {row.id} has already started once, so it no longer waits for other jobs",
            pointer="/document/after",
            hint=f"`dray hold {row.id}` keeps the job from starting again",
        )
    refuse_used_up(row, new.spec.max_runtime_s, row.runtime_used_s)


def limit_running(
    session: Session, row: JobRow, new: NewDocument, now: datetime, *, is_admin: bool
) -> list[dict[str, Any]]:
    """Change `max_runtime_s` of a locked job that has slots. Returns the changed field, as `apply`
    does. Raises Forbidden if a user who is not an admin raises the limit."""
    limit_s = new.spec.max_runtime_s
    changed = list(_changed(new.before, {"max_runtime_s": limit_s}))
    if not changed:
        return []
    old_s = row.max_runtime_s
    if not is_admin and old_s is not None and (limit_s is None or limit_s > old_s):
        raise LimitRaised(
            f"is {old_s} s, and only an admin can raise it while the job runs",
            pointer="/document/max_runtime_s",
            hint="use a shorter time, or ask an admin",
        )
    attempt = attempts_repository.get(session, row.id, row.attempt)
    assert attempt is not None, "the job has slots"
    since = attempt.started_at
    ran_s = 0.0 if since is None else max(0.0, (now - since).total_seconds())
    refuse_used_up(row, limit_s, row.runtime_used_s + ran_s)
    attempt.limits += 1
    spec = {**row.spec, "max_runtime_s": limit_s}
    document_values.change(session, row.id, differing(spec, row.spec))
    change(row, spec=spec, max_runtime_s=limit_s, is_runtime_of_queue=False)
    notify(session, ATTEMPTS)
    return changed


def refuse_used_up(row: JobRow, max_runtime_s: float | None, used_s: float) -> None:
    """Raise Unsatisfiable if the job has already run for as long as the new limit allows."""
    if max_runtime_s is not None and max_runtime_s <= used_s:
        raise Unsatisfiable(
            f"is {max_runtime_s}, but the job has already run for {used_s:.0f} s",
            pointer="/document/max_runtime_s",
            hint=f"use a longer time, or cancel the job with `dray cancel {row.id}`",
        )


def _changed(before: Document, after: Document) -> Iterator[dict[str, Any]]:
    for field in after:
        if field not in IN_THE_QUEUE:
            yield from _differences(f"/{field}", before.get(field), after[field])


def _differences(pointer: str, old: Any, new: Any) -> Iterator[dict[str, Any]]:
    if old == new:
        return
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in dict.fromkeys([*old, *new]):
            yield from _differences(f"{pointer}/{name}", old.get(name), new.get(name))
    else:
        yield {"pointer": pointer, "from": old, "to": new}


def sentence(changed: list[dict[str, Any]]) -> str:
    """Return the message of the event, such as `changed max_runtime_s from unset to 7200`."""
    parts = (
        f"{one['pointer'][1:].replace('/', '.')} from {_shown(one['from'])} to {_shown(one['to'])}"
        for one in changed
    )
    return f"changed {'; '.join(parts)}"


def _shown(value: Any) -> str:
    text = "unset" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
