"""The rank actor, which holds one slot in Ray and represents the training process in it.

The node's forkserver forks the training process. The actor passes the task to the process, writes
the log of the process, exports the progress to Ray as metrics, and observes the exit of the
process. If a rank needs no actor, the supervisor does all this (`local_rank`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from dray.train.spool import begin_count, segments
from ray_workers.node import rank_environment, rank_gate
from ray_workers.node.folders.storage_access import StorageAccess, needs_access
from ray_workers.node.forkserver.client import ForkedProcess
from ray_workers.node.forkserver.forked_child import Given
from ray_workers.node.found_metrics.finder import MetricFinder
from ray_workers.node.node_address import own_address
from ray_workers.node.rank_gate import RankGate
from ray_workers.node.secret_masking import note_secrets
from ray_workers.shared import heartbeat
from ray_workers.shared.contracts import RankTask
from ray_workers.shared.heartbeat import RankAssignment
from ray_workers.shared.names import repr_name
from ray_workers.shared.peers.peer_ports import SHARE_PORTS, ReservedPort
from ray_workers.shared.peers.store_proxy import StoreForwarder
from ray_workers.shared.secret_files import Masker, SecretUnavailable, read_secrets
from ray_workers.supervision.log_pump import ClosedLogPump, LogPump
from ray_workers.supervision.rules.failure_attribution import RankExit
from ray_workers.supervision.rules.timings import Timings


class RankHost:
    """The process and the node resources of one rank of an attempt. The methods run concurrently on
    one event loop."""

    def __init__(self, name: str, job_name: str, timings: Timings) -> None:
        self._name = name
        self._job_name = job_name
        self._timings = timings
        self._process: ForkedProcess | None = None
        self._has_ended = False
        self._storage: StorageAccess | None = None
        self._forwarder: StoreForwarder | None = None
        self._reserved: ReservedPort | None = None
        self._held = contextlib.ExitStack()

    def __repr__(self) -> str:
        return repr_name(self._job_name, self._name)

    async def gpus(self) -> list[str]:
        """Return the ids of the GPUs that Ray has assigned to this actor, including GPUs that the
        actor shares with others."""
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    async def reserve_port(self) -> str:
        """Reserve a port for the actor's processes. No other job on the node can get this port.
        Returns `host:port`."""
        self._reserved = ReservedPort(own_address())
        self._held.callback(self._reserved.close)
        return str(self._reserved)

    async def start(self, task: RankTask, socket_path: str, store_secret: bytes) -> int:
        """Fork the training process, or its successor if it has exited. Returns the pid.

        The master address in the task is the address of the store's proxy. The process gets this
        actor's address instead, because only the actor knows the secret.
        """
        with rank_gate.keeping_errors(task):
            gate = await asyncio.to_thread(rank_gate.admit, task, os.environ)
            return await self._start(gate, socket_path, store_secret)

    async def _start(self, gate: RankGate, socket_path: str, store_secret: bytes) -> int:
        task = gate.task
        if self._forwarder is not None:
            self._forwarder.close()
        self._forwarder = StoreForwarder(task.master_addr, task.master_port, store_secret)
        self._held.callback(self._forwarder.close)
        address = own_address()
        port = await self._forwarder.listen(address)
        task = replace(task, master_addr=address, master_port=port)
        # If the rank has no GPU, this is an empty string, which hides the GPUs of other jobs.
        visible = ",".join(await self.gpus())
        task = replace(task, env={**task.env, "CUDA_VISIBLE_DEVICES": visible})
        if self._reserved is not None and task.spec["script"]["framework"] not in SHARE_PORTS:
            self._reserved.unbind()
        begin_count(Path(task.spool_dir))
        self._finder = MetricFinder(task, since=time.time()) if task.spec.get("script") else None
        has_secrets = bool((task.spec.get("environment") or {}).get("secrets"))
        masker = await asyncio.to_thread(_masker_of, task) if has_secrets else Masker({})
        await asyncio.to_thread(note_secrets, task)
        self._process = await self._fork(task, socket_path)
        self._held.callback(self._process.abandon)
        self._has_ended = False
        self._page_prefix = task.page_prefix
        spool = Path(task.spool_dir), self._process.output, task.spool_limit_bytes
        self._log = (
            LogPump(*spool, self._timings)
            if gate.passes_output
            else ClosedLogPump(*spool, self._timings, task)
        )
        self._held.callback(self._log.finish)
        self._log.mask(masker)
        if self._finder is not None:
            self._log.show_to(self._finder.saw, self._finder.logged)
            self._held.callback(self._finder.close)
            self._finder.begin()
        gauges = export_progress(task, self._timings) if gate.passes_progress else asyncio.sleep(0)
        self._gauges = asyncio.ensure_future(gauges)
        self._held.callback(self._gauges.cancel)
        return self._process.pid

    async def _fork(self, task: RankTask, socket_path: str) -> ForkedProcess:
        """Fork the process. Only dray's own code gets the node's credentials; scripts access the
        storage through this actor."""
        request = {"op": "rank", "task": json.loads(task.to_json())}
        if needs_access(task):
            self._storage = StorageAccess(task)
            self._held.callback(self._storage.close)
            with self._storage.theirs as theirs:
                request["given"] = Given.STORAGE
                return await ForkedProcess.start(socket_path, request, theirs.fileno())
        credentials = rank_environment.credentials(os.environ)
        if runs_user_code(task.spec) or not credentials:
            return await ForkedProcess.start(socket_path, request)
        with open(os.memfd_create("credentials"), "r+b") as file:
            file.write(json.dumps(credentials).encode())
            file.seek(0)  # also flushes the file
            request["given"] = Given.CREDENTIALS
            return await ForkedProcess.start(socket_path, request, file.fileno())

    async def wait(self) -> RankExit:
        """Wait until all processes of the session have exited, and return how the training process
        exited."""
        assert self._process is not None, "start() comes first"
        log, gauges, finder = self._log, self._gauges, self._finder
        page_prefix = self._page_prefix
        code = await self._process.wait()
        ended_at = time.time()
        self._has_ended = True
        log.finish()
        gauges.cancel()
        if finder is not None and (note := await finder.finish()):
            log.add(note)
        if self._storage is not None:
            self._storage.close()
        rank = int(self._name.split(":")[-2])
        return RankExit(
            rank,
            exit_code=code,
            lost_forkserver=code is None and not self._process.left,
            is_stuck=code is None and bool(self._process.left),
            memory_kills=self._process.memory_kills,
            log_lines_lost=await log.lines_lost_at_the_end(),
            ended_at=ended_at,
            last_status=heartbeat.read_status(heartbeat.page_path(page_prefix)),
        )

    async def ping(self) -> None:
        """Return immediately, unless the actor's process is suspended."""

    async def announce(self, assignment: RankAssignment) -> None:
        """Notify the process of its rank in the next rendezvous round."""
        self._assignment = assignment
        # Read `self._assignment` when the page is written, so that the newest assignment is used if
        # several calls are waiting for the page.
        await self._write_page(lambda: heartbeat.announce(self._page_prefix, self._assignment))

    async def ask_to_leave(self) -> None:
        """Ask the process to save a checkpoint after its current step, and then to exit."""
        await self._write_page(lambda: heartbeat.ask_to_leave(self._page_prefix))

    async def _write_page(self, write: Callable[[], None]) -> None:
        """Write to the heartbeat page of the process. If the process is new, wait until it has
        created the page."""
        deadline = time.monotonic() + self._timings.page_limit_s
        while True:
            try:
                return write()
            except FileNotFoundError:
                if self._has_ended or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(self._timings.page_period_s)

    async def terminate(self) -> None:
        """Send SIGTERM to the process's session."""
        if self._process is not None:
            self._process.signal(signal.SIGTERM)

    async def stop(self, grace_s: float) -> None:
        """End the process by sending SIGTERM to its session, and SIGKILL after `grace_s`
        seconds."""
        if self._process is None:
            return
        await self.terminate()
        await asyncio.sleep(grace_s)
        self._process.signal(signal.SIGKILL)

    def close(self) -> None:
        """End the process, and release everything that the rank holds. This method need not be
        called in an actor, because everything is released when the actor's process exits."""
        self._held.close()


@ray.remote(max_restarts=0)
class RankActor(RankHost):
    """A rank in a process of its own."""


def runs_user_code(spec: Mapping[str, Any]) -> bool:
    """Whether the ranks of a job run the user's code: a script, an imported model or the user's
    metrics."""
    model, method = spec.get("model") or {}, spec.get("method") or {}
    return bool(spec.get("script") or method.get("metrics")) or model.get("name") == "imported"


def _masker_of(task: RankTask) -> Masker:
    """Return the masker for the rank's output. If the secrets can't be read, the masker masks
    nothing: the rank itself fails because it can't read them either."""
    environment = task.spec.get("environment") or {}
    try:
        names = environment.get("secrets") or ()
        policy = task.environment_policy
        return Masker(read_secrets(policy.secrets_dir, names, policy.owner))
    except SecretUnavailable:
        return Masker({})


async def export_progress(task: RankTask, timings: Timings) -> None:
    """Export the rank's latest step, loss and throughput as Ray metrics, for the dashboard and
    Grafana.

    The values are read from the end of the rank's spool, so the training process has no additional
    work.
    """
    # Delay the import: it takes 0.1 s of CPU time, which the training process needs while it
    # starts.
    await asyncio.sleep(timings.gauge_period_s)
    from ray.util.metrics import Gauge

    # Ray accepts only ASCII in labels.
    job_name = str(task.spec["name"]).encode("ascii", "backslashreplace").decode()
    tags = {"job": task.job_id, "job_name": job_name, "rank": str(task.rank)}
    keys = tuple(tags)
    shown = {
        "step": Gauge("dray_step", "Optimizer steps done", keys),
        "train/loss": Gauge("dray_train_loss", "Training loss of the step", keys),
        "perf/samples_per_s": Gauge("dray_samples_per_s", "Samples per second", keys),
    }
    spool_dir = Path(task.spool_dir)
    while True:
        newest = _last_metrics(spool_dir)
        for key, gauge in shown.items():
            if key in newest:
                gauge.set(newest[key], tags)
        await asyncio.sleep(timings.gauge_period_s)


def _last_metrics(spool_dir: Path) -> dict[str, float]:
    """Return the values, the step and the speed from the last METRICS frame near the end of a
    spool. The result is empty if there is no such frame."""
    for _, path in reversed(segments(spool_dir)[-2:]):
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 16384))
            for line in reversed(file.read().split(b"\n")[:-1]):
                if line.startswith(b'{"kind":"metrics"'):
                    body = json.loads(line)["body"]
                    speed = {"perf/samples_per_s": body.get("samples_per_s")}
                    newest = {**speed, **body["values"], "step": float(body["step"])}
                    return {key: value for key, value in newest.items() if value is not None}
    return {}
