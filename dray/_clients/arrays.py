"""Arrays and sweeps: many jobs of one document."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator

from dray import views
from dray._clients.base import AsyncCalls, BlockingCalls
from dray._http import sweeps
from dray._http.flows import States


class ArrayCalls(BlockingCalls):
    def array(self, array_id: str) -> views.JobArray:
        """The array, with the number of its jobs in each state."""
        return self._driver.run(self._flows.array(array_id))

    def wait_array(
        self, array_id: str, timeout_s: float | None = None, states: States | None = None
    ) -> views.JobArray:
        """Return the array as soon as each of its jobs is over or in one of `states`. Raises
        ArrayWaitTimeout after `timeout_s` seconds; the jobs go on."""
        return self._driver.run(self._flows.wait_array(array_id, timeout_s, states))

    def cancel_array(self, array_id: str) -> views.JobArray:
        """Stop all jobs of an array that are not over."""
        return self._driver.run(self._flows.cancel_array(array_id))

    def delete_array(self, array_id: str) -> None:
        """Remove all jobs of an array with all their files; raises JobLive unless all are over."""
        self._driver.run(self._flows.delete_array(array_id))

    def sweep(self, sweep_id: str) -> views.JobSweep:
        """The sweep, by the id of the array of its trials, with the best trial so far. It is waited
        for, cancelled and deleted as an array."""
        return self._driver.run(sweeps.get(self._flows, sweep_id))

    def trials(self, sweep_id: str, *, page_size: int = 100) -> Generator[views.Trial, None, None]:
        """Yield the trials of a sweep by their index, with their values, fetched page by page; the
        best is marked."""
        return self._driver.iterate(sweeps.trials(self._flows, sweep_id, page_size))


class AsyncArrayCalls(AsyncCalls):
    """See `ArrayCalls`, which has the same arguments, answers and errors."""

    async def array(self, array_id: str) -> views.JobArray:
        return await self._driver.run(self._flows.array(array_id))

    async def wait_array(
        self, array_id: str, timeout_s: float | None = None, states: States | None = None
    ) -> views.JobArray:
        return await self._driver.run(self._flows.wait_array(array_id, timeout_s, states))

    async def cancel_array(self, array_id: str) -> views.JobArray:
        return await self._driver.run(self._flows.cancel_array(array_id))

    async def delete_array(self, array_id: str) -> None:
        await self._driver.run(self._flows.delete_array(array_id))

    async def sweep(self, sweep_id: str) -> views.JobSweep:
        return await self._driver.run(sweeps.get(self._flows, sweep_id))

    def trials(self, sweep_id: str, *, page_size: int = 100) -> AsyncGenerator[views.Trial, None]:
        return self._driver.iterate(sweeps.trials(self._flows, sweep_id, page_size))
