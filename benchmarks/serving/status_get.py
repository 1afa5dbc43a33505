"""Getting a job's status: dray's server, a plain FastAPI + SQLAlchemy route, and MLflow's run
GET."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.figures import ratio_of_medians
from benchmarks.machine import BenchmarkError, wait_until_quiet
from benchmarks.processes import free_port
from benchmarks.report import Comparison, Result, Row
from benchmarks.serving import jobs, load, servers
from benchmarks.serving.servers import Running, dray, running

NUM_CONNECTIONS = 16
BLOCK_REQUESTS = 2000
MLFLOW_BLOCK_REQUESTS = 300
BLOCKS_PER_ROUND = 2
GOALS: Mapping[str, float] = {"plain": 1 / 3, "mlflow": 1 / 5}

METHOD = (
    "Each server is one process on SQLite: dray (`python -m api`, which also writes a log line "
    "for each request to a file), a plain FastAPI route without a log "
    "(`benchmarks/serving/plain.py`), and `mlflow server` with one worker. All three use uvicorn "
    "with httptools, without uvicorn's access log.",
    "A job (for MLflow, a run with the same number of parameters, tags and metrics) is "
    f"requested over {NUM_CONNECTIONS} persistent connections that are always busy, by a "
    "raw-socket client in a separate process. dray and the plain route read the same database "
    "file.",
    "Nothing is written during the measurement, so dray responds from its cache. The rows named "
    "'changing' request a different job each time, from a set too large to be cached: every "
    "response is read with SQL.",
    "Blocks of requests alternate. The first round is not counted. A sample is one block: "
    "seconds per request (the inverse of the throughput), and the server's CPU seconds per "
    "request.",
    "Ratio of medians, with an interval from a bootstrap of both sides. A/A: dray's odd blocks "
    "against its even blocks.",
)


@dataclass
class Contender:
    """One server and the requests to it."""

    label: str
    server: Running
    request: Callable[[], bytes]
    num_requests: int = BLOCK_REQUESTS
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def block(self, *, counts: bool) -> None:
        before = self.server.cpu_s()
        done = asyncio.run(
            load.ask(
                self.server.port,
                self.request,
                num_requests=self.num_requests,
                num_connections=NUM_CONNECTIONS,
            )
        )
        if counts:
            self.wall_s.append(done.per_request_s)
            self.cpu_s.append((self.server.cpu_s() - before) / self.num_requests)


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    with ExitStack() as stack:
        contenders = stack.enter_context(_contenders())
        for number in range(num_rounds + 1):
            wait_until_quiet(at_most_s=10)
            for _ in range(BLOCKS_PER_ROUND):
                for contender in contenders.values():
                    contender.block(counts=number > 0)
            if number:
                parts = [f"{name} {1 / each.wall_s[-1]:.0f}/s" for name, each in contenders.items()]
                progress(f"round {number}: {', '.join(parts)}")
    return conclude(contenders)


@contextmanager
def _contenders() -> Iterator[dict[str, Contender]]:
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dray-bench-")))
        ids = jobs.finished(home, 6000)
        own = stack.enter_context(dray(home))
        one = load.get(f"/v1/jobs/{ids[0]}", own.port)
        many = iter(_forever([load.get(f"/v1/jobs/{job_id}", own.port) for job_id in ids]))
        port = free_port()
        command = [sys.executable, "-m", "benchmarks.serving.plain", str(home), str(port)]
        plain = stack.enter_context(running(command, port, "/healthz", {}))
        _check_same(own.port, plain.port, ids[0])
        asked = load.get(f"/v1/jobs/{ids[0]}", plain.port)
        mlflow = stack.enter_context(servers.mlflow(Path(home) / "mlflow", num_workers=1))
        run = make_run(mlflow.port)
        run_request = load.get(f"/api/2.0/mlflow/runs/get?run_id={run}", mlflow.port)
        yield {
            "dray": Contender("dray", own, lambda: one),
            "changing": Contender("dray, changing", own, lambda: next(many)),
            "plain": Contender("FastAPI + SQLAlchemy", plain, lambda: asked),
            "mlflow": Contender(
                "MLflow runs/get", mlflow, lambda: run_request, MLFLOW_BLOCK_REQUESTS
            ),
        }


def conclude(contenders: Mapping[str, Contender]) -> Result:
    own = contenders["dray"]
    rows, comparisons = [], []
    for each in contenders.values():
        rows.append(Row(f"{each.label}: seconds per request", each.wall_s))
    for each in contenders.values():
        rows.append(Row(f"{each.label}: processor seconds per request", each.cpu_s))
    for name, goal in GOALS.items():
        peer = contenders[name]
        for what, ours, theirs in (
            ("time", own.wall_s, peer.wall_s),
            ("processor time", own.cpu_s, peer.cpu_s),
        ):
            ratio = ratio_of_medians(ours, theirs)
            comparisons.append(
                Comparison(
                    label=f"{what} per status GET, dray / {peer.label}",
                    n=len(ours),
                    ratio=ratio,
                    same=ratio_of_medians(ours[::2], ours[1::2]),
                    goal=f"at most 1/{1 / goal:.0f}",
                    met=ratio.value <= goal,
                )
            )
    return Result(
        name="status_get",
        title="Status of a job",
        method=METHOD,
        rows=rows,
        comparisons=comparisons,
    )


def _forever(requests: list[bytes]) -> Iterator[bytes]:
    while True:
        yield from requests


def _check_same(port: int, other_port: int, job_id: str) -> None:
    """Check that the plain route returns the same response as dray, so that the same work is
    timed."""
    answers = [
        httpx.get(f"http://127.0.0.1:{each}/v1/jobs/{job_id}", trust_env=False).json()
        for each in (port, other_port)
    ]
    if answers[0] != answers[1]:
        raise BenchmarkError(f"the two routes return different responses: {answers}")


def make_run(port: int) -> str:
    """Create a run with about as much data as a job."""
    url = f"http://127.0.0.1:{port}/api/2.0/mlflow"
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as http:

        def call(path: str, body: object) -> dict[str, object]:
            response = http.post(path, json=body)
            response.raise_for_status()
            answer: dict[str, object] = response.json()
            return answer

        made = call("/runs/create", {"experiment_id": "0", "run_name": "digits", "start_time": 1})
        info = made["run"]
        assert isinstance(info, dict)
        run_id = str(info["info"]["run_id"])
        call(
            "/runs/log-batch",
            {
                "run_id": run_id,
                "params": [{"key": f"p{i}", "value": "1"} for i in range(12)],
                "tags": [{"key": "team", "value": "a"}],
                "metrics": [
                    {"key": f"m{i}", "value": 0.5, "timestamp": 1, "step": 1} for i in range(5)
                ],
            },
        )
        return run_id
