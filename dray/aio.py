"""The asynchronous client: `async with dray.AsyncClient() as client: await client.cluster()`."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Any, Self

import httpx

from dray import functions, views
from dray._async.bulk import BulkCalls
from dray._async.cluster import ClusterCalls
from dray._async.downloads import DownloadCalls
from dray._async.federation import FederationCalls
from dray._async.jobs import ArrayCalls, JobCalls
from dray._async.media import MediaCalls
from dray._async.registry import RegistryCalls
from dray._async.report_pages import ReportPageCalls
from dray._async.reports import ReportCalls
from dray._async.reservations import ReservationCalls
from dray._async.schedules import ScheduleCalls
from dray._async.submitting import SubmitCalls
from dray._async.tracking import TrackingCalls
from dray._async.webhooks import WebhookCalls
from dray._http.transport import DEFAULT_TIMEOUT_S, Connection, Retry
from dray.errors import JobFailed
from dray.views import JobState


class AsyncClient(
    ScheduleCalls,
    SubmitCalls,
    TrackingCalls,
    ReportCalls,
    JobCalls,
    ArrayCalls,
    BulkCalls,
    FederationCalls,
    RegistryCalls,
    ReportPageCalls,
    MediaCalls,
    DownloadCalls,
    ClusterCalls,
    ReservationCalls,
    WebhookCalls,
):
    """Client for a dray server.

    All methods raise the exceptions of `dray.errors`. A request is retried with exponential backoff
    and jitter for `retry.patience_s` seconds if there is no response, or if the status permits a
    retry (408, 429, 5xx, or 409 while the same submission is in progress). `wait`, `follow`,
    `download`, and `logs` with `follow` retry for a minute, so that they survive a restart of the
    server. A retried submission creates only one job, because it has an idempotency key. While one
    thread iterates over results, other threads must not use the same client.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        *,
        retry: Retry | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`url` and `token` default to DRAY_URL (else http://127.0.0.1:8420) and DRAY_TOKEN.

        `timeout` is the time in seconds to wait for a connection and for each response, in addition
        to the time that the server was asked to wait. `transport` replaces the network in tests.
        """
        connection = Connection.open(url, token, timeout, retry or Retry())
        http = httpx.AsyncClient(transport=transport, **connection.client_options())
        super().__init__(connection, http)
        self.url = connection.url

    async def aclose(self) -> None:
        """Close the connections to the server."""
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
        """Attach to a job, given its id or name. Inside `async with await client.attach(job) as
        run:`, you can read the logs, metrics or events of the job while it runs. At the end of the
        block, the client waits for the job, and raises JobFailed unless the job succeeded."""
        return AsyncJobRun(self, job.id if isinstance(job, views.Job) else await self.resolve(job))


class AsyncJobRun:
    """A job that the client is attached to. Iterating over it yields the job's events as they
    happen, until the job ends.

    At the end of the `async with` block, the client waits for the job, and raises JobFailed unless
    the job succeeded. If the block raises an exception, the client does not wait, and the job
    continues.
    """

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
        """Return the job in its current state."""
        return await self._client.get(self.id)

    def logs(self, rank: int | None = None) -> AsyncGenerator[views.LogLine, None]:
        """Yield the log lines of all ranks, or only of `rank`, until the job ends."""
        return self._client.logs(self.id, rank, follow=True)

    def metrics(self, keys: Sequence[str] | None = None) -> AsyncGenerator[views.Point, None]:
        """Yield the metric points of rank 0, of all keys or only of `keys`, until the job ends."""
        return self._client.follow_metrics(self.id, keys)

    async def wait(self, timeout_s: float | None = None) -> views.Job:
        """Wait until the job has succeeded. Returns the job. Raises JobFailed if the job ends
        without success, and WaitTimeout after `timeout_s` seconds."""
        job = await self._client.wait(self.id, timeout_s)
        if job.state is not JobState.SUCCEEDED:
            raise JobFailed(job)
        return job

    async def cancel(self) -> views.Job:
        """Cancel the job in any state. Raises JobFinished if the job has already succeeded or
        failed."""
        return await self._client.cancel(self.id)

    async def result(self) -> Any:
        """Wait for a `submit_function` job, and return the function's result on rank 0.

        Loading the result can run code from the file, so only load the results of your own jobs.
        Raises JobFailed, and ArtifactNotFound for jobs that were not submitted by
        `submit_function`.
        """
        await self.wait()
        with tempfile.TemporaryDirectory() as folder:
            (path,) = await self._client.download(self.id, folder, functions.RESULT)
            return await asyncio.to_thread(functions.load_result, path)
