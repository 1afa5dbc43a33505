"""Jobs and arrays that start after others are randomly submitted, ended, cancelled, and deleted:
their states match a slow search of the whole graph."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from dray.views import JobState
from ray_workers.shared.contracts import Cause
from service.db.session import Database
from service.domain.errors import DependencyCircular, DependencyNeverSatisfied
from service.loops.shared.queue_view import snapshot
from service.storage.storage import Storage
from tests.marks import SOAK, soak
from tests.unit.service.helpers import Service

BAD = (JobState.FAILED, JobState.CANCELLED)
After = list[tuple[str, str, bool]]
"""The names of jobs and arrays, the condition, and whether it is for each job of an array."""
Pick = tuple[int, str, bool]
NUMBERS = st.integers(0, 99)
PICKS = st.lists(
    st.tuples(
        NUMBERS,
        st.sampled_from(["success", "success", "end", "failure"]),
        st.sampled_from([0, 0, 1]),
    ),
    max_size=3,
)
SUBMITS = st.tuples(PICKS, st.sampled_from([None, None, 1, 3, 3]))
"""The entries of `after`, as numbers of jobs and arrays, and the size of the array."""


@dataclass
class Modelled:
    """The oracle's record of a job."""

    after: After
    array_id: str | None
    index: int | None = None
    state: JobState = JobState.QUEUED
    is_deleted: bool = False


@dataclass
class Graph:
    """The oracle, which does not store dependencies, but searches all jobs each time."""

    jobs: dict[str, Modelled] = field(default_factory=dict)

    def states(self, name: str, index: int | None = None) -> list[JobState]:
        """Return the states of the job, or of the jobs in the array; with `index`, only of the job
        with this index that has not been deleted."""
        return [
            job.state
            for key, job in self.jobs.items()
            if name in (key, job.array_id)
            and (index is None or (job.index == index and not job.is_deleted))
        ]

    def is_doomed(self, after: After, index: int | None) -> bool:
        return any(
            self.is_against(on, self.states(name, index if each else None))
            for name, on, each in after
        )

    def is_against(self, on: str, states: list[JobState]) -> bool:
        if on == "success":
            return any(state in BAD for state in states)
        return on == "failure" and bool(states) and {*states} == {JobState.SUCCEEDED}

    def is_waiting(self, after: After, index: int | None) -> bool:
        return any(
            not state.is_terminal
            for name, _, each in after
            for state in self.states(name, index if each else None)
        )

    def waits_for(self, one: str, other: str) -> bool:
        """Whether the job `one` is, or waits for, `other`, directly or through other jobs."""
        seen: set[str] = set()
        names = [one]
        while names:
            name = names.pop()
            if name == other:
                return True
            if name not in seen:
                seen.add(name)
                names += [
                    after
                    for key, job in self.jobs.items()
                    if name in (key, job.array_id) and job.state is JobState.QUEUED
                    for after, _, each in job.after
                    if any(not state.is_terminal for state in self.states(after))
                ]
        return False

    def settle(self) -> None:
        while fallen := [
            job
            for job in self.jobs.values()
            if job.state is JobState.QUEUED and self.is_doomed(job.after, job.index)
        ]:
            for job in fallen:
                job.state = JobState.CANCELLED


def as_written(after: After) -> list[dict[str, Any]]:
    return [{"job": name, "on": on, "each": each} for name, on, each in after]


class Dependencies(RuleBasedStateMachine):
    """Choose one of the existing jobs by number."""

    def __init__(self, template: Path, folder: Path) -> None:
        super().__init__()
        shutil.copy(template, folder / "dray.db")
        self.database = Database(f"sqlite:///{folder / 'dray.db'}")
        self.service = Service(self.database, Storage((folder / "storage").as_uri()), folder)
        self.graph = Graph()
        self.sizes: dict[str, int] = {}
        """Sizes of the arrays."""

    def teardown(self) -> None:
        self.database.close()

    def units(self) -> list[str]:
        """Return all ids that a document can name."""
        there = {
            name
            for key, job in self.graph.jobs.items()
            if not job.is_deleted
            for name in (key, job.array_id)
            if name is not None
        }
        return sorted(there)

    def one_of(self, number: int, *states: JobState) -> str | None:
        found = [
            key
            for key, job in self.graph.jobs.items()
            if job.state in states and not job.is_deleted
        ]
        return found[number % len(found)] if found else None

    @initialize(submits=st.lists(SUBMITS, min_size=4, max_size=10))
    def begin(self, submits: list[tuple[list[Pick], int | None]]) -> None:
        for picks, size in submits:
            self.submit(picks, size)

    @rule(submits=SUBMITS)
    def submit_one(self, submits: tuple[list[Pick], int | None]) -> None:
        self.submit(*submits)

    def picked(self, picks: list[Pick], size: int | None) -> After:
        units = self.units()
        names = {units[number % len(units)]: more for number, *more in picks} if units else {}
        return [
            (name, on, bool(each) and size is not None and self.sizes.get(name) == size)
            for name, (on, each) in names.items()
        ]

    def submit(self, picks: list[Pick], size: int | None) -> None:
        after = self.picked(picks, size)
        document: dict[str, Any] = {"after": as_written(after)}
        if size is not None:
            document["array"] = {"size": size}
        graph = self.graph
        never = [e for e in after if self.never(e, size)]
        try:
            first = asyncio.run(self.service.submit(**document))
        except DependencyNeverSatisfied:
            assert never
            return
        assert not never
        array_id = asyncio.run(self.service.jobs.get(first)).array_id
        found = asyncio.run(self.service.jobs.list(limit=500)).items
        made = [job for job in found if job.id not in graph.jobs]
        assert len(made) == (size or 1)
        for job in made:
            graph.jobs[job.id] = Modelled(after, array_id, job.array_index)
        if array_id is not None and size is not None:
            self.sizes[array_id] = size
        graph.settle()

    def never(self, entry: tuple[str, str, bool], size: int | None) -> bool:
        """Whether a submission must be refused because of this entry."""
        name, on, each = entry
        if not each:
            return self.graph.is_doomed([entry], None)
        states = self.graph.states(name)
        is_bad = [self.graph.is_against(on, [state]) for state in states]
        return all(state.is_terminal for state in states) and all(is_bad)

    @rule(number=NUMBERS, picks=PICKS)
    def change(self, number: int, picks: list[Pick]) -> None:
        """Replace the dependencies of a job that is not part of an array."""
        free = [
            key
            for key, job in self.graph.jobs.items()
            if job.state is JobState.QUEUED and job.array_id is None
        ]
        if not free:
            return
        job_id = free[number % len(free)]
        after = self.picked(picks, None)
        never = self.graph.is_doomed(after, None)
        circular = any(self.graph.waits_for(name, job_id) for name, _, _ in after)
        try:
            asyncio.run(self.service.change(job_id, document={"after": as_written(after)}))
        except DependencyCircular:
            assert circular
        except DependencyNeverSatisfied:
            assert never
        else:
            assert not never
            assert not circular
            self.graph.jobs[job_id].after = after

    @rule(number=NUMBERS, cause=st.sampled_from([Cause.SUCCEEDED, Cause.BAD_DATA]))
    def run(self, number: int, cause: Cause) -> None:
        free = [
            key
            for key, job in self.graph.jobs.items()
            if job.state is JobState.QUEUED and not self.graph.is_waiting(job.after, job.index)
        ]
        if not free:
            return
        job_id = free[number % len(free)]
        assert self.service.claim(job_id) is not None
        self.service.end(job_id, 1, cause)
        good = cause is Cause.SUCCEEDED
        self.graph.jobs[job_id].state = JobState.SUCCEEDED if good else JobState.FAILED
        self.graph.settle()

    @rule(number=NUMBERS)
    def cancel(self, number: int) -> None:
        job_id = self.one_of(number, JobState.QUEUED)
        if job_id is not None:
            asyncio.run(self.service.jobs.cancel(job_id))
            self.graph.jobs[job_id].state = JobState.CANCELLED
            self.graph.settle()

    @rule(number=NUMBERS)
    def cancel_array(self, number: int) -> None:
        arrays = [unit for unit in self.units() if unit.startswith("array-")]
        if not arrays:
            return
        array_id = arrays[number % len(arrays)]
        asyncio.run(self.service.jobs.arrays.cancel(array_id))
        for job in self.graph.jobs.values():
            if job.array_id == array_id and not job.state.is_terminal:
                job.state = JobState.CANCELLED
        self.graph.settle()

    @rule(number=NUMBERS)
    def delete(self, number: int) -> None:
        """The states of individual jobs, and of arrays based on their remaining jobs."""
        job_id = self.one_of(number, JobState.SUCCEEDED, *BAD)
        if job_id is not None and self.graph.jobs[job_id].array_id is None:
            asyncio.run(self.service.jobs.delete(job_id))
            self.graph.jobs[job_id].is_deleted = True

    @invariant()
    def the_service_knows_what_the_oracle_finds(self) -> None:
        waiting, _ = self.database.read_sync(lambda s: snapshot(s, self.service.now))
        graph = self.graph
        queued = {key for key, job in graph.jobs.items() if job.state is JobState.QUEUED}
        assert {job.job_id for job in waiting} == queued
        held = {
            key for key in queued if graph.is_waiting(graph.jobs[key].after, graph.jobs[key].index)
        }
        assert {job.job_id for job in waiting if job.after} == held
        for key, job in graph.jobs.items():
            if not job.is_deleted:
                assert asyncio.run(self.service.jobs.get(key)).state is job.state


@SOAK
@pytest.mark.parametrize("num_runs", [10, soak(60)])
def test_the_service_agrees_with_a_slow_look_at_the_whole_graph(
    sqlite_url: str, tmp_path: Path, num_runs: int
) -> None:
    template = tmp_path / "dray.db"
    assert sqlite_url.endswith(str(template))
    folders = (tmp_path / str(number) for number in count())

    class Machine(Dependencies):
        def __init__(self) -> None:
            folder = next(folders)
            folder.mkdir()
            super().__init__(template, folder)

    bounded = settings(max_examples=num_runs, stateful_step_count=15)
    run_state_machine_as_test(Machine, settings=bounded)
