"""Observations of ranks, as tests make them, and what is reported of them."""

from __future__ import annotations

from typing import Any

from ray_workers.shared.contracts import FrameKind
from ray_workers.shared.frames import Report
from ray_workers.shared.heartbeat import (
    TIME_CATEGORIES,
    RankObservation,
    RankPhase,
    RankStatus,
    TimeCategory,
)


def observation(
    rank: int,
    phase: RankPhase = RankPhase.COMPUTE,
    age_s: float = 0.1,
    *,
    incarnation: int = 0,
    step: int = 10,
    collective: int = 5,
    round_number: int = 0,
    resumed_step: int = 0,
    first_at: float = 1.0,
    since: float = 0.0,
    state: str = "S",
    is_prepared: bool = False,
    is_verified: bool = True,
) -> RankObservation:
    status = RankStatus(
        step=step,
        phase=phase,
        collective=collective,
        since=since,
        generation=round_number,
        resumed_step=resumed_step,
        first_at=first_at,
        pid=100 + rank,
        use=TimeCategory.USEFUL,
        uses=dict.fromkeys(TIME_CATEGORIES, 0.0),
        is_prepared=is_prepared,
        is_verified=is_verified,
    )
    return RankObservation(rank, incarnation, status, age_s, state)


class Reports:
    """A reporter that keeps the reports."""

    def __init__(self) -> None:
        self.all: list[tuple[FrameKind, dict[str, Any]]] = []

    def report(self, report: Report) -> None:
        self.all.append((report.KIND, report.body()))

    def of(self, kind: FrameKind) -> list[dict[str, Any]]:
        return [body for each, body in self.all if each is kind]
