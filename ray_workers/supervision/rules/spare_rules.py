"""Rules for spares. The module is pure, and imports neither Ray nor torch."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable

from ray_workers.shared.heartbeat import RankObservation, RankPhase
from ray_workers.supervision.rules.failure_attribution import RankExit

FIRST_PAUSE_S, MOST_PAUSE_S = 5.0, 300.0
"""Pauses, in seconds, before a spare that could not be started is started again. The pause is
doubled after each failure."""


def is_responding(worker: RankObservation | None, limit_s: float, *, is_idle: bool = False) -> bool:
    """Whether a worker without a rank can get one. A worker that waits for a rank writes to its
    heartbeat page at least once per `limit_s` seconds unless it is suspended or hangs.

    worker: None if the worker's node did not report it. is_idle: whether the worker had a rank but
    no longer belongs to a complete replica. An idle worker might still be leaving its last round.
    All other workers must be waiting for a rank.
    """
    if worker is None or worker.state in ("", "T", "t"):
        return False
    is_waiting = worker.status.phase is RankPhase.STANDBY
    return worker.age_s <= limit_s if is_waiting else is_idle


def responding(
    observations: Iterable[RankObservation], limit_s: float, idle: Collection[int]
) -> set[int]:
    """Return the indices of the waiting and idle workers that have no rank and can get one."""
    return {
        one.rank for one in observations if is_responding(one, limit_s, is_idle=one.rank in idle)
    }


def is_standing_still(spare: RankObservation | None, limit_s: float, *, was_ready: bool) -> bool:
    """Whether a running spare has stopped responding. A spare that is still being started
    (`was_ready` is False) can stay in a phase for longer, so it counts as unresponsive only if it
    is suspended. If the spare's node does not report the spare, the silence of the node is handled
    separately."""
    if spare is None or not spare.state or spare.age_s <= limit_s:
        return False
    return was_ready or spare.state in ("T", "t")


def how_it_ended(end: RankExit) -> str:
    """Return a phrase such as `was killed by SIGKILL`."""
    if end.exit_code is None:
        return "vanished"
    if end.exit_code >= 0:
        return f"exited with code {end.exit_code}"
    try:
        return f"was killed by {signal.Signals(-end.exit_code).name}{end.why_killed}"
    except ValueError:
        return f"was killed by signal {-end.exit_code}"


def counted(number: int, noun: str) -> str:
    """Return a phrase such as `2 spares`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def pause_s(num_failures: int) -> float:
    """Return the pause before a spare that has failed to start `num_failures` times is started
    again."""
    return min(FIRST_PAUSE_S * 2.0 ** min(num_failures, 16), MOST_PAUSE_S)
