"""Use cases for reservations: create, list, show, change and delete them; and the check of a job
that names a reservation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy.orm import Session

from dray import views
from dray.input.times import LAST_YEAR
from dray.input.validation import Fault, check_as
from dray.reservations import ReservationChangeRequest, ReservationRequest
from dray.spec import JobSpec
from service.db.models import JobRow, NodeRow
from service.db.notifications import QUEUE
from service.db.repositories.scheduling import cluster as cluster_repository
from service.db.repositories.scheduling import queues as queues_repository
from service.db.repositories.scheduling import reservations as repository
from service.db.session import Database, notify, touch
from service.domain.errors import Conflict, DomainError, ReservationNotFound
from service.domain.events import ANONYMOUS
from service.domain.scheduling import policy
from service.domain.scheduling.rules.reservations import Reservation, ReservationRules
from service.domain.scheduling.rules.times import shown
from service.domain.scheduling.rules.tree import QueueTree

logger = logging.getLogger(__name__)

MOST = 1000
"""Maximum number of stored reservations. Reservations that have ended are deleted first."""
KEPT_FOR = timedelta(days=30)
"""Time after its end at which a reservation is deleted when another one is created."""

NOT_RULES = {"begin_at", "end_at", "duration_s", "time_zone", "maintenance"}
"""Fields of a request that are stored in another form."""


class InvalidReservation(DomainError, code="invalid_reservation"): ...


class ReservationUnfit(DomainError, code="reservation_unfit"): ...


class ReservationExists(Conflict, code="reservation_exists"): ...


class ReservationOverlaps(Conflict, code="reservation_overlaps"): ...


class TooManyReservations(Conflict, code="too_many_reservations"): ...


class Reservations:
    """Use cases for reservations. Each is one transaction. Changes become effective in the
    scheduler's next round."""

    def __init__(self, database: Database, *, clock: Callable[[], datetime] | None = None) -> None:
        self._database = database
        self._clock = clock

    def _now(self, session: Session) -> datetime:
        """Return the current time on the clock by which the scheduler begins and ends
        reservations."""
        return self._database.time(session) if self._clock is None else self._clock()

    async def create(
        self, wanted: ReservationRequest, *, actor: str = ANONYMOUS
    ) -> views.Reservation:
        """Create a reservation. Raises ReservationExists if the name is in use,
        InvalidReservation if it ends in the past, ReservationOverlaps and TooManyReservations."""

        def work(session: Session) -> views.Reservation:
            now = self._now(session)
            repository.lock_changes(session)
            before = repository.get(session, wanted.name)
            if before is not None and before.ends_at > now:
                raise ReservationExists(
                    f"there is already a reservation {wanted.name!r}, which ends at "
                    f"{shown(before.ends_at)}",
                    pointer="/name",
                    hint=f"use another name, or `dray reservation change {wanted.name}`",
                )
            repository.remove_ended(session, now - KEPT_FOR)
            if before is None and repository.count(session) >= MOST:
                repository.remove_ended(session, now)
            if before is None and repository.count(session) >= MOST:
                raise TooManyReservations(
                    f"there are already {MOST} reservations that have not ended",
                    hint="delete some of them with `dray reservation rm`",
                )
            return _store(session, _rules(wanted, actor, now), now)

        view = await self._database.write(work)
        logger.info("the reservation %s was created by %s", wanted.name, actor)
        return view

    async def change(
        self, name: str, changes: ReservationChangeRequest, *, actor: str = ANONYMOUS
    ) -> views.Reservation:
        """Change the given fields. Raises ReservationNotFound, and the same errors as `create`."""

        def work(session: Session) -> views.Reservation:
            now = self._now(session)
            repository.lock_changes(session)
            before = _found(session, name)
            given = changes.model_dump(mode="json", exclude_unset=True)
            merged = {**_document(before), **given, "name": name}
            if given.get("duration_s") is not None:
                merged["end_at"] = given.get("end_at")
            merged = {field: value for field, value in merged.items() if value is not None}
            try:
                wanted = check_as(ReservationRequest, merged)
            except Fault as fault:
                raise InvalidReservation(
                    fault.detail, pointer=fault.pointer, hint=fault.hint
                ) from None
            after = _rules(wanted, before.created_by, now)
            if after.begins_at == now and before.begins_at < now:
                after = replace(after, begins_at=before.begins_at)
            if (after.num_nodes, after.num_gpus) == (before.num_nodes, before.num_gpus):
                after = replace(after, chosen=before.chosen)
            return _store(session, after, now)

        view = await self._database.write(work)
        logger.info("the reservation %s was changed by %s", name, actor)
        return view

    async def list(self, *, user: str | None, ended: bool = False) -> views.ReservationPage:
        """Return the reservations that concern the user, or all of them if `user` is None, in the
        order in which they begin. With `ended`, also return reservations that have ended."""

        def work(session: Session) -> views.ReservationPage:
            now = self._now(session)
            found = repository.every(session) if ended else repository.unfinished(session, now)
            shown_ = [rules for rules in found if concerns(rules, user)]
            return views.ReservationPage(items=_views(session, shown_, now))

        return await self._database.read(work)

    async def get(self, name: str, *, user: str | None) -> views.Reservation:
        """Return a reservation. Raises ReservationNotFound if it does not exist or does not concern
        the user."""

        def work(session: Session) -> views.Reservation:
            rules = _found(session, name)
            if not concerns(rules, user):
                raise not_found(name)
            return _views(session, [rules], self._now(session))[0]

        return await self._database.read(work)

    async def delete(self, name: str, *, actor: str = ANONYMOUS) -> None:
        """Delete a reservation, which ends it. Jobs that run on its nodes continue. Raises
        ReservationNotFound."""

        def work(session: Session) -> None:
            repository.lock_changes(session)
            _found(session, name)
            touch(session)
            repository.remove(session, name)
            notify(session, QUEUE)

        await self._database.write(work)
        logger.info("the reservation %s was deleted by %s", name, actor)


def refuse_unfit(
    session: Session,
    spec: JobSpec,
    owner: str,
    project: str,
    now: datetime,
    *,
    before: JobRow | None = None,
    changed: Collection[str] = (),
) -> None:
    """Raise ReservationUnfit if a job with this document can't use the reservation that the
    document names. `before` is the row of a waiting job whose document changes, and `changed`
    contains the names of the changed fields. A change of other fields is not refused, regardless of
    what has happened to the reservation since then."""
    if spec.reservation is None:
        return
    found = repository.get(session, spec.reservation)
    if before is not None and "reservation" not in changed:
        if spec.queue != before.queue:
            refuse_leaving(session, before, spec.queue, now)
        if found is not None and found.ends_at > now and "max_runtime_s" in changed:
            _refuse_deadline(found, spec, before)
        return
    hint = "`dray reservation ls` shows your reservations"
    if found is None or not _is_for(session, found, owner, spec.queue, project):
        raise ReservationUnfit(
            f"there is no reservation {spec.reservation!r} for this job",
            pointer="/reservation",
            hint=hint,
        )
    if found.ends_at <= now:
        raise ReservationUnfit(
            f"the reservation {spec.reservation!r} ended at {shown(found.ends_at)}",
            pointer="/reservation",
            hint=hint,
        )
    if spec.begin_at is not None and spec.begin_at >= found.ends_at:
        raise ReservationUnfit(
            f"is {shown(spec.begin_at)}, but the reservation {found.name!r} ends at "
            f"{shown(found.ends_at)}",
            pointer="/begin_at",
            hint="give an earlier begin time, or name another reservation",
        )
    _refuse_deadline(found, spec, before)


def _refuse_deadline(found: ReservationRules, spec: JobSpec, before: JobRow | None) -> None:
    """Raise ReservationUnfit if a job that starts when the reservation begins can't end before its
    deadline. A job that has started before might need less than its limit."""
    if spec.deadline is None or found.flex:
        return
    has_started = before is not None and before.attempt > 0
    limit_s = 0 if has_started else spec.max_runtime_s or 0
    begins_at = max(found.begins_at, spec.begin_at or found.begins_at)
    left_s = (spec.deadline - begins_at).total_seconds()
    if 0 < left_s >= limit_s:
        return
    message = (
        f"is {shown(spec.deadline)}, but the reservation {found.name!r} begins at "
        f"{shown(found.begins_at)}"
    )
    hint = "give a later deadline, or leave the field out"
    if left_s > 0:
        message = (
            f"{message}, and with max_runtime_s: {limit_s} the job might run past its deadline"
        )
        hint = f"{hint}; or lower max_runtime_s"
    raise ReservationUnfit(message, pointer="/deadline", hint=hint)


def refuse_leaving(session: Session, job: Any, queue: str, now: datetime) -> None:
    """Raise ReservationUnfit if the reservation that a waiting job names does not admit the job in
    this queue. A reservation that has ended or was deleted does not matter. `job` is the job's
    row."""
    if job.reservation is None:
        return
    found = repository.get(session, job.reservation)
    if found is None or found.ends_at <= now:
        return
    if not _is_for(session, found, job.owner, queue, job.project):
        raise ReservationUnfit(
            f"the job's reservation {job.reservation!r} is not for the queue {queue!r}",
            pointer="/queue",
            hint="choose another queue, or first run "
            f"`dray change {job.id} --set reservation=null`",
        )


def _is_for(session: Session, rules: ReservationRules, *claim: str) -> bool:
    tree = QueueTree(queues_repository.every(session))
    return rules.reservation({}, tree).is_for(*claim)


def not_found(name: str) -> ReservationNotFound:
    hint = "`dray reservation ls` shows the reservations"
    return ReservationNotFound(f"there is no reservation {name!r}", hint=hint)


def _found(session: Session, name: str) -> ReservationRules:
    rules = repository.get(session, name)
    if rules is None:
        raise not_found(name)
    return rules


def concerns(rules: ReservationRules, user: str | None) -> bool:
    """Whether a user can see the reservation: users can see maintenance windows, reservations for
    themselves, and reservations for queues or projects, to which any user can submit jobs. `user`
    is None for an admin."""
    is_maintenance = rules.reservation({}).is_maintenance
    is_open = is_maintenance or rules.queues or rules.projects
    return user is None or user in rules.users or bool(is_open)


def _rules(wanted: ReservationRequest, actor: str, now: datetime) -> ReservationRules:
    given = wanted.model_dump(exclude=NOT_RULES)
    begins_at = now if wanted.begin_at is None else max(now, wanted.begin_at.astimezone(UTC))
    ends_at = wanted.end_at and wanted.end_at.astimezone(UTC)
    if ends_at is None:
        assert wanted.duration_s is not None, "it is validated"
        ends_at = begins_at + timedelta(seconds=wanted.duration_s)
    if ends_at <= begins_at:
        raise InvalidReservation(
            f"is {shown(ends_at)}, which is not later than the begin time, {shown(begins_at)}",
            pointer="/end_at",
            hint="give a later end time",
        )
    if ends_at.year > LAST_YEAR:
        raise InvalidReservation(
            f"the reservation would end at {shown(ends_at)}, but the latest year allowed is "
            f"{LAST_YEAR}",
            pointer="/duration_s" if wanted.end_at is None else "/end_at",
            hint="give an earlier end time",
        )
    return ReservationRules(begins_at=begins_at, ends_at=ends_at, created_by=actor, **given)


def _document(rules: ReservationRules) -> dict[str, Any]:
    """Return the reservation as a request."""
    names = ReservationRequest.model_fields.keys() & ReservationRules.__dataclass_fields__.keys()
    return {
        **{name: getattr(rules, name) for name in names},
        "begin_at": rules.begins_at.isoformat(),
        "end_at": rules.ends_at.isoformat(),
        "maintenance": rules.reservation({}).is_maintenance,
    }


def _store(session: Session, rules: ReservationRules, now: datetime) -> views.Reservation:
    others = [one for one in repository.unfinished(session, now) if one.name != rules.name]
    nodes = cluster_repository.nodes(session)
    _refuse_overlap(rules, others, nodes)
    repository.put(session, rules, now)
    touch(session)  # views of jobs don't change until the scheduler's next round
    notify(session, QUEUE)
    return _views(session, [rules], now)[0]


def _refuse_overlap(
    rules: ReservationRules, others: Sequence[ReservationRules], rows: Sequence[NodeRow]
) -> None:
    """Raise ReservationOverlaps if another reservation includes some of the same nodes at the same
    time. A maintenance window can include any nodes."""
    ids_of = by_name(rows)
    own = rules.reservation(ids_of)
    if own.is_maintenance:
        return
    nodes = [
        (row.hostname, node)
        for row, node in zip(rows, as_nodes(rows), strict=True)
        if own.holds(node)
    ]
    for other in others:
        there = other.reservation(ids_of)
        if not own.overlaps(there):
            continue
        shared = [] if other.is_counted else [name for name, node in nodes if there.holds(node)]
        shared += sorted({*rules.nodes} & {*other.nodes} - {*shared})
        if (own.all_nodes or there.all_nodes) and not shared:
            shared = ["all nodes"]
        if shared:
            raise ReservationOverlaps(
                f"{there.spoken} includes some of the same nodes at the same time: "
                f"{', '.join(shared[:5])}{' and more' if len(shared) > 5 else ''}",
                hint="choose other nodes or times, or change that reservation",
            )


def by_name(rows: Sequence[NodeRow]) -> Mapping[str, set[str]]:
    """Return the ids of the nodes, keyed by hostname and by id."""
    found: dict[str, set[str]] = {}
    for row in rows:
        for name in (row.hostname, row.node_id):
            found.setdefault(name, set()).add(row.node_id)
    return found


def as_nodes(rows: Sequence[NodeRow]) -> list[policy.Node]:
    return [policy.Node.labelled(r.node_id, r.total, r.available, r.labels) for r in rows]


def _views(
    session: Session, found: Sequence[ReservationRules], now: datetime
) -> list[views.Reservation]:
    if not found:
        return []
    rows = cluster_repository.nodes(session)
    ids_of, nodes = by_name(rows), as_nodes(rows)
    hostname = {row.node_id: row.hostname for row in rows}
    numbers = repository.num_jobs(session, [rules.name for rules in found])
    return [
        _view(rules, rules.reservation(ids_of), ids_of, nodes, hostname, numbers, now)
        for rules in found
    ]


def _view(
    rules: ReservationRules,
    reservation: Reservation,
    ids_of: Mapping[str, set[str]],
    nodes: Sequence[policy.Node],
    hostname: Mapping[str, str],
    numbers: Mapping[str, tuple[int, int]],
    now: datetime,
) -> views.Reservation:
    there = [node for node in nodes if reservation.holds(node)]
    num_waiting, num_running = numbers.get(rules.name, (0, 0))
    state = "active" if rules.begins_at <= now else "planned"
    given = _document(rules)
    del given["begin_at"], given["end_at"]
    return views.Reservation(
        **given,
        begins_at=rules.begins_at,
        ends_at=rules.ends_at,
        state="ended" if rules.ends_at <= now else state,
        includes=[views.ReservedNode(node_id=n.id, hostname=hostname[n.id]) for n in there],
        num_waiting=num_waiting,
        num_running=num_running,
        created_by=rules.created_by,
        warnings=[views.Reason(code=code, message=m) for code, m in _unmet(rules, ids_of, there)],
    )


def _unmet(
    rules: ReservationRules, ids_of: Mapping[str, set[str]], there: Sequence[policy.Node]
) -> list[tuple[str, str]]:
    """Return the nodes that the reservation needs but that don't exist."""
    missing = [name for name in rules.nodes if name not in ids_of]
    if missing:
        listed = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if missing[5:] else "")
        return [
            (
                "unknown_node",
                f"the cluster has no node {listed}; the reservation includes this node if it joins "
                "the cluster",
            )
        ]
    num_gpus = sum(node.total.get("GPU", 0.0) for node in there)
    if rules.num_nodes is not None and len(there) < rules.num_nodes:
        return [("too_few_nodes", f"includes {len(there)} of {rules.num_nodes} nodes so far")]
    if rules.num_gpus is not None and num_gpus < rules.num_gpus:
        return [("too_few_nodes", f"includes {num_gpus:g} of {rules.num_gpus} GPUs so far")]
    if rules.node_labels and not there:
        return [("unknown_node", "the cluster has no node with these labels")]
    return []
