"""The time of a script's steps, against the same program under torchrun."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.figures import ratio_of_medians
from benchmarks.machine import wait_until_quiet
from benchmarks.report import Comparison, Result, Row, seconds
from benchmarks.scripts.contenders import dray, torchrun_step_s, uploaded_folder

NUM_RANKS = 2
SETTLE_S = 4.0


@dataclass(frozen=True)
class Kind:
    """Steps of one length."""

    num_steps: int
    width: int
    turns_per_round: int
    goal: float | None
    """Highest ratio to torchrun; None if the ratio should lie inside the A/A interval."""

    @property
    def words(self) -> str:
        return "inside A/A" if self.goal is None else f"at most {self.goal:g}"


KINDS = {
    "long": Kind(24, 2700, 3, 1.01),
    "short": Kind(300, 64, 1, None),
}
"""Long ones take more than 100 ms, so that processes beside them cost each step the same share; to
see a hundredth takes more turns."""

METHOD = (
    "Two ranks of a DDP model on gloo, one thread each, run the same program under torchrun and "
    "as a script job of dray, whose service is running in both cases. "
    + " and ".join(f"{kind.num_steps} steps of width {kind.width}" for kind in KINDS.values())
    + " after five steps that are not counted. A turn's figure is the median of its steps.",
    "Turns are interleaved, after one turn of each contender that is not counted. A turn begins "
    "when the machine is quiet. Ratio of medians. A/A: dray's odd turns against its even turns.",
)


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    """Take `num_rounds` turns of short steps from each contender, and more of long ones."""
    rows, comparisons = [], []
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dray-bench-")))
        (home / "service").mkdir()
        folder = uploaded_folder(home, 0)
        service = stack.enter_context(dray(home / "service", folder, NUM_RANKS))
        for name, kind in KINDS.items():
            work = kind.num_steps, kind.width, NUM_RANKS
            turns = {
                f"dray, {name} step": partial(service.step_s, *work),
                f"torchrun, {name} step": partial(torchrun_step_s, *work, home),
            }
            samples = _interleaved(turns, num_rounds * kind.turns_per_round, progress)
            rows += [Row(label, each) for label, each in samples.items()]
            comparisons.append(_compare(samples, kind))
    return Result(
        name="script_steps",
        title="A script's steps",
        method=METHOD,
        rows=rows,
        comparisons=comparisons,
    )


def _interleaved(
    turns: Mapping[str, Callable[[], float]], num_turns: int, progress: Callable[[str], None]
) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {label: [] for label in turns}
    for number in range(num_turns + 1):
        for label, turn in turns.items():
            wait_until_quiet(at_least_s=SETTLE_S)
            took = turn()
            progress(f"turn {number}/{num_turns}  {label}: {seconds(took)}")
            if number:
                samples[label].append(took)
    return samples


def _compare(samples: dict[str, list[float]], kind: Kind) -> Comparison:
    (ours, mine), (theirs, peers) = samples.items()
    ratio = ratio_of_medians(mine, peers)
    same = ratio_of_medians(mine[0::2], mine[1::2])
    met = ratio.value <= kind.goal if kind.goal is not None else ratio.low <= same.high
    return Comparison(f"{ours} / {theirs}", len(mine), ratio, same, kind.words, met)
