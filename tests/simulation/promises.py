"""Checks of the promises that are visible from outside, during a simulation and at its end."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import text

from dray.views import JobState
from tests.simulation.attempt import Plan, SimAttempt
from tests.simulation.cluster import slots_of

if TYPE_CHECKING:
    from tests.simulation.world import World

KNOWN_AFTER = timedelta(seconds=60)
TERMINAL = {str(state) for state in JobState if state.is_terminal}


class Broken(AssertionError):
    """Raised when a promise is broken. The message begins with the promise's number."""


class Promises:
    """Checks the promises against the database and the cluster of a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._ended: dict[str, tuple[str, int]] = {}
        """State and attempt of jobs that were seen in a terminal state."""

    def started(self, attempt: SimAttempt) -> None:
        """Check I2, I6 and the number of workers when processes start."""
        spec = attempt.spec
        most = spec.spec["resources"]["num_workers"]
        if not (spec.min_workers or most) <= spec.world_size <= most:
            raise Broken(f"{attempt.key} starts {spec.world_size} workers of {most}")
        for other in self._world.cluster.everyone():
            is_same = other.spec.job_id == attempt.spec.job_id
            if other is not attempt and other.num_processes and is_same:
                raise Broken(f"I2: attempts {other.key} and {attempt.key} run at once")
        self._resumes_at_the_newest(attempt)

    def _resumes_at_the_newest(self, attempt: SimAttempt) -> None:
        """I6: it resumes from saved checkpoints, and from the newest of the last attempt that saved
        any."""
        given = [(ref.step, ref.url) for ref in attempt.spec.resume_from]
        if given != sorted(given, key=lambda ref: -ref[0]):
            raise Broken(
                f"I6: {attempt.key} resumes from {given}, which is not sorted newest first"
            )
        unknown = set(given) - self._world.cluster.written
        if unknown:
            raise Broken(f"I6: {attempt.key} resumes from {unknown}, which were never written")
        job_id, number = attempt.key
        newest = (
            "SELECT max(step) FROM checkpoints WHERE job_id = :job AND attempt = (SELECT "
            "max(attempt) FROM checkpoints WHERE job_id = :job AND attempt < :number)"
        )
        with self._world.engine.connect() as connection:
            step = connection.scalar(text(newest), {"job": job_id, "number": number})
        if (given[0][0] if given else None) != step:
            raise Broken(f"I6: {attempt.key} resumes from {given}, and {step} is the newest")

    def hold(self) -> None:
        """Check I1 to I4 and I8 now."""
        with self._world.engine.connect() as connection:
            jobs = connection.execute(text("SELECT id, state, attempt, event_seq FROM jobs")).all()
            live = connection.execute(
                text(
                    "SELECT job_id, attempt, slices, cluster_session, created_at FROM attempts "
                    "WHERE finished_at IS NULL"
                )
            ).all()
            windows = connection.execute(
                text("SELECT name, ends_at, created_at, nodes, all_nodes FROM reservations")
            ).all()
            events = connection.execute(
                text("SELECT job_id, count(*), min(seq), max(seq) FROM events GROUP BY job_id")
            ).all()
        self._none_is_lost({row[0] for row in jobs})
        self._ends_absorb({row[0]: (row[1], row[2]) for row in jobs})
        self._one_live_attempt([(row[0], row[1]) for row in live])
        self._no_slot_twice([(row[2], row[3]) for row in live])
        self._no_slot_unbooked({(row[0], row[1]): row[2] for row in live})
        self._no_start_in_a_window([(row[0], row[2], row[4]) for row in live], windows)
        seqs = {row[0]: tuple(row[1:]) for row in events}
        for job_id, _, _, seq in jobs:
            if seqs.get(job_id) != (seq, 1, seq):
                raise Broken(f"I8: {job_id} counts {seq} events and has {seqs.get(job_id)}")

    def _none_is_lost(self, there: set[str]) -> None:
        lost = [j for j in self._world.acknowledged if j not in there | set(self._world.deleted)]
        if lost:
            raise Broken(f"I1: {lost} were acknowledged but don't exist")

    def _ends_absorb(self, jobs: dict[str, tuple[str, int]]) -> None:
        for job_id, was in self._ended.items():
            if job_id in jobs and jobs[job_id] != was:
                raise Broken(f"I4: {job_id} ended as {was} and is {jobs[job_id]}")
        self._ended |= {job_id: now for job_id, now in jobs.items() if now[0] in TERMINAL}

    def _one_live_attempt(self, live: list[tuple[str, int]]) -> None:
        jobs = [job_id for job_id, _ in live]
        if len(set(jobs)) < len(jobs):
            raise Broken(f"I2: the live attempts are {live}")

    def _no_slot_twice(self, live: list[tuple[str, str]]) -> None:
        cluster = self._world.cluster
        held: dict[str, int] = {}
        for slices, session in live:
            for part in _parts(slices):
                if session == cluster.session:
                    node = part["node_id"]
                    held[node] = held.get(node, 0) + part["num_workers"]
        for node_id, number in held.items():
            if node_id in cluster.nodes and number > slots_of(cluster.nodes[node_id]):
                raise Broken(f"I3: {number} slots of {node_id} are promised")

    def _no_start_in_a_window(
        self, live: list[tuple[str, str, Any]], windows: Sequence[Any]
    ) -> None:
        """No job without a limit gets slots on a node in a maintenance window, nor before it. A
        round may not have seen a window that was created shortly before."""
        for name, ends_at, created_at, nodes, is_all in windows:
            known_at = _time(created_at) + KNOWN_AFTER
            for job_id, slices, claimed_at in live:
                there = {part["node_id"] for part in _parts(slices)}
                if not known_at < _time(claimed_at) < _time(ends_at):
                    continue
                if is_all or there & {*_parts(nodes)}:
                    raise Broken(f"{job_id} got slots on {there} in spite of {name}")

    def _no_slot_unbooked(self, live: dict[tuple[str, int], str]) -> None:
        """I3: the slots held by a group are in its row. Otherwise they would also be given to
        others."""
        for attempt in self._world.cluster.of_this_session():
            if attempt.key not in live:
                continue
            booked: Counter[str] = Counter()
            for part in _parts(live[attempt.key]):
                booked[part["node_id"]] += part["num_workers"]
            for mine in attempt.held:
                booked[mine.node_id] -= mine.num_workers
            over = {node_id: -left for node_id, left in booked.items() if left < 0}
            if over:
                raise Broken(f"I3: {attempt.key} holds slots that are not in the books: {over}")

    async def hold_at_the_end(self) -> None:
        """Check all promises, 60 seconds after every job has ended."""
        self.hold()
        left = self._world.cluster.what_is_left()
        if left:
            raise Broken(f"I7: {left} are left")
        with self._world.engine.connect() as connection:
            jobs = connection.execute(text("SELECT id, name, state, deleted_at FROM jobs")).all()
            moves = connection.execute(
                text("SELECT job_id, to_state FROM events WHERE to_state IS NOT NULL ORDER BY seq")
            ).all()
        for job_id, name, state, deleted_at in jobs:
            if deleted_at is not None:
                raise Broken(f"the deletion of {job_id} was never completed")
            ends = [to for job, to in moves if job == job_id and to in TERMINAL]
            if ends != [state]:
                raise Broken(f"I4: {job_id} is {state} but its events end it as {ends}")
            await self._each_step_once(job_id, name, state)

    async def _each_step_once(self, job_id: str, name: str, state: str) -> None:
        queries = self._world.some_process().runtime.queries
        series = (await queries.metrics(job_id)).series.get("train/loss")
        steps = series.steps if series else []
        if steps != sorted(set(steps)):
            raise Broken(f"I5: the served series of {job_id} repeats: {steps}")
        if job_id in self._world.cluster.mute or state != JobState.SUCCEEDED:
            return
        if steps != list(range(1, Plan.of(name).num_steps + 1)):
            raise Broken(f"I5: {job_id} succeeded with the steps {steps}")


def _time(value: Any) -> datetime:
    """Parse a time from either database."""
    found = datetime.fromisoformat(value) if isinstance(value, str) else value
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found


def _parts(slices: Any) -> list[Any]:
    """Parse a JSON column from either database."""
    parts: list[Any] = json.loads(slices) if isinstance(slices, str) else slices
    return parts
