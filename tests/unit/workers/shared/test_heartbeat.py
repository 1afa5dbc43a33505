"""The page of a rank is written by one process, and read and changed by others."""

from __future__ import annotations

import contextlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ray_workers.shared import heartbeat
from ray_workers.shared.heartbeat import (
    RING,
    TIME_CATEGORIES,
    HeartbeatPage,
    RankAssignment,
    RankObservation,
    RankPhase,
    RankStatus,
    TimeCategory,
    UnreportedStep,
)
from ray_workers.supervision.rules.slot_time import SlotTimeLedger


def figures(step: int) -> UnreportedStep:
    return UnreportedStep(step, 0, 200, 0.1, 2.0 / step, 0.5, 0.01, 0.001)


def test_what_a_process_does_is_seen_from_outside(tmp_path: Path) -> None:
    page = HeartbeatPage(heartbeat.page_path(heartbeat.prefix_of(tmp_path, 3, 1)))
    page.begin(generation=2, step=7)
    page.enter(RankPhase.COMPUTE, TimeCategory.USEFUL)
    page.exchange()
    page.commit(8)
    (observation,) = heartbeat.observe_ranks(tmp_path)
    assert (observation.rank, observation.incarnation, observation.state) == (3, 1, "R")
    status = observation.status
    assert (status.step, status.phase, status.collective) == (8, RankPhase.EXCHANGE, 1)
    assert (status.generation, status.resumed_step, status.pid) == (2, 7, os.getpid())
    assert status.use is TimeCategory.USEFUL
    assert status.first_at > 0
    assert 0 <= observation.age_s < 60


def test_the_thread_that_trains_is_the_main_thread_until_another_one_takes_over(
    tmp_path: Path,
) -> None:
    path = heartbeat.page_path(heartbeat.prefix_of(tmp_path, 0, 0))
    page = HeartbeatPage(path)
    assert heartbeat.observe_ranks(tmp_path)[0].status.training_thread == os.getpid()
    page.trains_in(4711)
    assert heartbeat.observe_ranks(tmp_path)[0].status.training_thread == 4711
    HeartbeatPage(path, goes_on=True)  # another program, whose main thread trains
    assert heartbeat.observe_ranks(tmp_path)[0].status.training_thread == os.getpid()


def test_a_rank_must_leave_its_group_once_a_later_one_is_announced(tmp_path: Path) -> None:
    prefix = heartbeat.prefix_of(tmp_path, 0, 0)
    page = HeartbeatPage(heartbeat.page_path(prefix))
    page.begin(generation=2, step=7)
    assert not page.must_leave_group
    heartbeat.announce(prefix, RankAssignment(3, 0, 1, None))
    assert page.must_leave_group
    page.begin(generation=3, step=7)
    assert not page.must_leave_group


def test_the_first_step_of_a_generation_keeps_its_time(tmp_path: Path) -> None:
    page = HeartbeatPage(heartbeat.page_path(heartbeat.prefix_of(tmp_path, 0, 0)))
    page.commit(1)
    first = heartbeat.observe_ranks(tmp_path)[0].status.first_at
    page.commit(2)
    assert heartbeat.observe_ranks(tmp_path)[0].status.first_at == first
    page.begin(1, 2)
    assert heartbeat.observe_ranks(tmp_path)[0].status.first_at == 0.0


def test_a_generation_is_verified_once_its_ranks_have_compared_their_copies(tmp_path: Path) -> None:
    page = HeartbeatPage(heartbeat.page_path(heartbeat.prefix_of(tmp_path, 0, 0)))
    page.begin(1, 2, is_verified=False)
    page.commit(3)
    assert not heartbeat.observe_ranks(tmp_path)[0].status.is_verified
    page.verify()
    assert heartbeat.observe_ranks(tmp_path)[0].status.is_verified


def test_what_gets_on_is_young_again_and_its_time_is_booked_whole(tmp_path: Path) -> None:
    page = HeartbeatPage(heartbeat.page_path(heartbeat.prefix_of(tmp_path, 0, 0)))
    page.enter(RankPhase.EVALUATE, TimeCategory.USEFUL)
    began = time.monotonic()
    entered = heartbeat.observe_ranks(tmp_path)[0].status.since
    page.move()
    moved = heartbeat.observe_ranks(tmp_path)[0].status.since
    page.enter(RankPhase.SAVE, TimeCategory.CHECKPOINTING)
    saved = heartbeat.observe_ranks(tmp_path)[0].status
    assert entered < began < moved < saved.since
    assert saved.uses[TimeCategory.USEFUL] == pytest.approx(saved.since - entered)


def test_an_assignment_is_announced_and_found(tmp_path: Path) -> None:
    prefix = heartbeat.prefix_of(tmp_path, 0, 0)
    with pytest.raises(FileNotFoundError):
        heartbeat.announce(prefix, RankAssignment(1, 0, 2, None))
    page = HeartbeatPage(heartbeat.page_path(prefix))
    assert page.wanted == 0
    heartbeat.announce(prefix, RankAssignment(1, 0, 2, None))
    assert page.wanted == 1
    assert heartbeat.announced(prefix) == RankAssignment(1, 0, 2, None)
    assert not page.is_asked_to_leave
    heartbeat.ask_to_leave(prefix)
    assert page.is_asked_to_leave


def test_an_assignment_announced_to_a_page_that_is_just_being_made_is_not_overwritten(
    tmp_path: Path,
) -> None:
    def announce(prefix: str) -> None:
        while True:
            with contextlib.suppress(FileNotFoundError):
                return heartbeat.announce(prefix, RankAssignment(1, 0, 2, None))

    with ThreadPoolExecutor(1) as others:
        for rank in range(300):
            prefix = heartbeat.prefix_of(tmp_path, rank, 0)
            announced = others.submit(announce, prefix)
            page = HeartbeatPage(heartbeat.page_path(prefix))
            announced.result()
            assert page.wanted == 1, rank


def test_the_last_figures_outlive_their_process(tmp_path: Path) -> None:
    path = heartbeat.page_path(heartbeat.prefix_of(tmp_path, 0, 0))
    page = HeartbeatPage(path)
    assert page.kept() == []
    for step in range(1, RING + 6):
        page.keep(figures(step))
    del page
    found = heartbeat.unreported_steps(path.read_bytes())
    assert found == [figures(step) for step in range(6, RING + 6)]


def test_a_page_that_is_just_being_made_is_not_seen(tmp_path: Path) -> None:
    heartbeat.page_path(heartbeat.prefix_of(tmp_path, 0, 0)).write_bytes(b"")
    assert heartbeat.observe_ranks(tmp_path) == []
    assert heartbeat.observe_ranks(tmp_path / "none") == []


def seen(
    incarnation: int, uses: dict[TimeCategory, float], *, alive: TimeCategory | None = None
) -> RankObservation:
    status = RankStatus(
        1, RankPhase.COMPUTE, 0, 0.0, 0, 0, 0.0, 1, alive or TimeCategory.USEFUL, uses, False
    )
    return RankObservation(0, incarnation, status, 2.0, "R" if alive else "")


def test_the_classes_of_the_ledger_add_up_to_what_was_held() -> None:
    ledger = SlotTimeLedger()
    none = dict.fromkeys(TIME_CATEGORIES, 0.0)
    ledger.hold(1, now=100.0)
    ledger.hold(1, now=103.0)
    books = ledger.account([], TimeCategory.STARTING)
    assert books == dict.fromkeys(map(str, TIME_CATEGORIES), 0.0) | {"starting": 3.0}
    first = seen(
        0, none | {TimeCategory.STARTING: 1.0, TimeCategory.USEFUL: 4.0}, alive=TimeCategory.USEFUL
    )
    ledger.hold(2, now=110.0)
    books = ledger.account([first], TimeCategory.IDLE)
    assert books["useful"] == pytest.approx(6.0)
    assert sum(books.values()) == pytest.approx(10.0)
    dead = seen(0, none | {TimeCategory.STARTING: 1.0, TimeCategory.USEFUL: 7.0})
    second = seen(
        1,
        none | {TimeCategory.RECOVERING: 0.5, TimeCategory.RECOMPUTED: 1.0},
        alive=TimeCategory.USEFUL,
    )
    ledger.hold(2, now=112.5)
    books = ledger.account([dead, second], TimeCategory.RECOVERING)
    assert books["useful"] == pytest.approx(9.0)
    assert books["recomputed"] == pytest.approx(1.0)
    assert books["recovering"] > 0.5
    assert sum(books.values()) == pytest.approx(15.0)
    gone = ledger.account([second], TimeCategory.IDLE)
    assert gone["useful"] == pytest.approx(9.0), "the uses in a page are kept when the page is gone"


def test_what_was_written_into_a_page_is_there_when_its_process_goes_on_as_another_program(
    tmp_path: Path,
) -> None:
    prefix = heartbeat.prefix_of(tmp_path, 0, 0)
    HeartbeatPage(heartbeat.page_path(prefix))
    heartbeat.ask_to_leave(prefix)
    assert HeartbeatPage(heartbeat.page_path(prefix), goes_on=True).is_asked_to_leave
