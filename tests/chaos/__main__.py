"""`make chaos`: the complete run, which ends with a table. The exit code is 1 if a promise was
broken.

    python -m tests.chaos [--seed N] [--turns N] [--ground NAME] [--only WORD] [--turn N]

`--only stopped` draws only faults with stopped processes. `--turn` replays a single turn of a
ground from its seed.
"""

from __future__ import annotations

import argparse
import itertools
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import machine
from tests.chaos import plan, report
from tests.chaos.ground import GROUNDS
from tests.chaos.kinds import kinds
from tests.chaos.promises import Learned
from tests.chaos.turn import Result, Runner

PAGE = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "chaos.md"


def main() -> int:
    asked = _arguments()
    began = time.monotonic()
    grounds = [asked.ground] if asked.ground else list(GROUNDS)
    results: list[Result] = []
    learned: dict[str, Learned | None] = {}
    with tempfile.TemporaryDirectory(prefix="dray-chaos-") as folder:
        known = kinds(Path(folder))
        for name in grounds:
            home = Path(folder, name)
            home.mkdir()
            print(f"on the ground {name}, seed {asked.seed}", flush=True)
            with GROUNDS[name](home) as ground:
                runner = Runner(ground, known, learned)
                for turn in _chosen(asked, name):
                    results.append(runner.play(turn))
                    _tell(results[-1], time.monotonic() - began)
    took_s = time.monotonic() - began
    text = report.page(results, machine.describe(), asked.seed, took_s)
    print(text)
    breaches = [breach for result in results for breach in result.breaches]
    print(*breaches, sep="\n")
    if asked.is_whole and not breaches:
        PAGE.write_text(text)
    return 1 if breaches else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--turns", type=int, default=plan.TURNS, help="of each ground")
    parser.add_argument("--ground", choices=GROUNDS)
    parser.add_argument("--turn", type=int)
    parser.add_argument(
        "--only", default="", help="only blows that contain this word, such as `stopped`"
    )
    asked = parser.parse_args()
    enough = asked.turns >= plan.TURNS
    asked.is_whole = enough and not (asked.ground or asked.turn is not None or asked.only)
    return asked


def _chosen(asked: argparse.Namespace, ground: str) -> Iterator[plan.Turn]:
    turns = plan.turns(asked.seed, ground, asked.only)
    if asked.turn is None:
        return itertools.islice(turns, asked.turns)
    return itertools.islice(turns, asked.turn, asked.turn + 1)


def _tell(result: Result, at_s: float) -> None:
    turn = result.turn
    print(f"{at_s:6.0f} s  turn {turn.number}: {turn.victim}, with {turn.bystander}")
    for blown in result.blown:
        took = "" if blown.recovery_s is None else f" in {blown.recovery_s:.2f} s"
        lost = "" if not blown.steps_lost else f", {blown.steps_lost} steps lost"
        print(f"          {' + '.join(blown.blow)}: {blown.how}{took}{lost}")
    for blow in result.missed:
        print(f"          {' + '.join(blow)}: came too late")
    for breach in result.breaches:
        print(f"          BROKEN: {breach}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
