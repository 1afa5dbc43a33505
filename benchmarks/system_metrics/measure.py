"""The CPU time of system metrics on a node and, compared with all other reports, in the service."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from benchmarks.figures import ratio_of_medians
from benchmarks.machine import wait_until_quiet
from benchmarks.many_jobs import jobs, workload
from benchmarks.report import Comparison, Result, Row, Table, seconds
from ray_workers.node import session_records
from ray_workers.node.session_records import SessionRecord
from ray_workers.node.system_metrics.sampler import SystemMetricsSampler
from ray_workers.shared.contracts import SUPERVISOR_RANK, Frame, FrameKind, Phase, PollReply
from ray_workers.shared.processes.procfs import started_ticks
from ray_workers.shared.supervisor_frames import SystemMetricsReport
from service.config.settings import Settings
from service.db.models import SystemMetricsRow
from service.db.session import Database
from service.domain.system_metrics import LONE_SAMPLES
from service.ingest import attempt_results
from service.ingest.attempt_results import Received
from service.ingest.decoding import decode
from service.storage.storage import Storage
from service.telemetry import system_metrics
from service.telemetry.known_attempts import KnownAttempt, KnownAttempts

NUM_RANKS, NUM_THREADS, NUM_LOADERS = 8, 60, 4
PERIOD_S = 10.0
GOAL_OF_NODE, GOAL_OF_SERVICE = 0.001, 0.05
STEPS = workload.LEDGER_EVERY
NUM_JOBS = workload.NUM_PHASES
OF_RANK = ("system/cpu", "system/memory_rss", "system/disk_read", "system/disk_written")
OF_NODE = (
    *("system/node/cpu", "system/node/memory_used", "system/node/memory_available"),
    *("system/node/disk_read", "system/node/disk_written"),
    *("system/node/network_received", "system/node/network_sent"),
)

METHOD = (
    f"Node: CPU time of the thread that takes a sample of the node and of {NUM_RANKS} ranks, "
    f"each a process with {NUM_THREADS} threads and {NUM_LOADERS} child processes, relative to "
    f"the {PERIOD_S:g} s between two samples. /proc and /sys are the machine's own.",
    f"Service: CPU time to unpickle, validate and store a sample of each of {NUM_JOBS} jobs in "
    "one transaction on SQLite, relative to the CPU time of the jobs' other reports between two "
    f"samples: {STEPS} replies per job as in `many_jobs` ({workload.NUM_RANKS} ranks, one step "
    "per second, a ledger), with one transaction per step. The jobs have been running before, "
    "and their samples are merged at different times. The time of the other reports does not "
    "include other work of the service.",
)

_RANK = f"""
import subprocess, sys, threading
for _ in range({NUM_THREADS}):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
loaders = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
           for _ in range({NUM_LOADERS})]
print(flush=True)
sys.stdin.read()
for loader in loaders:
    loader.kill()
"""


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    wait_until_quiet()
    of_node = _samples_of_node(num_rounds)
    progress(f"a sample of a node: {np.median(of_node) * 1e6:.0f} us")
    samples, others, num_bytes = _seconds_of_service(num_rounds)
    each_s = float(np.mean(samples)) / NUM_JOBS
    progress(f"a sample in the service: {each_s * 1e6:.0f} us")
    limit = [PERIOD_S * GOAL_OF_NODE]
    node = Comparison(
        label=f"a sample of a node / {GOAL_OF_NODE:.1%} of a core",
        n=len(of_node),
        ratio=ratio_of_medians(of_node, limit),
        same=ratio_of_medians(of_node[::2], of_node[1::2]),
        goal="at most 1",
        met=float(np.median(of_node)) <= limit[0],
    )
    service = Comparison(
        label="storing the samples of jobs / their other reports",
        n=len(others),
        ratio=ratio_of_medians(samples, others),
        same=ratio_of_medians(others[::2], others[1::2]),
        goal=f"at most {GOAL_OF_SERVICE}, of the means too",
        met=float(np.mean(samples)) <= GOAL_OF_SERVICE * float(np.mean(others)),
    )
    num_values = NUM_RANKS * len(OF_RANK) + len(OF_NODE)
    rows = [
        ["processor time of a sample on a node", seconds(float(np.median(of_node)))],
        ["for each rank", seconds(float(np.median(of_node)) / NUM_RANKS)],
        ["processor time of a sample in the service, mean", seconds(each_s)],
        ["cores of the service for 1,000 such jobs", f"{each_s * 1000 / PERIOD_S:.3f}"],
        ["values of a sample", str(num_values)],
        ["rows a second of 1,000 such jobs", f"{1000 / PERIOD_S:g}"],
        ["bytes of a sample that was joined with others", f"{num_bytes:.0f}"],
    ]
    return Result(
        name="system_metrics",
        title="System metrics",
        method=METHOD,
        rows=[
            Row("a sample of a node", of_node),
            Row(f"storing a sample of each of {NUM_JOBS} jobs", samples),
            Row(f"storing their other reports of {STEPS} s", others),
        ],
        comparisons=[node, service],
        tables=[Table("System metrics", ["", ""], rows)],
    )


def _samples_of_node(num_rounds: int) -> list[float]:
    """Return the CPU time of each sample except the first, when nothing is known yet."""
    taken = []
    with tempfile.TemporaryDirectory(prefix="dray-bench-") as folder, ExitStack() as ranks:
        for rank in range(NUM_RANKS):
            record = _record(rank, ranks.enter_context(_running()))
            session_records.write_session(Path(folder), record)
        sampler = SystemMetricsSampler(Path(folder))
        for _ in range(num_rounds + 1):
            began = time.thread_time()
            found = sampler.read("job", 1)
            taken.append(time.thread_time() - began)
            assert found.keys() == set(range(NUM_RANKS))
    return taken[1:]


@contextmanager
def _running() -> Iterator[int]:
    """Run a process like a rank's. Yields its pid."""
    process = subprocess.Popen(
        [sys.executable, "-c", _RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process.pid
    finally:
        process.communicate()


def _record(rank: int, pid: int) -> SessionRecord:
    return SessionRecord(
        place="",
        boot_id="",
        server_pid=1,
        server_started=1,
        pid=pid,
        started=started_ticks(pid) or 0,
        mark=f"{rank:x}",
        job_id="job",
        attempt=1,
        rank=rank,
    )


def _seconds_of_service(num_rounds: int) -> tuple[list[float], list[float], float]:
    """Return the CPU time in each round for the samples and for all other reports, and the bytes of
    a merged sample."""
    samples: list[float] = []
    others: list[float] = []
    with tempfile.TemporaryDirectory(prefix="dray-bench-") as home:
        settings = Settings(home=Path(home))
        jobs.write(settings, NUM_JOBS, 0)
        database, storage = Database(settings.database_url), Storage(settings.storage_url)
        try:
            service = _Service(database, storage)
            for number in range(num_rounds + 1):  # the first round reads previously stored data
                samples.append(service.store_samples())
                others.append(service.store_reports(range(number * STEPS, (number + 1) * STEPS)))
            return samples[1:], others[1:], database.read_sync(_bytes_of_joined)
        finally:
            database.close()


class _Service:
    """Stores the reports of jobs whose samples are merged at different times."""

    def __init__(self, database: Database, storage: Storage) -> None:
        self._database = database
        self._storage = storage
        self._known = KnownAttempts()
        self._samples = [KnownAttempt() for _ in range(NUM_JOBS)]
        self._time = int(time.time()) - 100_000
        for number in range(LONE_SAMPLES):
            first = NUM_JOBS * (LONE_SAMPLES - number) // LONE_SAMPLES
            self.store_samples(range(first, NUM_JOBS))

    def store_samples(self, numbers: range = range(NUM_JOBS)) -> float:
        self._time += int(PERIOD_S)
        sent = [pickle.dumps(_sample(self._time)) for _ in numbers]

        def store(session: Session) -> None:
            for number, data in zip(numbers, sent, strict=True):
                report = decode(pickle.loads(data))
                assert isinstance(report, SystemMetricsReport)
                job_id, known = jobs.RUNNING.format(number), self._samples[number]
                system_metrics.store(session, job_id, report.time, report, known)

        began = time.process_time()
        self._database.write_sync(store)
        return time.process_time() - began

    def store_reports(self, steps: range) -> float:
        """Return the CPU time to store these steps of every job, with one transaction per step."""
        return sum(map(self._store_step, steps))

    def _store_step(self, number: int) -> float:
        sent = [_pickled(phase, number) for phase in range(NUM_JOBS)]
        now = datetime.now(UTC)
        began = time.process_time()
        received = [
            Received(jobs.RUNNING.format(phase), 1, _reply(cursor, pickle.loads(data)))
            for phase, (cursor, data) in enumerate(sent)
        ]
        self._database.write_sync(
            lambda session: attempt_results.record(
                session, self._storage, received, now, known=self._known
            )
        )
        return time.process_time() - began


def _pickled(phase: int, number: int) -> tuple[dict[str, int], bytes]:
    """Return the cursor and the frames of a job's next step."""
    step = workload.first_step(phase) + 1 + number
    data = workload.pickled(step, step, time.time() - step * workload.PERIOD_S)
    return workload.cursor_at(step), data


def _reply(cursor: dict[str, int], frames: tuple[Frame, ...]) -> PollReply:
    return PollReply(cursor, Phase.RUNNING, {}, frames, more=False, outcome=None, silent=())


def _sample(at: int) -> Frame:
    """Return a sample of the ranks of a job on a separate node."""
    others = list(range(1, NUM_RANKS))
    columns = [
        {"ranks": [0], "values": {key: [123456.0] for key in (*OF_RANK, *OF_NODE)}},
        {"ranks": others, "values": {key: [123456.0] * len(others) for key in OF_RANK}},
    ]
    body = {"time": at, "columns": columns}
    return Frame(SUPERVISOR_RANK, 0, FrameKind.SYSTEM_METRICS, float(at), body)


def _bytes_of_joined(session: Session) -> float:
    row = SystemMetricsRow
    sums = select(func.sum(func.length(row.points)), func.sum(row.num_samples))
    size, count = session.execute(sums.where(~row.is_lone)).one()
    return float(size / count) if count else 0.0
