"""Find jobs, wait for them, change them, end them, and inject faults into them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping
from datetime import datetime

from dray import views
from dray._clients.base import AsyncCalls, BlockingCalls
from dray._http import fault_injection, queues
from dray._http.flows import JobFilter, States
from dray.views import DrillKind, JobState


class JobCalls(BlockingCalls):
    def get(
        self, job_id: str, *, wait_s: float = 0.0, known_state: JobState | None = None
    ) -> views.Job:
        """The job; with `wait_s` (up to 60 s) once its state is not `known_state`."""
        return self._driver.run(self._flows.get(job_id, wait_s, known_state))

    def jobs(
        self,
        *,
        state: States | None = None,
        queue: str | None = None,
        label: Mapping[str, str] | None = None,
        owner: str | None = None,
        project: str | None = None,
        name: str | None = None,
        name_glob: str | None = None,
        text: str | None = None,
        array: str | None = None,
        array_index: int | None = None,
        collapse_arrays: bool = False,
        created_after: datetime | None = None,
        created_before: datetime | None = None,
        where: str | None = None,
        brief: bool = False,
        page_size: int = 100,
    ) -> Generator[views.Job, None, None]:
        """Yield the jobs that match all arguments, newest first, fetched page by page.

        state: one state or several, any of which matches. owner: `@me` is the caller. label: a
        job must have every pair. name_glob: a pattern of the whole name, in which `*` stands for
        any text and `?` for one character. text: a part of the name, in whatever case. array: the
        id of an array. array_index: the index that a job has in its array. collapse_arrays: yield
        one job alone of each array; with `state`, of those with a job in any of them.
        created_after, created_before: with a time zone; the job was submitted at the first or
        later, and before the second. where: a search expression, such as
        `val/accuracy > 0.9 and train.optimizer.lr < 0.01`; raises InvalidSearch with the column at
        fault. brief: leave `spec` of each empty, which is most of an answer.
        """
        chosen = JobFilter(
            *(state, queue, label, owner, project),
            name=name,
            name_glob=name_glob,
            text=text,
            array=array,
            array_index=array_index,
            collapse_arrays=collapse_arrays,
            created_after=created_after,
            created_before=created_before,
            where=where,
            brief=brief,
        )
        return self._driver.iterate(self._flows.jobs(chosen, page_size))

    def resolve(self, reference: str, *, arrays: bool = False) -> str:
        """The id of the one job with this name, or whose id begins with it; `@last` is the caller's
        newest job; `ARRAY/INDEX` is a job of an array. A complete id is returned unchanged. With
        `arrays` it may be an array's: by its id, how that begins, or the name of its jobs.

        Raises JobNotFound, and AmbiguousJob with the candidates if there are several.
        """
        return self._driver.run(self._flows.resolve(reference, arrays=arrays))

    def wait(
        self,
        job_id: str,
        timeout_s: float | None = None,
        states: States | None = None,
    ) -> views.Job:
        """Return the job as soon as it is over or in one of `states`, whatever its end.

        The client uses long polls and survives restarts of the server. Raises WaitTimeout after
        `timeout_s` seconds; the job goes on.
        """
        return self._driver.run(self._flows.wait(job_id, timeout_s, states))

    def cancel(self, job_id: str) -> views.Job:
        """Stop the job in any state; raises JobFinished if it already succeeded or failed."""
        return self._driver.run(self._flows.cancel(job_id))

    def hold(self, job_id: str) -> views.Job:
        """Keep a waiting job from starting until `release`; raises JobNotWaiting if it does not
        wait."""
        return self._driver.run(queues.change_job(self._flows, job_id, held=True))

    def release(self, job_id: str) -> views.Job:
        """Let a held job start again."""
        return self._driver.run(queues.change_job(self._flows, job_id, held=False))

    def move(self, job_id: str, queue: str | None = None, *, first: bool = False) -> views.Job:
        """Move a waiting job to another queue, before all others of its priority there with
        `first`, or both. The rules of that queue apply. Raises JobNotWaiting, UnknownQueue,
        QueueFull or PriorityTooHigh, and Forbidden for `first` unless an admin asks."""
        flow = queues.change_job(self._flows, job_id, queue=queue, first=first or None)
        return self._driver.run(flow)

    def set_priority(self, job_id: str, priority: int) -> views.Job:
        """Change the priority of a job that has not ended; raises PriorityTooHigh above the queue's
        `max_priority` unless an admin asks."""
        return self._driver.run(queues.change_job(self._flows, job_id, priority=priority))

    def preempt(self, job_id: str, *, grace_s: float | None = None) -> views.Job:
        """Have a job save a checkpoint within `grace_s` seconds (by default the server's setting),
        leave its slots and resume from its place in the queue. Raises JobNotRunning if the job
        holds no slots."""
        return self._driver.run(fault_injection.preempt(self._flows, job_id, grace_s))

    def drill(
        self,
        job_id: str,
        *,
        kind: DrillKind | str,
        rank: int = 0,
        at_step: int | None = None,
        wait: bool = True,
        idempotency_key: str | None = None,
    ) -> views.Drill:
        """Inject a fault into a job that trains: `kill` or `stall` a rank, or `preempt` the job.

        The fault is injected at once, or when `at_step` optimizer steps are done. Returns the drill
        when it is over, or with `wait=False` immediately. Raises JobNotRunning or DrillImpossible.
        """
        flow = fault_injection.drill(
            self._flows, job_id, DrillKind(kind), rank, at_step, wait, idempotency_key
        )
        return self._driver.run(flow)

    def drills(self, job_id: str) -> list[views.Drill]:
        """Every drill of the job, oldest first."""
        return self._driver.run(fault_injection.drills(self._flows, job_id))

    def hangs(self, job_id: str) -> list[views.Hang]:
        """The newest hangs that were found, with the culprits and the stack of every rank."""
        return self._driver.run(fault_injection.hangs(self._flows, job_id))

    def delete(self, job_id: str) -> None:
        """Remove a finished job with all its files; raises JobLive if the job has not ended."""
        self._driver.run(self._flows.delete(job_id))

    def explain(self, job_id: str) -> views.Explanation:
        """Explain why the job is in its state, and what it waits for."""
        return self._driver.run(self._flows.explain(job_id))


class AsyncJobCalls(AsyncCalls):
    """See `JobCalls`, which has the same arguments, answers and errors."""

    async def get(
        self, job_id: str, *, wait_s: float = 0.0, known_state: JobState | None = None
    ) -> views.Job:
        return await self._driver.run(self._flows.get(job_id, wait_s, known_state))

    def jobs(
        self,
        *,
        state: States | None = None,
        queue: str | None = None,
        label: Mapping[str, str] | None = None,
        owner: str | None = None,
        project: str | None = None,
        name: str | None = None,
        name_glob: str | None = None,
        text: str | None = None,
        array: str | None = None,
        array_index: int | None = None,
        collapse_arrays: bool = False,
        created_after: datetime | None = None,
        created_before: datetime | None = None,
        where: str | None = None,
        brief: bool = False,
        page_size: int = 100,
    ) -> AsyncGenerator[views.Job, None]:
        chosen = JobFilter(
            *(state, queue, label, owner, project),
            name=name,
            name_glob=name_glob,
            text=text,
            array=array,
            array_index=array_index,
            collapse_arrays=collapse_arrays,
            created_after=created_after,
            created_before=created_before,
            where=where,
            brief=brief,
        )
        return self._driver.iterate(self._flows.jobs(chosen, page_size))

    async def resolve(self, reference: str, *, arrays: bool = False) -> str:
        return await self._driver.run(self._flows.resolve(reference, arrays=arrays))

    async def wait(
        self,
        job_id: str,
        timeout_s: float | None = None,
        states: States | None = None,
    ) -> views.Job:
        return await self._driver.run(self._flows.wait(job_id, timeout_s, states))

    async def cancel(self, job_id: str) -> views.Job:
        return await self._driver.run(self._flows.cancel(job_id))

    async def hold(self, job_id: str) -> views.Job:
        return await self._driver.run(queues.change_job(self._flows, job_id, held=True))

    async def release(self, job_id: str) -> views.Job:
        return await self._driver.run(queues.change_job(self._flows, job_id, held=False))

    async def move(
        self, job_id: str, queue: str | None = None, *, first: bool = False
    ) -> views.Job:
        flow = queues.change_job(self._flows, job_id, queue=queue, first=first or None)
        return await self._driver.run(flow)

    async def set_priority(self, job_id: str, priority: int) -> views.Job:
        return await self._driver.run(queues.change_job(self._flows, job_id, priority=priority))

    async def preempt(self, job_id: str, *, grace_s: float | None = None) -> views.Job:
        return await self._driver.run(fault_injection.preempt(self._flows, job_id, grace_s))

    async def drill(
        self,
        job_id: str,
        *,
        kind: DrillKind | str,
        rank: int = 0,
        at_step: int | None = None,
        wait: bool = True,
        idempotency_key: str | None = None,
    ) -> views.Drill:
        flow = fault_injection.drill(
            self._flows, job_id, DrillKind(kind), rank, at_step, wait, idempotency_key
        )
        return await self._driver.run(flow)

    async def drills(self, job_id: str) -> list[views.Drill]:
        return await self._driver.run(fault_injection.drills(self._flows, job_id))

    async def hangs(self, job_id: str) -> list[views.Hang]:
        return await self._driver.run(fault_injection.hangs(self._flows, job_id))

    async def delete(self, job_id: str) -> None:
        await self._driver.run(self._flows.delete(job_id))

    async def explain(self, job_id: str) -> views.Explanation:
        return await self._driver.run(self._flows.explain(job_id))
