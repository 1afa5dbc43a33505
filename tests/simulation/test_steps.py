"""All promises hold when the service is killed, or stopped beyond its lease, at any of its steps.

A step is a call to the database or the cluster: before it arrives, or after it arrived but before
its answer does. `make soak` tries all steps on SQLite and every `SHARE`-th on PostgreSQL, where
only the SQL differs and every statement is executed many times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from ray_workers.shared.slices import Slice
from service.db.session import Database
from service.domain import leases
from service.domain.scheduling.elastic import resizing
from service.domain.scheduling.elastic.resizing import Holding, Resized
from tests.marks import ONE_SET, SOAK, soak_but
from tests.simulation import books, scenarios
from tests.simulation.cluster import SimCluster
from tests.simulation.conftest import TIMEOUT_S, seeds
from tests.simulation.promises import Broken
from tests.simulation.scenarios import Injection, Story

pytestmark = [pytest.mark.usefixtures("_quiet"), pytest.mark.timeout(TIMEOUT_S)]

SHARE = 8
PARTS = 24
"""Parts of a story's steps: every 24th from the first, every 24th from the second, and so on."""
QUARTERS = 4
"""Parts of the steps of shorter stories."""
IN_PARTS = soak_but(range(PARTS), short=[seeds().start % PARTS])
"""`make test` tries the steps of a single part, selected by the first seed."""


@pytest.fixture
def postgres_engine(postgres_url: str) -> Iterator[Engine]:
    database = Database(postgres_url)
    yield database.engine
    database.close()


def _fault_points(story: Story, folder: Path) -> range:
    return scenarios.tell(story, books.empty_memory(), folder).fault_points


def _inject_at(steps: range, story: Story, inject: Injection, folder: Path) -> None:
    for at in steps:
        scenarios.tell(story, books.empty_memory(), folder, at, inject)


@pytest.mark.parametrize("part", IN_PARTS)
def test_killed_at_any_step_it_is_taken_up_by_the_next(folder: Path, part: int) -> None:
    story = scenarios.all_that_happens_to_jobs
    steps = _fault_points(story, folder)
    assert len(steps) > 100
    _inject_at(steps[part::PARTS], story, scenarios.kill, folder)


@SOAK
@pytest.mark.parametrize("part", IN_PARTS)
def test_killed_at_a_step_it_is_taken_up_by_the_next_on_postgresql(
    folder: Path, part: int, postgres_engine: Engine
) -> None:
    story = scenarios.all_that_happens_to_jobs
    for at in _fault_points(story, folder)[::SHARE][part::PARTS]:
        engine = books.empty_postgres(postgres_engine)
        scenarios.tell(story, engine, folder, at, scenarios.kill)


@SOAK
@pytest.mark.parametrize("part", IN_PARTS)
def test_each_minute_of_a_schedule_gets_one_job_wherever_the_service_is_killed(
    folder: Path, part: int
) -> None:
    story = scenarios.a_schedule_submits_each_minute
    steps = _fault_points(story, folder)
    assert len(steps) > 100
    _inject_at(steps[part::PARTS], story, scenarios.kill, folder)


STORIES = [scenarios.one_takes_over, scenarios.one_launches_late]


@ONE_SET
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
@pytest.mark.parametrize("part", soak_but(range(QUARTERS), short=[seeds().start % QUARTERS]))
def test_stopped_at_any_step_past_its_lease_it_does_nothing_of_before(
    folder: Path, story: Story, part: int
) -> None:
    steps = _fault_points(story, folder)[part::QUARTERS]
    _inject_at(steps, story, scenarios.stop_for_long, folder)


@SOAK
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_stopped_at_a_step_past_its_lease_it_does_nothing_of_before_on_postgresql(
    folder: Path, story: Story, postgres_engine: Engine
) -> None:
    for at in _fault_points(story, folder)[::SHARE]:
        engine = books.empty_postgres(postgres_engine)
        scenarios.tell(story, engine, folder, at, scenarios.stop_for_long)


@SOAK
@pytest.mark.parametrize("part", IN_PARTS)
def test_a_group_of_changing_size_holds_what_the_books_say_wherever_the_service_is_killed(
    folder: Path, part: int
) -> None:
    story = scenarios.a_group_shrinks_and_grows
    told = scenarios.tell(story, books.empty_memory(), folder)
    trace = "\n".join(told.trace)
    assert "takes [Slice" in trace
    assert "'lacking': 1" in trace
    _inject_at(told.fault_points[part::PARTS], story, scenarios.kill, folder)


# Check that broken rules are detected, so that the tests above can fail.


@SOAK
def test_without_the_fence_a_slot_would_be_given_twice(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = scenarios.one_takes_over
    steps = _fault_points(story, folder)
    monkeypatch.setattr(leases, "holds", lambda *_: True)
    with pytest.raises(Broken, match="I3"):
        _inject_at(steps, story, scenarios.stop_for_long, folder)


@SOAK
def test_if_an_older_word_freed_a_grant_its_slots_would_be_given_twice(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = scenarios.a_group_shrinks_and_grows
    steps = _fault_points(story, folder)

    def freed(holding: Holding, kept: Sequence[Slice], known: int, lacking: int) -> Resized:
        return Resized(Holding(tuple(kept), holding.resize_number), None)

    monkeypatch.setattr(resizing, "resized", freed)
    with pytest.raises(Broken, match="I3"):
        _inject_at(steps, story, scenarios.kill, folder)


class _Forgets(dict[Any, None]):
    def __contains__(self, key: object) -> bool:
        return False


@SOAK
def test_if_an_ended_attempt_could_be_launched_two_would_run_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = scenarios.one_launches_late
    steps = _fault_points(story, folder)
    make = SimCluster.__init__

    def forgetful(self: SimCluster, *arguments: Any) -> None:
        make(self, *arguments)
        self.closed = _Forgets()

    monkeypatch.setattr(SimCluster, "__init__", forgetful)
    with pytest.raises(Broken, match="I2"):
        _inject_at(steps, story, scenarios.stop_for_long, folder)
