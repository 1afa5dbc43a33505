"""Turns of every contender, one after the other, round after round."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.figures import ratio_of_medians
from benchmarks.machine import wait_until_quiet
from benchmarks.report import Comparison, Result, Row, Table, seconds
from benchmarks.scripts.contenders import (
    RayJobs,
    dray,
    ray_jobs,
    torchrun_step_s,
    uploaded_folder,
)
from benchmarks.scripts.environments import ByHand, OnNode

NUM_RANKS = 2
LONG = (20, 2200)
"""Steps, and the width that makes them some 100 ms long on a slow core."""
SHORT = (300, 64)
MEGABYTES = 100
SETTLE_S = 4.0

OURS, RAY = "dray, first line", "ray job submit, first line"
COLD, CACHED, READY = "environment, empty cache", "environment, cached", "environment, again"
AGAIN = f"dray, {MEGABYTES} MB with one changed file"
STEPS = {
    "long": (LONG, 1.01, "at most 1.01"),
    "short": (SHORT, None, "inside A/A"),
}

METHOD = (
    "First line: one process on CPU prints the time by its own first statement. dray: from "
    "`client.upload_code` of a folder whose parts the server has, through `client.submit`. Ray: "
    "from `JobSubmissionClient.submit_job` with the same folder as working_dir, uploaded before. "
    "Services and clusters run before the clock starts.",
    f"{MEGABYTES} MB: ten files that do not compress and one that changes each time, from the call "
    "of `upload_code` (which reads and hashes them) to the answer of the submit.",
    "Environment: ten packages without dependencies. dray: a node's own builder, from the question "
    "to the answer that it is ready. By hand: `uv venv` and `uv pip install`. Each has its own "
    "cache of packages, on one disk: empty, or filled by the turn before. Again: the question "
    "for an environment that the node has.",
    "Steps: two ranks of a DDP model on gloo, one thread each, the same program under torchrun and "
    f"as a script of dray. {LONG[0]} steps of width {LONG[1]} and {SHORT[0]} of width {SHORT[1]} "
    "after five that are not counted; a turn's figure is the median of its steps.",
    "Turns are interleaved, one of each per round; one round before them is not counted. A turn "
    "begins when the machine is quiet. Ratio of medians; A/A: odd rounds against even ones.",
)


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    """Take `num_rounds` turns of each contender, after one round that is not counted."""
    turns: dict[str, Callable[[], float]] = {}
    samples: dict[str, list[float]] = {}
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dray-bench-")))
        for name in ("small", "large", "ray"):
            (home / name).mkdir()
        small, large = uploaded_folder(home, 0), uploaded_folder(home, MEGABYTES)
        ours = stack.enter_context(dray(home / "small", small, NUM_RANKS))
        peer: RayJobs = stack.enter_context(ray_jobs(home / "ray", small, NUM_RANKS))
        heavy = stack.enter_context(dray(home / "large", large, NUM_RANKS))
        node, by_hand = OnNode(home / "node"), ByHand(home / "by-hand")
        turns |= {
            OURS: ours.first_line_s,
            RAY: peer.first_line_s,
            AGAIN: heavy.submit_s,
            f"dray, {COLD}": node.cold_s,
            f"uv, {COLD}": by_hand.cold_s,
            f"dray, {CACHED}": node.cached_s,
            f"uv, {CACHED}": by_hand.cached_s,
            f"dray, {READY}": node.again_s,
        }
        for name, ((num_steps, size), _, _) in STEPS.items():
            turns[f"dray, {name} step"] = partial(ours.step_s, num_steps, size, NUM_RANKS)
            turns[f"torchrun, {name} step"] = partial(
                torchrun_step_s, num_steps, size, NUM_RANKS, home
            )
        for number in range(num_rounds + 1):
            for label, turn in turns.items():
                wait_until_quiet(at_least_s=SETTLE_S)
                took = turn()
                progress(f"round {number}/{num_rounds}  {label}: {seconds(took)}")
                if number:
                    samples.setdefault(label, []).append(took)
    return conclude(samples)


def conclude(samples: dict[str, list[float]]) -> Result:
    """The figures that follow from the samples."""
    comparisons = [_compare(samples, OURS, RAY, 0.5, "at most 1/2")]
    for what in (COLD, CACHED):
        comparisons.append(_compare(samples, f"dray, {what}", f"uv, {what}", 1.1, "at most 1.1"))
    for name, (_, goal, words) in STEPS.items():
        pair = f"dray, {name} step", f"torchrun, {name} step"
        comparisons.append(_compare(samples, *pair, goal, words))
    limits = [
        ["submit to first line (p50)", seconds(median(samples[OURS])), "at most 0.5 s"],
        [f"{AGAIN} (p50)", seconds(median(samples[AGAIN])), "under 1 s"],
        [f"dray, {READY} (p50)", seconds(median(samples[f"dray, {READY}"])), "at once"],
    ]
    return Result(
        name="scripts",
        title="A script's start and steps",
        method=METHOD,
        rows=[Row(label, each) for label, each in samples.items()],
        comparisons=comparisons,
        tables=[Table("Against a limit", ["", "measured", "goal"], limits)],
    )


def _compare(
    samples: dict[str, list[float]], ours: str, theirs: str, goal: float | None, words: str
) -> Comparison:
    mine: Sequence[float] = samples[ours]
    ratio = ratio_of_medians(mine, samples[theirs])
    same = ratio_of_medians(mine[0::2], mine[1::2])
    met = ratio.value <= goal if goal is not None else ratio.low <= same.high
    return Comparison(f"{ours} / {theirs}", len(mine), ratio, same, words, met)
