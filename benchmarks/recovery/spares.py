"""The recovery of a job whose ranks hold 500 MB of state each, with and without a spare: replicas,
and groups that divide a model and keep copies in the memory of peers."""

from __future__ import annotations

import random
import string
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

REPLICAS, SHARDED, TENSOR = "replicas", "sharded", "tensor"
NUM_SPARES: Mapping[str, int] = {"": 0, ", spare": 1}
GOALS_S = {
    f"{kind}{rest}": (1.0 if num else 2.0)
    for kind in (SHARDED, TENSOR)
    for rest, num in NUM_SPARES.items()
}
COPY_EVERY = 4
KILL_AT_STEP, NUM_STEPS = 10, 1000
SETTLE_S = 6.0

METHOD = (
    "Two ranks on CPU (gloo, one thread each). Each rank holds about 500 MB of parameters and of "
    "the state of AdamW in fp32. Replicas: an MLP with 41 million parameters on the digits, batch "
    "of 128. Sharded: an MLP with 82 million parameters on the digits, batch of 16, sharded with "
    "FSDP2. Tensor: a GPT with 84 million parameters, batch of 4 sequences of 32 bytes, each layer "
    "divided between the ranks. The divided models keep copies in the memory of the other rank "
    f"every {COPY_EVERY} steps, or when the previous copy is complete, if that is later.",
    f"When rank 1 has committed step {KILL_AT_STEP}, the spare, if there is one, is ready, and the "
    "first copy is complete, its process receives SIGKILL by its pid. The job is cancelled after "
    "the recovery.",
    "The table shows the seconds from just before the signal until any rank commits the next "
    "optimizer step in a group without the dead process. They include the whole step, whose usual "
    "duration is in the second table.",
    "All turns use one service with an embedded Ray with three slots. Turns alternate, after one "
    "round that is not counted.",
    "Ratio of medians, with an interval from a bootstrap of both sides. A/A: odd rounds against "
    "even rounds.",
)


def documents(texts: str) -> dict[str, dict[str, Any]]:
    """Return the documents of the jobs, by kind. texts: address of a folder with text."""
    job = work.job(NUM_STEPS, save_every=NUM_STEPS) | {"name": "spares"}
    train = job["train"]
    copies = job["checkpoint"] | {"in_memory": {"every_steps": COPY_EVERY}}
    return {
        REPLICAS: job | {"model": {"name": "mlp", "width": 6400, "num_layers": 2}},
        SHARDED: job
        | {
            "model": {"name": "mlp", "width": 9080, "num_layers": 2},
            "train": train | {"global_batch_size": 16},
            "parallel": {"shard": work.NUM_RANKS},
            "checkpoint": copies,
        },
        TENSOR: job
        | {
            "recipe": "language_model",
            "data": {"source": texts, "validation_fraction": 0.1},
            "model": {"width": 1184, "num_layers": 5, "num_heads": 4, "context_length": 32},
            "train": train | {"global_batch_size": 4},
            "parallel": {"tensor": work.NUM_RANKS},
            "checkpoint": copies,
        },
    }


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    """Run `num_rounds` turns of each kind with and without a spare, after one round that is not
    counted."""
    found: dict[str, list[Recovery]] = {}
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dray-bench-")))
        kinds = documents(_texts(home / "texts"))
        ours = stack.enter_context(contenders.dray(home, num_slots=work.NUM_RANKS + 1))
        for number in range(num_rounds + 1):
            for kind, document in kinds.items():
                for rest, num_spares in NUM_SPARES.items():
                    wait_until_quiet(at_least_s=SETTLE_S)
                    spares = {"elastic": {"spares": num_spares}} if num_spares else {}
                    recovery = ours.killed_with_spares(
                        document | spares, num_spares, at_step=KILL_AT_STEP
                    )
                    figures = f"{seconds(recovery.next_s)}, {recovery.steps_lost} steps lost"
                    progress(f"round {number}/{num_rounds}  {kind}{rest}: {figures}")
                    if number:
                        found.setdefault(f"{kind}{rest}", []).append(recovery)
    return conclude(found)


def _texts(folder: Path) -> str:
    folder.mkdir()
    drawn = random.Random(0).choices(string.ascii_lowercase + " ", k=100_000)
    (folder / "text.txt").write_text("".join(drawn))
    return folder.as_uri()


def conclude(found: Mapping[str, Sequence[Recovery]]) -> Result:
    """Compute the figures from the turns."""
    times = {label: [each.next_s for each in turns] for label, turns in found.items()}
    rows = [
        [label, *(f"{median(each):.3g} ({max(each):.3g})" for each in (lost, steps))]
        for label, turns in found.items()
        if (lost := [turn.steps_lost for turn in turns])
        and (steps := [turn.step_s for turn in turns if turn.step_s is not None])
    ]
    return Result(
        name="spares",
        title="From the kill of a rank to the next step, with and without a spare",
        method=list(METHOD),
        rows=[Row(label, taken) for label, taken in times.items()],
        comparisons=[_goal(label, times[label]) for label in GOALS_S if label in times],
        tables=[
            Table(
                "Of the same turns",
                ["", "repeated steps, p50 (most)", "a step before the kill (s), p50 (most)"],
                rows,
            )
        ],
        raw={label: {"turns": [asdict(each) for each in turns]} for label, turns in found.items()},
    )


def _goal(label: str, taken: Sequence[float]) -> Comparison:
    goal = GOALS_S[label]
    ratio = ratio_of_medians(taken, [goal])
    words = f"next step, {label} / {goal:g} s"
    return Comparison(words, len(taken), ratio, _same(taken), f"below {goal:g} s", ratio.value < 1)


def _same(taken: Sequence[float]) -> Ratio:
    return ratio_of_medians(taken[0::2], taken[1::2])
