"""The asynchronous client: `dray.Client`'s methods, awaited; its iterators, with `async for`."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import httpx

from dray import frames, functions, views
from dray._http import (
    costs,
    fault_injection,
    federation,
    outlook,
    queues,
    sweeps,
    tracking,
    webhooks,
)
from dray._http.code import OnUpload
from dray._http.downloads import OnProgress
from dray._http.drivers import AsyncDriver
from dray._http.flows import Flows, JobFilter, Spec, States
from dray._http.transport import DEFAULT_TIMEOUT_S, Connection, Retry
from dray.client import http_options
from dray.code.packing import PackedCode, pack
from dray.federation import trainer_of
from dray.runs import AsyncJobRun
from dray.views import DrillKind, JobState, WebhookFormat

if TYPE_CHECKING:
    import pandas


Jobs: TypeAlias = "Iterable[views.Job | str] | AsyncIterable[views.Job]"
"""Jobs or their ids; `jobs` yields the former."""


async def _listed(jobs: Jobs) -> list[views.Job | str]:
    if isinstance(jobs, AsyncIterable):
        return [job async for job in jobs]
    return list(jobs)


class AsyncClient:
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
        self._http = httpx.AsyncClient(transport=transport, **http_options(connection.url))
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

    async def submit(self, spec: Spec, *, idempotency_key: str | None = None) -> views.Job:
        return await self._driver.run(self._flows.submit(spec, idempotency_key))

    async def dry_run(self, spec: Spec) -> views.Explanation:
        return await self._driver.run(self._flows.dry_run(spec))

    async def upload_code(
        self,
        folder: str | PathLike[str] | PackedCode = ".",
        *,
        include: Sequence[str] = (),
        on_progress: OnUpload | None = None,
    ) -> views.Code:
        packed = (
            folder
            if isinstance(folder, PackedCode)
            else await asyncio.to_thread(pack, Path(folder), include)
        )
        return await self._driver.run(self._flows.upload_code(packed, on_progress))

    async def submit_function(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        num_workers: int = 1,
        spec: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
    ) -> views.Job:
        with tempfile.TemporaryDirectory() as folder:
            functions.write(Path(folder), function, args, kwargs or {})
            code = await self.upload_code(folder)
        document = functions.document(function, num_workers, spec, code.id)
        return await self.submit(document, idempotency_key=idempotency_key)

    async def attach(self, job: views.Job | str) -> AsyncJobRun:
        return AsyncJobRun(self, job.id if isinstance(job, views.Job) else await self.resolve(job))

    async def job_code(self, job_id: str) -> list[views.CodeFile]:
        return await self._driver.run(self._flows.job_code(job_id))

    async def download_code(self, job_id: str, dest: str | PathLike[str]) -> list[Path]:
        return await self._driver.run(self._flows.download_code(job_id, dest))

    async def plan(
        self,
        spec: Spec,
        *,
        memory_bytes_per_rank: int | None = None,
        flops_per_s: float | None = None,
        bandwidth_bytes_per_s: float | None = None,
        latency_s: float | None = None,
    ) -> views.Plan:
        options = {
            "memory_bytes_per_rank": memory_bytes_per_rank,
            "flops_per_s": flops_per_s,
            "bandwidth_bytes_per_s": bandwidth_bytes_per_s,
            "latency_s": latency_s,
        }
        return await self._driver.run(self._flows.plan(spec, options))

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

    async def compare(self, jobs: Jobs) -> views.Comparison:
        return await self._driver.run(tracking.compare(self._flows, await _listed(jobs)))

    async def frame(self, jobs: Jobs) -> pandas.DataFrame:
        frames.require_pandas()
        return frames.of_jobs(
            await self._driver.run(tracking.jobs_of(self._flows, await _listed(jobs)))
        )

    async def series_frame(
        self,
        jobs: Jobs,
        keys: Sequence[str] | None = None,
        *,
        max_points: int | None = None,
    ) -> pandas.DataFrame:
        frames.require_pandas()
        flow = tracking.series_of(self._flows, await _listed(jobs), keys, max_points)
        return frames.of_series(await self._driver.run(flow))

    def experiments(self, *, page_size: int = 100) -> AsyncGenerator[views.Experiment, None]:
        return self._driver.iterate(tracking.experiments(self._flows, page_size))

    async def experiment(self, name: str) -> views.ExperimentSummary:
        return await self._driver.run(tracking.experiment(self._flows, name))

    async def pin_baseline(self, name: str, job_id: str | None) -> views.ExperimentSummary:
        return await self._driver.run(tracking.pin_baseline(self._flows, name, job_id))

    async def annotations(self, job_id: str) -> views.Annotations:
        return await self._driver.run(tracking.get_annotations(self._flows, job_id))

    async def annotate(
        self,
        job_id: str,
        *,
        add_tags: Sequence[str] | None = None,
        remove_tags: Sequence[str] | None = None,
        notes: str | None = None,
        revision: int | None = None,
    ) -> views.Annotations:
        flow = tracking.annotate(
            *(self._flows, job_id, revision),
            add_tags=add_tags and list(add_tags),
            remove_tags=remove_tags and list(remove_tags),
            notes=notes,
        )
        return await self._driver.run(flow)

    async def wait(
        self,
        job_id: str,
        timeout_s: float | None = None,
        states: States | None = None,
    ) -> views.Job:
        return await self._driver.run(self._flows.wait(job_id, timeout_s, states))

    def follow(self, job_id: str, *, after_seq: int = 0) -> AsyncGenerator[views.Event, None]:
        return self._driver.iterate(self._flows.follow(job_id, after_seq))

    def events(self, job_id: str, *, after_seq: int = 0) -> AsyncGenerator[views.Event, None]:
        return self._driver.iterate(self._flows.events(job_id, after_seq))

    async def metrics(
        self,
        job_id: str,
        keys: Sequence[str] | None = None,
        *,
        rank: int | None = None,
        after_step: int | None = None,
        until_step: int | None = None,
        max_points: int | None = None,
        in_order: bool = False,
        times: bool = False,
    ) -> views.Metrics:
        return await self._driver.run(
            self._flows.metrics(
                job_id,
                keys,
                rank,
                after_step,
                max_points,
                until_step=until_step,
                in_order=in_order,
                times=times,
            )
        )

    def follow_metrics(
        self,
        job_id: str,
        keys: Sequence[str] | None = None,
        *,
        rank: int | None = None,
        after: Mapping[str, int] | None = None,
    ) -> AsyncGenerator[views.Point, None]:
        return self._driver.iterate(self._flows.follow_metrics(job_id, keys, rank, after))

    async def system_metrics(
        self,
        job_id: str,
        keys: Sequence[str] | None = None,
        *,
        rank: int | None = None,
        after_time: int | None = None,
        max_points: int | None = None,
    ) -> views.SystemMetrics:
        return await self._driver.run(
            self._flows.system_metrics(job_id, keys, rank, after_time, max_points)
        )

    async def newest_system_metrics(self, job_id: str) -> views.SystemSample:
        return await self._driver.run(self._flows.newest_system_metrics(job_id))

    def logs(
        self,
        job_id: str,
        rank: int | None = None,
        *,
        attempt: int | None = None,
        follow: bool = False,
    ) -> AsyncGenerator[views.LogLine, None]:
        return self._driver.iterate(self._flows.logs(job_id, rank, attempt, follow))

    async def attempts(self, job_id: str) -> list[views.Attempt]:
        return await self._driver.run(self._flows.attempts(job_id))

    async def checkpoints(self, job_id: str) -> list[views.Checkpoint]:
        return await self._driver.run(self._flows.checkpoints(job_id))

    async def artifacts(self, job_id: str) -> list[views.Artifact]:
        return await self._driver.run(self._flows.artifacts(job_id))

    async def download(
        self,
        job_id: str,
        dest: str | PathLike[str],
        artifact: str | None = None,
        *,
        on_progress: OnProgress | None = None,
    ) -> list[Path]:
        return await self._driver.run(self._flows.download(job_id, dest, artifact, on_progress))

    async def checkpoint_files(self, job_id: str, step: int) -> list[views.CheckpointFile]:
        return await self._driver.run(self._flows.checkpoint_files(job_id, step))

    async def download_checkpoint(
        self,
        job_id: str,
        step: int,
        dest: str | PathLike[str],
        *,
        on_progress: OnProgress | None = None,
    ) -> list[Path]:
        return await self._driver.run(
            self._flows.download_checkpoint(job_id, step, dest, on_progress)
        )

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

    async def queues(self) -> list[views.Queue]:
        return await self._driver.run(queues.every(self._flows))

    async def queue(self, name: str) -> views.Queue:
        return await self._driver.run(queues.get(self._flows, name))

    async def set_queue(self, name: str, **rules: Any) -> views.Queue:
        return await self._driver.run(queues.set_rules(self._flows, name, rules))

    async def delete_queue(self, name: str) -> None:
        await self._driver.run(queues.delete(self._flows, name))

    async def create_webhook(
        self,
        url: str,
        *,
        states: Sequence[JobState | str] | None = None,
        queue: str | None = None,
        labels: Mapping[str, str] | None = None,
        format: WebhookFormat | str | None = None,  # noqa: A002  the API's word
        all_users: bool = False,
    ) -> views.Webhook:
        flow = webhooks.create(
            *(self._flows, url, states, queue, labels, format), all_users=all_users
        )
        return await self._driver.run(flow)

    async def webhooks(self) -> list[views.Webhook]:
        return await self._driver.run(webhooks.every(self._flows))

    async def webhook(self, webhook_id: str) -> views.Webhook:
        return await self._driver.run(webhooks.get(self._flows, webhook_id))

    async def enable_webhook(self, webhook_id: str) -> views.Webhook:
        return await self._driver.run(webhooks.enable(self._flows, webhook_id, enabled=True))

    async def disable_webhook(self, webhook_id: str) -> views.Webhook:
        return await self._driver.run(webhooks.enable(self._flows, webhook_id, enabled=False))

    async def delete_webhook(self, webhook_id: str) -> None:
        await self._driver.run(webhooks.delete(self._flows, webhook_id))

    async def test_webhook(self, webhook_id: str, *, wait: bool = True) -> views.WebhookDelivery:
        return await self._driver.run(webhooks.test(self._flows, webhook_id, wait=wait))

    async def invite_clients(self, job_id: str, clients: int = 1) -> list[views.Invitation]:
        return await self._driver.run(federation.invite(self._flows, job_id, clients))

    async def federated_clients(self, job_id: str) -> views.FederatedClientPage:
        return await self._driver.run(federation.clients(self._flows, job_id))

    async def revoke_client(self, job_id: str, client: int) -> None:
        await self._driver.run(federation.revoke(self._flows, job_id, client))

    async def join(
        self,
        job_id: str,
        data: str | PathLike[str],
        *,
        on_round: Callable[[str], None] | None = None,
    ) -> views.JobState:
        with tempfile.TemporaryDirectory(prefix="dray-client-") as folder:
            make_trainer = trainer_of(Path(folder), data)
            tell = on_round or (lambda _sentence: None)
            flow = federation.join(self._flows, job_id, Path(folder), make_trainer, tell)
            return await self._driver.run(flow)

    def webhook_deliveries(self, webhook_id: str) -> AsyncGenerator[views.WebhookDelivery, None]:
        return self._driver.iterate(webhooks.deliveries(self._flows, webhook_id))

    async def costs(
        self,
        by: Literal["user", "queue"] = "user",
        *,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> views.CostReport:
        return await self._driver.run(costs.report(self._flows, by, since, until))

    async def decisions(
        self, *, before: int | None = None, limit: int = 100
    ) -> list[views.Decision]:
        return await self._driver.run(outlook.decisions(self._flows, before, limit))

    async def decision(self, number: int) -> views.ReplayedDecision:
        return await self._driver.run(outlook.decision(self._flows, number))

    async def forecast_errors(self) -> views.ForecastErrors:
        return await self._driver.run(outlook.forecast_errors(self._flows))

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

    async def cluster(self) -> views.Cluster:
        return await self._driver.run(self._flows.cluster())
