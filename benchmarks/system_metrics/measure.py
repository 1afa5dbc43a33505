"""The processor time of system metrics: on a node, and in the service beside all other reports."""

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
from ray_workers.shared.frames import SystemMetricsReport
from ray_workers.shared.processes.procfs import started_ticks
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
GOAL_OF_NODE, GOAL_OF_SERVICE = 0.001, 1.05
STEPS = workload.LEDGER_EVERY
NUM_JOBS = workload.NUM_PHASES
OF_RANK = ("system/cpu", "system/memory_rss", "system/disk_read", "system/disk_written")
OF_NODE = (
    *("system/node/cpu", "system/node/memory_used", "system/node/memory_available"),
    *("system/node/disk_read", "system/node/disk_written"),
    *("system/node/network_received", "system/node/network_sent"),
)

METHOD = (
    f"Node: processor time of the thread that takes a sample of {NUM_RANKS} ranks, each a process "
    f"with {NUM_THREADS} threads and {NUM_LOADERS} children, and of the node; over the "
    f"{PERIOD_S:g} s between two samples. /proc and /sys are the machine's own.",
    f"Service: processor time to unpickle and store the reports of {NUM_JOBS} jobs as in "
    f"`many_jobs` ({workload.NUM_RANKS} ranks, a step a second, a ledger in {STEPS} steps) in one "
    f"transaction a second on SQLite, for {STEPS} seconds: with a sample beside each ledger, and "
    "without, in turns. The jobs have run before, so that their samples are joined now and then, "
    "as they are in the long run. What else a service does is left out, which makes the share of "
    "the samples look larger than it is.",
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
    with_samples, without, num_bytes = _seconds_of_service(num_rounds)
    more_s = max(float(np.mean(with_samples) - np.mean(without)) / NUM_JOBS, 0.0)
    progress(f"a sample in the service: {more_s * 1e6:.0f} us")
    limit = [PERIOD_S * GOAL_OF_NODE]
    node = Comparison(
        label=f"a sample of a node / {GOAL_OF_NODE:.1%} of a core",
        n=len(of_node),
        ratio=ratio_of_medians(of_node, limit),
        same=ratio_of_medians(of_node[::2], of_node[1::2]),
        goal="at most 1",
        met=float(np.median(of_node)) <= limit[0],
    )
    share = float(np.mean(with_samples) / np.mean(without))
    service = Comparison(
        label="storing reports with samples / without",
        n=len(without),
        ratio=ratio_of_medians(with_samples, without),
        same=ratio_of_medians(without[::2], without[1::2]),
        goal=f"at most {GOAL_OF_SERVICE}, of the means too",
        met=share <= GOAL_OF_SERVICE,
    )
    num_values = NUM_RANKS * len(OF_RANK) + len(OF_NODE)
    rows = [
        ["processor time of a sample on a node", seconds(float(np.median(of_node)))],
        ["for each rank", seconds(float(np.median(of_node)) / NUM_RANKS)],
        ["processor time of a sample in the service, mean", seconds(more_s)],
        ["cores of the service for 1,000 such jobs", f"{more_s * 1000 / PERIOD_S:.4f}"],
        ["storing with samples / without, of the means", f"{share:.3f}"],
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
            Row(f"storing {STEPS} s of {NUM_JOBS} jobs with samples", with_samples),
            Row(f"storing {STEPS} s of {NUM_JOBS} jobs without", without),
        ],
        comparisons=[node, service],
        tables=[Table("System metrics", ["", ""], rows)],
    )


def _samples_of_node(num_rounds: int) -> list[float]:
    """Processor time of each sample but the first, in which nothing is known yet."""
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
    """The pid of a process like a rank's."""
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
    """Processor time of each round with samples and without; bytes of a joined sample."""
    with_samples: list[float] = []
    without: list[float] = []
    with tempfile.TemporaryDirectory(prefix="dray-bench-") as home:
        settings = Settings(home=Path(home))
        jobs.write(settings, 2 * NUM_JOBS, 0)
        database, storage = Database(settings.database_url), Storage(settings.storage_url)
        try:
            database.write_sync(_write_samples)
            store = _Store(database, storage)
            for number in range(-1, num_rounds):  # the first one reads what was stored before
                with_s, without_s = store.round(number)
                if number >= 0:
                    with_samples.append(with_s)
                    without.append(without_s)
            return with_samples, without, database.read_sync(_bytes_of_joined)
        finally:
            database.close()


def _write_samples(session: Session) -> None:
    """As many as jobs have at different moments between two times at which they are joined."""
    for number in range(NUM_JOBS):
        known = KnownAttempt()
        for past in range(LONE_SAMPLES * number // NUM_JOBS):
            at = int(time.time()) - 10_000 + past * int(PERIOD_S)
            report = decode(_sample(at))
            assert isinstance(report, SystemMetricsReport)
            system_metrics.store(session, jobs.RUNNING.format(number), at, report, known)


class _Store:
    """Stores the reports of both groups of jobs, step by step."""

    def __init__(self, database: Database, storage: Storage) -> None:
        self._database = database
        self._storage = storage
        self._known = KnownAttempts()

    def round(self, number: int) -> tuple[float, float]:
        passed_s = [0.0, 0.0]
        for step in range((number + 1) * STEPS, (number + 2) * STEPS):
            for group in (0, 1) if step % 2 else (1, 0):
                passed_s[group] += self._step(group, step)
        return passed_s[0], passed_s[1]

    def _step(self, group: int, step: int) -> float:
        sent = [
            (jobs.RUNNING.format(group * NUM_JOBS + phase), *_pickled(phase, step, group == 0))
            for phase in range(NUM_JOBS)
        ]
        now = datetime.now(UTC)
        began = time.process_time()
        received = [
            Received(job_id, 1, _reply(cursor, pickle.loads(data))) for job_id, cursor, data in sent
        ]
        self._database.write_sync(
            lambda session: attempt_results.record(
                session, self._storage, received, now, known=self._known
            )
        )
        return time.process_time() - began


def _pickled(phase: int, step: int, has_samples: bool) -> tuple[dict[str, int], bytes]:
    """The cursor and the frames of one step of a job."""
    step += workload.first_step(phase) + 1
    data = workload.pickled(step, step, time.time() - step * workload.PERIOD_S)
    if has_samples and step % workload.LEDGER_EVERY == workload.LEDGER_EVERY - 1:
        data = pickle.dumps((*pickle.loads(data), _sample(int(time.time()))))
    return workload.cursor_at(step), data


def _reply(cursor: dict[str, int], frames: tuple[Frame, ...]) -> PollReply:
    return PollReply(cursor, Phase.RUNNING, {}, frames, more=False, outcome=None, silent=())


def _sample(at: int) -> Frame:
    """Of the ranks of a job that has a node of its own."""
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
