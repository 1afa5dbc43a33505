"""The asynchronous client: `dray.Client`'s methods, awaited; its iterators, with `async for`."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import httpx

from dray import views
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
from dray.runs import AsyncJobRun


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
