"""The asynchronous client: `dray.Client`'s methods, awaited; its iterators, with `async for`."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from dray import functions, views
from dray._clients.arrays import AsyncArrayCalls
from dray._clients.base import http_options
from dray._clients.cluster import AsyncClusterCalls
from dray._clients.federation import AsyncFederationCalls
from dray._clients.jobs import AsyncJobCalls
from dray._clients.reports import AsyncReportCalls
from dray._clients.submitting import AsyncSubmitCalls
from dray._clients.tracking import AsyncTrackingCalls
from dray._clients.webhooks import AsyncWebhookCalls
from dray._http.drivers import AsyncDriver
from dray._http.flows import Flows
from dray._http.transport import DEFAULT_TIMEOUT_S, Connection, Retry
from dray.errors import JobFailed
from dray.views import JobState


class AsyncClient(
    AsyncSubmitCalls,
    AsyncJobCalls,
    AsyncArrayCalls,
    AsyncReportCalls,
    AsyncTrackingCalls,
    AsyncClusterCalls,
    AsyncWebhookCalls,
    AsyncFederationCalls,
):
    """See `dray.Client`, which has the same arguments, answers and errors."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        *,
        retry: Retry | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        connection = Connection.open(url, token, timeout, retry or Retry())
        self.url = connection.url
        self._http = httpx.AsyncClient(transport=transport, **http_options(connection))
        self._flows = Flows(connection)
        self._driver = AsyncDriver(connection, self._http)

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def attach(self, job: views.Job | str) -> AsyncJobRun:
        return AsyncJobRun(self, job.id if isinstance(job, views.Job) else await self.resolve(job))


class AsyncJobRun:
    """See `JobRun`: `async with`, `async for`, and methods to be awaited."""

    def __init__(self, client: AsyncClient, job_id: str) -> None:
        self._client = client
        self.id = job_id

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            await self.wait()

    def __aiter__(self) -> AsyncGenerator[views.Event, None]:
        return self._client.follow(self.id)

    async def job(self) -> views.Job:
        return await self._client.get(self.id)

    def logs(self, rank: int | None = None) -> AsyncGenerator[views.LogLine, None]:
        return self._client.logs(self.id, rank, follow=True)

    def metrics(self, keys: Sequence[str] | None = None) -> AsyncGenerator[views.Point, None]:
        return self._client.follow_metrics(self.id, keys)

    async def wait(self, timeout_s: float | None = None) -> views.Job:
        job = await self._client.wait(self.id, timeout_s)
        if job.state is not JobState.SUCCEEDED:
            raise JobFailed(job)
        return job

    async def cancel(self) -> views.Job:
        return await self._client.cancel(self.id)

    async def result(self) -> Any:
        await self.wait()
        folder = await asyncio.to_thread(tempfile.TemporaryDirectory)
        with folder as name:
            (path,) = await self._client.download(self.id, name, functions.RESULT)
            return await asyncio.to_thread(functions.load_result, Path(path))
