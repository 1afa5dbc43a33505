"""The blocking client: `with dray.Client() as client: job = client.submit("job.yaml")`."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import httpx

from dray import views
from dray._clients.arrays import ArrayCalls
from dray._clients.base import http_options
from dray._clients.cluster import ClusterCalls
from dray._clients.federation import FederationCalls
from dray._clients.jobs import JobCalls
from dray._clients.reports import ReportCalls
from dray._clients.submitting import SubmitCalls
from dray._clients.tracking import TrackingCalls
from dray._clients.webhooks import WebhookCalls
from dray._http.drivers import SyncDriver
from dray._http.flows import Flows
from dray._http.transport import DEFAULT_TIMEOUT_S, Connection, Retry
from dray.runs import JobRun


class Client(
    SubmitCalls,
    JobCalls,
    ArrayCalls,
    ReportCalls,
    TrackingCalls,
    ClusterCalls,
    WebhookCalls,
    FederationCalls,
):
    """Talks to one dray server.

    Every method raises the exceptions of `dray.errors`. Requests without an answer, or with an
    answer that asks for a retry (408, 429, 5xx, 409 of a submit in flight), are repeated with
    growing random pauses for `retry.patience_s` seconds; `wait`, `follow`, `download` and following
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
        self.url = connection.url
        self._http = httpx.Client(transport=transport, **http_options(connection))
        self._flows = Flows(connection)
        self._driver = SyncDriver(connection, self._http)

    def close(self) -> None:
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
        """Follow a job, by its id or name: `with client.attach(job) as run:` reads its logs,
        metrics or events as they come, waits for its end, and raises JobFailed unless it
        succeeded."""
        return JobRun(self, job.id if isinstance(job, views.Job) else self.resolve(job))
