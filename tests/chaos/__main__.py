"""`make chaos`: the complete run, which writes its page. Exits with 1 if a promise was broken.

    python -m tests.chaos [--seed N] [--turns N] [--ground NAME] [--only WORD] [--turn N]

Each turn that ends is recorded in `.chaos.jsonl`. An interrupted run continues with `--seed N`: it
skips the recorded turns of that seed, except for turns in which a promise was broken. `--only
stopped` injects only faults whose names contain that word. `--turn` replays a single turn of a
ground with the faults that the seed gives it. Neither reads or writes the record.
"""

from __future__ import annotations

import argparse
import itertools
import json
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from benchmarks import machine
from tests.chaos import plan, report
from tests.chaos.ground import GROUNDS
from tests.chaos.kinds import kinds
from tests.chaos.promises import Learned
from tests.chaos.turn import Result, Runner
from tests.seeds import commit

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "explanation" / "chaos.md"
RECORD = ROOT / ".chaos.jsonl"


@dataclass(frozen=True)
class Played:
    """A turn that ended: a line of the record."""

    seed: int
    ground: str
    commit: str
    took_s: float
    result: Result


PLAYED = TypeAdapter(Played)


def main() -> int:
    asked = _arguments()
    grounds = [asked.ground] if asked.ground else list(GROUNDS)
    turns = {name: list(_chosen(asked, name)) for name in grounds}
    played = [
        each
        for each in _recorded(asked)
        if each.ground in turns and each.result.turn in turns[each.ground]
    ]
    learned: dict[str, Learned | None] = {}
    with tempfile.TemporaryDirectory(prefix="dray-chaos-") as folder:
        known = kinds(Path(folder))
        for name in grounds:
            done = [each.result.turn for each in played if each.ground == name]
            left = [turn for turn in turns[name] if turn not in done]
            print(f"on the ground {name}, seed {asked.seed}, {len(left)} turns", flush=True)
            if not left:
                continue
            home = Path(folder, name)
            home.mkdir()
            with GROUNDS[name](home) as ground:
                runner = Runner(ground, known, learned)
                played += [_play(asked, name, runner, turn) for turn in left]
    results = [each.result for each in played]
    facts = machine.describe() | {"commit": ", ".join(dict.fromkeys(p.commit for p in played))}
    text = report.page(results, facts, asked.seed, sum(each.took_s for each in played))
    print(text)
    breaches = [breach for result in results for breach in result.breaches]
    print(*breaches, sep="\n")
    if asked.is_recorded and not asked.ground and not breaches:
        PAGE.write_text(text)
    return 1 if breaches else 0


def _play(asked: argparse.Namespace, name: str, runner: Runner, turn: plan.Turn) -> Played:
    began = time.monotonic()
    result = runner.play(turn)
    played = Played(asked.seed, name, commit(), round(time.monotonic() - began, 1), result)
    _tell(played)
    if asked.is_recorded:
        with RECORD.open("a") as record:
            record.write(json.dumps(asdict(played)) + "\n")
    return played


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--turns", type=int, default=plan.TURNS, help="of each ground")
    parser.add_argument("--ground", choices=GROUNDS)
    parser.add_argument("--turn", type=int)
    parser.add_argument("--only", default="", help="only faults with this word, such as `stopped`")
    asked = parser.parse_args()
    enough = asked.turns >= plan.TURNS
    asked.is_recorded = enough and asked.turn is None and not asked.only
    return asked


def _recorded(asked: argparse.Namespace) -> list[Played]:
    """Return the recorded turns of this seed that kept every promise."""
    if not asked.is_recorded or not RECORD.exists():
        return []
    every = map(PLAYED.validate_json, RECORD.read_text().splitlines())
    return [each for each in every if each.seed == asked.seed and not each.result.breaches]


def _chosen(asked: argparse.Namespace, ground: str) -> Iterator[plan.Turn]:
    turns = plan.turns(asked.seed, ground, asked.only)
    if asked.turn is None:
        return itertools.islice(turns, asked.turns)
    return itertools.islice(turns, asked.turn, asked.turn + 1)


def _tell(played: Played) -> None:
    result, turn = played.result, played.result.turn
    print(f"{played.took_s:6.0f} s  turn {turn.number}: {turn.victim}, with {turn.bystander}")
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
