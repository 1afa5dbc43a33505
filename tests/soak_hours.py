"""Run one generator of `tests/generated` for a given time: `python -m tests.soak --only files`.

It runs in rounds of a few minutes, each with the next range of seeds. For each round a line is
appended to `.soak-hours.jsonl`, so that runs can be interrupted and added up. Without `--from`, a
run begins after the last seed in that file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.seeds import CASES_VARIABLE, commit

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / ".soak-hours.jsonl"
ROUND_S = 240.0
FIRST_ROUND = {
    "documents": 40,
    "files": 40,
    "loggers": 200,
    "names": 12,
    "plans": 2_000,
    "programs": 4,
}
"""Number of seeds in the first round. Later rounds use as many as fit into ROUND_S."""
LEAST_SEEDS = 4
DEADLINE_S = 1_800
"""Timeout of a test, which tries all seeds of a round, even on a busy machine."""


@dataclass(frozen=True)
class Round:
    """The result of one pytest run."""

    generator: str
    first: int
    num_seeds: int
    cases: int
    """Completed cases: a seed is one case for each test that uses it."""
    seconds: float
    cpu_s: float
    commit: str
    finds: tuple[str, ...]
    """Failed tests, each with the first line of its error."""


def run_for(generator: str, seconds: float, first: int | None, options: Iterable[str]) -> int:
    """Run rounds for this long. Return 1 if a test failed, else 0. options: passed to pytest."""
    start = _next_seed(generator) if first is None else first
    began = time.monotonic()
    rounds: list[Round] = []
    num_seeds = FIRST_ROUND[generator]
    while not rounds or time.monotonic() - began < seconds:
        left = seconds - (time.monotonic() - began)
        if rounds:
            pace = rounds[-1].seconds / rounds[-1].num_seeds
            num_seeds = max(LEAST_SEEDS, min(int(min(ROUND_S, left) / pace), 4 * num_seeds))
        rounds.append(_round(generator, start, num_seeds, options))
        start += num_seeds
        with RECORD.open("a") as record:
            record.write(json.dumps(asdict(rounds[-1])) + "\n")
        print(_line("round", rounds[-1:]), flush=True)
    for find in (find for each in rounds for find in each.finds):
        print(find)
    print(_line("all", rounds))
    print(_line("in .soak-hours.jsonl", [r for r in _recorded() if r.generator == generator]))
    return 1 if any(each.finds for each in rounds) else 0


def _round(generator: str, first: int, num_seeds: int, options: Iterable[str]) -> Round:
    with tempfile.TemporaryDirectory() as name:
        report, cases = Path(name, "report.xml"), Path(name, "cases")
        command = [sys.executable, "-m", "pytest", "-m", "", *options]
        command += ["--timeout", str(DEADLINE_S), "--junitxml", str(report)]
        environment = os.environ | {
            "DRAY_FIRST_SEED": str(first),
            "DRAY_SEEDS": str(num_seeds),
            "OMP_NUM_THREADS": "1",
            CASES_VARIABLE: str(cases),
        }
        now, cpu_s, at = commit(), _cpu_s(), time.monotonic()
        done = subprocess.run([*command, f"tests/generated/{generator}"], cwd=ROOT, env=environment)
        return Round(
            generator,
            first,
            num_seeds,
            cases=len(cases.read_text().splitlines()) if cases.exists() else 0,
            seconds=round(time.monotonic() - at, 1),
            cpu_s=round(_cpu_s() - cpu_s, 1),
            commit=now,
            finds=tuple(_finds(report, first, num_seeds, done.returncode)),
        )


def _finds(report: Path, first: int, num_seeds: int, returncode: int) -> list[str]:
    where = f"seeds {first} to {first + num_seeds - 1}"
    found = []
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        for fault in (*case.findall("failure"), *case.findall("error")):
            reason = (fault.get("message") or fault.text or "").splitlines()[:1]
            found.append(f"{case.get('name')}, {where}: {''.join(reason)[:300]}")
    if returncode and not found:
        found.append(f"pytest ended with {returncode}, {where}")
    return found


def _cpu_s() -> float:
    """CPU time of all processes that have exited."""
    times = os.times()
    return times.children_user + times.children_system


def _recorded() -> list[Round]:
    lines = RECORD.read_text().splitlines() if RECORD.exists() else []
    return [Round(**json.loads(line)) for line in lines]


def _next_seed(generator: str) -> int:
    ends = [each.first + each.num_seeds for each in _recorded() if each.generator == generator]
    return max(ends, default=0)


def _line(title: str, rounds: list[Round]) -> str:
    """Sum up the cases, seeds, seconds, commits and failures of several rounds of one generator."""
    commits = ", ".join(dict.fromkeys(each.commit for each in rounds))
    last = max(each.first + each.num_seeds for each in rounds) - 1
    return (
        f"{rounds[0].generator}, {title}: {sum(each.cases for each in rounds)} cases, "
        f"{sum(each.num_seeds for each in rounds)} seeds from "
        f"{min(each.first for each in rounds)} to {last}, "
        f"{sum(each.seconds for each in rounds):.0f} s "
        f"({sum(each.cpu_s for each in rounds):.0f} s of a processor), "
        f"commit {commits}, {sum(len(each.finds) for each in rounds)} finds"
    )
