"""Arrays and sweeps: many jobs of one document."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from dray import errors, views
from dray._async.calls import Calls
from dray._http.transport import LONG_POLL_S, Call, params, segment
from dray.filters import States, states_of


class ArrayCalls(Calls):
    async def array(self, array_id: str) -> views.JobArray:
        """The array, with the number of its jobs in each state."""
        return await self._read(views.JobArray, Call("GET", _path(array_id)))

    async def wait_array(
        self, array_id: str, timeout_s: float | None = None, states: States | None = None
    ) -> views.JobArray:
        """Return the array as soon as each of its jobs is over or in one of `states`. Raises
        ArrayWaitTimeout after `timeout_s` seconds; the jobs go on."""
        wanted = states_of(states)
        deadline = None if timeout_s is None else self._clock() + timeout_s
        array = await self._read(views.JobArray, Call("GET", _path(array_id)), patient=True)
        while not array.is_settled(wanted):
            asked = self._clock()
            left_s = LONG_POLL_S if deadline is None else deadline - asked
            if left_s <= 0:
                raise errors.ArrayWaitTimeout(array, timeout_s or 0.0)
            wait_s = min(LONG_POLL_S, left_s)
            query = params(wait_s=wait_s, state=wanted)
            call = Call("GET", _path(array_id), query, wait_s=wait_s)
            array = await self._read(views.JobArray, call, patient=True)
            await self._pause_if_hurried(asked, wait_s, changed=array.is_settled(wanted))
        return array

    async def cancel_array(self, array_id: str) -> views.JobArray:
        """Stop all jobs of an array that are not over."""
        return await self._read(views.JobArray, Call("POST", f"{_path(array_id)}/cancel"))

    async def delete_array(self, array_id: str) -> None:
        """Remove all jobs of an array with all their files; raises JobLive unless all are over."""
        await self._send(Call("DELETE", _path(array_id)))

    async def sweep(self, sweep_id: str) -> views.JobSweep:
        """The sweep, by the id of the array of its trials, with the best trial so far. It is waited
        for, cancelled and deleted as an array."""
        return await self._read(views.JobSweep, Call("GET", f"/v1/sweeps/{segment(sweep_id)}"))

    def trials(self, sweep_id: str, *, page_size: int = 100) -> AsyncGenerator[views.Trial, None]:
        """Yield the trials of a sweep by their index, with their values, fetched page by page; the
        best is marked."""
        path = f"/v1/sweeps/{segment(sweep_id)}/trials"
        return self._items(views.TrialPage, path, page_size=page_size)


def _path(array_id: str) -> str:
    return f"/v1/arrays/{segment(array_id)}"
