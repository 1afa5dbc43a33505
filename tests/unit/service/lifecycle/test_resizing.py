"""Groups that change their size: slots they hold, grants, and messages."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy.orm import Session

from dray.views import JobState
from ray_workers.shared.commands import Grant, Recall
from ray_workers.shared.contracts import Cause, Frame, FrameKind, Phase
from ray_workers.shared.slices import Slice
from service.db.repositories import attempts as attempts_repository
from service.db.repositories import jobs as jobs_repository
from service.domain.scheduling import policy
from service.domain.scheduling.elastic.resizing import (
    GROWING_PAUSE,
    KEEPING_PAUSE,
    LACKING_PAUSE,
    RECALL_LIMIT,
    Holding,
    NotItsOwn,
    Resized,
    resized,
)
from service.lifecycle import resizing
from service.loops.shared.queue_view import LiveAttempt, snapshot
from tests.marks import ON_SQLITE, RULES
from tests.unit.service.helpers import Service, events_of, frame, regrouped, regrouping, told

pytestmark = RULES

A, B = Slice("node-a", 2), Slice("node-b", 1)
ONE_OF_A = Slice("node-a", 1)


def test_a_group_that_lost_slots_holds_what_it_says() -> None:
    assert resized(Holding((A, B)), [A], 0, 0) == Resized(Holding((A,)), None)
    assert resized(Holding((A,)), [ONE_OF_A], 0, 1) == Resized(Holding((ONE_OF_A,)), None)


def test_a_grant_ends_when_the_group_knows_it() -> None:
    holding = Holding((A, B), 1, (B,))
    assert resized(holding, [A, B], 1, 0) == Resized(Holding((A, B), 1), None)


def test_a_grant_that_a_group_could_not_take_is_followed_by_a_pause() -> None:
    holding = Holding((A, B), 3, (B,))
    assert resized(holding, [A], 3, 0) == Resized(Holding((A,), 3), GROWING_PAUSE)
    assert resized(holding, [A], 3, 1) == Resized(Holding((A,), 3), LACKING_PAUSE)


def test_what_a_group_said_before_it_knew_of_a_grant_leaves_the_grant_its_own() -> None:
    """Otherwise the slots would be granted to another group while the first group is occupying
    them."""
    holding = Holding((A, B), 2, (B,))
    after = Holding((ONE_OF_A, B), 2, (B,))
    assert resized(holding, [ONE_OF_A], 1, 0) == Resized(after, None)
    assert resized(after, [ONE_OF_A, B], 2, 0) == Resized(Holding((ONE_OF_A, B), 2), None)


def test_a_group_may_hold_some_of_a_grant_before_it_says_that_it_knows_it() -> None:
    two = Slice("node-b", 2)
    holding = Holding((A, two), 1, (two,))
    assert resized(holding, [A, B], 0, 0) == Resized(Holding((A, B, B), 1, (two,)), None)
    assert resized(holding, [A, two], 0, 0) == Resized(holding, None)


@pytest.mark.parametrize(
    ("holding", "kept", "known"),
    [
        (Holding((A,)), [Slice("node-a", 3)], 0),
        (Holding((A,)), [A, ONE_OF_A], 0),
        (Holding((A,)), [B], 0),
        (Holding((A,)), [A], 1),
    ],
)
def test_a_group_holds_nothing_that_it_was_not_given(
    holding: Holding, kept: list[Slice], known: int
) -> None:
    with pytest.raises(NotItsOwn):
        resized(holding, kept, known, 0)


def said(*slices: Slice, world_size: int | None = None, lacking: int = 0, grants: int = 0) -> Frame:
    body = {
        "world_size": sum(s.num_workers for s in slices) if world_size is None else world_size,
        "slices": [{"node_id": s.node_id, "num_workers": s.num_workers} for s in slices],
        "lacking": lacking,
        "grants": grants,
        "message": "node-b is gone",
    }
    return told(FrameKind.RESIZED, body)


ELASTIC = {"resources": {"num_workers": 4}, "elastic": {"min_workers": 2}}


async def trains(service: Service, workers: int = 2, **fields: Any) -> str:
    job_id = await service.submit(**{**ELASTIC, **fields})
    assert service.claim(job_id, workers=workers) is not None
    service.report(job_id, 1, phase=Phase.RUNNING)
    return job_id


def live(service: Service, job_id: str) -> LiveAttempt:
    _, attempts = service.database.read_sync(lambda s: snapshot(s, service.now))
    (found,) = [attempt for attempt in attempts if attempt.job_id == job_id]
    return found


def growing(service: Service, job_id: str) -> policy.Growing | None:
    return live(service, job_id).growing


def give(service: Service, seen: policy.Growing, *slices: Slice) -> bool:
    return service.database.write_sync(lambda s: resizing.grant(s, seen, slices, service.now))


async def grown(service: Service, *slices: Slice) -> str:
    """Return a job with two workers that was granted these slots."""
    job_id = await trains(service)
    seen = growing(service, job_id)
    assert seen is not None
    assert give(service, seen, *slices)
    return job_id


async def test_a_claim_of_fewer_says_so_and_how_few_may_go_on(service: Service) -> None:
    job_id = await service.submit(**ELASTIC)
    claimed = service.claim(job_id, workers=3)
    assert claimed is not None
    assert claimed.min_workers == 2
    job = await service.jobs.get(job_id)
    assert (job.world_size, job.reason.message) == (3, "starts 3 of 4 workers on 1 node")
    rigid = await service.submit()
    claimed = service.claim(rigid)
    assert claimed is not None
    assert claimed.min_workers is None


async def test_the_queue_shows_with_how_few_a_job_starts(service: Service) -> None:
    await service.submit(**ELASTIC)
    waiting, _ = service.database.read_sync(lambda s: snapshot(s, service.now))
    assert waiting[0].request == policy.Request(4, {"CPU": 1.0}, 2)


async def test_a_group_that_shrank_frees_its_slots_and_says_so(service: Service) -> None:
    job_id = await trains(service, workers=4)
    service.report(job_id, 1, [regrouping(3), said(Slice("node-a", 3)), regrouped(3, world_size=3)])
    job = await service.jobs.get(job_id)
    assert (job.state, job.world_size, job.spec["resources"]["num_workers"]) == (
        *(JobState.RUNNING, 3),
        4,
    )
    assert live(service, job_id).slices == (Slice("node-a", 3),)
    (attempt,) = (await service.queries.attempts(job_id)).items
    assert attempt.world_size == 3
    (event,) = await events_of(service, job_id, "resized")
    assert event.message == "node-b is gone"
    assert event.data == {
        "world_size": 3,
        "before": 4,
        "slices": [{"node_id": "node-a", "num_workers": 3}],
        "lacking": 0,
    }


async def test_only_the_live_attempt_and_only_its_supervisor_change_the_books(
    service: Service,
) -> None:
    job_id = await trains(service, workers=4)
    by_a_rank = frame(FrameKind.RESIZED, said(Slice("node-a", 1)).body, rank=0)
    service.report(job_id, 1, [by_a_rank])
    assert live(service, job_id).slices == (Slice("node-a", 4),)
    service.end(job_id, 1, Cause.NODE_LOST)
    assert service.claim(job_id, 1, workers=4) is not None
    service.report(job_id, 1, [said(Slice("node-a", 1))])
    assert live(service, job_id).slices == (Slice("node-a", 4),)


@pytest.mark.parametrize(
    "frame",
    [
        said(Slice("node-a", 5)),
        said(Slice("node-x", 1)),
        said(Slice("node-a", 2), world_size=3),
        said(world_size=0),
        said(Slice("node-a", 2), grants=1),
        told(FrameKind.RESIZED, {**said(Slice("node-a", 2)).body, "slices": "all"}),
        told(FrameKind.RESIZED, {**said(Slice("node-a", 2)).body, "lacking": -1}),
        told(FrameKind.RESIZED, {"world_size": 2, "slices": [], "lacking": 0}),
    ],
)
@ON_SQLITE
async def test_a_size_that_can_not_be_is_refused(service: Service, frame: Frame) -> None:
    job_id = await trains(service, workers=4)
    service.report(job_id, 1, [frame])
    assert live(service, job_id).slices == (Slice("node-a", 4),)
    assert len(await events_of(service, job_id, "frames_refused")) == 1
    assert not await events_of(service, job_id, "resized")


async def test_a_group_below_its_size_may_grow_while_it_trains(service: Service) -> None:
    job_id = await trains(service)
    seen = growing(service, job_id)
    assert seen is not None
    assert (seen.slices, seen.lacking, seen.most) == ((Slice("node-a", 2),), 0, 2)
    service.report(job_id, 1, [regrouping(1)])
    assert growing(service, job_id) is None
    service.report(job_id, 1, [regrouped(1)])
    assert growing(service, job_id) == seen
    await service.jobs.cancel(job_id)
    assert growing(service, job_id) is None


async def test_neither_one_that_starts_nor_one_that_leaves_grows(service: Service) -> None:
    job_id = await service.submit(**ELASTIC)
    service.claim(job_id, workers=2)
    assert growing(service, job_id) is None
    service.report(job_id, 1, phase=Phase.RUNNING)
    assert growing(service, job_id) is not None
    await service.faults.preempt(job_id)
    assert growing(service, job_id) is None


async def test_one_that_is_whole_or_keeps_its_size_does_not_grow(service: Service) -> None:
    assert growing(service, await trains(service, workers=4)) is None
    assert growing(service, await trains(service, workers=2, elastic=None)) is None


async def test_one_that_lacks_workers_is_to_be_served_also_if_it_keeps_its_size(
    service: Service,
) -> None:
    job_id = await trains(service, workers=4, elastic=None)
    service.report(job_id, 1, [regrouping(3), said(Slice("node-a", 3), lacking=1)])
    seen = growing(service, job_id)
    assert seen is not None
    assert (seen.lacking, seen.slices) == (1, (Slice("node-a", 3),))
    assert (await service.jobs.get(job_id)).state is JobState.RECOVERING
    assert give(service, seen, B)
    whole = said(Slice("node-a", 3), B, grants=1)
    service.report(job_id, 1, [whole, regrouped(3, world_size=4)])
    assert growing(service, job_id) is None
    assert (await service.jobs.get(job_id)).world_size == 4


async def test_granted_slots_are_held_at_once_and_told_until_they_are_known(
    service: Service,
) -> None:
    job_id = await grown(service, B)
    attempt = live(service, job_id)
    assert attempt.slices == (Slice("node-a", 2), B)
    assert service.followed(job_id).commands == (Grant(1, (Slice("node-b", 1),), None),)
    assert attempt.node_ids == ("node-a", "node-b")
    assert attempt.growing is None, "one grant at a time"
    assert (await service.jobs.get(job_id)).world_size == 2
    (event,) = await events_of(service, job_id, "growing")
    assert event.message == "is granted 1 worker in addition to its 2"
    assert event.data == {"grant": 1, "slices": [{"node_id": "node-b", "num_workers": 1}]}
    service.report(job_id, 1, [said(Slice("node-a", 2), B, grants=1)])
    attempt = live(service, job_id)
    assert (service.followed(job_id).commands, attempt.slices) == ((), (Slice("node-a", 2), B))
    assert attempt.growing is not None
    assert (await service.jobs.get(job_id)).world_size == 3


async def test_a_batch_goes_with_a_grant_and_with_a_recall(service: Service) -> None:
    job_id = await trains(service)
    seen = growing(service, job_id)
    assert seen is not None
    given = (seen, (B,), service.now, 128)
    assert service.database.write_sync(lambda s: resizing.grant(s, *given))
    assert service.followed(job_id).commands == (Grant(1, (B,), 128),)
    (event,) = await events_of(service, job_id, "growing")
    assert event.message == "is granted 1 worker in addition to its 2, with a global batch of 128"
    assert event.data is not None
    assert event.data["batch_size"] == 128
    service.report(job_id, 1, [said(A, B, grants=1)], phase=Phase.RUNNING)
    asked = replace(shrink(job_id, B), batch_size=64)
    assert service.database.write_sync(lambda s: resizing.recall(s, asked, 1, service.now))
    assert service.followed(job_id).commands == (Recall(2, (B,), 64),)
    service.report(job_id, 1, [said(A, grants=2)])
    service.advance(GROWING_PAUSE.total_seconds())
    again = growing(service, job_id)
    assert again is not None
    assert give(service, again, B)
    assert service.followed(job_id).commands == (Grant(3, (B,), None),), "a batch is sent once"


async def test_a_batch_changes_alone_by_a_grant_of_no_slots(service: Service) -> None:
    job_id = await trains(service)
    service.advance(400.0)

    def same_batch_s() -> float:
        running = live(service, job_id).running
        assert running is not None
        return running.same_batch_s

    def change() -> bool:
        return service.database.write_sync(
            lambda s: resizing.change_batch(s, job_id, 1, 256, service.now)
        )

    assert same_batch_s() == 400.0
    assert change()
    seen = live(service, job_id)
    assert (service.followed(job_id).commands, seen.slices, seen.growing) == (
        (Grant(1, (), 256),),
        (A,),
        None,
    )
    assert size_told(service, job_id) == "is about to continue with a different global batch size"
    assert (same_batch_s(), change()) == (0.0, False), "it has not answered yet"
    (event,) = await events_of(service, job_id, "changing_batch")
    assert event.data == {"grant": 1, "batch_size": 256}
    service.advance(10.0)
    service.report(job_id, 1, [said(A, grants=1)], phase=Phase.RUNNING)
    assert (service.followed(job_id).commands, same_batch_s()) == ((), 10.0)


async def test_a_loss_that_was_told_before_the_grant_does_not_free_it(service: Service) -> None:
    job_id = await grown(service, B)
    service.report(job_id, 1, [said(ONE_OF_A, lacking=1)])
    attempt = live(service, job_id)
    assert attempt.slices == (ONE_OF_A, B)
    assert service.followed(job_id).commands == (Grant(1, (Slice("node-b", 1),), None),)


async def test_after_slots_that_it_could_not_take_a_group_is_left_alone_for_a_while(
    service: Service,
) -> None:
    job_id = await grown(service, B)
    service.report(job_id, 1, [said(Slice("node-a", 2), grants=1)])
    attempt = live(service, job_id)
    assert (attempt.slices, attempt.growing) == ((Slice("node-a", 2),), None)
    assert service.followed(job_id).commands == ()
    assert attempt.node_ids == ("node-a", "node-b"), "files may be on the node"
    service.advance(GROWING_PAUSE.total_seconds())
    assert growing(service, job_id) is not None


async def test_a_grant_to_a_group_that_changed_meanwhile_gives_nothing(service: Service) -> None:
    job_id = await trains(service, workers=3)
    seen = growing(service, job_id)
    assert seen is not None
    service.report(job_id, 1, [said(Slice("node-a", 2))])
    assert not give(service, seen, B)
    now = growing(service, job_id)
    assert now is not None
    assert give(service, now, B)
    assert not give(service, now, B)
    service.end(job_id, 1, Cause.NODE_LOST)
    assert not give(service, now, B)
    assert len(await events_of(service, job_id, "growing")) == 1


async def test_the_end_of_an_attempt_clears_all_of_it(service: Service) -> None:
    job_id = await grown(service, B)
    service.report(job_id, 1, [said(ONE_OF_A, lacking=1)])
    service.end(job_id, 1, Cause.NODE_LOST)
    _, attempts = service.database.read_sync(lambda s: snapshot(s, service.now))
    assert attempts == ()
    job = await service.jobs.get(job_id)
    assert (job.state, job.world_size) == (JobState.QUEUED, 4)
    assert service.claim(job_id, 1, workers=2) is not None
    attempt = service.followed(job_id)
    assert (service.followed(job_id).commands, attempt.node_ids) == ((), ("node-a",))


async def test_a_group_below_its_size_explains_what_it_waits_for(service: Service) -> None:
    job_id = await trains(service)
    assert (await service.queries.explain(job_id)).reason.message == "trains on 2 workers"
    reason = policy.Reason("waiting_for_slots", "could grow by 2 workers; 0 are free")
    stay = policy.Stay(job_id, reason, ("job-x",))

    def note() -> int:
        return service.database.write_sync(lambda s: resizing.note_stays(s, [stay]))

    assert [note(), note()] == [1, 0]
    explained = await service.queries.explain(job_id)
    assert explained.reason.message == "trains on 2 workers; could grow by 2 workers; 0 are free"
    assert (explained.blocked_by, explained.expected_start_at) == (["job-x"], None)
    seen = growing(service, job_id)
    assert seen is not None
    assert give(service, seen, B)
    explained = await service.queries.explain(job_id)
    assert explained.reason.message == "trains on 2 workers; is being granted 1 worker more"
    service.end(job_id, 1)
    assert (await service.queries.explain(job_id)).reason.message == "it ended"


async def test_of_gossip_it_is_explained_with_how_many_it_trains_on(service: Service) -> None:
    job_id = await service.submit(resources={"num_workers": 3}, sync={"kind": "gossip"})
    assert service.claim(job_id, workers=3) is not None
    service.report(job_id, 1, phase=Phase.RUNNING)
    assert size_told(service, job_id) == ""
    service.report(job_id, 1, [regrouping(2)], phase=Phase.RUNNING)
    assert size_told(service, job_id) == "", "it recovers"
    service.report(job_id, 1, [regrouped(2, world_size=2)], phase=Phase.RUNNING)
    trains_on = "continues to train with 2 of 3 workers; a replacement joins once it is ready"
    explained = await service.queries.explain(job_id)
    assert explained.reason.message.endswith(f"; {trains_on}")
    # No process can be started; then a node is lost and not replaced.
    whole = Slice("node-a", 3)
    service.report(job_id, 1, [said(whole, world_size=2)], phase=Phase.RUNNING)
    assert size_told(service, job_id) == "node-b is gone", "the reason that the group reported"
    assert growing(service, job_id) is None
    service.report(job_id, 1, [regrouping(1), said(ONE_OF_A, lacking=2)], phase=Phase.RUNNING)
    seen = growing(service, job_id)
    assert seen is not None
    assert not seen.trains
    service.report(job_id, 1, [regrouped(1, world_size=1)], phase=Phase.RUNNING)
    seen = growing(service, job_id)
    assert seen is not None
    assert seen.trains
    service.report(job_id, 1, [said(ONE_OF_A)], phase=Phase.RUNNING)
    assert size_told(service, job_id) == "node-b is gone"
    service.report(job_id, 1, [regrouped(0, world_size=3)], phase=Phase.RUNNING)
    assert size_told(service, job_id) == ""


async def test_a_stay_of_a_job_that_has_ended_is_noted_nowhere(service: Service) -> None:
    stay = policy.Stay("job-gone", policy.Reason("waiting_for_slots", "nothing is free"))
    await trains(service)
    assert service.database.write_sync(lambda s: resizing.note_stays(s, [stay])) == 0


def shrink(job_id: str, *slices: Slice) -> policy.Shrink:
    message = "continues with fewer workers, so that job other can start"
    return policy.Shrink(job_id, slices, policy.Reason("shrinks", message), "other")


def ask_back(service: Service, job_id: str, *slices: Slice) -> bool:
    asked = shrink(job_id, *slices)
    return service.database.write_sync(lambda s: resizing.recall(s, asked, 1, service.now))


def spare(service: Service, job_id: str) -> tuple[Slice, ...]:
    running = live(service, job_id).running
    assert running is not None
    return running.spare


def size_told(service: Service, job_id: str) -> str:
    """Return the reason that `explain` gives for the size of the group."""

    def work(session: Session) -> str:
        job = jobs_repository.get(session, job_id)
        assert job is not None
        attempt = attempts_repository.get(session, job_id, 1)
        return resizing.why_this_size(job, attempt, service.now)[0]

    return service.database.read_sync(work)


async def spread(service: Service) -> str:
    """Return a job with three workers on two nodes that continues with two of them."""
    job_id = await grown(service, B)
    service.report(job_id, 1, [said(A, B, grants=1)], phase=Phase.RUNNING)
    return job_id


async def test_slots_that_are_asked_back_stay_held_until_the_group_has_left_them(
    service: Service,
) -> None:
    job_id = await spread(service)
    assert spare(service, job_id) == (B,)
    assert ask_back(service, job_id, B)
    seen = live(service, job_id)
    assert (seen.slices, seen.growing) == ((A, B), None)
    assert service.followed(job_id).commands == (Recall(2, (B,), None),)
    assert seen.running is not None
    assert (seen.running.recalled, seen.running.spare) == ((B,), ())
    (event,) = await events_of(service, job_id, "shrinking")
    assert event.message == (
        "was asked to release 1 worker: it continues with fewer workers, "
        "so that job other can start"
    )
    assert event.data == {"recall": 2, "slices": [{"node_id": "node-b", "num_workers": 1}]}
    assert not ask_back(service, job_id, B), "it was asked before"
    service.report(job_id, 1, [said(A, grants=2)])
    seen = live(service, job_id)
    assert (seen.slices, seen.growing) == ((A,), None)
    assert service.followed(job_id).commands == ()
    assert size_told(service, job_id) == "", "it may be asked for other slots soon"
    service.advance(GROWING_PAUSE.total_seconds())
    assert growing(service, job_id) is not None


async def test_it_is_known_when_a_group_grew_and_when_it_shrank_for_the_gain_of_others(
    service: Service,
) -> None:
    def changed_s(job_id: str) -> tuple[float, float]:
        running = live(service, job_id).running
        assert running is not None
        return running.grown_s, running.shrunk_s

    assert changed_s(await trains(service)) == (math.inf, math.inf)
    makes_room, gains_less = await spread(service), await spread(service)
    service.advance(60.0)
    assert changed_s(gains_less) == (60.0, math.inf)
    assert ask_back(service, makes_room, B)
    asked = replace(shrink(gains_less, B), because_of=gains_less)
    assert service.database.write_sync(lambda s: resizing.recall(s, asked, 1, service.now))
    service.advance(5.0)
    assert changed_s(makes_room) == (65.0, math.inf)
    assert changed_s(gains_less) == (65.0, 5.0)


async def test_what_a_group_said_before_it_knew_of_a_recall_does_not_end_it(
    service: Service,
) -> None:
    job_id = await spread(service)
    assert ask_back(service, job_id, B)
    service.report(job_id, 1, [said(A, B, grants=1)])
    assert service.followed(job_id).commands == (Recall(2, (B,), None),)


async def test_a_group_that_keeps_what_it_was_asked_for_is_left_alone_for_a_while(
    service: Service,
) -> None:
    job_id = await spread(service)
    assert ask_back(service, job_id, B)
    service.report(job_id, 1, [said(A, B, grants=2)])
    assert service.followed(job_id).commands == ()
    assert spare(service, job_id) == ()
    service.advance(GROWING_PAUSE.total_seconds())
    assert spare(service, job_id) == (), "it would keep them again"
    assert growing(service, job_id) is not None
    again = f"{service.now + KEEPING_PAUSE - GROWING_PAUSE:%H:%M:%S} UTC"
    assert size_told(service, job_id) == (
        f"kept slots that it was asked to release, and will not be asked again before {again}"
    )
    service.advance((KEEPING_PAUSE - GROWING_PAUSE).total_seconds())
    assert spare(service, job_id) == (B,)
    assert size_told(service, job_id) == ""


def withdraw(service: Service, job_id: str) -> bool:
    return service.database.write_sync(lambda s: resizing.withdraw(s, job_id, 1, service.now))


async def test_a_recall_that_is_not_answered_is_withdrawn_and_the_slots_stay_the_groups(
    service: Service,
) -> None:
    job_id = await spread(service)
    assert ask_back(service, job_id, B)
    told = f"was asked to release 1 worker by {service.now + RECALL_LIMIT:%H:%M:%S} UTC"
    assert size_told(service, job_id) == told
    assert (await service.queries.explain(job_id)).reason.message.endswith(f"; {told}")
    service.advance(RECALL_LIMIT.total_seconds() - 1)
    assert not live(service, job_id).is_recall_unanswered
    assert not withdraw(service, job_id)
    service.advance(1)
    assert live(service, job_id).is_recall_unanswered
    assert withdraw(service, job_id)
    (event,) = await events_of(service, job_id, "recall_unanswered")
    assert (event.code, event.message) == (
        "recall_unanswered",
        "did not release 1 worker within 120 s of the request: dray assumes that the job keeps "
        "these slots, and may ask it to release all its slots",
    )
    assert event.data == {"recall": 2, "slices": [{"node_id": "node-b", "num_workers": 1}]}
    seen = live(service, job_id)
    assert (seen.slices, seen.is_recall_unanswered) == ((A, B), False)
    assert service.followed(job_id).commands == ()
    assert seen.running is not None
    assert (seen.running.recalled, seen.running.spare) == ((), ())
    service.report(job_id, 1, [said(A, grants=2)])
    assert live(service, job_id).slices == (A,), "slots that are released late are still freed"


@ON_SQLITE
async def test_a_group_that_is_to_leave_has_no_recall_to_answer(service: Service) -> None:
    job_id = await spread(service)
    assert ask_back(service, job_id, B)
    await service.faults.preempt(job_id)
    service.advance(RECALL_LIMIT.total_seconds())
    assert not live(service, job_id).is_recall_unanswered
    assert not withdraw(service, job_id)


@ON_SQLITE
async def test_only_spare_slots_are_asked_back(service: Service) -> None:
    job_id = await spread(service)
    assert not ask_back(service, job_id, A)
    assert not ask_back(service, job_id, B, B)
    await service.faults.preempt(job_id)
    assert not ask_back(service, job_id, B)
    rigid = await service.submit(resources={"num_workers": 2})
    assert service.claim(rigid, workers=2) is not None
    service.report(rigid, 1, phase=Phase.RUNNING)
    assert spare(service, rigid) == ()


@ON_SQLITE
async def test_an_attempt_that_ends_gives_nothing_back_any_more(service: Service) -> None:
    job_id = await spread(service)
    assert ask_back(service, job_id, B)
    service.end(job_id, 1, Cause.NODE_LOST)
    assert service.claim(job_id, 1, workers=2) is not None
    assert service.followed(job_id).commands == ()
