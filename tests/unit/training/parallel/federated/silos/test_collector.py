"""The rules for ending a round of silos, and for counting each update once."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_workers.shared.frames import SiloRoundReport
from ray_workers.training.parallel.federated.silos.collector import (
    NOTICE_S,
    RoundCollector,
    RoundNotices,
    SiloUpdate,
)


def update(number: float = 0.0) -> SiloUpdate:
    return SiloUpdate(1, 1, torch.tensor([number]), {})


def test_a_round_waits_for_all_that_are_there_and_for_none_that_is_lost() -> None:
    rules = RoundCollector(3, least=1, deadline_s=None)
    rules.begin(1, now=0.0)
    assert rules.take(0, 1, update())
    assert rules.wait_s(1e9) > 0, "two have not come yet"
    rules.join(1)
    rules.lost(2)
    assert rules.wait_s(1e9) > 0
    assert rules.take(1, 1, update())
    assert rules.wait_s(0.0) == 0


def test_a_deadline_ends_a_round_with_its_quorum_and_not_before() -> None:
    rules = RoundCollector(3, least=2, deadline_s=10.0)
    rules.begin(1, now=100.0)
    assert rules.take(0, 1, update())
    assert rules.wait_s(111.0) > 0, "one update is no quorum"
    assert rules.take(2, 1, update())
    assert rules.wait_s(104.0) == 6.0
    assert rules.wait_s(111.0) == 0
    assert rules.num_late == 1
    assert list(rules.end()) == [0, 2]
    rules.begin(2, now=111.0)
    assert not rules.take(1, 1, update()), "it is of a round that is over"
    assert rules.wants(1) == 2


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "late", "lost", "join", "end"]), st.integers(0, 3)),
        max_size=60,
    )
)
def test_no_update_counts_twice_in_any_order_of_events(events: list[tuple[str, int]]) -> None:
    rules, number, counted = RoundCollector(4, 1, None), 1, set[int]()
    rules.begin(number, 0.0)
    for word, silo in events:
        if word == "take":
            assert rules.take(silo, number, update()) == (silo not in counted)
            counted.add(silo)
        elif word == "late":
            assert not rules.take(silo, number - 1, update())
        elif word == "lost":
            rules.lost(silo)
        elif word == "join":
            rules.join(silo)
            assert rules.wants(silo) == (None if silo in counted else number)
        else:
            assert set(rules.end()) == counted
            assert not rules.take(silo, number, update()), "the round is closed"
            number, counted = number + 1, set()
            rules.begin(number, 0.0)


def test_a_round_is_reported_once_it_is_open_for_long_and_when_it_changes() -> None:
    rules, told = RoundCollector(3, least=2, deadline_s=60.0), list[SiloRoundReport]()
    notices = RoundNotices(told.append)

    def look(now: float) -> None:
        notices.look(rules.state(now), now)

    rules.begin(1, now=100.0)
    notices.begin(100.0)
    look(100.0 + NOTICE_S / 2)
    notices.end()
    assert told == [], "it was over soon"
    rules.begin(2, now=200.0)
    notices.begin(200.0)
    rules.take(1, 2, update())
    for second in range(31):
        if second == 8:
            rules.take(0, 2, update())
        look(200.0 + second)
    assert told == [
        SiloRoundReport(2, [0, 2], 2, ends_in_s=55.0),
        SiloRoundReport(2, [2], 2, ends_in_s=50.0),
    ]
    notices.end()
    notices.end()
    assert [report.missing for report in told] == [[0, 2], [2], []]
