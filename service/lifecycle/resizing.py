"""Changes the sizes of groups: the slots that they hold, are granted, and are asked to release.

Granted slots are immediately recorded as held in the attempt's row, and recalled slots remain
recorded as held. Therefore, no other job gets these slots while the grant or the recall is being
sent to the group. A grant or recall is sent repeatedly until the group reports the slots that it
holds. A recall to which the group does not respond in time is withdrawn: the group is assumed to
keep its slots, and can be asked to release all of them instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from sqlalchemy import Row
from sqlalchemy.orm import Session

from dray.views import JobState
from ray_workers.shared.commands import Grant, Recall
from ray_workers.shared.contracts import Phase
from ray_workers.shared.memory_limit import human
from ray_workers.shared.slices import RoleSlots, Slice
from service.db.models import AttemptRow, JobRow
from service.db.notifications import ATTEMPTS, QUEUE
from service.db.repositories import attempts as attempts_repository
from service.db.repositories import jobs as repository
from service.db.repositories.bulk import change
from service.db.repositories.scheduling import cluster as cluster_repository
from service.db.session import notify, touch
from service.domain.attempts.group_traits import goes_on_without_lost
from service.domain.scheduling import policy
from service.domain.scheduling.elastic import resizing as rules
from service.domain.scheduling.placement.phrases import workers
from service.domain.scheduling.placement.slots import count as count_of
from service.domain.scheduling.rules.reservations import RESERVED
from service.lifecycle import held_slots
from service.lifecycle.transitions import remark

HOLDING = (JobState.STARTING, JobState.RUNNING, JobState.RECOVERING)
ALIVE = (Phase.STARTING, Phase.RUNNING)


def as_slices(rows: Sequence[Mapping[str, Any]]) -> tuple[Slice, ...]:
    return tuple(Slice(row["node_id"], row["num_workers"]) for row in rows)


def as_rows(slices: Sequence[Slice]) -> list[dict[str, Any]]:
    return [{"node_id": part.node_id, "num_workers": part.num_workers} for part in slices]


def as_roles(rows: Sequence[Mapping[str, Any]] | None) -> tuple[RoleSlots, ...]:
    """Return the roles in the column `roles` of a job or attempt."""
    return tuple(RoleSlots(**row) for row in rows or ())


def role_rows(roles: Sequence[RoleSlots]) -> list[dict[str, Any]] | None:
    return [asdict(role) for role in roles] or None


def held_request(
    slices: Sequence[Mapping[str, Any]],
    bundle: Mapping[str, float],
    roles: Sequence[Mapping[str, Any]] | None,
) -> policy.Request:
    """Return a request for the slots that an attempt holds, as recorded in these columns."""
    number = count_of(as_slices(slices))
    return policy.Request(number, bundle, roles=as_roles(roles))


def carriers(attempt: AttemptRow | Row[Any]) -> tuple[str, ...]:
    """Return the ids of all nodes that may have files or processes of the attempt."""
    here = (part["node_id"] for part in attempt.slices)
    return tuple(dict.fromkeys([*(attempt.carriers or ()), *here]))


def request_of(job: JobRow | Row[Any]) -> policy.Request:
    """Return the slots that a job requests."""
    homes = tuple(tuple(labels) for labels in job.homes or ())
    size = job.num_workers, job.bundle, job.min_workers
    roles = as_roles(job.roles)
    where, num_spares = (job.required_topology, homes), job.num_spares
    return policy.Request(*size, *where, roles, num_spares, num_parts=job.num_parts)


def _least_of(job: JobRow | Row[Any]) -> int | None:
    """Return the minimum number of slots that a running group of the job keeps; None if it keeps
    all its slots."""
    is_elastic = job.min_workers is not None or job.num_spares > 0
    return request_of(job).least_running if is_elastic else None


def still_requests(session: Session, job_id: str, request: policy.Request) -> bool:
    """Whether the job still requests these slots. Locks the job."""
    job = repository.lock(session, job_id)
    return job is not None and request_of(job) == request


def growing(
    job: JobRow | Row[Any], attempt: AttemptRow | Row[Any], now: datetime
) -> policy.Growing | None:
    """Return the group for use in the plan if it could use more slots and may be granted some now;
    otherwise None.

    A group that is not elastic can also lack workers and wait for replacements.
    """
    if attempt.preempt_asked_at is not None or _is_pending(attempt):
        return None
    if attempt.phase not in ALIVE or (attempt.grow_after and attempt.grow_after > now):
        return None
    slices = as_slices(attempt.slices)
    elastic = _least_of(job) is not None and count_of(slices) < job.num_workers
    waits = attempt.lacking > 0 and job.state in HOLDING
    if not waits and not (elastic and not attempt.lacking and job.state == JobState.RUNNING):
        return None
    return policy.Growing(
        job_id=job.id,
        attempt=attempt.attempt,
        priority=job.priority,
        seq=job.number,
        request=request_of(job),
        slices=slices,
        lacking=attempt.lacking,
        # Only ranks that don't depend on particular peers can train while workers are missing.
        trains=attempt.lacking > 0 and job.state == JobState.RUNNING,
        queue=job.queue,
        owner=job.owner,
    )


def _is_pending(attempt: AttemptRow | Row[Any]) -> bool:
    """Whether the group has not yet reported its slots after the last grant or recall."""
    return attempt.granted is not None or attempt.recalled is not None


def spare(
    job: JobRow | Row[Any], attempt: AttemptRow | Row[Any], now: datetime
) -> tuple[Slice, ...]:
    """Return the slots that an elastic group may be asked to release now, in the order in which
    they should be released. The slots of spares come first.

    Only groups that recover in place can release slots, because they continue in the same
    processes. A script can be asked even if it has not called `train.prepare`, because these calls
    are not recorded. A script that has not called `train.prepare` keeps its slots.
    """
    least = _least_of(job)
    trains = job.state == JobState.RUNNING and attempt.phase == Phase.RUNNING
    is_settled = not attempt.lacking and not _is_pending(attempt)
    is_due = all(at is None or at <= now for at in (attempt.grow_after, attempt.recall_after))
    if least is None or not (trains and is_settled and is_due):
        return ()
    num_ranks = job.num_workers - job.num_spares
    return rules.spare(as_slices(attempt.slices), least, job.num_parts, num_ranks)


def same_batch_s(job: JobRow | Row[Any], attempt: AttemptRow | Row[Any], now: datetime) -> float:
    """Return the number of seconds for which an elastic group has trained with its global batch; 0
    if the batch can't be changed now."""
    trains = job.state == JobState.RUNNING and attempt.phase == Phase.RUNNING
    since = attempt.batch_at or attempt.running_at
    is_settled = not attempt.lacking and not _is_pending(attempt) and not attempt.preempt_asked_at
    if job.min_workers is None or not (trains and is_settled) or since is None:
        return 0.0
    return max(0.0, (now - since).total_seconds())


def change_batch(
    session: Session, job_id: str, attempt: int, batch_size: int, now: datetime
) -> bool:
    """Let the group form again on its slots with this global batch size, using an empty grant.
    Return False if the group is no longer allowed to form again."""
    job = repository.lock(session, job_id)
    row = attempts_repository.get(session, job_id, attempt)
    if job is None or row is None or row.finished_at is not None:
        return False
    if not same_batch_s(job, row, now):
        return False
    row.granted = []
    row.grants += 1
    row.batch_size, row.batch_at = batch_size, now
    remark(
        session,
        job,
        type_="changing_batch",
        code="changing_batch",
        message=f"will continue with a global batch of {batch_size}",
        now=now,
        data={"grant": row.grants, "batch_size": batch_size},
    )
    notify(session, QUEUE, ATTEMPTS)
    return True


def recalled(attempt: AttemptRow | Row[Any]) -> Recall | None:
    """Return the recall to send to the group until it reports its slots."""
    if attempt.recalled is None:
        return None
    return Recall(attempt.grants, as_slices(attempt.recalled), attempt.batch_size)


def recall(session: Session, shrink: policy.Shrink, attempt: int, now: datetime) -> bool:
    """Ask the group to release slots; return False if that is no longer allowed."""
    job = repository.lock(session, shrink.job_id)
    row = attempts_repository.get(session, shrink.job_id, attempt)
    if job is None or row is None or row.finished_at is not None:
        return False
    may_be = Counter(spare(job, row, now))
    may_be.subtract(shrink.slices)
    if row.preempt_asked_at is not None or min(may_be.values(), default=-1) < 0:
        return False
    row.recalled, row.recalled_at = as_rows(shrink.slices), now
    if shrink.because_of == shrink.job_id and shrink.reason.code != RESERVED:
        row.shrunk_at = now
    row.grants += 1
    row.growth = None
    _choose_batch(row, shrink.batch_size, now)
    number = count_of(shrink.slices)
    remark(
        session,
        job,
        type_="shrinking",
        code="makes_room",
        message=f"was asked to release {workers(number)}: it {shrink.reason.message}"
        f"{_with_batch(shrink.batch_size)}",
        now=now,
        data={"recall": row.grants, "slices": as_rows(shrink.slices)} | _batch(shrink.batch_size),
    )
    notify(session, QUEUE, ATTEMPTS)
    return True


def is_unanswered(attempt: AttemptRow | Row[Any], now: datetime) -> bool:
    """Whether the group has not responded to a recall within the time limit."""
    if attempt.recalled is None or attempt.preempt_asked_at is not None:
        return False
    # If an older release stored the recall, `recalled_at` is None.
    return attempt.recalled_at is None or now - attempt.recalled_at >= rules.RECALL_LIMIT


def withdraw(session: Session, job_id: str, attempt: int, now: datetime) -> bool:
    """Withdraw a recall to which the group has not responded. The group is assumed to keep its
    slots, but a later report that it has released them still takes effect."""
    job = repository.lock(session, job_id)
    row = attempts_repository.get(session, job_id, attempt)
    if job is None or row is None or row.finished_at is not None or not is_unanswered(row, now):
        return False
    slices, limit_s = as_slices(row.recalled or []), rules.RECALL_LIMIT.total_seconds()
    number = count_of(slices)
    row.recalled = row.recalled_at = None
    row.recall_after = now + rules.KEEPING_PAUSE
    remark(
        session,
        job,
        type_="recall_unanswered",
        code="recall_unanswered",
        message=(
            f"did not release {workers(number)} within {limit_s:g} s of the request: dray "
            "assumes that the job keeps these slots, and may ask it to release all its slots"
        ),
        now=now,
        data={"recall": row.grants, "slices": as_rows(slices)},
    )
    notify(session, QUEUE, ATTEMPTS)
    return True


def granted(attempt: AttemptRow | Row[Any]) -> Grant | None:
    """Return the grant to send to the group until it reports its slots."""
    if attempt.granted is None:
        return None
    return Grant(attempt.grants, as_slices(attempt.granted), attempt.batch_size)


def _choose_batch(attempt: AttemptRow, batch_size: int | None, now: datetime) -> None:
    attempt.batch_size = batch_size
    if batch_size is not None:
        attempt.batch_at = now


def _with_batch(batch_size: int | None) -> str:
    return "" if batch_size is None else f", with a global batch of {batch_size}"


def _batch(batch_size: int | None) -> dict[str, Any]:
    """Return the part of an event's data that describes the batch."""
    return {} if batch_size is None else {"batch_size": batch_size}


def grant(
    session: Session,
    seen: policy.Growing,
    slices: Sequence[Slice],
    now: datetime,
    batch_size: int | None = None,
) -> bool:
    """Grant the group these slots and this global batch. Return False, and grant nothing, if the
    group has changed since the plan read it."""
    job = repository.lock(session, seen.job_id)
    attempt = attempts_repository.get(session, seen.job_id, seen.attempt)
    if job is None or attempt is None or attempt.finished_at is not None:
        return False
    if growing(job, attempt, now) != seen:
        return False
    attempt.carriers = list(dict.fromkeys([*carriers(attempt), *(p.node_id for p in slices)]))
    held_slots.settle(attempt, now)
    labels = cluster_repository.labels(session, [part.node_id for part in slices])
    attempt.held = {**held_slots.on_nodes(slices, labels), **(attempt.held or {})}
    attempt.slices = [*attempt.slices, *as_rows(slices)]
    attempt.granted = as_rows(slices)
    attempt.grants += 1
    attempt.growth = None
    attempt.grown_at = attempt.grown_at if seen.lacking else now
    _choose_batch(attempt, batch_size, now)
    number = count_of(slices)
    remark(
        session,
        job,
        type_="growing",
        code="growing",
        message=f"is granted {workers(number)} in addition to its {count_of(seen.slices)}"
        f"{_with_batch(batch_size)}",
        now=now,
        data={"grant": attempt.grants, "slices": as_rows(slices)} | _batch(batch_size),
    )
    notify(session, QUEUE, ATTEMPTS)
    return True


def note_stays(session: Session, stays: Sequence[policy.Stay]) -> int:
    """Store the reason why each group does not grow; return the number of changed reasons.

    Adds no event, since plans are made often. Unchanged rows are not written.
    """
    by_job = {stay.job_id: stay for stay in stays}
    changed = 0
    for attempt in attempts_repository.live(session) if by_job else ():
        stay = by_job.get(attempt.job_id)
        if stay is None:
            continue
        why = {
            "code": stay.reason.code,
            "message": stay.reason.message,
            "blocked_by": list(stay.blocked_by),
        }
        if attempt.growth != why:
            attempt.growth = why
            touch(session, attempt.job_id)
            changed += 1
    return changed


def close(attempt: AttemptRow) -> None:
    """Clear the size changes of an attempt that has ended."""
    change(attempt, lacking=0, granted=None, growth=None, recalled=None, recalled_at=None)


def why_this_size(job: JobRow, attempt: AttemptRow | None, now: datetime) -> tuple[str, list[str]]:
    """Return a sentence that explains why a group is smaller than requested or keeps its size, and
    the jobs that block it. The sentence and the list of jobs are empty if there is no reason to
    show."""
    if attempt is None or attempt.finished_at is not None or job.state not in HOLDING:
        return "", []
    if attempt.granted == []:
        return "is about to continue with a different global batch size", []
    if attempt.granted is not None:
        return f"is being granted {workers(count_of(as_slices(attempt.granted)))} more", []
    if attempt.recalled is not None:
        number, limit = count_of(as_slices(attempt.recalled)), rules.RECALL_LIMIT
        until = (attempt.recalled_at or now) + limit
        return f"was asked to release {workers(number)} by {until:%H:%M:%S} UTC", []
    if attempt.growth is None and attempt.recall_after is not None and attempt.recall_after > now:
        at = f"{attempt.recall_after:%H:%M:%S} UTC"
        return (
            f"kept slots that it was asked to release, and will not be asked again before {at}",
            [],
        )
    if attempt.growth is None:
        return _why_fewer_train(job), []
    return attempt.growth["message"], list(attempt.growth["blocked_by"])


def spares_sentence(job: JobRow, attempt: AttemptRow | None) -> str:
    """Return a sentence about the spares of a job that holds slots; empty if it has none."""
    if not job.num_spares or attempt is None or job.state not in HOLDING:
        return ""
    held = max(0, count_of(as_slices(attempt.slices)) - (job.num_workers - job.num_spares))
    ready, wanted = job.spares_ready, f"{job.num_spares} spare{'s'[: job.num_spares > 1]}"
    if held >= job.num_spares:
        return f"{ready} of {wanted} {'is' if job.num_spares == 1 else 'are'} ready"
    return f"{held} of {wanted} {'has a slot' if job.num_spares == 1 else 'have slots'}"


def copies_sentence(job: JobRow) -> str:
    """Return a sentence about the copies of the state in the memory of a job that holds slots;
    empty if there are none."""
    copies = job.memory_copies
    if copies is None or job.state not in HOLDING:
        return ""
    return (
        f"the state after step {copies['step']} is kept in the memory of the workers "
        f"({human(copies['state_bytes'])}; the copies use up to {human(copies['worker_bytes'])} on "
        "a worker)"
    )


def trains_with_fewer(job: JobRow, world_size: int) -> bool:
    """Whether the job trains with this many workers while its lost ranks are replaced."""
    return world_size < job.num_workers - job.num_spares and goes_on_without_lost(job.spec)


def _why_fewer_train(job: JobRow) -> str:
    if job.state != JobState.RUNNING or not trains_with_fewer(job, job.world_size):
        return ""
    of_all = f"continues to train with {job.world_size} of {workers(job.num_workers)}"
    return f"{of_all}; a replacement joins once it is ready"
