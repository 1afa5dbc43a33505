"""The running time that an outcome names, without the sleep of the machine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ray_workers.shared.contracts import Cause, Outcome, Phase
from ray_workers.supervision import attempt_run
from ray_workers.supervision.slots import SlotsUnavailable
from tests.unit.workers.supervision.test_attempt_run import Ended

RUN: Any = attempt_run.AttemptRun._run


async def nothing(*_: Any) -> None:
    pass


async def no(*_: Any) -> bool:
    return False


@pytest.mark.parametrize("has_slots", [True, False])
async def test_it_counts_from_the_slots_on_by_a_clock_that_stands_still_in_sleep(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_slots: bool
) -> None:
    clock = SimpleNamespace(awake_s=0.0, wall_s=1e9)

    async def acquire() -> None:
        clock.awake_s += 5.0
        if not has_slots:
            raise SlotsUnavailable("others use them")

    async def train() -> Outcome:
        await one._build()
        clock.awake_s += 30.0
        clock.wall_s += 3600.0
        return Outcome.of(Cause.SUCCEEDED, "every rank exited with code 0")

    one = Ended(monkeypatch, tmp_path).run
    plain_time = SimpleNamespace(monotonic=lambda: clock.awake_s, time=lambda: clock.wall_s)
    monkeypatch.setattr(attempt_run, "time", plain_time)
    group = {"acquire": acquire, "start": nothing, "release": nothing, "has_lost_a_node": no}
    one._group = SimpleNamespace(**group, num_slots=1, log_lines_lost={})
    for name in ("_slot_seconds", "_report_ledger", "_keep_books", "_refresh_speed"):
        monkeypatch.setattr(one, name, nothing)
    monkeypatch.setattr(one._nodes, "put_code", nothing)
    monkeypatch.setattr(one, "_train", train)
    await RUN(one)
    assert one._outcome.ran_s == (30.0 if has_slots else None)


@pytest.mark.parametrize("left", ["b", "ab"])
async def test_an_attempt_whose_node_has_just_left_is_charged_to_no_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, left: str
) -> None:
    """An autoscaler may remove a node at the moment at which a job is launched on it."""
    one = Ended(monkeypatch, tmp_path, left=left).run
    one._outcome = None
    for name in ("_slot_seconds", "_report_ledger", "_keep_books", "_refresh_speed"):
        monkeypatch.setattr(one, name, nothing)
    monkeypatch.setattr(one._group, "has_lost_a_node", no)
    one._group.members = []
    await RUN(one)
    assert one._outcome.cause is Cause.NODE_LOST
    message = f"dray's agent was not found on {', '.join(left)}"
    assert one._outcome.message == message
    reply = await one.poll({}, 0.0, 1 << 20)
    assert (reply.phase, reply.outcome) == (Phase.ENDED, one._outcome)
