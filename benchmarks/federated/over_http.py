"""Rounds of 200 clients over HTTP: rounds per minute, their cost for the service, and their effect
on a concurrent job."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.federated.http_clients import Swarm
from benchmarks.figures import ratio_of_medians
from benchmarks.machine import BenchmarkError, wait_until_quiet
from benchmarks.pages import JobPages
from benchmarks.processes import service
from benchmarks.report import Comparison, Result, Row, Table
from dray import Client
from dray.views import JobState

CLIENTS, ROUNDS = 200, 6
BESIDE_S = 8.0
WHERE = {False: "shared processors", True: "processors apart"}
GOAL = 1.1
METHOD = [
    f"`python -m api` runs with an embedded Ray with 2 slots. A federated job with {CLIENTS} "
    f"clients, all of which take part in each of {ROUNDS} rounds, uses one slot: a perceptron "
    "for `sklearn://digits`, 38 kB. The clients run in a separate process, send the same "
    "requests as `dray federate join`, and send an update without training.",
    "Rounds per minute are derived from the steps of the job, excluding the first. CPU time is "
    "that of the service's process and its gateway, relative to the duration of the rounds, and "
    "per update.",
    "A second job, on the other slot, reports the duration of its steps while the clients take "
    f"part, and for {BESIDE_S:g} s before. Two kinds of turns alternate. In one, all processes "
    "share all cores. In the other, the second job's rank has one core to itself, and the "
    "clients, the service, Ray and the federated rank use the rest, as in a cluster, where the "
    "service and the clients do not run on the ranks' machines. The goal applies to the latter.",
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
    """`num_rounds` pairs of jobs, one with shared processors and one apart."""
    turns: dict[bool, list[Turn]] = {False: [], True: []}
    for number in range(2 * num_rounds):
        is_apart = number % 2 == 1
        turns[is_apart].append(found := _turn(is_apart))
        progress(
            f"{WHERE[is_apart]}: {found.rounds_per_minute:.0f} rounds a minute, "
            f"{found.cores:.2f} cores, {found.ms_per_update:.2f} ms an update"
        )
    return Result(
        name="federated_http",
        title=f"Rounds of {CLIENTS} clients over HTTP",
        method=METHOD,
        rows=[
            row
            for is_apart, found in turns.items()
            for row in (
                Row(f"steps of a job, alone, {WHERE[is_apart]}", _quiet(found)),
                Row(f"beside the clients, {WHERE[is_apart]}", _beside(found)),
            )
        ],
        comparisons=[_compare(found, is_apart) for is_apart, found in turns.items()],
        tables=[
            Table(
                "The federated job",
                ["", "rounds a minute", "the service's cores", "ms of it an update"],
                [
                    [
                        *(WHERE[is_apart], f"{one.rounds_per_minute:.0f}"),
                        *(f"{one.cores:.2f}", f"{one.ms_per_update:.2f}"),
                    ]
                    for is_apart, found in turns.items()
                    for one in found
                ],
            )
        ],
    )


def _quiet(turns: list[Turn]) -> list[float]:
    return [step for each in turns for step in each.quiet_s]


def _beside(turns: list[Turn]) -> list[float]:
    return [step for each in turns for step in each.beside_s]


def _compare(turns: list[Turn], is_apart: bool) -> Comparison:
    quiet, beside = _quiet(turns), _beside(turns)
    ratio = ratio_of_medians(beside, quiet)
    return Comparison(
        label=f"beside / alone, {WHERE[is_apart]}",
        n=len(beside),
        ratio=ratio,
        same=ratio_of_medians(quiet[::2], quiet[1::2]),
        goal=f"at most {GOAL:g}" if is_apart else "",
        met=ratio.value <= GOAL if is_apart else None,
    )


def _turn(is_apart: bool) -> Turn:
    """With a service of its own."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dray-bench-"))
        if is_apart:
            last = stack.enter_context(_without_the_last_processor())
        client = stack.enter_context(service(Path(folder), num_slots=2))
        wait_until_quiet()
        beside = client.submit(BESIDE).id
        client.wait(beside, states=[JobState.RUNNING], timeout_s=60)
        if is_apart:
            _move(JobPages(beside).observe()[0].status.pid, last)
        return _take(client, beside)


@contextlib.contextmanager
def _without_the_last_processor() -> Iterator[int]:
    """Keep this process and its children off the last processor, which is yielded to the caller."""
    *rest, last = all_of_them = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, rest)
    try:
        yield last
    finally:
        os.sched_setaffinity(0, all_of_them)


def _move(pid: int, processor: int) -> None:
    """Move all threads of a process."""
    for thread in psutil.Process(pid).threads():
        os.sched_setaffinity(thread.id, [processor])


def _take(client: Client, beside: str) -> Turn:
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
