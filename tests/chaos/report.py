"""Write the page with the results of a chaos run. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from tests.chaos.ground import MIN_RUN_S, SILENCE_LIMIT_S
from tests.chaos.turn import ENDED, FROM_CHECKPOINT, IN_PLACE, UNTOUCHED, Blown, Result

HOWS = (IN_PLACE, FROM_CHECKPOINT, UNTOUCHED, ENDED)
HEAD = (
    f"| fault | injected | {' | '.join(HOWS)} | p50 s | p99 s | lost steps, median | maximum |\n"
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n"
)


def num_faults(results: Sequence[Result]) -> int:
    return sum(len(blown.blow) for result in results for blown in result.blown)


def num_jobs(results: Sequence[Result]) -> int:
    return sum(result.num_jobs for result in results)


def table(results: Sequence[Result]) -> str:
    """Return the rows; faults that were injected together share a row."""
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
    """Return the smallest value that is at least as large as `share` of the values."""
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]


def page(results: Sequence[Result], machine: Mapping[str, str], seed: int, took_s: float) -> str:
    """Return the text of docs/explanation/chaos.md."""
    breaches = [breach for result in results for breach in result.breaches]
    facts = ", ".join(f"{name} {value}" for name, value in machine.items())
    return (
        "# Chaos\n\n"
        "`make chaos` runs jobs of several kinds on a real Ray, injects faults drawn from a seed, "
        "and checks every promise of the design after each turn. The last complete run wrote this "
        "page.\n\n"
        f"{num_jobs(results)} jobs, {num_faults(results)} faults, {len(breaches)} broken "
        f"promises; seed {seed}, {took_s / 60:.0f} minutes. {facts}.\n\n"
        f"{table(results)}\n"
        "## How to read the table\n\n"
        "Faults joined by `+` were injected together. The columns count how the jobs continued:\n\n"
        "- *in place*: the surviving ranks kept their state;\n"
        "- *from the checkpoint*: another attempt resumed. A job of one rank and a plain script "
        "have no other rank to recover from;\n"
        "- *training went on*: the fault affected no training process;\n"
        "- *ended meanwhile*: the job was cancelled, or ended before the fault had an effect.\n\n"
        "The time is measured from the fault to the next step, in seconds. Where a dead rank was "
        "replaced, the supervisor measured the time. In all other cases, the time is measured "
        "until the service records the event; for a stopped rank or loader, it includes the time "
        "that the hang detector needs. Where training went on, the time is measured until the "
        "service accepted jobs again. Lost steps are "
        "completed steps that had to be repeated.\n\n"
        "## The faults\n\n"
        "- *Stopped* is SIGSTOP: the process is alive but does not respond. The process continues "
        "when the jobs of the turn have ended; only the service continues earlier, because no "
        "other service replaces it here.\n"
        "- *Stopped briefly*: the process is stopped for half of the limit after which users are "
        f"notified, which must have no effect. `DRAY_SILENCE_LIMIT_S` is {SILENCE_LIMIT_S:g} in "
        "these runs, which "
        "shortens the limits in [faults](faults.md).\n"
        "- *Outranked*: a job of a higher priority takes all slots. *Quota claimed*: a job of a "
        "queue whose quota is guaranteed takes the slots. *Slots recalled*: an elastic group "
        "shrinks "
        f"for another job. `DRAY_MIN_RUN_S` is {MIN_RUN_S:g} in these runs. The time is "
        "measured until the preempted job trains again, so it includes the other job's run.\n"
        "- In a job of silos, rank 0 aggregates, and every other rank is a silo on a separate "
        "node. *Clients outside* are processes of `dray federate join`; a killed client is "
        "started "
        "again, and a stopped client stays stopped for longer than the deadline of a round.\n\n"
        "One turn in five also runs a sweep: four trials with early stopping.\n\n"
        "## What is checked\n\n"
        "Every job:\n\n"
        "- It is listed, and ended once, in the expected state. No two attempts of the job were "
        "alive at the same time, and no node provided more resources than it has.\n"
        "- Each step of each series is present exactly once.\n"
        "- Its weights are bitwise equal to the weights of a run without faults, unless the job "
        "is elastic, uses gossip or asynchronous servers, or has silos that don't wait for each "
        "other.\n"
        "- Its newest checkpoint loads. With gossip, it has the mean of all copies, whose push "
        "weights add up to the number of copies; with parameter servers, it has each batch "
        "once.\n"
        "- Its events have no gap.\n"
        "- 60 s after its end, no process, actor, placement group or spool of the job remains.\n"
        "- The API never responded with a status of 500 or above, except for a declared 503.\n\n"
        "Every stopped process: an event reported that the process did not respond, the process "
        "was replaced, and it had ended by the time that the jobs had ended. No user was charged "
        "for an attempt that was lost because of it.\n\n"
        "Every federated job: each round is present once, with at most one update of each client "
        "and at least its quorum of updates. Where a round waits for all clients, all series are "
        "bitwise equal to the series of a run without faults. Clients over HTTP sent as many "
        "updates as the job counts, and ended in the same way as their job. No name of a silo's "
        "data, and no "
        "line or stack of a silo, is shown, logged or stored.\n\n"
        "Every preempted job had held its slots for the minimum run time, and was not charged.\n\n"
        "Every sweep: no more trials ran than allowed, only early stopping cancelled trials, each "
        "complete trial has the weights of the same trial run without others, and the best trial "
        "has the best value.\n"
    )
