"""How long the `dray` command takes, from its start to its end, against Python itself."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.figures import Spread, ratio_of_medians
from benchmarks.machine import ROOT, BenchmarkError, clean_environment, wait_until_quiet
from benchmarks.report import Comparison, Result, Row
from benchmarks.serving import jobs
from benchmarks.serving.servers import dray

NUM_JOBS = 30
RUNS_PER_ROUND = 3
GOAL_S = 0.3
COMMAND = Path(sys.executable).with_name("dray")
OURS: Mapping[str, Sequence[str]] = {
    f"dray {argument}": (str(COMMAND), argument) for argument in ("--help", "--version", "ls")
}
FLOORS: Mapping[str, Sequence[str]] = {
    f"python -c '{line}'": (sys.executable, "-c", line)
    for line in ("pass", "import httpx, pydantic")
}
FLOOR = "python -c 'pass'"

METHOD = (
    "Seconds from the start to the end of the process, with its output in a pipe. `dray` is the "
    "command that pip installs. Compiled modules and files are cached.",
    f"`dray ls` prints the jobs of a running `python -m api --no-loops` with {NUM_JOBS} finished "
    "jobs in SQLite. Its time includes the request.",
    "For comparison, Python runs with nothing to do, and with the two packages that `dray ls` "
    "needs to send the request and parse the response.",
    f"Commands alternate, {RUNS_PER_ROUND} runs in each round. The first round is not counted.",
    "Ratio of a median to the limit, or to the median of bare Python, with intervals from "
    "bootstraps. A/A: odd samples against even samples.",
)


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    commands = {**OURS, **FLOORS}
    took_s: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory(prefix="dray-bench-") as folder:
        ids = jobs.finished(Path(folder), NUM_JOBS)
        with dray(Path(folder)) as server:
            environment = {**clean_environment(), "DRAY_URL": f"http://127.0.0.1:{server.port}"}
            if ids[0] not in _output(OURS["dray ls"], environment):
                raise BenchmarkError("`dray ls` does not show the jobs that there are")
            for number in range(num_rounds + 1):
                wait_until_quiet(at_most_s=10)
                for _ in range(RUNS_PER_ROUND):
                    for name, command in commands.items():
                        began = time.perf_counter()
                        _output(command, environment)
                        if number:
                            took_s[name].append(time.perf_counter() - began)
                if number:
                    last = ", ".join(f"{name} {took_s[name][-1]:.3f} s" for name in commands)
                    progress(f"round {number}: {last}")
    return conclude(took_s)


def _output(command: Sequence[str], environment: Mapping[str, str]) -> str:
    try:
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BenchmarkError(f"{' '.join(command)} can't be run: {error}") from None


def conclude(took_s: Mapping[str, Sequence[float]]) -> Result:
    """The figures from each command's samples."""
    comparisons = []
    for name in OURS:
        ours = took_s[name]
        same = ratio_of_medians(ours[::2], ours[1::2])
        highest = Spread.of(ours).highest
        comparisons += [
            Comparison(
                label=f"{name} / {GOAL_S:g} s",
                n=len(ours),
                ratio=(ratio := ratio_of_medians(ours, [GOAL_S])),
                same=same,
                goal=f"below 1 (the highest of {len(ours)} took {highest:.3f} s)",
                met=ratio.value < 1,
            ),
            Comparison(
                label=f"{name} / {FLOOR}",
                n=len(ours),
                ratio=ratio_of_medians(ours, took_s[FLOOR]),
                same=same,
                goal="none: what starting Python costs here",
                met=None,
            ),
        ]
    return Result(
        name="cli_start_up",
        title="The command's start",
        method=METHOD,
        rows=[Row(name, samples) for name, samples in took_s.items()],
        comparisons=comparisons,
    )
