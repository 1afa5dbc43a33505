"""Turns of every contender, one after the other, round after round."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.figures import ratio_of_medians
from benchmarks.first_step.contenders import Torchrun, Turn, dray, ray_train
from benchmarks.machine import wait_until_quiet
from benchmarks.report import Comparison, Result, Row, Table, seconds

RECIPE = "dray, POST of a recipe"
AGAIN = "dray, POST right after another job"
SCRIPT = "dray, POST of torchrun's script"
RAY_TRAIN = "Ray Train on a running cluster"
TORCHRUN = "torchrun, cold"

SETTLE_S = {RECIPE: 6.0, AGAIN: 0.0, RAY_TRAIN: 6.0, TORCHRUN: 2.0, SCRIPT: 2.0}
"""Least pause before a turn. dray fills its pool of idle Ray workers three seconds after a launch,
which must neither be in the way of a peer nor still to come at dray's own next turn."""

GOALS = {RAY_TRAIN: (0.1, "at most 1/10"), TORCHRUN: (1 / 3, "at most 1/3")}

METHOD = (
    "Two ranks on CPU (gloo, one thread each) start the digits CNN with batch size 64 and AdamW. "
    "Times are in seconds from the submission to the end of the first optimizer step on the "
    "worker's clock, on one machine.",
    "dray: from just before the POST to a running `python -m api` with its embedded Ray, to the "
    "job's `first_step_at`, when the step was reported. Its pool of idle Ray workers had six "
    'seconds to fill up after the last job, except in "right after another job".',
    "Ray Train: from the call of `TorchTrainer.fit()` in a running driver with everything "
    "imported, on a running Ray cluster with 4 CPUs, to the end of the faster rank's step. "
    "Starting a driver or a cluster is not counted.",
    "torchrun: from the exec of `python -m torch.distributed.run` (static rendezvous, fixed "
    "port) to the end of the faster rank's step. Files are in the page cache.",
    "The peers' script imports torch and scikit-learn (for the images) and nothing from dray. "
    "dray also runs this script. The tables below show the script's own timestamps.",
    "Turns are interleaved, with one turn of each contender per round, after one round that is "
    "not counted. A turn begins when the machine is quiet. The daemons of dray, its Ray and Ray "
    "Train's cluster run idle during all turns.",
    "Ratio of medians, with an interval from a bootstrap of both sides. A/A: dray's odd rounds "
    "against its even rounds, so with half the samples.",
)


@dataclass
class Samples:
    """The turns of one contender."""

    turns: list[Turn] = field(default_factory=list)
    busy: list[float | None] = field(default_factory=list)
    """Share of the cores that was busy just before each turn; None where it was not waited for."""

    @property
    def first_steps(self) -> list[float]:
        return [turn.first_step_s for turn in self.turns]


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    """Take `num_rounds` turns of each contender, after one round that is not counted."""
    samples = {label: Samples() for label in SETTLE_S}
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dray-bench-")))
        for name in ("dray", "ray", "torchrun"):
            (home / name).mkdir()
        service = stack.enter_context(dray(home / "dray"))
        turns: dict[str, Callable[[], Turn]] = {
            RECIPE: service.recipe,
            AGAIN: service.recipe,
            RAY_TRAIN: stack.enter_context(ray_train(home / "ray")).turn,
            TORCHRUN: Torchrun(home / "torchrun").turn,
            SCRIPT: service.script,
        }
        for number in range(num_rounds + 1):
            for label, pause_s in SETTLE_S.items():
                busy = wait_until_quiet(at_least_s=pause_s) if pause_s else None
                turn = turns[label]()
                progress(f"round {number}/{num_rounds}  {label}: {seconds(turn.first_step_s)}")
                if number:
                    samples[label].turns.append(turn)
                    samples[label].busy.append(busy)
    return conclude(samples)


def conclude(samples: Mapping[str, Samples]) -> Result:
    """The figures that follow from the samples."""
    comparisons = [
        _compare(ours, theirs, samples, goal, words)
        for ours in (RECIPE, SCRIPT)
        for theirs, (goal, words) in GOALS.items()
    ]
    return Result(
        name="submit_to_first_step",
        title="Submit to first optimizer step",
        method=METHOD,
        rows=[Row(label, each.first_steps) for label, each in samples.items()],
        comparisons=comparisons,
        tables=[breakdown(label, each.turns) for label, each in samples.items()],
        raw={
            label: {"marks": [turn.marks for turn in each.turns], "busy_before": each.busy}
            for label, each in samples.items()
        },
    )


def breakdown(label: str, turns: Sequence[Turn]) -> Table:
    """Median time at which each moment came, and median time since the one before."""
    rows: list[list[str]] = []
    before = [0.0] * len(turns)
    for moment in turns[0].marks:
        at = [turn.marks[moment] for turn in turns]
        took = [now - earlier for now, earlier in zip(at, before, strict=True)]
        rows.append([moment, seconds(median(at)), seconds(median(took))])
        before = at
    return Table(f"Where the time goes: {label}", ["moment", "at (p50)", "took (p50)"], rows)


def _compare(
    ours: str, theirs: str, samples: Mapping[str, Samples], goal: float, words: str
) -> Comparison:
    mine = samples[ours].first_steps
    ratio = ratio_of_medians(mine, samples[theirs].first_steps)
    same = ratio_of_medians(mine[0::2], mine[1::2])
    return Comparison(f"{ours} / {theirs}", len(mine), ratio, same, words, ratio.value <= goal)
