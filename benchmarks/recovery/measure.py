"""Interleaved turns of all contenders, and the figures that follow from them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.figures import Ratio, ratio_of_medians
from benchmarks.machine import BenchmarkError, wait_until_quiet
from benchmarks.recovery import contenders, work
from benchmarks.recovery.commits import Recovery, lost_of_a_minute
from benchmarks.recovery.contenders import Torchrun
from benchmarks.report import Comparison, Result, Row, Table, seconds

KILL = "dray, a rank killed"
SCRIPT = "dray, a prepared script's rank killed"
DRILL = "dray, a rank killed by its drill"
RAY_TRAIN = "Ray Train, FailureConfig"
RAY_ELASTIC = "Ray Train, elastic"
RAY_REPLICAS = "Ray Train, torchft's replica groups"
TORCHRUN = "torchrun --max-restarts"
TORCHFT = "torchft"

OURS = (KILL, SCRIPT, DRILL)

RAY_TRAINS = {
    RAY_TRAIN: work.FIXED,
    RAY_ELASTIC: work.ELASTIC,
    RAY_REPLICAS: work.REPLICA_GROUPS,
}
SETTLE_S = {TORCHRUN: 2.0, TORCHFT: 2.0, **dict.fromkeys((*OURS, *RAY_TRAINS), 6.0)}
"""Minimum pause before a turn; see `first_step`."""
GOALS = dict.fromkeys((RAY_TRAIN, RAY_ELASTIC, TORCHRUN), (0.1, "at most 1/10"))
AT_MOST_S = 1.0
MAX_FAILURES = 10
"""Maximum number of failures of one contender in the whole run."""

METHOD = (
    "Two ranks on CPU (gloo, one thread each) train the digits CNN with batch size 128, AdamW, "
    "and a checkpoint every 20 steps. When rank 1 has committed step 50, its process receives "
    "SIGKILL by its pid. Times are measured from just before the signal, on one clock.",
    "The first table shows the seconds until any rank commits the next optimizer step in a group "
    "without the dead process. A step of the broken group that the survivor still commits does "
    "not count. For a peer that returns to a checkpoint, this is a repeated step, which is the "
    "most favourable interpretation for the peer. A table further below shows the times until "
    "the job passes the step that it had reached, and until the killed rank trains again.",
    "Ranks record their commits: dray's ranks on their page in shared memory, the peers' ranks "
    "in a log. Both are checked every 5 ms until the kill. For drills, the figures are those "
    "returned by `POST /v1/jobs/{id}/drill`.",
    "A prepared script is the peers' loop with `prepare` of `dray.train` instead of DDP, "
    "uploaded as the code of a job. Its rank is killed and observed like the recipe's.",
    "dray: a running `python -m api` with an embedded Ray with two slots. Ray Train: "
    "`FailureConfig(max_failures=1)` and `ray.train.report` for each checkpoint, in a running "
    "driver on a running cluster with 4 CPUs and default settings. Elastic: the same with "
    "`ScalingConfig(num_workers=(1, 2))`. Replica groups: `TorchftConfig` with torchft's loop "
    "below, without checkpoints. torchrun: `--max-restarts 1`, "
    "static rendezvous, and `torch.save` on rank 0 without fsync.",
    "torchft: fault-tolerant DDP, a lighthouse with a heartbeat timeout of 1 s (the default is "
    "5), and a launcher that restarts the dead replica immediately. Until the replica is back, "
    "the survivor trains alone on its half of each batch. There are no checkpoints. The hook of "
    "torchft's DDP is replaced by one that lets the survivor continue after gloo's error.",
    "A peer's turn fails if it ends with an error, or if its ranks do not meet again within 60 "
    "s. Failed turns are recorded and repeated, so the peer's times include only successful "
    f"turns. After {MAX_FAILURES} failures, the peer takes no more turns.",
    "The peers' scripts import torch and scikit-learn, and nothing from dray.",
    "Turns are interleaved, with one turn of each contender per round, after one round that is "
    "not counted. A turn begins when the machine is quiet. The daemons of dray, its Ray and Ray "
    "Train's cluster, and torchft's lighthouse run idle during all turns.",
    "Ratio of medians, with an interval from a bootstrap of both sides. A/A: dray's odd rounds "
    "against its even rounds, so with half the samples.",
)


@dataclass
class Samples:
    """The turns of one contender."""

    recoveries: list[Recovery] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    """Share of the cores that was busy just before each turn."""
    failures: int = 0
    """Number of turns that had to be repeated, including the round that is not counted."""

    @property
    def next_s(self) -> list[float]:
        return [each.next_s for each in self.recoveries]

    @property
    def caught_up_s(self) -> list[float]:
        return [each.caught_up_s for each in self.recoveries if each.caught_up_s is not None]

    @property
    def whole_s(self) -> list[float]:
        return [each.whole_s for each in self.recoveries if each.whole_s is not None]


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    """Run `num_rounds` turns of each contender, after one round that is not counted."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dray-bench-")))
        turns = _start(stack, home)
        samples = {label: Samples() for label in turns}
        for number in range(num_rounds + 1):
            for label, turn in list(turns.items()):
                busy = wait_until_quiet(at_least_s=SETTLE_S[label])
                try:
                    recovery = _until_it_recovers(label, turn, samples[label], progress)
                except BenchmarkError:
                    if label in OURS or not samples[label].recoveries:
                        raise
                    progress(f"{label} has failed too often and takes no more turns")
                    del turns[label]
                    continue
                progress(f"round {number}/{num_rounds}  {label}: {_sentence(recovery)}")
                if number:
                    samples[label].recoveries.append(recovery)
                    samples[label].busy.append(busy)
    return conclude(samples)


def _until_it_recovers(
    label: str, turn: Callable[[], Recovery], samples: Samples, progress: Callable[[str], None]
) -> Recovery:
    """Run a turn of the contender. If a peer's turn fails, this is recorded and the turn is
    repeated. For dray, a failure is an error."""
    while True:
        try:
            return turn()
        except BenchmarkError as error:
            samples.failures += 1
            if label in OURS or samples.failures > MAX_FAILURES:
                raise
            progress(f"{label} failed: {str(error).splitlines()[0]}")
            wait_until_quiet(at_least_s=SETTLE_S[label])


def _start(stack: ExitStack, home: Path) -> dict[str, Callable[[], Recovery]]:
    """Start all contenders, and return a function for each that runs a turn."""
    for name in ("dray", "ray", "torchrun", "torchft"):
        (home / name).mkdir()
    ours = stack.enter_context(contenders.dray(home / "dray"))
    ray_train = stack.enter_context(contenders.ray_train(home / "ray"))
    turns: dict[str, Callable[[], Recovery]] = {
        KILL: ours.killed,
        SCRIPT: ours.killed_of_script,
        **{label: partial(ray_train.turn, mode) for label, mode in RAY_TRAINS.items()},
        TORCHRUN: Torchrun(home / "torchrun").turn,
    }
    if contenders.has_torchft():
        turns[TORCHFT] = stack.enter_context(contenders.torchft(home / "torchft")).turn
    else:
        del turns[RAY_REPLICAS]
    return turns | {DRILL: ours.drilled}


def _sentence(recovery: Recovery) -> str:
    return f"{seconds(recovery.next_s)}, {recovery.steps_lost} steps lost"


def conclude(samples: Mapping[str, Samples]) -> Result:
    """Compute the figures from the samples."""
    peers = [label for label in samples if label not in OURS]
    comparisons = []
    for label in (KILL, SCRIPT):
        ours = samples[label]
        for peer in peers:
            theirs = samples[peer]
            further = "beyond the step reached"
            comparisons += [
                _compare("next step", label, peer, ours.next_s, theirs.next_s),
                _compare(further, label, peer, ours.caught_up_s, theirs.caught_up_s),
            ]
    comparisons += [_within_a_second(label, samples[label].next_s) for label in OURS]
    without = "" if TORCHFT in samples else " torchft is not installed here."
    return Result(
        name="recovery",
        title="From the kill of a rank to the next step",
        method=[*METHOD[:-1], METHOD[-1] + without],
        rows=[Row(label, each.next_s) for label, each in samples.items()],
        comparisons=comparisons,
        tables=[cost(samples)],
        raw={
            label: {"turns": [asdict(each) for each in own.recoveries], "busy_before": own.busy}
            for label, own in samples.items()
        },
    )


def cost(samples: Mapping[str, Samples]) -> Table:
    """Return a table with the other costs of the death of a rank."""
    rows = []
    for label, own in samples.items():
        lost = [each.steps_lost for each in own.recoveries]
        share = lost_of_a_minute(own.recoveries)
        rows.append(
            [
                label,
                f"{median(lost):g} ({max(lost)})",
                _median(own.caught_up_s),
                _median(own.whole_s),
                "not seen" if share is None else f"{1 - share:.1%}",
                str(own.failures),
            ]
        )
    return Table(
        "What it costs besides; the goodput follows from the times, it was not run",
        [
            "",
            "steps lost, p50 (most)",
            "beyond the step reached, p50",
            "rank 1 trains again, p50",
            "goodput at one kill a minute",
            "turns that failed",
        ],
        rows,
    )


def _median(values: Sequence[float]) -> str:
    return seconds(median(values)) if values else "not seen"


def _compare(
    what: str, label: str, peer: str, mine: Sequence[float], theirs: Sequence[float]
) -> Comparison:
    goal, words = GOALS.get(peer, (1.0, "none; met if faster"))
    ratio = ratio_of_medians(mine, theirs)
    return Comparison(
        f"{what}, {label} / {peer}", len(mine), ratio, _same(mine), words, ratio.value <= goal
    )


def _within_a_second(label: str, taken: Sequence[float]) -> Comparison:
    ratio = ratio_of_medians(taken, [AT_MOST_S])
    return Comparison(
        f"next step, {label} / one second",
        len(taken),
        ratio,
        _same(taken),
        "below 1 s",
        ratio.value < 1.0,
    )


def _same(taken: Sequence[float]) -> Ratio:
    return ratio_of_medians(taken[0::2], taken[1::2])
