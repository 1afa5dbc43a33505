"""Run all tests, in parts: `python -m tests.soak` or `make soak`.

A part that has passed is not run again until a file in the tree changes, so an interrupted or
failed run continues where it stopped. `--list` shows the parts and their status; `python -m
tests.soak storms chaos` runs these two parts regardless of their status. `--only files --for 3600
--from 0` runs one generator for an hour (`tests/soak_hours.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests import soak_hours

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / ".soak.json"
"""`{"tree": hash, "passed": {part: seconds}}`"""
EVERY_TEST = ("-m", "")
FRESH_SEEDS = {"DRAY_FRESH_SEEDS": "1"}
NUM_STORMS = 2000
GENERATED = {
    "documents": (4, 2_000),
    "files": (4, 2_000),
    "loggers": (1, 10_000),
    "names": (8, 100),
    "plans": (4, 10_000),
    "programs": (4, 150),
}
"""Number of parts, and of cases per part, for each generator in tests/generated."""
PROCESSES = str(min(os.cpu_count() or 1, 4))
SHARED = ("--numprocesses", PROCESSES, "--dist", "worksteal", "-q")
"""pytest options for tests that run in parallel."""


@dataclass(frozen=True)
class Part:
    """A subset of the tests, run by one pytest process."""

    name: str
    paths: tuple[str, ...]
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    def run(self) -> int:
        """Run pytest and return its exit code. pytest prints to the terminal."""
        command = [sys.executable, "-m", "pytest", *EVERY_TEST, *self.options, *self.paths]
        environment = os.environ | FRESH_SEEDS | self.environment
        return subprocess.run(command, cwd=ROOT, env=environment).returncode


def parts() -> list[Part]:
    """Return the parts, fastest first. Each file that starts Ray is a separate part."""
    with_ray = {"RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1"}
    files = [
        path.relative_to(ROOT)
        for folder in ("contract", "integration", "chaos")
        for path in sorted((ROOT / "tests" / folder).glob("test_*.py"))
    ]
    return [
        Part("unit", ("tests/unit",), SHARED, {"OMP_NUM_THREADS": "1", "DRAY_FUZZ": "whole"}),
        Part("page", ("tests/page",), ("-q",)),
        *(
            Part(
                f"{name}-{number}",
                (f"tests/generated/{name}",),
                SHARED,
                {"OMP_NUM_THREADS": "1", "DRAY_SEEDS": str(num_cases)},
            )
            for name, (num_parts, num_cases) in GENERATED.items()
            for number in range(1, num_parts + 1)
        ),
        Part("storms", ("tests/simulation",), SHARED, {"DRAY_SEEDS": str(NUM_STORMS)}),
        *(Part(_name(path), (str(path),), ("-q",), with_ray) for path in files),
    ]


def _name(path: Path) -> str:
    """The part's name: `contract` for tests/contract/test_cluster.py, `faults` for
    tests/integration/test_faults.py, `chaos-faults` for tests/chaos/test_faults.py."""
    own = path.stem.removeprefix("test_")
    match path.parent.name:
        case "contract":
            return "contract"
        case "integration":
            return own
        case folder:
            return f"{folder}-{own}"


def tree() -> str:
    """Return git's hash of the current files, committed or not."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"GIT_INDEX_FILE": str(Path(folder, "index"))}
        for command in (["git", "read-tree", "HEAD"], ["git", "add", "--all"]):
            subprocess.run(command, cwd=ROOT, env=environment, check=True)
        written = subprocess.run(
            ["git", "write-tree"], cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE
        )
    return written.stdout.decode().strip()


def passed(now: str) -> dict[str, float]:
    """Duration in seconds of each part that has passed on this tree."""
    if not RECORD.exists():
        return {}
    record = json.loads(RECORD.read_text())
    known: dict[str, float] = record["passed"] if record["tree"] == now else {}
    return known


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    known_parts = {part.name: part for part in parts()}
    parser.add_argument("parts", nargs="*", metavar="PART", help="run only these parts")
    parser.add_argument("--list", action="store_true", help="list the parts")
    hours = parser.add_argument_group("run one generator of tests/generated for a given time")
    hours.add_argument("--only", metavar="NAME", choices=GENERATED, help=", ".join(GENERATED))
    hours.add_argument(
        "--for", dest="seconds", type=float, default=3600.0, metavar="SECONDS", help="3600"
    )
    hours.add_argument(
        "--from",
        dest="first",
        type=int,
        metavar="SEED",
        help="first seed, instead of the one after the last in .soak-hours.jsonl",
    )
    options = parser.parse_args()
    if options.only is not None:
        return soak_hours.run_for(options.only, options.seconds, options.first, SHARED)
    unknown = [name for name in options.parts if name not in known_parts]
    if unknown:
        parser.error(f"no part is called {unknown[0]}; the parts are {', '.join(known_parts)}")
    now = tree()
    seconds = passed(now)
    if options.list:
        for name in known_parts:
            print(
                f"{name:20}", f"passed, {seconds[name]:.0f} s" if name in seconds else "to be run"
            )
        return 0
    wanted = options.parts or [name for name in known_parts if name not in seconds]
    failed = []
    for number, name in enumerate(wanted, 1):
        print(f"\n{name} ({number} of {len(wanted)})", flush=True)
        began = time.monotonic()
        if known_parts[name].run() == 0:
            seconds[name] = round(time.monotonic() - began, 1)
        else:
            failed.append(name)
            seconds.pop(name, None)
        RECORD.write_text(json.dumps({"tree": now, "passed": seconds}, indent=1))
    for name in known_parts:
        state = f"{seconds[name]:7.1f} s" if name in seconds else "failed" * (name in failed)
        print(f"{name:20} {state or 'not run'}")
    print(
        f"{len(seconds)} of {len(known_parts)} parts have passed, in {sum(seconds.values()):.0f} s"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
