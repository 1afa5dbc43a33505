"""Reservations are created, changed and deleted; jobs that name one are checked."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Any

import pytest
from pydantic import ValidationError
from sqlalchemy.orm import Session

from dray.requests import ArrayChangeRequest, JobChangeRequest
from dray.reservations import ReservationChangeRequest, ReservationRequest
from ray_workers.shared.contracts import Cause
from service.db.models import ClusterRow, NodeRow
from service.db.repositories import jobs as jobs_repository
from service.db.repositories.scheduling import cluster
from service.db.repositories.scheduling import queues as queues_repository
from service.db.repositories.scheduling import reservations as repository
from service.domain.errors import DomainError, ReservationNotFound
from service.domain.scheduling import policy
from service.domain.scheduling.outlook.situation import Situation
from service.domain.scheduling.rules.tree import QueueTree
from service.jobs.array_changes import ArrayChanges
from service.loops.shared import queue_view
from service.outlook import answers
from service.queues import reservations
from service.queues.reservations import (
    InvalidReservation,
    ReservationExists,
    ReservationOverlaps,
    Reservations,
    ReservationUnfit,
    TooManyReservations,
)
from tests.unit.service.helpers import START, Service, events_of
from tests.unit.service.jobs.test_bulk import bulk


def at(hours: float) -> str:
    return (START + timedelta(hours=hours)).isoformat()


def wanted(name: str = "class", begin_h: float = 1, end_h: float = 2, **more: Any) -> Any:
    usual = {"users": ["ann"], "nodes": ["node-a"]}
    if more.get("maintenance"):
        del usual["users"]
    document = {"name": name, "begin_at": at(begin_h), "end_at": at(end_h), **usual, **more}
    given = {field: value for field, value in document.items() if value is not None}
    return ReservationRequest.model_validate(given)


def change(**fields: Any) -> ReservationChangeRequest:
    return ReservationChangeRequest.model_validate(fields)


@pytest.fixture
def use(service: Service) -> Reservations:
    nodes = {"node-a": {"rack": "r1"}, "node-b": {"rack": "r1"}, "node-c": {}}

    def store(session: Session) -> None:
        cluster.put(
            session,
            ClusterRow(id=1, connected=True, session="s", updated_at=service.now),
        )
        rows = [
            NodeRow(
                node_id=f"id-{name}",
                hostname=name,
                alive=True,
                accepted=True,
                total={"CPU": 8.0, "GPU": 4.0},
                available={"CPU": 8.0, "GPU": 4.0},
                labels=labels,
                quarantined=[],
                updated_at=service.now,
            )
            for name, labels in nodes.items()
        ]
        cluster.replace_nodes(session, rows)

    service.database.write_sync(store)
    return Reservations(service.database, clock=lambda: service.now)


async def test_a_reservation_is_created_shown_changed_and_deleted(use: Reservations) -> None:
    made = await use.create(wanted(comment="lesson 2"), actor="root")
    assert (made.state, made.users, made.created_by) == ("planned", ["ann"], "root")
    assert [(node.node_id, node.hostname) for node in made.includes] == [("id-node-a", "node-a")]
    assert await use.get("class", user=None) == made
    changed = await use.change("class", change(users=["bob"], end_at=at(5), comment=None))
    assert (changed.users, changed.comment, changed.begins_at) == (["bob"], "", made.begins_at)
    assert changed.ends_at == START + timedelta(hours=5)
    by_number = await use.change("class", change(nodes=None, num_nodes=2))
    assert (by_number.nodes, by_number.num_nodes) == ([], 2)
    assert [warning.message for warning in by_number.warnings] == ["includes 0 of 2 nodes so far"]
    await use.delete("class")
    for missing in (
        use.get("class", user=None),
        use.delete("class"),
        use.change("class", change()),
    ):
        with pytest.raises(ReservationNotFound):
            await missing


async def test_times(use: Reservations, service: Service) -> None:
    past = await use.create(wanted("past", -5, 2))
    assert (past.begins_at, past.state) == (START, "active"), "a begin in the past is now"
    service.now += timedelta(minutes=5)
    kept = await use.change("past", change(comment="x"))
    assert kept.begins_at == START
    with pytest.raises(InvalidReservation) as told:
        await use.create(wanted("over", -5, -2, nodes=["node-b"]))
    assert told.value.pointer == "/end_at"
    with pytest.raises(InvalidReservation):
        await use.change("past", change(end_at=at(-1)))
    lasting = wanted("lasting", nodes=["node-c"], end_at=None, duration_s="90m")
    assert (await use.create(lasting)).ends_at == START + timedelta(hours=2.5)
    shorter = await use.change("lasting", change(duration_s=60))
    assert shorter.ends_at - shorter.begins_at == timedelta(seconds=60)
    zone = {"begin_at": "2026-03-29T02:30:00", "time_zone": "Europe/Berlin"}
    with pytest.raises(ValidationError, match="clocks are set forward"):
        wanted(**zone)


async def test_a_reservation_ends_in_a_year_in_which_it_can_be_changed(use: Reservations) -> None:
    for begin_at, end in (
        ("2999-12-31T23:00:00Z", {"end_at": None, "duration_s": 10**8}),
        ("2999-12-31T20:00:00Z", {"end_at": "2999-12-31T23:30:00-01:00"}),
    ):
        with pytest.raises(InvalidReservation, match="the latest year allowed is 2999") as told:
            await use.create(wanted("far", begin_at=begin_at, **end))
        assert told.value.pointer == f"/{[*end][-1]}"
    await use.create(wanted("far", begin_at="2999-12-31T20:00:00Z", end_at=None, duration_s="3h"))
    changed = await use.change("far", change(comment="x"))
    assert changed.ends_at.isoformat() == "2999-12-31T23:00:00+00:00"


async def test_a_change_can_not_set_both_the_end_and_the_duration(use: Reservations) -> None:
    await use.create(wanted())
    with pytest.raises(InvalidReservation, match="exactly one of end_at and duration_s"):
        await use.change("class", change(duration_s=60, end_at=at(3)))
    for fields in ({"duration_s": 60, "end_at": None}, {"duration_s": None, "end_at": at(3)}):
        await use.change("class", change(**fields))
    changed = await use.change("class", change(duration_s=None))
    assert changed.ends_at.isoformat() == at(3)


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "Class"},
        {"name": ""},
        {"name": "x" * 64},
        {"users": []},
        {"users": ["ann"], "maintenance": True},
        {"users": ["a b"]},
        {"nodes": []},
        {"num_nodes": 1},
        {"nodes": None, "num_nodes": 0},
        {"nodes": None, "num_nodes": 1, "num_gpus": 1},
        {"nodes": None, "num_gpus": float("nan")},
        {"nodes": None, "num_gpus": 10**30},
        {"all_nodes": True},
        {"nodes": [""]},
        {"nodes": ["n" * 256]},
        {"end_at": None},
        {"duration_s": 60},
        {"end_at": "2027-01-01T00:00:00"},
        {"end_at": "9999-01-01T00:00:00Z"},
        {"at_begin": "kill"},
        {"maintenance": True, "flex": True},
        {"maintenance": True, "at_end": "preempt"},
        {"other": 1},
    ],
    ids=str,
)
def test_bad_requests(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        wanted(**fields)


async def test_names_and_overlaps(use: Reservations, service: Service) -> None:
    await use.create(wanted())
    with pytest.raises(ReservationExists):
        await use.create(wanted(begin_h=3, end_h=4))
    for fields in (
        {"nodes": ["node-b", "node-a"]},
        {"nodes": ["id-node-a"]},
        {"nodes": None, "node_labels": {"rack": "r1"}},
        {"nodes": None, "all_nodes": True},
    ):
        with pytest.raises(ReservationOverlaps, match="'class'"):
            await use.create(wanted("other", 1.5, 3, **fields))
    await use.create(wanted("before", 0, 1))
    await use.create(wanted("after", 2, 3))
    await use.create(wanted("counted", 1, 2, nodes=None, num_nodes=1))
    window = await use.create(wanted("disks", 0, 9, maintenance=True, nodes=None, all_nodes=True))
    assert len(window.includes) == 3
    with pytest.raises(ReservationOverlaps, match="maintenance window 'disks'"):
        await use.create(wanted("late", 4, 5))
    with pytest.raises(ReservationOverlaps):
        await use.change("before", change(end_at=at(1.5)))
    assert (await use.get("before", user=None)).ends_at == START + timedelta(hours=1)
    unknown = await use.create(wanted("unknown", 20, 21, nodes=["node-z", "ünode/ 7"]))
    assert [w.code for w in unknown.warnings] == ["unknown_node"]
    with pytest.raises(ReservationOverlaps, match="node-z"):
        await use.create(wanted("again", 20, 21, nodes=["node-z"]))
    service.now += timedelta(hours=10)
    again = await use.create(wanted(begin_h=11, end_h=12))
    assert again.state == "planned", "the name of a reservation that has ended is free"


async def test_two_requests_at_once_add_one_of_two_reservations(use: Reservations) -> None:
    found = await asyncio.gather(
        *(use.create(wanted(f"r{n}")) for n in range(6)),
        *(use.create(wanted("same", 4, 5)) for _ in range(3)),
        return_exceptions=True,
    )
    failed = [type(one) for one in found if isinstance(one, DomainError)]
    assert failed.count(ReservationOverlaps) + failed.count(ReservationExists) == 7
    assert len((await use.list(user=None)).items) == 2


async def test_users_see_the_reservations_that_concern_them(use: Reservations) -> None:
    await use.create(wanted("anns", 1, 2))
    await use.create(wanted("bobs", 3, 4, users=["bob"]))
    await use.create(wanted("night", 5, 6, users=None, queues=["night"]))
    await use.create(wanted("disks", 7, 8, maintenance=True))

    async def names(user: str | None) -> list[str]:
        return [one.name for one in (await use.list(user=user)).items]

    assert await names(None) == ["anns", "bobs", "night", "disks"]
    assert await names("ann") == ["anns", "night", "disks"]
    assert await names("cid") == ["night", "disks"]
    with pytest.raises(ReservationNotFound):
        await use.get("bobs", user="ann")
    assert (await use.get("bobs", user="bob")).name == "bobs"


async def test_the_number_is_bounded_and_those_that_have_ended_go_first(
    use: Reservations, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reservations, "MOST", 2)
    await use.create(wanted("one"))
    await use.create(wanted("two", 5, 6))
    with pytest.raises(TooManyReservations):
        await use.create(wanted("three", 7, 8))
    service.now += timedelta(hours=3)
    await use.create(wanted("three", 7, 8))
    assert [one.name for one in (await use.list(user=None, ended=True)).items] == ["two", "three"]
    assert [one.name for one in (await use.list(user=None)).items] == ["two", "three"]


async def test_a_choice_is_not_stored_for_a_reservation_that_was_changed(
    use: Reservations, service: Service
) -> None:
    await use.create(wanted(nodes=None, num_nodes=1))
    seen = service.database.read_sync(lambda s: repository.get(s, "class"))
    assert seen is not None
    service.database.write_sync(lambda s: repository.choose(s, seen, ["id-node-b"]))
    assert [n.hostname for n in (await use.get("class", user=None)).includes] == ["node-b"]
    kept = await use.change("class", change(comment="x"))
    assert [node.hostname for node in kept.includes] == ["node-b"]
    await use.change("class", change(end_at=at(3)))
    service.database.write_sync(lambda s: repository.choose(s, seen, ["id-node-c"]))
    assert [n.hostname for n in (await use.get("class", user=None)).includes] == ["node-b"]


async def test_only_its_users_jobs_can_name_a_reservation(
    use: Reservations, service: Service
) -> None:
    await use.create(wanted(users=["default", "ann"]))
    await use.create(wanted("bobs", 3, 4, users=["bob"]))
    job_id = await service.submit(reservation="class")
    job = await service.jobs.get(job_id)
    assert (job.reservation, job.spec["reservation"]) == ("class", "class")
    assert (await use.get("class", user=None)).num_waiting == 1
    messages = []
    for name in ("bobs", "missing"):
        with pytest.raises(ReservationUnfit) as told:
            await service.submit(reservation=name)
        assert told.value.pointer == "/reservation"
        messages.append(told.value.message.replace(name, "x"))
    assert messages[0] == messages[1], "the answer does not tell that another's exists"
    service.now += timedelta(hours=2)
    with pytest.raises(ReservationUnfit, match="ended at"):
        await service.submit(reservation="class")
    assert len((await service.jobs.list()).items) == 1


async def test_the_reservation_of_a_waiting_job_is_changed(
    use: Reservations, service: Service
) -> None:
    await use.create(wanted(users=["default", "ann"]))
    job_id = await service.submit()
    document = {"document": {"reservation": "class"}}
    changed = await service.changes.change(job_id, JobChangeRequest.model_validate(document))
    assert changed.reservation == "class"
    assert "reservation from unset to class" in (await events_of(service, job_id))[-1].message
    document = {"document": {"reservation": None}}
    changed = await service.changes.change(job_id, JobChangeRequest.model_validate(document))
    assert changed.reservation is None
    with pytest.raises(ReservationUnfit):
        await service.changes.change(
            job_id, JobChangeRequest.model_validate({"document": {"reservation": "missing"}})
        )


async def test_arrays_and_their_jobs_name_it(use: Reservations, service: Service) -> None:
    await use.create(wanted(users=["default", "ann"]))
    await service.submit(reservation="class", array={"size": 3})
    assert [job.reservation for job in (await service.jobs.list()).items] == ["class"] * 3
    assert datetime.fromisoformat(at(1)) > service.now


async def test_a_reservation_for_a_queue_is_for_the_queues_under_it(
    use: Reservations, service: Service
) -> None:
    await service.queue("lab")
    await service.queue("vision", parent="lab")
    await use.create(wanted(users=None, queues=["lab"]))
    await service.submit(queue="vision", reservation="class")
    await service.queue("text", parent="lab")
    await service.submit(queue="text", reservation="class")
    await service.queue("other")
    with pytest.raises(ReservationUnfit):
        await service.submit(queue="other", reservation="class")
    assert (await use.get("class", user=None)).queues == ["lab"]


async def test_a_waiting_job_does_not_leave_the_queue_that_its_reservation_is_for(
    use: Reservations, service: Service
) -> None:
    for name in ("a", "b", "other"):
        await service.queue(name)
    await use.create(wanted(users=None, queues=["a", "b"]))
    await service.submit(queue="a", reservation="class", array={"size": 2})
    job = (await service.jobs.list()).items[0]
    arrays = ArrayChanges(service.database, service.settings, clock=lambda: service.now)
    assert job.array_id is not None
    for changes in ({"queue": "other"}, {"queue": "other", "document": {"max_retries": 2}}):
        with pytest.raises(ReservationUnfit) as told:
            await service.change(job.id, **changes)
        assert (told.value.pointer, "'other'" in told.value.message) == ("/queue", True)
    with pytest.raises(ReservationUnfit) as told:
        await service.change(job.id, document={"queue": "other"})
    assert told.value.pointer == "/document/queue"
    with pytest.raises(ReservationUnfit, match="no job was changed"):
        await arrays.change(job.array_id, ArrayChangeRequest(queue="other"))
    for dry_run in (True, False):
        done = await bulk(
            service, "move", parameters={"queue": "other"}, max=2, filter={}, dry_run=dry_run
        )
        assert [problem.code for problem in done.problems] == ["reservation_unfit"]
    tree = QueueTree(service.database.read_sync(queues_repository.every))

    def suggested(session: Session) -> list[str]:
        row = jobs_repository.get(session, job.id)
        assert row is not None
        return [one.queue.name for one in answers.that_accept(session, tree, row, service.now)]

    assert service.database.read_sync(suggested) == ["b"]
    assert (await arrays.change(job.array_id, ArrayChangeRequest(queue="b"))).changed == 2
    assert (await service.change(job.id, queue="other", document={"reservation": None})).queue
    service.now += timedelta(hours=2)
    assert (await arrays.change(job.array_id, ArrayChangeRequest(queue="other"))).changed == 1


@pytest.mark.parametrize("has_started", [False, True])
@pytest.mark.parametrize("is_deleted", [False, True])
async def test_a_job_whose_reservation_has_ended_can_be_changed(
    use: Reservations, service: Service, has_started: bool, is_deleted: bool
) -> None:
    await service.queue("other")
    await use.create(wanted(users=["ann"]))
    job_id = await service.submit(reservation="class")
    if has_started:
        assert service.claim(job_id) is not None
        service.end(job_id, 1, Cause.PREEMPTED)
    if is_deleted:
        await use.delete("class")
    else:
        service.now += timedelta(hours=2)
    changed = await service.change(job_id, document={"max_retries": 2})
    assert (changed.spec["max_retries"], changed.reservation) == (2, "class")
    assert (await service.change(job_id, queue="other")).queue == "other"
    with pytest.raises(ReservationUnfit):
        await service.change(job_id, document={"reservation": "class"})
    assert (await service.change(job_id, document={"reservation": None})).reservation is None


@pytest.mark.parametrize(
    ("times", "pointer", "flex_pointer"),
    [
        ({"begin_at": at(2)}, "/begin_at", "/begin_at"),
        ({"begin_at": at(1.9)}, None, None),
        ({"deadline": at(1)}, "/deadline", None),
        ({"deadline": at(1.1)}, None, None),
        ({"deadline": at(1.5), "max_runtime_s": 1801}, "/deadline", None),
        ({"deadline": at(1.5), "max_runtime_s": 1800}, None, None),
        ({"begin_at": at(1.6), "deadline": at(1.7), "max_runtime_s": 360}, None, None),
        ({"begin_at": at(9), "deadline": at(10)}, "/begin_at", "/begin_at"),
    ],
    ids=str,
)
async def test_times_that_contradict_the_reservation_are_refused(
    use: Reservations,
    service: Service,
    times: dict[str, Any],
    pointer: str | None,
    flex_pointer: str | None,
) -> None:
    await use.create(wanted())
    await use.create(wanted("flexible", nodes=["node-b"], flex=True))
    for name, expected in (("class", pointer), ("flexible", flex_pointer)):
        unnamed = await service.submit(**times)
        if expected is None:
            await service.submit(reservation=name, **times)
            await service.change(unnamed, document={"reservation": name})
            continue
        with pytest.raises(ReservationUnfit) as told:
            await service.submit(reservation=name, **times)
        assert told.value.pointer == expected
        with pytest.raises(ReservationUnfit) as told:
            await service.change(unnamed, document={"reservation": name})
        assert told.value.pointer == f"/document{expected}"
    if pointer is None and "begin_at" not in times:
        job_id = await service.submit(reservation="class", **times)
        with pytest.raises(ReservationUnfit):
            await service.change(job_id, document={"max_runtime_s": 3600})


async def test_a_suggestion_uses_the_reservation_that_the_job_names_now(
    use: Reservations, service: Service
) -> None:
    await use.create(wanted())
    job_id = await service.submit(reservation="class")
    queue, running = service.database.read_sync(lambda s: queue_view.snapshot(s, service.now))
    seen = Situation(policy.Snapshot(queue, running, connected=True))
    await service.change(job_id, document={"reservation": None})

    def now(session: Session) -> str | None:
        row = jobs_repository.get(session, job_id)
        assert row is not None
        return answers.Answers()._waiting(session, seen, row, service.now).reservation

    assert [job.reservation for job in queue] == ["class"]
    assert service.database.read_sync(now) is None
