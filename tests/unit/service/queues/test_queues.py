"""Queues with both databases: their rules, the jobs that they admit, and the slots of these
jobs."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest
from pydantic import ValidationError
from sqlalchemy import event
from sqlalchemy.orm import Session

from dray.queue_requests import QueueChangeRequest, QueueRequest
from ray_workers.shared.contracts import Cause
from service.cluster.port import ClusterSnapshot
from service.db.notifications import QUEUE
from service.db.repositories.scheduling import queues as repository
from service.db.session import Database
from service.domain.errors import (
    DomainError,
    InvalidQueue,
    PriorityTooHigh,
    QueueFull,
    QueueInUse,
    QueueNotFound,
    UnknownQueue,
    Unsatisfiable,
)
from service.domain.scheduling.rules.queues import MAX_NAMES, Queue, changed
from service.nodes import node_table
from tests.unit.service.helpers import Service, spec
from tests.wire import cluster_node

RULES: dict[str, Any] = {
    "weight": 2.5,
    "user_weights": {"ann": 2.0, "bob@lab.example": 0.5},
    "quota": {"GPU": 4.0},
    "limit": {"GPU": 8.0, "memory": float(64 << 30), "accelerator_type:H100": 2.0},
    "user_limit": {"CPU": 0.5},
    "max_running": 0,
    "max_running_per_user": 1,
    "max_queued": 10,
    "max_queued_per_user": 2,
    "max_priority": 70,
}


async def _change(service: Service, name: str, **changes: Any) -> None:
    await service.queues.change(name, QueueChangeRequest.model_validate(changes))


def _see_cluster(service: Service, **resources: float) -> None:
    seen = ClusterSnapshot("s", "ray://x", None, False, (cluster_node("node-a", resources),))
    service.database.write_sync(lambda s: node_table.store(s, seen, None, service.now))


async def _count(service: Service) -> int:
    return len((await service.jobs.list()).items)


async def test_the_default_queue_is_there_and_has_no_limits(service: Service) -> None:
    (queue,) = (await service.queues.list()).items
    assert (queue.name, queue.limit, queue.max_queued, queue.max_priority) == (
        *("default", {}, None, 100),
    )
    assert service.database.read_sync(repository.every) == (Queue("default"),)


async def test_all_rules_are_kept(service: Service) -> None:
    made = await service.queue("night", **RULES)
    shown = (await service.queues.get("night")).model_dump()
    assert shown == made.model_dump()
    assert {name: shown[name] for name in RULES} == RULES
    stored = service.database.read_sync(lambda s: repository.get(s, "night"))
    assert stored == Queue("night", **RULES)


async def test_put_replaces_and_change_keeps_what_is_not_given(service: Service) -> None:
    await service.queue("night", **RULES)
    limit, weights = {"memory": None, "GPU": 16}, {"ann": None, "carol": 3}
    await _change(service, "night", limit=limit, max_queued=None, weight=3, user_weights=weights)
    shown = (await service.queues.get("night")).model_dump()
    assert shown["limit"] == {"GPU": 16.0, "accelerator_type:H100": 2.0}
    assert (shown["max_queued"], shown["weight"], shown["quota"]) == (None, 3.0, {"GPU": 4.0})
    assert shown["user_weights"] == {"bob@lab.example": 0.5, "carol": 3.0}
    await service.queue("night", weight=1)
    assert service.database.read_sync(lambda s: repository.get(s, "night")) == Queue("night")


def test_null_stands_for_the_default() -> None:
    queue = Queue("night", **RULES)
    assert changed(queue, dict.fromkeys(RULES)) == Queue("night")
    assert changed(queue, {}) == queue


async def test_a_change_wakes_the_scheduler(service: Service) -> None:
    with service.database.signals.subscribe(QUEUE) as woken:
        await service.queue("night")
        assert await woken.wait(0)
        await _change(service, "night", weight=2)
        assert await woken.wait(0)


async def test_a_limit_below_a_quota_is_refused_and_nothing_changes(service: Service) -> None:
    await service.queue("night", quota={"GPU": 4}, limit={"GPU": 4})
    with pytest.raises(InvalidQueue) as told:
        await _change(service, "night", limit={"GPU": 2}, weight=2)
    assert (told.value.pointer, told.value.message) == (
        "/limit/GPU",
        "is 2 GPU, which is less than the quota of 4 GPU",
    )
    assert (await service.queues.get("night")).weight == 1.0
    with pytest.raises(InvalidQueue):
        await service.queue("other", quota={"CPU": 2}, limit={"CPU": 1})
    with pytest.raises(QueueNotFound):
        await service.queues.get("other")


@pytest.mark.parametrize("rule", sorted(MAX_NAMES.keys() - {"borrowing_limit", "lending_limit"}))
async def test_a_rule_has_a_bounded_number_of_names(service: Service, rule: str) -> None:
    most = MAX_NAMES[rule]
    names = [f"accelerator_type:A{n}" if most == 64 else f"user-{n}" for n in range(20_000)]
    await service.queue("night", **{rule: dict.fromkeys(names[:most], 1.0)})
    with pytest.raises(InvalidQueue) as told:
        await _change(service, "night", **{rule: {names[most]: 1.0}})
    assert told.value.pointer == f"/{rule}"
    assert told.value.message == f"would have {most + 1:,} names, but at most {most:,} are allowed"
    await _change(service, "night", **{rule: {names[0]: None, names[most]: 1.0}})
    for change in (service.queue, functools.partial(_change, service)):
        with pytest.raises(InvalidQueue):
            await change("night", **{rule: dict.fromkeys(names, 1.0)})
    stored = service.database.read_sync(lambda s: repository.get(s, "night"))
    assert set(getattr(stored, rule)) == set(names[1 : most + 1])


async def test_a_quota_that_the_cluster_can_not_honour_is_taken_with_a_warning(
    service: Service,
) -> None:
    assert (await service.queue("night", quota={"CPU": 9})).warnings == []  # no cluster is known
    _see_cluster(service, CPU=8.0)
    (warning,) = (await service.queues.get("night")).warnings
    assert (warning.code, warning.message) == (
        "quota_above_cluster",
        "the queue's quota is 9 CPU, but the cluster has 8 CPU",
    )
    assert (await service.queue("night", quota={"CPU": 5})).warnings == []
    (warning,) = (await service.queue("day", quota={"CPU": 4})).warnings
    assert (warning.code, warning.message) == (
        "quotas_above_cluster",
        "the quotas of all queues add up to 9 CPU, but the cluster has 8 CPU",
    )
    assert [len(queue.warnings) for queue in (await service.queues.list()).items] == [1, 0, 1]


async def test_a_queue_goes_once_no_unfinished_job_is_in_it(service: Service) -> None:
    await service.queue("night")
    job_id = await service.submit(queue="night")
    with pytest.raises(QueueInUse, match="1 job in the queue 'night' has not ended"):
        await service.queues.delete("night")
    await service.jobs.cancel(job_id)
    await service.queues.delete("night")
    assert (await service.jobs.get(job_id)).queue == "night"
    for call in (service.queues.get, service.queues.delete):
        with pytest.raises(QueueNotFound):
            await call("night")
    with pytest.raises(QueueNotFound):
        await _change(service, "night", weight=2)
    with pytest.raises(QueueInUse):
        await service.queues.delete("default")


async def test_a_queue_shows_its_jobs_and_what_they_hold_by_user(service: Service) -> None:
    await service.queue("night", user_weights={"bob": 2.5})
    running = await service.submit(queue="night", resources={"num_workers": 3})
    assert service.claim(running, workers=3) is not None
    await service.submit(queue="night")
    held = await service.submit(queue="night")
    await service.change(held, held=True)
    await service.jobs.submit(spec(queue="night"), owner="bob")
    await service.submit()
    shown = await service.queues.get("night")
    assert (shown.num_waiting, shown.num_held, shown.num_running) == (3, 1, 1)
    assert shown.holds == {"CPU": 3.0}
    ann, bob = shown.users
    assert (ann.owner, ann.num_waiting, ann.num_held, ann.num_running) == ("ann", 2, 1, 1)
    assert (bob.owner, bob.num_waiting, bob.num_running, bob.holds) == ("bob", 1, 0, {})
    assert (ann.weight, bob.weight) == (1.0, 2.5)
    service.end(running, 1, Cause.SUCCEEDED)
    shown = await service.queues.get("night")
    assert (shown.num_running, shown.holds) == (0, {})


async def test_an_unknown_queue_is_told_with_those_there_are(service: Service) -> None:
    await service.queue("night")
    with pytest.raises(UnknownQueue) as told:
        await service.submit(queue="nigth")
    assert told.value.message == "there is no queue 'nigth'; the queues are default, night"
    assert (told.value.pointer, told.value.hint) == ("/queue", "did you mean 'night'?")
    assert await _count(service) == 0


async def test_a_priority_above_the_queues_is_refused(service: Service) -> None:
    await service.queue("night", max_priority=60)
    await service.submit(queue="night", priority=60)
    with pytest.raises(PriorityTooHigh) as told:
        await service.submit(queue="night", priority=61)
    assert told.value.pointer == "/priority"
    assert await _count(service) == 1


async def test_a_full_queue_takes_no_more_until_one_has_started(service: Service) -> None:
    await service.queue("night", max_queued=3, max_queued_per_user=1)
    first = await service.submit(queue="night")
    with pytest.raises(QueueFull, match="1 job of ann waits in the queue 'night'"):
        await service.submit(queue="night")
    for owner in ("bob", "cat"):
        await service.jobs.submit(spec(queue="night"), owner=owner)
    with pytest.raises(QueueFull, match="3 jobs wait in the queue 'night'"):
        await service.jobs.submit(spec(queue="night"), owner="dan")
    assert await _count(service) == 3
    assert service.claim(first) is not None
    await service.submit(queue="night")


async def test_an_array_that_a_queue_never_takes_is_told_to_be_smaller(service: Service) -> None:
    await service.queue("night", max_queued=3)
    with pytest.raises(QueueFull) as refused:
        await service.submit(queue="night", array={"size": 4})
    assert refused.value.hint == "submit fewer jobs, or choose another queue"
    await service.submit(queue="night", array={"size": 3})


async def test_a_job_that_a_limit_never_allows_is_refused(service: Service) -> None:
    await service.queue("night", limit={"CPU": 2})
    with pytest.raises(Unsatisfiable, match="has a limit of 2 CPU") as told:
        await service.submit(queue="night", resources={"num_workers": 3})
    assert told.value.pointer == "/queue"


async def test_submits_at_once_never_overfill_a_queue(service: Service) -> None:
    await service.queue("night", max_queued=5)
    submits = (service.submit(queue="night") for _ in range(16))
    ends = await asyncio.gather(*submits, return_exceptions=True)
    assert sum(isinstance(end, str) for end in ends) == 5
    assert all(isinstance(end, str | QueueFull) for end in ends)


async def test_no_job_is_left_without_a_queue(service: Service) -> None:
    """The queue is deleted while jobs are submitted to it."""
    for number in range(8):
        name = f"night-{number}"
        await service.queue(name)
        ends = await asyncio.gather(
            *(service.submit(queue=name) for _ in range(4)),
            service.queues.delete(name),
            *(service.submit(queue=name) for _ in range(4)),
            return_exceptions=True,
        )
        assert all(end is None or isinstance(end, str | DomainError) for end in ends), ends
        there = service.database.read_sync(lambda s, name=name: repository.get(s, name))
        assert (there is not None) == any(isinstance(end, str) for end in ends)


async def test_two_who_make_a_queue_at_once_both_succeed(service: Service) -> None:
    made = await asyncio.gather(*(service.queue("night", weight=n) for n in (1, 2, 3, 4)))
    assert {queue.name for queue in made} == {"night"}


async def test_of_changes_at_once_that_make_a_queue_none_is_lost(service: Service) -> None:
    changes: list[dict[str, Any]] = [
        *({"weight": 2}, {"max_queued": 3}, {"limit": {"CPU": 4}}, {"quota": {"CPU": 2}}),
        *({"user_weights": {f"user-{n}": 2}} for n in range(8)),
    ]
    asked = [QueueChangeRequest.model_validate(each) for each in changes]
    for number in range(4):
        name = f"night-{number}"
        calls = (service.queues.change(name, each, create=True) for each in asked)
        await asyncio.gather(*calls)
        weights = {f"user-{n}": 2.0 for n in range(8)}
        rules = {"limit": {"CPU": 4.0}, "quota": {"CPU": 2.0}, "user_weights": weights}
        stored = service.database.read_sync(lambda s, name=name: repository.get(s, name))
        assert stored == Queue(name, weight=2.0, max_queued=3, **rules)


async def test_a_queue_is_not_made_by_a_change_that_is_refused(service: Service) -> None:
    bad = QueueChangeRequest(quota={"CPU": 2}, limit={"CPU": 1})
    with pytest.raises(InvalidQueue):
        await service.queues.change("night", bad, create=True)
    with pytest.raises(QueueNotFound):
        await service.queues.get("night")


async def test_a_claim_finds_the_job_held_or_moved(service: Service) -> None:
    await service.queue("night")
    job_id = await service.submit()
    await service.change(job_id, held=True)
    assert service.claim(job_id) is None
    await service.change(job_id, held=False, queue="night")
    assert service.claim(job_id, queue="default") is None
    assert service.claim(job_id, queue="night") is not None


def test_jobs_of_a_queue_are_counted_along_one_index(sqlite_url: str) -> None:
    """The number of ended jobs does not matter."""
    database = Database(sqlite_url)
    statements: list[tuple[str, Any]] = []

    @event.listens_for(database.engine, "before_cursor_execute")
    def _keep(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        if statement.startswith("SELECT"):
            statements.append((statement, parameters))

    with Session(database.engine) as session:
        repository.count_waiting(session, ["a"])
        repository.count_waiting(session, ["a"], "ann")
        repository.count_unfinished(session, "a")
        repository.waiting(session, ["a"])
        repository.running(session, ["a"])
        for statement, parameters in statements[:]:
            raw = session.connection().exec_driver_sql(
                f"EXPLAIN QUERY PLAN {statement}", parameters
            )
            assert "ix_jobs_unfinished (queue=?" in raw.all()[0][3], statement
    assert len(statements) == 5
    database.close()


BAD: dict[str, dict[str, Any]] = {
    "no weight": {"weight": 0},
    "a negative weight": {"weight": -1.0},
    "an infinite weight": {"weight": float("inf")},
    "a weight that is no number": {"weight": float("nan")},
    "no weight of a user": {"user_weights": {"ann": 0}},
    "a negative weight of a user": {"user_weights": {"ann": -1}},
    "a weight of a user that is no number": {"user_weights": {"ann": float("nan")}},
    "a weight as a text": {"user_weights": {"ann": "2"}},
    "a name that no user has": {"user_weights": {"ann lee": 2}},
    "users without weights": {"user_weights": ["ann"]},
    "a negative amount": {"limit": {"GPU": -1}},
    "an infinite amount": {"quota": {"GPU": float("inf")}},
    "an amount that is no number": {"quota": {"GPU": float("nan")}},
    "a truth": {"quota": {"GPU": True}},
    "a text": {"quota": {"GPU": "8"}},
    "a resource by another name": {"user_limit": {"gpu": 1}},
    "an accelerator without a name": {"limit": {"accelerator_type:": 1}},
    "an ambiguous size": {"limit": {"memory": "8G"}},
    "a size of GPUs": {"limit": {"GPU": "8GiB"}},
    "a list": {"limit": ["GPU"]},
    "a negative count": {"max_running": -1},
    "a count that is no integer": {"max_queued": 1.5},
    "a priority above all": {"max_priority": 101},
    "a negative priority": {"max_priority": -1},
    "an unknown rule": {"max_runing": 1},
}


@pytest.mark.parametrize("kind", [QueueRequest, QueueChangeRequest])
@pytest.mark.parametrize("rules", BAD.values(), ids=BAD.keys())
def test_bad_rules_are_refused(
    kind: type[QueueRequest] | type[QueueChangeRequest], rules: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError):
        kind.model_validate(rules)


def test_memory_may_be_a_size() -> None:
    rules = QueueRequest.model_validate({"limit": {"memory": "8GiB", "CPU": 0}})
    assert rules.limit == {"memory": float(8 << 30), "CPU": 0.0}
