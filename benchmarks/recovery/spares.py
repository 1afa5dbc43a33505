"""The recovery of a job whose ranks hold 500 MB of state each, with and without a spare."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.figures import Ratio, ratio_of_medians
from benchmarks.machine import wait_until_quiet
from benchmarks.recovery import contenders, work
from benchmarks.recovery.commits import Recovery
from benchmarks.report import Comparison, Result, Row, Table, seconds

WITHOUT, WITH = "without a spare", "with a spare"
NUM_SPARES: Mapping[str, int] = {WITHOUT: 0, WITH: 1}
GOALS_S = {WITHOUT: 2.0, WITH: 1.0}
WIDTH, NUM_LAYERS = 6400, 2
"""Size of the MLP: 41 million parameters, which with the state of AdamW are 496 MB in fp32."""
KILL_AT_STEP, NUM_STEPS = 8, 40
SETTLE_S = 6.0

METHOD = (
    "Two ranks on CPU (gloo, one thread each) train an MLP with AdamW on the digits. Each rank "
    "holds 496 MB of state. When rank 1 has committed step 8 and the spare, if there is one, is "
    "ready, its process receives SIGKILL by its pid.",
    "The table shows the seconds from just before the signal until any rank commits the next "
    "optimizer step in a group without the dead process, so they include that step.",
    "Both turns use one service with an embedded Ray with three slots. Turns alternate, after one "
    "round that is not counted.",
    "Ratio of medians, with an interval from a bootstrap of both sides. A/A: odd rounds against "
    "even rounds.",
)


def document(num_spares: int) -> dict[str, Any]:
    job = work.job(NUM_STEPS, save_every=NUM_STEPS)
    job["name"] = "spares"
    job["model"] = {"name": "mlp", "width": WIDTH, "num_layers": NUM_LAYERS}
    return job | ({"elastic": {"spares": num_spares}} if num_spares else {})


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    """Run `num_rounds` turns with and without a spare, after one round that is not counted."""
    found: dict[str, list[Recovery]] = {label: [] for label in NUM_SPARES}
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dray-bench-")))
        ours = stack.enter_context(contenders.dray(home, num_slots=work.NUM_RANKS + 1))
        for number in range(num_rounds + 1):
            for label, num_spares in NUM_SPARES.items():
                wait_until_quiet(at_least_s=SETTLE_S)
                recovery = ours.killed_with_spares(
                    document(num_spares), num_spares, at_step=KILL_AT_STEP
                )
                figures = f"{seconds(recovery.next_s)}, {recovery.steps_lost} steps lost"
                progress(f"round {number}/{num_rounds}  {label}: {figures}")
                if number:
                    found[label].append(recovery)
    return conclude(found)


def conclude(found: Mapping[str, Sequence[Recovery]]) -> Result:
    """Compute the figures from the turns."""
    times = {label: [each.next_s for each in turns] for label, turns in found.items()}
    comparisons = [_goal(label, taken) for label, taken in times.items()]
    ratio = ratio_of_medians(times[WITH], times[WITHOUT])
    same = _same(times[WITH])
    comparisons.append(
        Comparison(
            *(f"{WITH} / {WITHOUT}", len(times[WITH]), ratio, same, "below 1", ratio.value < 1.0)
        )
    )
    lost = [
        [label, f"{median(each):g} ({max(each)})"]
        for label, turns in found.items()
        if (each := [turn.steps_lost for turn in turns])
    ]
    return Result(
        name="spares",
        title="From the kill of a rank to the next step, with and without a spare",
        method=list(METHOD),
        rows=[Row(label, taken) for label, taken in times.items()],
        comparisons=comparisons,
        tables=[Table("Steps that were repeated", ["", "p50 (most)"], lost)],
        raw={label: {"turns": [asdict(each) for each in turns]} for label, turns in found.items()},
    )


def _goal(label: str, taken: Sequence[float]) -> Comparison:
    goal = GOALS_S[label]
    ratio = ratio_of_medians(taken, [goal])
    words = f"next step, {label} / {goal:g} s"
    return Comparison(words, len(taken), ratio, _same(taken), f"below {goal:g} s", ratio.value < 1)


def _same(taken: Sequence[float]) -> Ratio:
    return ratio_of_medians(taken[0::2], taken[1::2])
