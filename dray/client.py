"""The blocking client: `with dray.Client() as client: job = client.submit("job.yaml")`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from datetime import datetime
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self
from urllib.parse import urlsplit

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
from dray._http.drivers import SyncDriver
from dray._http.flows import Flows, JobFilter, Spec, States
from dray._http.transport import DEFAULT_TIMEOUT_S, Connection, Retry
from dray.code.packing import PackedCode, pack
from dray.federation import trainer_of
from dray.runs import JobRun
from dray.views import DrillKind, JobState, WebhookFormat

if TYPE_CHECKING:
    import pandas


def http_options(url: str) -> dict[str, Any]:
    """Options of httpx clients for a server at `url`."""
    address = urlsplit(url)
    return {
        # Proxy settings never apply to a server on this very machine.
        "trust_env": address.hostname not in ("127.0.0.1", "localhost", "::1"),
        # Without TLS there is nothing to verify, and loading the certificates takes 20 ms.
        "verify": address.scheme != "http",
    }


class Client:
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
        self._http = httpx.Client(transport=transport, **http_options(connection.url))
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

    def submit(self, spec: Spec, *, idempotency_key: str | None = None) -> views.Job:
        """Queue a job: a JobSpec, a mapping, or the path of a YAML or JSON document.

        With the same `idempotency_key` (1 to 255 printable ASCII characters) the same document
        creates one job, however often it is submitted. Raises Unprocessable with the pointer to
        the field at fault, Unsatisfiable if the cluster could never run it.
        """
        return self._driver.run(self._flows.submit(spec, idempotency_key))

    def dry_run(self, spec: Spec) -> views.Explanation:
        """Whether and when the job would start if it were submitted now, and what would have it
        start earlier; nothing is stored. Raises what `submit` raises."""
        return self._driver.run(self._flows.dry_run(spec))

    def upload_code(
        self,
        folder: str | PathLike[str] | PackedCode = ".",
        *,
        include: Sequence[str] = (),
        on_progress: OnUpload | None = None,
    ) -> views.Code:
        """Upload the files of a folder, or the result of `dray.code.packing.pack`, for
        `script: {code: ...}` of a job document.

        Files that Git ignores, `.git`, virtual environments, `.env` and private keys are left out,
        except those in `include`. Only parts that the server does not have yet are sent.
        `on_progress(bytes sent, bytes to send)` is called as they go. Raises SpecError for a
        folder that can't be uploaded.
        """
        packed = folder if isinstance(folder, PackedCode) else pack(Path(folder), include)
        return self._driver.run(self._flows.upload_code(packed, on_progress))

    def submit_function(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        num_workers: int = 1,
        spec: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
    ) -> views.Job:
        """Queue a job whose ranks each call `function(*args, **kwargs)`, as a script would run.

        The function is pickled by cloudpickle (`pip install 'dray[functions]'`) with what it refers
        to in its own module or notebook, and uploaded as code. Nodes need the same minor version of
        Python, and the packages that it imports. `attach(job).result()` is what it returned on rank
        0. spec: other parts of the job document, such as `{"environment": {...}}`. Raises SpecError
        for what can't be pickled, Forbidden where the server takes no functions.
        """
        with tempfile.TemporaryDirectory() as folder:
            functions.write(Path(folder), function, args, kwargs or {})
            code = self.upload_code(folder)
        document = functions.document(function, num_workers, spec, code.id)
        return self.submit(document, idempotency_key=idempotency_key)

    def attach(self, job: views.Job | str) -> JobRun:
        """Follow a job, by its id or name: `with client.attach(job) as run:` reads its logs,
        metrics or events as they come, waits for its end, and raises JobFailed unless it
        succeeded."""
        return JobRun(self, job.id if isinstance(job, views.Job) else self.resolve(job))

    def job_code(self, job_id: str) -> list[views.CodeFile]:
        """The files of the code that the job runs; CodeNotFound if it brought none."""
        return self._driver.run(self._flows.job_code(job_id))

    def download_code(self, job_id: str, dest: str | PathLike[str]) -> list[Path]:
        """Write the code that the job runs below the folder `dest`; the files' paths."""
        return self._driver.run(self._flows.download_code(job_id, dest))

    def plan(
        self,
        spec: Spec,
        *,
        memory_bytes_per_rank: int | None = None,
        flops_per_s: float | None = None,
        bandwidth_bytes_per_s: float | None = None,
        latency_s: float | None = None,
    ) -> views.Plan:
        """Compute memory and expected step time of each way to divide a job; nothing is submitted.

        Arguments default to what the server knows about its cluster, or to typical numbers; the
        plan says which. Raises NotPlannable if the plan would depend on unread data.
        """
        options = {
            "memory_bytes_per_rank": memory_bytes_per_rank,
            "flops_per_s": flops_per_s,
            "bandwidth_bytes_per_s": bandwidth_bytes_per_s,
            "latency_s": latency_s,
        }
        return self._driver.run(self._flows.plan(spec, options))

    def get(
        self, job_id: str, *, wait_s: float = 0.0, known_state: JobState | None = None
    ) -> views.Job:
        """The job; with `wait_s` (up to 60 s) once its state is not `known_state`."""
        return self._driver.run(self._flows.get(job_id, wait_s, known_state))

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
    ) -> Generator[views.Job, None, None]:
        """Yield the jobs that match all arguments, newest first, fetched page by page.

        state: one state or several, any of which matches. owner: `@me` is the caller. label: a
        job must have every pair. text: a part of the name, in whatever case. array: the id of an
        array. array_index: the index that a job has in its array. collapse_arrays: yield one job
        alone of each array; with `state`, of those with a job in any of them. created_after,
        created_before: with a time zone; the job was submitted at the first or later, and before
        the second. where: a search expression, such as
        `val/accuracy > 0.9 and train.optimizer.lr < 0.01`; raises InvalidSearch with the column at
        fault. brief: leave `spec` of each empty, which is most of an answer.
        """
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

    def resolve(self, reference: str, *, arrays: bool = False) -> str:
        """The id of the one job with this name, or whose id begins with it; `@last` is the caller's
        newest job; `ARRAY/INDEX` is a job of an array. A complete id is returned unchanged. With
        `arrays` it may be an array's: by its id, how that begins, or the name of its jobs.

        Raises JobNotFound, and AmbiguousJob with the candidates if there are several.
        """
        return self._driver.run(self._flows.resolve(reference, arrays=arrays))

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

    def compare(self, jobs: Iterable[views.Job | str]) -> views.Comparison:
        """Up to 50 jobs side by side: the fields in which their documents differ, their metrics,
        times and costs. The pinned baseline of their experiment comes first. Raises NotComparable
        for one job without a baseline."""
        return self._driver.run(tracking.compare(self._flows, list(jobs)))

    def frame(self, jobs: Iterable[views.Job | str]) -> pandas.DataFrame:
        """A pandas frame with a row for each job, by its id: how it did, the fields of the
        documents that differ, and the newest value of each metric. Raises ImportError without
        pandas (`pip install 'dray[frames]'`)."""
        frames.require_pandas()
        return frames.of_jobs(self._driver.run(tracking.jobs_of(self._flows, list(jobs))))

    def series_frame(
        self,
        jobs: Iterable[views.Job | str],
        keys: Sequence[str] | None = None,
        *,
        max_points: int | None = None,
    ) -> pandas.DataFrame:
        """A pandas frame with a row for each point of all series of the jobs, or of those of
        `keys`: columns job, key, step and value. `max_points` of each series, as of `metrics`."""
        frames.require_pandas()
        flow = tracking.series_of(self._flows, list(jobs), keys, max_points)
        return frames.of_series(self._driver.run(flow))

    def experiments(self, *, page_size: int = 100) -> Generator[views.Experiment, None, None]:
        """Yield the experiments by name: the values of the label `experiment`."""
        return self._driver.iterate(tracking.experiments(self._flows, page_size))

    def experiment(self, name: str) -> views.ExperimentSummary:
        """The experiment, with the states of its jobs and the range of each metric. Raises
        ExperimentNotFound if no job is in it."""
        return self._driver.run(tracking.experiment(self._flows, name))

    def pin_baseline(self, name: str, job_id: str | None) -> views.ExperimentSummary:
        """Have the jobs of an experiment compared with this one, or with none. Raises
        NotComparable for a job of another experiment."""
        return self._driver.run(tracking.pin_baseline(self._flows, name, job_id))

    def annotations(self, job_id: str) -> views.Annotations:
        """The tags and notes of a job."""
        return self._driver.run(tracking.get_annotations(self._flows, job_id))

    def annotate(
        self,
        job_id: str,
        *,
        add_tags: Sequence[str] | None = None,
        remove_tags: Sequence[str] | None = None,
        notes: str | None = None,
        revision: int | None = None,
    ) -> views.Annotations:
        """Add or remove tags of a job in any state, or replace its notes (Markdown). With
        `revision`, that of `annotations`, raises AnnotationsChanged if somebody changed them
        since."""
        flow = tracking.annotate(
            *(self._flows, job_id, revision),
            add_tags=add_tags and list(add_tags),
            remove_tags=remove_tags and list(remove_tags),
            notes=notes,
        )
        return self._driver.run(flow)

    def wait(
        self,
        job_id: str,
        timeout_s: float | None = None,
        states: States | None = None,
    ) -> views.Job:
        """Return the job as soon as it is over or in one of `states`, whatever its end.

        The client uses long polls and survives restarts of the server. Raises WaitTimeout after
        `timeout_s` seconds; the job goes on.
        """
        return self._driver.run(self._flows.wait(job_id, timeout_s, states))

    def follow(self, job_id: str, *, after_seq: int = 0) -> Generator[views.Event, None, None]:
        """Yield each event after `after_seq` when it happens, up to the one that ends the job.

        Events come over one stream (SSE), which is resumed after a broken connection or a restart
        of the server: no event is missed or repeated.
        """
        return self._driver.iterate(self._flows.follow(job_id, after_seq))

    def events(self, job_id: str, *, after_seq: int = 0) -> Generator[views.Event, None, None]:
        """Yield the events so far after `after_seq`."""
        return self._driver.iterate(self._flows.events(job_id, after_seq))

    def metrics(
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
        """Series of rank 0 (or `rank`), all or those of `keys`, with at most `max_points` each:
        thinned out, or with `in_order` the first ones after `after_step`, and with `times` when
        each point was reported. after_step, until_step: a part of them in more detail."""
        return self._driver.run(
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
    ) -> Generator[views.Point, None, None]:
        """Yield each point when it is reported, of all series or of `keys`, until the job is over.

        No point is left out. A step that a later attempt trains again is yielded once. after: the
        last step that the caller has of each series, to go on from there.
        """
        return self._driver.iterate(self._flows.follow_metrics(job_id, keys, rank, after))

    def system_metrics(
        self,
        job_id: str,
        keys: Sequence[str] | None = None,
        *,
        rank: int | None = None,
        after_time: int | None = None,
        max_points: int | None = None,
    ) -> views.SystemMetrics:
        """System metrics of rank 0 (or `rank`) over time, and of its node if it is the lowest rank
        there: all series or those of `keys`, with at most `max_points` points each."""
        return self._driver.run(
            self._flows.system_metrics(job_id, keys, rank, after_time, max_points)
        )

    def newest_system_metrics(self, job_id: str) -> views.SystemSample:
        """The newest sample of what each rank uses."""
        return self._driver.run(self._flows.newest_system_metrics(job_id))

    def logs(
        self,
        job_id: str,
        rank: int | None = None,
        *,
        attempt: int | None = None,
        follow: bool = False,
    ) -> Generator[views.LogLine, None, None]:
        """Yield lines of every rank and attempt, or of one; with `follow` until the job is over."""
        return self._driver.iterate(self._flows.logs(job_id, rank, attempt, follow))

    def attempts(self, job_id: str) -> list[views.Attempt]:
        return self._driver.run(self._flows.attempts(job_id))

    def checkpoints(self, job_id: str) -> list[views.Checkpoint]:
        return self._driver.run(self._flows.checkpoints(job_id))

    def artifacts(self, job_id: str) -> list[views.Artifact]:
        return self._driver.run(self._flows.artifacts(job_id))

    def download(
        self,
        job_id: str,
        dest: str | PathLike[str],
        artifact: str | None = None,
        *,
        on_progress: OnProgress | None = None,
    ) -> list[Path]:
        """Download all artifacts, or one by its id or path, into the folder `dest`.

        An interrupted download continues where it stopped; a file gets its name only once its
        sha256 is right. `on_progress(path, bytes downloaded, bytes of the file)` is called during
        the download. Returns the files' paths. Raises IntegrityError.
        """
        return self._driver.run(self._flows.download(job_id, dest, artifact, on_progress))

    def checkpoint_files(self, job_id: str, step: int) -> list[views.CheckpointFile]:
        """The files of the checkpoint at `step`; raises CheckpointNotFound if there is none."""
        return self._driver.run(self._flows.checkpoint_files(job_id, step))

    def download_checkpoint(
        self,
        job_id: str,
        step: int,
        dest: str | PathLike[str],
        *,
        on_progress: OnProgress | None = None,
    ) -> list[Path]:
        """Download the checkpoint at `step` into the folder `dest`, as `download` does."""
        return self._driver.run(self._flows.download_checkpoint(job_id, step, dest, on_progress))

    def cancel(self, job_id: str) -> views.Job:
        """Stop the job in any state; raises JobFinished if it already succeeded or failed."""
        return self._driver.run(self._flows.cancel(job_id))

    def hold(self, job_id: str) -> views.Job:
        """Keep a waiting job from starting until `release`; raises JobNotWaiting if it does not
        wait."""
        return self._driver.run(queues.change_job(self._flows, job_id, held=True))

    def release(self, job_id: str) -> views.Job:
        """Let a held job start again."""
        return self._driver.run(queues.change_job(self._flows, job_id, held=False))

    def move(self, job_id: str, queue: str | None = None, *, first: bool = False) -> views.Job:
        """Move a waiting job to another queue, before all others of its priority there with
        `first`, or both. The rules of that queue apply. Raises JobNotWaiting, UnknownQueue,
        QueueFull or PriorityTooHigh, and Forbidden for `first` unless an admin asks."""
        flow = queues.change_job(self._flows, job_id, queue=queue, first=first or None)
        return self._driver.run(flow)

    def set_priority(self, job_id: str, priority: int) -> views.Job:
        """Change the priority of a job that has not ended; raises PriorityTooHigh above the queue's
        `max_priority` unless an admin asks."""
        return self._driver.run(queues.change_job(self._flows, job_id, priority=priority))

    def queues(self) -> list[views.Queue]:
        """All queues by name, with their rules and the jobs in them."""
        return self._driver.run(queues.every(self._flows))

    def queue(self, name: str) -> views.Queue:
        """The queue; raises QueueNotFound if there is none."""
        return self._driver.run(queues.get(self._flows, name))

    def set_queue(self, name: str, **rules: Any) -> views.Queue:
        """Change the rules that are given of a queue, or make one with them; for admins.

        Rules are `weight`, `max_running`, `max_running_per_user`, `max_queued`,
        `max_queued_per_user`, `max_priority`, `budget`, `monthly_budget`, amounts of resources by
        Ray's names: `quota`, `limit` and `user_limit`, such as
        `limit={"GPU": 8, "memory": "64GiB"}`, and the weights of users: `user_weights={"ann": 2}`.
        Within these only the resources and users that are given change. None stands for the
        default, and removes a resource or a weight.
        Raises InvalidQueue if the rules contradict each other.
        """
        return self._driver.run(queues.set_rules(self._flows, name, rules))

    def delete_queue(self, name: str) -> None:
        """Remove a queue; raises QueueInUse while jobs that have not ended are in it. For
        admins."""
        self._driver.run(queues.delete(self._flows, name))

    def create_webhook(
        self,
        url: str,
        *,
        states: Sequence[JobState | str] | None = None,
        queue: str | None = None,
        labels: Mapping[str, str] | None = None,
        format: WebhookFormat | str | None = None,  # noqa: A002  the API's word
        all_users: bool = False,
    ) -> views.Webhook:
        """Have an address told when your jobs, or with `all_users` everybody's (for admins), come
        to one of `states`; by default when they end. `queue` and `labels` choose among them.

        `secret` of the answer is the key of the signatures, and is told this once. Raises
        WebhookUrlForbidden, UnknownQueue or TooManyWebhooks.
        """
        flow = webhooks.create(
            *(self._flows, url, states, queue, labels, format), all_users=all_users
        )
        return self._driver.run(flow)

    def webhooks(self) -> list[views.Webhook]:
        """Your webhooks, oldest first; for admins, everybody's."""
        return self._driver.run(webhooks.every(self._flows))

    def webhook(self, webhook_id: str) -> views.Webhook:
        """The webhook, without its secret; raises WebhookNotFound if you have no such one."""
        return self._driver.run(webhooks.get(self._flows, webhook_id))

    def enable_webhook(self, webhook_id: str) -> views.Webhook:
        """Have a disabled webhook notified of what happens from now on."""
        return self._driver.run(webhooks.enable(self._flows, webhook_id, enabled=True))

    def disable_webhook(self, webhook_id: str) -> views.Webhook:
        """Send nothing more to it; messages that wait are dropped."""
        return self._driver.run(webhooks.enable(self._flows, webhook_id, enabled=False))

    def delete_webhook(self, webhook_id: str) -> None:
        """Remove a webhook with its messages."""
        self._driver.run(webhooks.delete(self._flows, webhook_id))

    def test_webhook(self, webhook_id: str, *, wait: bool = True) -> views.WebhookDelivery:
        """Send it a message about no job. Returns that with the receiver's answer, or with
        `wait=False` at once. Raises WebhookDisabled."""
        return self._driver.run(webhooks.test(self._flows, webhook_id, wait=wait))

    def invite_clients(self, job_id: str, clients: int = 1) -> list[views.Invitation]:
        """Invite clients outside of the cluster to a federated job; raises TooManyClients if as
        many are invited as its document has. Their tokens are told this once."""
        return self._driver.run(federation.invite(self._flows, job_id, clients))

    def federated_clients(self, job_id: str) -> views.FederatedClientPage:
        """The clients that were invited to a job, and its newest round."""
        return self._driver.run(federation.clients(self._flows, job_id))

    def revoke_client(self, job_id: str, client: int) -> None:
        """Revoke a client's token; raises ClientNotFound if the job has no such client."""
        self._driver.run(federation.revoke(self._flows, job_id, client))

    def join(
        self,
        job_id: str,
        data: str | PathLike[str],
        *,
        on_round: Callable[[str], None] | None = None,
    ) -> views.JobState:
        """Take part in a federated job as a client outside of its cluster, with a client's token,
        until the job ends; returns the job's last state.

        data: a table with the columns of the job's data, or for images a folder with a folder for
        each class. Nothing of it is sent: an update of the model, numbers of samples and mean
        losses are. on_round: called with a sentence about each round. A client that was stopped
        may call again at any time. Raises ImportError if the packages of `dray[client]` are
        missing, ValueError if the data do not fit the job, Unauthorized once the token is revoked.
        """
        with tempfile.TemporaryDirectory(prefix="dray-client-") as folder:
            make_trainer = trainer_of(Path(folder), data)
            tell = on_round or (lambda _sentence: None)
            flow = federation.join(self._flows, job_id, Path(folder), make_trainer, tell)
            return self._driver.run(flow)

    def webhook_deliveries(self, webhook_id: str) -> Generator[views.WebhookDelivery, None, None]:
        """Its messages with the receiver's last answers, newest first."""
        return self._driver.iterate(webhooks.deliveries(self._flows, webhook_id))

    def costs(
        self,
        by: Literal["user", "queue"] = "user",
        *,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> views.CostReport:
        """The cost of each user, or of the jobs of each queue, from one time to another, with a
        time zone; by default since this month began, in UTC. Admins see everybody's costs, others
        their own."""
        return self._driver.run(costs.report(self._flows, by, since, until))

    def decisions(self, *, before: int | None = None, limit: int = 100) -> list[views.Decision]:
        """The newest rounds of the scheduler that changed something, of the last hours; with
        `before` those of lower numbers."""
        return self._driver.run(outlook.decisions(self._flows, before, limit))

    def decision(self, number: int) -> views.ReplayedDecision:
        """A round of the scheduler: its view of the jobs, its decisions, and those of the policy on
        the same view now. Raises DecisionNotFound if that round is not kept."""
        return self._driver.run(outlook.decision(self._flows, number))

    def forecast_errors(self) -> views.ForecastErrors:
        """How far off the forecasts of starts and ends were of the last 7 days."""
        return self._driver.run(outlook.forecast_errors(self._flows))

    def preempt(self, job_id: str, *, grace_s: float | None = None) -> views.Job:
        """Have a job save a checkpoint within `grace_s` seconds (by default the server's setting),
        leave its slots and resume from its place in the queue. Raises JobNotRunning if the job
        holds no slots."""
        return self._driver.run(fault_injection.preempt(self._flows, job_id, grace_s))

    def drill(
        self,
        job_id: str,
        *,
        kind: DrillKind | str,
        rank: int = 0,
        at_step: int | None = None,
        wait: bool = True,
        idempotency_key: str | None = None,
    ) -> views.Drill:
        """Inject a fault into a job that trains: `kill` or `stall` a rank, or `preempt` the job.

        The fault is injected at once, or when `at_step` optimizer steps are done. Returns the drill
        when it is over, or with `wait=False` immediately. Raises JobNotRunning or DrillImpossible.
        """
        flow = fault_injection.drill(
            self._flows, job_id, DrillKind(kind), rank, at_step, wait, idempotency_key
        )
        return self._driver.run(flow)

    def drills(self, job_id: str) -> list[views.Drill]:
        """Every drill of the job, oldest first."""
        return self._driver.run(fault_injection.drills(self._flows, job_id))

    def hangs(self, job_id: str) -> list[views.Hang]:
        """The newest hangs that were found, with the culprits and the stack of every rank."""
        return self._driver.run(fault_injection.hangs(self._flows, job_id))

    def delete(self, job_id: str) -> None:
        """Remove a finished job with all its files; raises JobLive if the job has not ended."""
        self._driver.run(self._flows.delete(job_id))

    def explain(self, job_id: str) -> views.Explanation:
        """Explain why the job is in its state, and what it waits for."""
        return self._driver.run(self._flows.explain(job_id))

    def cluster(self) -> views.Cluster:
        """The nodes, their slots, and the jobs that hold the slots."""
        return self._driver.run(self._flows.cluster())
