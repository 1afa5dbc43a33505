"""Rounds of 200 clients over HTTP: how many a minute, what they cost the service, and whether a job
beside them notices."""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.federated.http_clients import Swarm
from benchmarks.figures import ratio_of_medians
from benchmarks.machine import BenchmarkError, wait_until_quiet
from benchmarks.processes import service
from benchmarks.report import Comparison, Result, Row, Table
from dray import Client
from dray.views import JobState

CLIENTS, ROUNDS = 200, 6
BESIDE_S = 8.0
GOAL = 1.1
METHOD = [
    f"`python -m api` with an embedded Ray of 2 slots. A federated job of {CLIENTS} clients, all "
    f"of them in each of {ROUNDS} rounds, has one slot: a perceptron for `sklearn://digits`, "
    "38 kB. The clients are in a process of their own, ask as `dray federate join` does, and send "
    "an update without training for it.",
    "Rounds a minute: by the steps of the job, without the first. Processor time: of the service's "
    "own process and its gateway, over that of the rounds, and for each update.",
    f"A job beside them, on the other slot, reports the time of its steps: while the clients take "
    f"part, and for {BESIDE_S:g} s before. On a machine of few processors it also notices the "
    "process of the clients.",
]
DOCUMENT: dict[str, Any] = {
    "recipe": "image_classification",
    "model": {"name": "mlp", "width": 64},
    "data": {"source": "sklearn://digits"},
    "federated": {
        "clients": CLIENTS,
        "clients_per_round": CLIENTS,
        "rounds": ROUNDS,
        "evaluate_every": ROUNDS,
        "deadline_s": 60,
        "http": {},
    },
}
BESIDE: dict[str, Any] = {
    "recipe": "image_classification",
    "model": {"name": "mlp", "width": 64},
    "train": {"epochs": 100_000, "eval_every_epochs": 100_000},
    "checkpoint": {"every_steps": 10**9},
}


@dataclass(frozen=True)
class Turn:
    """One federated job."""

    rounds_per_minute: float
    cores: float
    """Processor time of the service, over time."""
    ms_per_update: float
    quiet_s: list[float]
    """Step times of the job beside it, before."""
    beside_s: list[float]
    """The same while the clients took part."""


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    """`num_rounds` jobs one after the other."""
    turns = []
    with (
        tempfile.TemporaryDirectory(prefix="dray-bench-") as folder,
        service(Path(folder), num_slots=2) as client,
    ):
        for number in range(num_rounds):
            wait_until_quiet()
            turns.append(found := turn(client))
            progress(
                f"turn {number}: {found.rounds_per_minute:.0f} rounds a minute, "
                f"{found.cores:.2f} cores, {found.ms_per_update:.2f} ms an update"
            )
    quiet = [step for each in turns for step in each.quiet_s]
    beside = [step for each in turns for step in each.beside_s]
    ratio, same = ratio_of_medians(beside, quiet), ratio_of_medians(quiet[::2], quiet[1::2])
    rows = [
        [f"{one.rounds_per_minute:.0f}", f"{one.cores:.2f}", f"{one.ms_per_update:.2f}"]
        for one in turns
    ]
    return Result(
        name="federated_http",
        title=f"Rounds of {CLIENTS} clients over HTTP",
        method=METHOD,
        rows=[Row("steps of a job, alone", quiet), Row("beside the clients", beside)],
        comparisons=[
            Comparison(
                *("beside / alone", len(beside), ratio, same, f"at most {GOAL:g}"),
                ratio.value <= GOAL,
            )
        ],
        tables=[
            Table(
                "The federated job",
                ["rounds a minute", "the service's cores", "ms of it an update"],
                rows,
            )
        ],
    )


def turn(client: Client) -> Turn:
    beside = client.submit(BESIDE).id
    client.wait(beside, states=[JobState.RUNNING], timeout_s=60)
    time.sleep(BESIDE_S)
    first = _last_step(client, beside)
    job_id = client.submit(DOCUMENT).id
    tokens = [one.token for one in client.invite_clients(job_id, CLIENTS)]
    swarm = Swarm(client.url, job_id, tokens)
    processes = _service_processes()
    cpu_s, began = _cpu_s(processes), time.monotonic()
    taking_part = threading.Thread(target=swarm.run)
    taking_part.start()
    ended = client.wait(job_id, timeout_s=300)
    took_s, cpu_s = time.monotonic() - began, _cpu_s(processes) - cpu_s
    taking_part.join(60)
    if ended.state is not JobState.SUCCEEDED or swarm.sent < CLIENTS * ROUNDS:
        raise BenchmarkError(f"{job_id} is {ended.state}, with {swarm.sent} updates")
    last = _last_step(client, beside)
    steps = client.metrics(beside, ["perf/step_time_s"]).series["perf/step_time_s"]
    times = [(step, float(value)) for step, value in zip(steps.steps, steps.values, strict=True)]
    client.cancel(beside)
    client.wait(beside, timeout_s=60)
    series = client.metrics(job_id, ["perf/step_time_s"]).series["perf/step_time_s"]
    per_round = statistics.median(float(value) for value in series.values[1:])
    return Turn(
        rounds_per_minute=60 / per_round,
        cores=cpu_s / took_s,
        ms_per_update=1000 * cpu_s / swarm.sent,
        quiet_s=[value for step, value in times if step <= first],
        beside_s=[value for step, value in times if first < step <= last],
    )


def _last_step(client: Client, job_id: str) -> int:
    progress = client.get(job_id).progress
    return 0 if progress is None else progress.step


def _service_processes() -> list[psutil.Process]:
    """The service and its gateway: not Ray's processes, which are in sessions of their own."""
    (own,) = [one for one in psutil.Process().children() if "api" in one.cmdline()]
    gateway = [one for one in own.children() if "gateway" in " ".join(one.cmdline())]
    return [own, *gateway]


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(one.cpu_times()[:2]) for one in processes)
