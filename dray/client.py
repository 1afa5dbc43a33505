# Written by `make blocking` from dray/aio.py: change that file instead.
"""The blocking client: `with dray.Client() as client: client.cluster()`."""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import Any, Self

import httpx

from dray import functions, views
from dray._http.transport import DEFAULT_TIMEOUT_S, Connection, Retry
from dray._sync.bulk import BulkCalls
from dray._sync.cluster import ClusterCalls
from dray._sync.downloads import DownloadCalls
from dray._sync.federation import FederationCalls
from dray._sync.jobs import ArrayCalls, JobCalls
from dray._sync.media import MediaCalls
from dray._sync.registry import RegistryCalls
from dray._sync.report_pages import ReportPageCalls
from dray._sync.reports import ReportCalls
from dray._sync.reservations import ReservationCalls
from dray._sync.schedules import ScheduleCalls
from dray._sync.submitting import SubmitCalls
from dray._sync.tracking import TrackingCalls
from dray._sync.webhooks import WebhookCalls
from dray.errors import JobFailed
from dray.views import JobState


class Client(
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
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`url` and `token` default to DRAY_URL (else http://127.0.0.1:8420) and DRAY_TOKEN.

        `timeout` is the time in seconds to wait for a connection and for each response, in addition
        to the time that the server was asked to wait. `transport` replaces the network in tests.
        """
        connection = Connection.open(url, token, timeout, retry or Retry())
        http = httpx.Client(transport=transport, **connection.client_options())
        super().__init__(connection, http)
        self.url = connection.url

    def close(self) -> None:
        """Close the connections to the server."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def attach(self, job: views.Job | str) -> JobRun:
        """Attach to a job, given its id or name. Inside `with client.attach(job) as
        run:`, you can read the logs, metrics or events of the job while it runs. At the end of the
        block, the client waits for the job, and raises JobFailed unless the job succeeded."""
        return JobRun(self, job.id if isinstance(job, views.Job) else self.resolve(job))


class JobRun:
    """A job that the client is attached to. Iterating over it yields the job's events as they
    happen, until the job ends.

    At the end of the `with` block, the client waits for the job, and raises JobFailed unless
    the job succeeded. If the block raises an exception, the client does not wait, and the job
    continues.
    """

    def __init__(self, client: Client, job_id: str) -> None:
        self._client = client
        self.id = job_id

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.wait()

    def __iter__(self) -> Generator[views.Event, None, None]:
        return self._client.follow(self.id)

    def job(self) -> views.Job:
        """Return the job in its current state."""
        return self._client.get(self.id)

    def logs(self, rank: int | None = None) -> Generator[views.LogLine, None, None]:
        """Yield the log lines of all ranks, or only of `rank`, until the job ends."""
        return self._client.logs(self.id, rank, follow=True)

    def metrics(self, keys: Sequence[str] | None = None) -> Generator[views.Point, None, None]:
        """Yield the metric points of rank 0, of all keys or only of `keys`, until the job ends."""
        return self._client.follow_metrics(self.id, keys)

    def wait(self, timeout_s: float | None = None) -> views.Job:
        """Wait until the job has succeeded. Returns the job. Raises JobFailed if the job ends
        without success, and WaitTimeout after `timeout_s` seconds."""
        job = self._client.wait(self.id, timeout_s)
        if job.state is not JobState.SUCCEEDED:
            raise JobFailed(job)
        return job

    def cancel(self) -> views.Job:
        """Cancel the job in any state. Raises JobFinished if the job has already succeeded or
        failed."""
        return self._client.cancel(self.id)

    def result(self) -> Any:
        """Wait for a `submit_function` job, and return the function's result on rank 0.

        Loading the result can run code from the file, so only load the results of your own jobs.
        Raises JobFailed, and ArtifactNotFound for jobs that were not submitted by
        `submit_function`.
        """
        self.wait()
        with tempfile.TemporaryDirectory() as folder:
            (path,) = self._client.download(self.id, folder, functions.RESULT)
            return functions.load_result(path)
