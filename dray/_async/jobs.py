"""Find, wait for, change and stop jobs, arrays and sweeps, and inject faults."""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from datetime import datetime
from typing import Any

from dray import errors, views
from dray._async.calls import Calls
from dray._http import references
from dray._http.transport import LONG_POLL_S, Call, Parameters, params, present, segment
from dray.filters import JobFilter, JobTable, States, label_texts, states_of
from dray.views import DrillKind, JobState


class JobCalls(Calls):
    async def get(
        self, job_id: str, *, wait_s: float = 0.0, known_state: JobState | None = None
    ) -> views.Job:
        """Return the job. With `wait_s` (at most 60), wait up to this many seconds until the job's
        state differs from `known_state`."""
        return await self._job(job_id, wait_s, known_state)

    async def _job(
        self,
        job_id: str,
        wait_s: float = 0.0,
        known_state: JobState | None = None,
        *,
        patient: bool = False,
    ) -> views.Job:
        query = params(wait_s=wait_s or None, state=known_state)
        call = Call("GET", _path(job_id), query, wait_s=wait_s)
        return await self._read(views.Job, call, patient=patient)

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
        schedule: str | None = None,
        reservation: str | None = None,
        collapse_arrays: bool = False,
        created_after: datetime | None = None,
        created_before: datetime | None = None,
        where: str | None = None,
        sort: str | None = None,
        columns: Sequence[str] | None = None,
        brief: bool = False,
        page_size: int = 100,
    ) -> AsyncGenerator[views.Job, None]:
        """Yield the jobs that match all arguments, newest first or in the order of `sort`. Jobs are
        fetched page by page.

        state: one or more states; a job must be in one of them. queue: the job's queue, or a queue
        above it. owner: a user name, or `@me` for the caller. label: key-value pairs, all of which
        a job must have. name_glob: a pattern for the complete name, in which `*` matches any text
        and `?` matches one character. text: a part of the name, ignoring case. array: the id of an
        array. array_index: the index of a job in its array. schedule: the id or name of a schedule.
        reservation: the name of the reservation that a job names. collapse_arrays: yield only one
        job for each array; with `state`, only for arrays with a job in one of the states.
        created_after, created_before: times with a time zone; a job must have been submitted at or
        after `created_after` and before `created_before`. where: a search expression such as
        `val/accuracy > 0.9 and train.optimizer.lr < 0.01`; raises InvalidSearch with the column of
        the error. sort: a column such as `best:val/accuracy` or, for descending order,
        `-best:val/accuracy`; jobs without the value come last. If a job's value changes during the
        iteration, the job can be missing. columns: columns such as `lr` and `cost`, whose values
        are in each job's `values`. brief: omit each job's `spec`, which makes up most of a
        response.
        """
        chosen = JobTable.model_construct(
            state=states_of(state),
            queue=queue,
            label=label_texts(label),
            owner=owner,
            project=project,
            name=name,
            name_glob=name_glob,
            text=text,
            array=array,
            array_index=array_index,
            schedule=schedule,
            reservation=reservation,
            collapse_arrays=collapse_arrays,
            created_after=created_after,
            created_before=created_before,
            where=where,
            sort=sort,
            columns=None if columns is None else ",".join(columns),
        )
        query = (*references.query_of(chosen), *params(brief=brief))
        return self._listed_once(query, page_size)

    async def _listed_once(
        self, query: Parameters, page_size: int
    ) -> AsyncGenerator[views.Job, None]:
        """Yield each job of the list once. In a sorted list, a job can be on two pages if its value
        changes between them."""
        seen = set()
        async for job in self._items(views.JobPage, "/v1/jobs", query, page_size=page_size):
            if job.id not in seen:
                seen.add(job.id)
                yield job

    async def resolve(self, reference: str, *, arrays: bool = False) -> str:
        """Return the id of the job that `reference` identifies: a name, or the beginning of an id.
        `@last` is the caller's newest job, and `ARRAY/INDEX` is a job of an array. A complete id is
        returned unchanged. With `arrays`, the reference can also identify an array, by its id, the
        beginning of its id, or the name of its jobs; then the id of the array is returned.

        Raises JobNotFound if no job matches, and AmbiguousJob with the candidates if several jobs
        match.
        """
        kinds = "(job|array)" if arrays else "job"
        if re.fullmatch(rf"{kinds}-[0-9a-z]{{26}}", reference):
            return reference
        found: dict[str, views.Job] = {}
        for chosen in references.meant(reference, arrays):
            num = 1 if reference == "@last" else references.MAX_CANDIDATES + 1
            call = Call("GET", "/v1/jobs", (*references.query_of(chosen), *params(limit=num)))
            page = await self._read(views.JobPage, call)
            for job in page.items:
                found[(chosen.collapse_arrays and job.array_id) or job.id] = job
        if len(found) > 1:
            raise references.ambiguous(reference, found)
        for one in found:
            return one
        raise references.not_found(reference)

    async def resolve_all(self, reference: str, *, arrays: bool = False) -> list[str]:
        """Return the ids of the jobs that `reference` identifies. In addition to the references of
        `resolve`, this accepts lists of indices, such as `ARRAY/1,3,5-9` and `ARRAY/0-98:2`. Raises
        JobNotFound if one of the indices does not exist."""
        listed = references.index_list(reference)
        named = (*references.query_of(JobFilter.model_construct(name=reference)), *params(limit=1))
        if (
            listed is None
            or (await self._read(views.JobPage, Call("GET", "/v1/jobs", named))).items
        ):
            return [await self.resolve(reference, arrays=arrays)]
        array_id = await self.resolve(listed.array, arrays=True)
        ids: dict[int | None, str] = {}
        async for job in self.jobs(array=array_id, brief=True, page_size=500):
            ids[job.array_index] = job.id
        return listed.among(ids)

    async def wait(
        self, job_id: str, timeout_s: float | None = None, states: States | None = None
    ) -> views.Job:
        """Wait until the job has ended, successfully or not, or is in one of `states`. Returns the
        job.

        The client uses long polling and continues waiting if the server restarts. Raises
        WaitTimeout after `timeout_s` seconds, without stopping the job.
        """
        wanted = states_of(states)
        deadline = None if timeout_s is None else self._clock() + timeout_s
        job = await self._job(job_id, patient=True)
        while not (job.state in wanted or job.state.is_terminal):
            asked = self._clock()
            left_s = LONG_POLL_S if deadline is None else deadline - asked
            if left_s <= 0:
                raise errors.WaitTimeout(job, timeout_s or 0.0)
            wait_s = min(LONG_POLL_S, left_s)
            known = job.state
            job = await self._job(job_id, wait_s, known, patient=True)
            await self._pause_if_hurried(asked, wait_s, changed=job.state != known)
        return job

    async def cancel(self, job_id: str) -> views.Job:
        """Cancel the job in any state. Raises JobFinished if the job has already succeeded or
        failed."""
        return await self._read(views.Job, Call("POST", f"{_path(job_id)}/cancel"))

    async def hold(self, job_id: str) -> views.Job:
        """Prevent a waiting job from starting until `release` is called. Raises JobNotWaiting if
        the job is not waiting."""
        return await self._change(job_id, held=True)

    async def release(self, job_id: str) -> views.Job:
        """Allow a held job to start."""
        return await self._change(job_id, held=False)

    async def move(
        self, job_id: str, queue: str | None = None, *, first: bool = False
    ) -> views.Job:
        """Move a waiting job to another queue or, with `first`, ahead of all other jobs of its
        priority. The rules of the new queue apply. Raises JobNotWaiting, UnknownQueue, QueueFull,
        PriorityTooHigh, RuntimeTooLong or ReservationUnfit, and raises Forbidden if a caller who is
        not an admin uses `first`."""
        return await self._change(job_id, queue=queue, first=first or None)

    async def change(self, job_id: str, document: Mapping[str, Any]) -> views.Job:
        """Change fields of a waiting job's document. `document` is a merge patch (RFC 7396), such
        as `{"resources": {"num_workers": 2}, "max_runtime_s": None}`, in which None restores a
        field's default. The new document is checked like a submission; if it is refused, the job
        remains unchanged. Raises JobNotWaiting if the job has started, and the errors of
        `submit`."""
        return await self._change(job_id, document=dict(document))

    async def set_priority(self, job_id: str, priority: int) -> views.Job:
        """Change the priority of a job that has not ended. Raises PriorityTooHigh if the priority
        exceeds the queue's `max_priority` and the caller is not an admin."""
        return await self._change(job_id, priority=priority)

    async def _change(self, job_id: str, **changes: Any) -> views.Job:
        """Change the queue, priority or other scheduling fields of a job. Fields that are None
        remain unchanged."""
        call = Call.with_json("PATCH", _path(job_id), present(**changes))
        return await self._read(views.Job, call)

    async def preempt(
        self, job_id: str, *, grace_s: float | None = None, hold: bool = False
    ) -> views.Job:
        """Ask a job to save a checkpoint within `grace_s` seconds and release its slots. `grace_s`
        defaults to the server's setting. The job keeps its position in the queue, and resumes when
        slots are free; with `hold`, the job does not resume before it is released. Raises
        JobNotRunning if the job has no slots."""
        path = f"{_path(job_id)}/preempt"
        body = present(grace_s=grace_s, held=hold or None)
        call = Call.with_json("POST", path, body) if body else Call("POST", path)
        return await self._read(views.Job, call)

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
        """Inject a fault into a running job: `kill` or `stall` a rank, or `preempt` the job.

        The fault is injected immediately, or after `at_step` optimizer steps. Returns the drill
        when it is over or, with `wait=False`, immediately. Raises JobNotRunning or DrillImpossible.
        """
        body = present(kind=DrillKind(kind), rank=rank, at_step=at_step)
        # All retries use the same key, so that a lost response doesn't cause a second fault.
        key = uuid.uuid4().hex if idempotency_key is None else idempotency_key
        path = f"{_path(job_id)}/drill"
        call = Call.with_json("POST", path, body, headers={"Idempotency-Key": key})
        found = await self._read(views.Drill, call)
        while wait and not found.state.is_over:
            asked = self._clock()
            path = f"{_path(job_id)}/drills/{segment(found.id)}"
            call = Call("GET", path, params(wait_s=LONG_POLL_S), wait_s=LONG_POLL_S)
            found = await self._read(views.Drill, call, patient=True)
            await self._pause_if_hurried(asked, LONG_POLL_S, changed=found.state.is_over)
        return found

    async def drills(self, job_id: str) -> list[views.Drill]:
        """Return all drills of the job, oldest first."""
        return await self._list(views.DrillPage, f"{_path(job_id)}/drills")

    async def hangs(self, job_id: str) -> list[views.Hang]:
        """Return the most recent hangs of the job, with the ranks that caused them and the stack of
        every rank."""
        return await self._list(views.HangPage, f"{_path(job_id)}/hangs")

    async def delete(self, job_id: str) -> None:
        """Delete a finished job and all its files. Raises JobLive if the job has not ended."""
        await self._send(Call("DELETE", _path(job_id)))

    async def explain(self, job_id: str) -> views.Explanation:
        """Explain why the job is in its current state, and what it is waiting for."""
        return await self._read(views.Explanation, Call("GET", f"{_path(job_id)}/explain"))

    async def factors(self, job_id: str) -> views.JobFactors:
        """Return the factors that decide a waiting job's position in the queue, and why the jobs
        ahead of it come first."""
        return await self._read(views.JobFactors, Call("GET", f"{_path(job_id)}/factors"))


class ArrayCalls(Calls):
    async def array(self, array_id: str) -> views.JobArray:
        """Return the array, with the number of jobs in each state."""
        return await self._read(views.JobArray, Call("GET", _array_path(array_id)))

    async def wait_array(
        self, array_id: str, timeout_s: float | None = None, states: States | None = None
    ) -> views.JobArray:
        """Wait until every job of the array has ended or is in one of `states`. Returns the array.
        Raises ArrayWaitTimeout after `timeout_s` seconds, without stopping the jobs."""
        wanted = states_of(states)
        deadline = None if timeout_s is None else self._clock() + timeout_s
        array = await self._read(views.JobArray, Call("GET", _array_path(array_id)), patient=True)
        while not array.is_settled(wanted):
            asked = self._clock()
            left_s = LONG_POLL_S if deadline is None else deadline - asked
            if left_s <= 0:
                raise errors.ArrayWaitTimeout(array, timeout_s or 0.0)
            wait_s = min(LONG_POLL_S, left_s)
            query = params(wait_s=wait_s, state=wanted)
            call = Call("GET", _array_path(array_id), query, wait_s=wait_s)
            array = await self._read(views.JobArray, call, patient=True)
            await self._pause_if_hurried(asked, wait_s, changed=array.is_settled(wanted))
        return array

    async def cancel_array(self, array_id: str) -> views.JobArray:
        """Cancel all jobs of an array that have not ended."""
        return await self._read(views.JobArray, Call("POST", f"{_array_path(array_id)}/cancel"))

    async def hold_array(self, array_id: str) -> views.ArrayChange:
        """Hold the waiting jobs of an array.

        Like all changes of arrays, this skips jobs to which the change does not apply, such as
        ended jobs, and counts them in the result.
        """
        return await self._change_array(array_id, held=True)

    async def release_array(self, array_id: str) -> views.ArrayChange:
        """Allow the held jobs of an array to start."""
        return await self._change_array(array_id, held=False)

    async def move_array(
        self, array_id: str, queue: str | None = None, *, first: bool = False
    ) -> views.ArrayChange:
        """Move the waiting jobs of an array to another queue or, with `first`, ahead of all other
        jobs of their priority. Either all of these jobs are moved, or none. Raises UnknownQueue,
        QueueFull, PriorityTooHigh or ReservationUnfit, and raises Forbidden if a caller who is not
        an admin uses `first`."""
        return await self._change_array(array_id, **present(queue=queue, first=first or None))

    async def set_array_priority(self, array_id: str, priority: int) -> views.ArrayChange:
        """Change the priority of the unfinished jobs of an array. Raises PriorityTooHigh if the
        priority exceeds the queue's `max_priority` and the caller is not an admin."""
        return await self._change_array(array_id, priority=priority)

    async def set_max_running(self, array_id: str, max_running: int | None) -> views.ArrayChange:
        """Change how many jobs of an array run at the same time; None removes the limit. If more
        jobs than this are running, they continue, and no further jobs start until enough of them
        have ended."""
        return await self._change_array(array_id, max_running=max_running)

    async def _change_array(self, array_id: str, **changes: Any) -> views.ArrayChange:
        call = Call.with_json("PATCH", _array_path(array_id), changes)
        return await self._read(views.ArrayChange, call)

    async def preempt_array(
        self, array_id: str, *, grace_s: float | None = None, hold: bool = False
    ) -> views.ArrayChange:
        """Ask the running jobs of an array to save checkpoints within `grace_s` seconds, release
        their slots and, if `hold` is set, wait until a caller releases the jobs. `grace_s` defaults
        to the server's setting."""
        given = present(grace_s=grace_s, held=hold or None)
        call = Call.with_json("POST", f"{_array_path(array_id)}/preempt", given)
        return await self._read(views.ArrayChange, call)

    async def delete_array(self, array_id: str) -> None:
        """Delete all jobs of an array and their files. Raises JobLive if any job has not ended."""
        await self._send(Call("DELETE", _array_path(array_id)))

    async def sweep(self, sweep_id: str) -> views.JobSweep:
        """Return the sweep, including the best trial so far. The id of a sweep is the id of the
        array of its trials; use the methods for arrays to wait for, cancel or delete it."""
        return await self._read(views.JobSweep, Call("GET", f"/v1/sweeps/{segment(sweep_id)}"))

    def trials(self, sweep_id: str, *, page_size: int = 100) -> AsyncGenerator[views.Trial, None]:
        """Yield the trials of a sweep in the order of their indices, with their parameter values.
        The best trial is marked. Trials are fetched page by page."""
        path = f"/v1/sweeps/{segment(sweep_id)}/trials"
        return self._items(views.TrialPage, path, page_size=page_size)

    async def sweep_importance(
        self, sweep_id: str, *, metric: str | None = None, include_stopped: bool = False
    ) -> views.Importance:
        """Return how much a metric depends on each parameter of a sweep, estimated from the trials
        that succeeded.

        metric: such as `val/loss` or `best:val/loss`, by default the metric of the sweep.
        include_stopped: whether trials that were stopped early count. If there are fewer than 20
        trials, the result has a `reason` instead of importances. Raises SweepNotFound or
        InvalidSearch.
        """
        query = params(metric=metric, include_stopped=include_stopped)
        call = Call("GET", f"/v1/sweeps/{segment(sweep_id)}/importance", query)
        return await self._read(views.Importance, call)


def _path(job_id: str) -> str:
    return f"/v1/jobs/{segment(job_id)}"


def _array_path(array_id: str) -> str:
    return f"/v1/arrays/{segment(array_id)}"
