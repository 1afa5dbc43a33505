"""Turns of every contender, one after the other, round after round."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks.figures import ratio_of_medians
from benchmarks.machine import wait_until_quiet
from benchmarks.report import Comparison, Result, Row, Table, seconds
from benchmarks.scripts.contenders import (
    RayJobs,
    dray,
    ray_jobs,
    uploaded_folder,
)
from benchmarks.scripts.environments import ByHand, OnNode

NUM_RANKS = 2
MEGABYTES = 100
SETTLE_S = 4.0

OURS, RAY = "dray, first line", "ray job submit, first line"
COLD, CACHED, READY = "environment, empty cache", "environment, cached", "environment, again"
AGAIN = f"dray, {MEGABYTES} MB with one changed file"

METHOD = (
    "First line: one process on CPU prints the time with its first statement. dray: measured "
    "from `client.upload_code` of a folder whose parts the server already has, followed by "
    "`client.submit`. Ray: measured from `JobSubmissionClient.submit_job` with the same folder "
    "as working_dir, which was uploaded before. Services and clusters are running before the "
    "clock starts.",
    f"{MEGABYTES} MB: ten incompressible files and one file that changes each time, from the "
    "call of `upload_code` (which reads and hashes them) to the response to the submission.",
    "Environment: ten packages without dependencies. dray: a node's builder, from the request to "
    "the response that the environment is ready. By hand: `uv venv` and `uv pip install`. Each "
    "has a separate package cache on the same disk, which is empty or filled by the previous "
    "turn. Again: requesting an environment that the node already has.",
    "Turns are interleaved, with one turn of each contender per round, after one round that is "
    "not counted. A turn begins when the machine is quiet. Ratio of medians. A/A: odd rounds "
    "against even rounds.",
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
    limits = [
        ["submit to first line (p50)", seconds(median(samples[OURS])), "at most 0.5 s"],
        [f"{AGAIN} (p50)", seconds(median(samples[AGAIN])), "under 1 s"],
        [f"dray, {READY} (p50)", seconds(median(samples[f"dray, {READY}"])), "at once"],
    ]
    return Result(
        name="scripts",
        title="A script's start",
        method=METHOD,
        rows=[Row(label, each) for label, each in samples.items()],
        comparisons=comparisons,
        tables=[Table("Against a limit", ["", "measured", "goal"], limits)],
    )


def _compare(
    samples: dict[str, list[float]], ours: str, theirs: str, goal: float, words: str
) -> Comparison:
    mine: Sequence[float] = samples[ours]
    ratio = ratio_of_medians(mine, samples[theirs])
    same = ratio_of_medians(mine[0::2], mine[1::2])
    met = ratio.value <= goal
    return Comparison(f"{ours} / {theirs}", len(mine), ratio, same, words, met)
