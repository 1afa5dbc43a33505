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
from dray._sync.cluster import ClusterCalls
from dray._sync.downloads import DownloadCalls
from dray._sync.federation import FederationCalls
from dray._sync.jobs import ArrayCalls, JobCalls
from dray._sync.reports import ReportCalls
from dray._sync.submitting import SubmitCalls
from dray._sync.tracking import TrackingCalls
from dray._sync.webhooks import WebhookCalls
from dray.errors import JobFailed
from dray.views import JobState


class Client(
    SubmitCalls,
    TrackingCalls,
    ReportCalls,
    JobCalls,
    ArrayCalls,
    FederationCalls,
    DownloadCalls,
    ClusterCalls,
    WebhookCalls,
):
    """Client of one dray server.

    Every method raises the exceptions of `dray.errors`. Requests without an answer, or with an
    answer that asks for a retry (408, 429, 5xx, 409 for a submit in flight), are repeated with
    growing random pauses for `retry.patience_s` seconds. `wait`, `follow`, `download` and following
    logs retry for a minute, so that a restart of the server does not end them. A repeated submit
    creates one job, by its idempotency key. Threads must not share a client while iterating.
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

        `timeout` is in seconds, for connecting and for each answer, on top of the time that
        the server was asked to wait. `transport` replaces the network, for tests.
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
        """Follow a job by its id or name. `with client.attach(job) as run:` can read
        its logs, metrics or events while it runs, waits for its end, and raises JobFailed unless
        the job succeeded."""
        return JobRun(self, job.id if isinstance(job, views.Job) else self.resolve(job))


class JobRun:
    """One job. Iterating yields its events as they happen, until the job ends.

    The end of the `with` block waits for the job, and raises JobFailed unless the job
    succeeded. If the block itself raises, the job goes on and is not waited for.
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
        """Return the present state of the job."""
        return self._client.get(self.id)

    def logs(self, rank: int | None = None) -> Generator[views.LogLine, None, None]:
        """Yield the lines of every rank, or of one, until the job is over."""
        return self._client.logs(self.id, rank, follow=True)

    def metrics(self, keys: Sequence[str] | None = None) -> Generator[views.Point, None, None]:
        """Yield the points of rank 0, of all keys or only `keys`, until the job is over."""
        return self._client.follow_metrics(self.id, keys)

    def wait(self, timeout_s: float | None = None) -> views.Job:
        """Wait until the job has succeeded. Returns the job. Raises JobFailed if it ended
        otherwise, WaitTimeout after `timeout_s` seconds."""
        job = self._client.wait(self.id, timeout_s)
        if job.state is not JobState.SUCCEEDED:
            raise JobFailed(job)
        return job

    def cancel(self) -> views.Job:
        """Stop the job in any state. Raises JobFinished if it already succeeded or failed."""
        return self._client.cancel(self.id)

    def result(self) -> Any:
        """Wait for a job of `submit_function`, and load what the function returned on rank 0.

        Loading runs code from the file, so do this only with your own jobs. Raises JobFailed;
        ArtifactNotFound for another kind of job.
        """
        self.wait()
        with tempfile.TemporaryDirectory() as folder:
            (path,) = self._client.download(self.id, folder, functions.RESULT)
            return functions.load_result(path)
