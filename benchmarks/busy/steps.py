"""How long a program trains on a machine with other work: under dray, under torchrun, and under
dray with ranks at the niceness that Ray gives its workers."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.figures import ratio_of_medians
from benchmarks.machine import BenchmarkError, clean_environment
from benchmarks.processes import running, service, torchrun_command
from benchmarks.report import Comparison, Result, Row
from benchmarks.scripts.contenders import PROGRAM
from dray import Client
from dray.views import JobState

NUM_STEPS, SIZE, NUM_RANKS = 60, 512, 2
BUSY_PER_CORE = 2
RAYS_NICENESS = "15"
TIMEOUT_S = 400.0

METHOD = (
    f"{NUM_RANKS} ranks run {NUM_STEPS} steps of a DDP model with {SIZE} x {SIZE} weights, while "
    f"{BUSY_PER_CORE} other processes per core are always busy, each in a separate session and "
    "at niceness 0. The time is the sum of rank 0's steps. Contenders take turns.",
)


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    with (
        tempfile.TemporaryDirectory(prefix="dray-bench-") as folder,
        contextlib.ExitStack() as all_,
    ):
        homes = [Path(folder, name) for name in ("dray", "nice")]
        for home in homes:
            home.mkdir()
        plain = all_.enter_context(service(homes[0], num_slots=NUM_RANKS))
        nice = {"RAY_worker_niceness": RAYS_NICENESS}
        stands_back = all_.enter_context(service(homes[1], num_slots=NUM_RANKS, environment=nice))
        all_.enter_context(_busy(Path(folder)))
        taken: dict[str, list[float]] = {name: [] for name in ("dray", "again", "torchrun", "nice")}
        for number in range(num_rounds):
            taken["dray"].append(_of_dray(plain))
            taken["torchrun"].append(_of_torchrun())
            taken["again"].append(_of_dray(plain))
            taken["nice"].append(_of_dray(stands_back))
            progress(
                f"round {number}: " + ", ".join(f"{n} {t[-1]:.1f} s" for n, t in taken.items())
            )
    return Result(
        name="busy_machine",
        title="Steps on a machine with other work",
        method=METHOD,
        rows=[
            Row("dray", taken["dray"] + taken["again"]),
            Row("torchrun", taken["torchrun"]),
            Row(f"dray, ranks at niceness {RAYS_NICENESS}", taken["nice"]),
        ],
        comparisons=[
            Comparison(
                label="dray / torchrun",
                n=num_rounds,
                ratio=ratio_of_medians(taken["dray"], taken["torchrun"]),
                same=ratio_of_medians(taken["dray"], taken["again"]),
                goal="at most 1.1",
                met=ratio_of_medians(taken["dray"], taken["torchrun"]).low <= 1.1,
            ),
            Comparison(
                label=f"dray with niceness {RAYS_NICENESS} / torchrun",
                n=num_rounds,
                ratio=ratio_of_medians(taken["nice"], taken["torchrun"]),
                same=ratio_of_medians(taken["dray"], taken["again"]),
                goal="none: what an operator may choose",
                met=None,
            ),
        ],
    )


@contextlib.contextmanager
def _busy(folder: Path) -> Iterator[None]:
    command = [sys.executable, "-c", "while True: pass"]
    with contextlib.ExitStack() as all_:
        for _ in range(BUSY_PER_CORE * len(os.sched_getaffinity(0))):
            all_.enter_context(running(command, clean_environment(), folder / "busy.log"))
        yield


def _of_dray(client: Client) -> float:
    document = {
        "script": {"entrypoint": str(PROGRAM), "args": [str(NUM_STEPS), str(SIZE)]},
        "resources": {"num_workers": NUM_RANKS},
        "max_retries": 0,
    }
    job = client.wait(client.submit(document).id, TIMEOUT_S)
    if job.state is not JobState.SUCCEEDED:
        raise BenchmarkError(f"dray's job ended {job.state}: {job.reason.message}")
    return _total_s("\n".join(line.text for line in client.logs(job.id)))


def _of_torchrun() -> float:
    command = torchrun_command(str(PROGRAM), str(NUM_STEPS), str(SIZE), num_ranks=NUM_RANKS)
    ended = subprocess.run(
        command,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        start_new_session=True,
    )
    if ended.returncode != 0:
        raise BenchmarkError(f"torchrun failed:\n{ended.stderr[-2000:]}")
    return _total_s(ended.stdout)


def _total_s(output: str) -> float:
    (line,) = (line for line in output.splitlines() if "steps_ms" in line)
    return float(sum(json.loads(line)["steps_ms"])) / 1e3
