"""The table at the end of a chaos run: pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from tests.chaos.ground import MIN_RUN_S, SILENCE_LIMIT_S
from tests.chaos.turn import ENDED, FROM_CHECKPOINT, IN_PLACE, UNTOUCHED, Blown, Result

HOWS = (IN_PLACE, FROM_CHECKPOINT, UNTOUCHED, ENDED)
HEAD = (
    f"| fault | struck | {' | '.join(HOWS)} | p50 s | p99 s | steps lost, median | most |\n"
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n"
)


def num_faults(results: Sequence[Result]) -> int:
    return sum(len(blown.blow) for result in results for blown in result.blown)


def num_jobs(results: Sequence[Result]) -> int:
    return sum(result.num_jobs for result in results)


def table(results: Sequence[Result]) -> str:
    """A row for each blow, those that strike together in one."""
    rows: dict[str, list[Blown]] = {}
    for result in results:
        for blown in result.blown:
            rows.setdefault(" + ".join(blown.blow), []).append(blown)
    return HEAD + "".join(_row(name, rows[name]) for name in sorted(rows))


def _row(name: str, blown: Sequence[Blown]) -> str:
    hows = Counter(each.how for each in blown)
    seconds = sorted(each.recovery_s for each in blown if each.recovery_s is not None)
    lost = [each.steps_lost for each in blown if each.steps_lost is not None]
    cells = [
        name,
        str(len(blown)),
        *(str(hows[how] or "") for how in HOWS),
        f"{quantile(seconds, 0.50):.2f}" if seconds else "",
        f"{quantile(seconds, 0.99):.2f}" if seconds else "",
        f"{statistics.median(lost):g}" if lost else "",
        str(max(lost)) if lost else "",
    ]
    return f"| {' | '.join(cells)} |\n"


def quantile(ordered: Sequence[float], share: float) -> float:
    """The least value that at least this share of them does not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]


def page(results: Sequence[Result], machine: Mapping[str, str], seed: int, took_s: float) -> str:
    """docs/explanation/chaos.md"""
    breaches = [breach for result in results for breach in result.breaches]
    facts = ", ".join(f"{name} {value}" for name, value in machine.items())
    return (
        "# Chaos\n\n"
        "`make chaos` runs jobs of several kinds on a real Ray, strikes them with faults that are "
        "drawn by a seed, and looks at every promise of the design after each. This page is what "
        "the last whole run wrote.\n\n"
        f"{num_jobs(results)} jobs, {num_faults(results)} faults, {len(breaches)} promises "
        f"broken; seed {seed}, {took_s / 60:.0f} minutes. {facts}.\n\n"
        f"{table(results)}\n"
        "Faults with a `+` struck together. *In place*: the survivors kept their state. *From the "
        "checkpoint*: another attempt resumed; a job of one rank and a script have nobody to be "
        "mended from. *Training went on*: the fault struck nothing that trains. *Ended "
        "meanwhile*: cancelled, or done before the fault mattered.\n\n"
        "Seconds are from the fault to the next step. Where a dead rank was replaced they are the "
        "supervisor's own; else they last until the service's event of it, and for a rank or "
        "a loader that was stopped they include the time in which the hang detector makes "
        "sure. Where training went on they are until the service took jobs again. Steps lost "
        "are those that were done and had to be done again.\n\n"
        "*Stopped* is SIGSTOP: the process lives and answers nothing, and nobody lets it go before "
        "the jobs of the turn have ended, but for the service, which has no other here to take its "
        "place. *Stopped briefly* is for half the time after which users are told, and nothing may "
        f"come of it. `DRAY_SILENCE_LIMIT_S` is {SILENCE_LIMIT_S:g} in these runs, so that the "
        "limits of [faults](faults.md) are that much shorter.\n\n"
        "*Outranked* is a job of a higher priority that takes all slots, *quota claimed* one of a "
        "queue with a guarantee of them, and *slots recalled* one for which an elastic group "
        f"shrinks; `DRAY_MIN_RUN_S` is {MIN_RUN_S:g} in these runs. The seconds are until the "
        "job that left trains again, so they hold the run of the one that came. A turn in five "
        "has a sweep beside the job that is struck: four trials with early stopping.\n\n"
        "In a job of silos rank 0 aggregates, and every other rank is a silo on a node of its "
        "own; *clients outside* are processes of `dray federate join`, which are started again "
        "when they were killed, and stopped for longer than the deadline of a round.\n\n"
        "Checked of every job: it is listed and ended as it must, once; no two attempts of it "
        "lived at a time; no node gave more than it has; each step of each series is there, "
        "once; its weights are those of a run without faults, to the bit, unless it is elastic, "
        "of gossip, of asynchronous servers or of silos that do without each other; its newest "
        "checkpoint loads, and has the mean of all copies of gossip, whose push weights sum to "
        "their number, and of parameter servers each batch once; its events have no gap; 60 s "
        "after its end no process, actor, placement group or spool of it is left; the API "
        "answered nothing of 500 and more but a declared 503. Checked of what was stopped: an "
        "event said that it did not answer; it was replaced, and is not there any more when the "
        "jobs have ended; no attempt that it cost was charged to the user. Checked of federated "
        "jobs: each round is there once, with an update of each client at most, and of its "
        "quorum at least; where a round waits for all clients, all series are those of a run "
        "without faults, to the bit; clients over HTTP have sent as many updates as count, and "
        "end as their job does; no name of a silo's data is in what is shown, logged or stored, "
        "nor is a line or a stack of a silo. Checked of jobs that made room: each had held its "
        "slots for the minimum run time, and was not charged. Checked of sweeps: no more trials "
        "ran than may, none was cancelled but by early stopping, those that went to their end "
        "have the weights of the same trial alone, and the best has the best value.\n"
    )
