"""A rank shows its progress while it joins a group."""

from __future__ import annotations

from typing import Any

import pytest

from ray_workers.shared.heartbeat import HeartbeatPage, RankPhase, TimeCategory, parse_status
from ray_workers.training.elastic import process_group
from ray_workers.training.elastic.rendezvous import RendezvousHandler
from tests.wire import rank_task


@pytest.mark.parametrize(
    ("round_number", "use"), [(0, TimeCategory.STARTING), (3, TimeCategory.RECOVERING)]
)
def test_a_rank_shows_that_it_connects_only_once_all_ranks_are_there(
    monkeypatch: pytest.MonkeyPatch, round_number: int, use: TimeCategory
) -> None:
    page = HeartbeatPage(None)
    page.enter(RankPhase.JOINING, use)
    shown: list[Any] = []

    def look(*_: Any) -> None:
        status = parse_status(page._map[:])
        shown.append((status.phase, status.use))

    monkeypatch.setattr(RendezvousHandler, "_meet", look)
    monkeypatch.setattr(process_group, "join", look)
    handler = RendezvousHandler(rank_task(world_size=2, generation=round_number), page)
    handler.join(lambda: None)
    assert shown == [(RankPhase.JOINING, use), (RankPhase.FORMING, use)]
