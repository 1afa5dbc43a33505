"""Stored rounds are as small as the decisions allow, limited in number, and lead to the same
decisions when replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.orm import Session

from ray_workers.shared.slices import Slice
from service.db.repositories.scheduling import decisions as repository
from service.domain.errors import DatabaseUnavailable, DecisionNotFound
from service.domain.scheduling.elastic.sizing import ElasticJob, ReportedStep
from service.domain.scheduling.outlook.situation import Situation
from service.domain.scheduling.policy import Impossible, Preempt, Start, plan
from service.domain.scheduling.rules.queues import Queue
from service.loops.scheduling import decision_recorder
from service.loops.shared.fencing import LoopDatabase
from service.loops.shared.timings import LoopTimings
from service.outlook import codec, decisions
from service.outlook.decisions import SeenRound
from tests.unit.service.domain.scheduling.outlook.test_outlook import NOW, runs, situation, waits
from tests.unit.service.helpers import Service


def seen(num_waiting: int = 1, *, gpus: int = 1) -> SeenRound:
    """Return a round with four GPUs, one of which is held by a job."""
    queue = [waits(f"j{n}", gpus, seq=n) for n in range(num_waiting)]
    snapshot = situation(queue, [runs("r", {"n": 1})]).snapshot
    return SeenRound(snapshot, tuple(plan(snapshot, NOW)), NOW)


def keep(service: Service, round_: SeenRound) -> int:
    record = decisions.record(round_)
    service.database.write_sync(lambda s: decisions.store(s, [record]))
    return service.database.read_sync(lambda s: repository.newest(s, None, 1))[0].number


def test_a_kept_round_is_decided_the_same_again(service: Service) -> None:
    round_ = seen(5)
    number = keep(service, round_)
    found = service.database.read_sync(lambda s: decisions.replay(s, number))
    assert found.is_same
    assert (found.started, found.num_waiting) == (["j0", "j1", "j2"], 5)
    assert [each.decision for each in found.decided] == ["start"] * 3 + ["wait"] * 2
    assert found.decided[0].node_ids == ["n"]
    assert found.decided[3].reason is not None
    assert found.decided[3].reason.code == "waiting_for_slots"
    assert found.decided[3].left_s == 3600.0
    assert found.nodes == {"n": {"GPU": 3.0}}


def test_a_round_that_the_policy_decides_otherwise_now_is_said_to_differ(service: Service) -> None:
    other = replace(seen(), decisions=(Start("j0", (Slice("elsewhere", 1),)),))
    number = keep(service, other)
    found = service.database.read_sync(lambda s: decisions.replay(s, number))
    assert not found.is_same
    assert (found.decided[0].node_ids, found.replayed[0].node_ids) == (["elsewhere"], ["n"])


def test_a_round_that_is_told_in_other_words_now_is_decided_the_same(service: Service) -> None:
    snapshot = situation([waits("high", 4, priority=90)], [runs("low", {"n": 2})]).snapshot
    wait, preempt = plan(snapshot, NOW)
    assert isinstance(preempt, Preempt)
    reworded = replace(preempt, reason=replace(preempt.reason, message="makes room"))
    number = keep(service, SeenRound(snapshot, (wait, reworded), NOW))
    assert service.database.read_sync(lambda s: decisions.replay(s, number)).is_same


def test_jobs_that_changed_nothing_are_not_kept() -> None:
    round_ = seen(1000)
    record = decisions.record(round_)
    there, _, _ = codec.decode_record(record.data)
    assert len(there.snapshot.queue) < 20
    assert record.summary["num_waiting"] == 1000
    assert len(record.data) < 4000


def test_a_round_in_which_all_wait_as_before_has_no_changes() -> None:
    assert seen(3, gpus=4).changes == []
    assert [type(each) for each in seen(1, gpus=9).changes] == [Impossible]


def test_of_large_rounds_few_wait_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_recorder, "MOST_JOBS", 25)
    recorder = decision_recorder.DecisionRecorder(None, LoopTimings())  # type: ignore[arg-type]
    for num_waiting in (10, 10, 10, 40):
        recorder.note(seen(num_waiting))
        assert recorder._num_jobs() <= max(25, num_waiting)
    assert recorder._num_jobs() == 40, "the newest is kept"


@pytest.mark.anyio
async def test_rounds_that_wait_are_kept_in_one_transaction(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[int] = []
    store = decisions.store

    def count(session: Session, records: Sequence[decisions.Record]) -> None:
        stored.append(len(records))
        store(session, records)

    monkeypatch.setattr(decisions, "store", count)
    monkeypatch.setattr(decisions, "KEPT_FOR", timedelta(days=99999))
    recorder = recorder_of(service)
    for _ in range(3):
        recorder.note(seen())
    assert await recorder.run_once() == 3
    assert stored == [3]
    assert len(service.database.read_sync(lambda s: repository.newest(s, None, 9))) == 3


def recorder_of(service: Service) -> decision_recorder.DecisionRecorder:
    timings = LoopTimings(record_rest=0.0, record_period_s=0.0)
    return decision_recorder.DecisionRecorder(LoopDatabase(service.database), timings)


def kept(service: Service) -> list[int]:
    """Return the number of waiting jobs in each stored round, oldest first."""
    rows = service.database.read_sync(lambda s: repository.newest(s, None, 9))
    return [row.summary["num_waiting"] for row in reversed(rows)]


@pytest.mark.anyio
@pytest.mark.parametrize("fails", ["record", "store"])
async def test_a_round_that_can_not_be_kept_spoils_no_other(
    service: Service, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    does = getattr(decisions, fails)

    def spoilt(*given: Any) -> Any:
        found = given[-1] if fails == "store" else [given[0]]
        num_waiting = [
            r.summary["num_waiting"] if fails == "store" else len(r.snapshot.queue) for r in found
        ]
        if 2 in num_waiting:
            raise ValueError("of this round alone")
        return does(*given)

    monkeypatch.setattr(decisions, fails, spoilt)
    monkeypatch.setattr(decisions, "KEPT_FOR", timedelta(days=99999))
    recorder = recorder_of(service)
    for num_waiting in (1, 2, 3):
        recorder.note(seen(num_waiting))
    await recorder.run_once()
    assert kept(service) == [1, 3]


@pytest.mark.anyio
async def test_rounds_that_the_database_did_not_take_are_kept_with_the_next(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "KEPT_FOR", timedelta(days=99999))
    recorder = recorder_of(service)
    with monkeypatch.context() as away:

        async def write(_: object) -> None:
            recorder.note(seen(3))
            raise DatabaseUnavailable("the database does not respond")

        away.setattr(service.database, "write", write)
        recorder.note(seen(1))
        recorder.note(seen(2))
        with pytest.raises(DatabaseUnavailable):
            await recorder.run_once()
    assert await recorder.run_once() == 3
    assert kept(service) == [1, 2, 3]


def test_a_job_that_is_asked_to_leave_is_told_with_the_job_that_comes(service: Service) -> None:
    queue = [waits("high", 4, priority=90)]
    snapshot = situation(queue, [runs("low", {"n": 2})]).snapshot
    round_ = SeenRound(snapshot, tuple(plan(snapshot, NOW)), NOW)
    assert [type(each) for each in round_.changes] == [Preempt]
    number = keep(service, round_)
    found = service.database.read_sync(lambda s: decisions.replay(s, number))
    assert (found.is_same, found.left) == (True, ["low"])
    leaves = found.decided[-1]
    assert (leaves.decision, leaves.because_of, leaves.priority) == ("preempt", "high", 50)


def test_old_rounds_and_the_oldest_of_too_many_are_forgotten(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = [keep(service, seen()) for _ in range(5)]
    sizes = len(decisions.record(seen()).data)
    monkeypatch.setattr(decisions, "MAX_BYTES", 3 * sizes + sizes // 2)
    service.database.write_sync(lambda s: decisions.forget(s, NOW))
    page = service.database.read_sync(lambda s: decisions.page(s, None, 2))
    assert [item.number for item in page.items] == [numbers[4], numbers[3]]
    page = service.database.read_sync(lambda s: decisions.page(s, page.next_before, 2))
    assert [item.number for item in page.items] == [numbers[2]]
    with pytest.raises(DecisionNotFound):
        service.database.read_sync(lambda s: decisions.replay(s, numbers[0]))
    later = NOW + decisions.KEPT_FOR + timedelta(seconds=1)
    service.database.write_sync(lambda s: decisions.forget(s, later))
    assert service.database.read_sync(lambda s: decisions.page(s, None, 2)).items == []


def test_a_record_of_another_release_is_not_found_and_says_so(service: Service) -> None:
    number = keep(service, seen())

    def spoil(session: Session) -> None:
        row = repository.get(session, number)
        assert row is not None
        row.record = b"else"

    service.database.write_sync(spoil)
    with pytest.raises(DecisionNotFound, match="another release"):
        service.database.read_sync(lambda s: decisions.replay(s, number))
    with pytest.raises(codec.Unreadable):
        codec.decode(codec._packed({"document": {"snapshot": 3}, "used_s": []}))


def test_a_situation_comes_back_as_it_was() -> None:
    there = situation([waits("a", held="ann")], [runs("r", {"n": 1}, ends_within_s=3.0)])
    there = replace(there, snapshot=replace(there.snapshot, used_s={("default", "ann"): 2.5}))
    there = replace(there, accounts=frozenset({("default", "ann")}), left_out={"a": 7})
    assert codec.decode(codec.encode(there)) == there


def test_the_step_times_of_elastic_jobs_come_back_as_they_were() -> None:
    job = ElasticJob(1, 4, 64, 16, (ReportedStep(2, 1, 64, 0.5),), in_place=True, steps_left=9.0)
    job = replace(job, batch_range=(32, 512), noise_scale=900.0)
    snapshot = replace(seen().snapshot, elastic={"a": job})
    there = Situation(snapshot)
    assert codec.decode(codec.encode(there)) == there


def test_a_record_from_before_users_had_weights_is_read() -> None:
    queue = Queue("default", user_weights={"ann": 2.0})
    there = situation([waits("a", owner="ann")], [], queues=(queue,))
    document = codec._unpacked(codec.encode(there))
    (stored,) = document["document"]["snapshot"]["queues"]
    assert stored.pop("user_weights") == {"ann": 2.0}
    (old,) = codec.decode(codec._packed(document)).snapshot.queues
    assert old == Queue("default")
    assert codec.decode(codec.encode(there)) == there
