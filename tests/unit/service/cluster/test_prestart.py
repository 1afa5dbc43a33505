"""Missing idle worker processes are requested, but never twice."""

from __future__ import annotations

import pytest

from service.cluster.ray import prestart
from service.cluster.ray.prestart import APPEARS_S, CALM_S, IDLE_WORKERS, Count, Prestarter


class Clock:
    """Replaces `time`, and a raylet that records the requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.asked: list[tuple[str, int]] = []
        monkeypatch.setattr(prestart, "time", self)
        monkeypatch.setattr(prestart, "threading", self)

    def monotonic(self) -> float:
        return self.now

    def Thread(self, *, target: object, args: tuple[str, int], daemon: bool) -> Clock:  # noqa: N802
        self.asked.append(args)
        return self

    def start(self) -> None:
        """Run the thread's function immediately."""

    def count(self, idle_workers: int) -> Count:
        """Query a node and return its answer."""
        return Count("node:1", idle_workers, self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_only_what_is_missing_is_asked_for(clock: Clock) -> None:
    prestarter = Prestarter()
    prestarter.keep_warm("full", clock.count(IDLE_WORKERS + 3))
    prestarter.keep_warm("short", clock.count(1))
    assert clock.asked == [("node:1", IDLE_WORKERS - 1)]


def test_whoever_comes_anew_asks_for_nothing_that_is_there(clock: Clock) -> None:
    """After a restart, the gateway does not request more workers."""
    for _ in range(5):
        Prestarter().keep_warm("node", clock.count(IDLE_WORKERS))
    assert clock.asked == []


def test_what_was_asked_for_has_time_to_appear(clock: Clock) -> None:
    prestarter = Prestarter()
    prestarter.keep_warm("node", clock.count(0))
    clock.now += APPEARS_S / 2
    prestarter.keep_warm("node", clock.count(0))
    assert len(clock.asked) == 1
    clock.now += APPEARS_S
    prestarter.keep_warm("node", clock.count(3))
    assert clock.asked[1:] == [("node:1", IDLE_WORKERS - 3)]


def test_a_launch_has_the_processors_first_and_is_counted_then(clock: Clock) -> None:
    prestarter = Prestarter()
    before = clock.count(IDLE_WORKERS)
    clock.now += 1
    prestarter.used()
    assert not prestarter.awaits_news(before.asked_at)
    prestarter.keep_warm("node", clock.count(1))
    assert clock.asked == []
    clock.now += CALM_S + 1
    assert prestarter.awaits_news(before.asked_at)
    prestarter.keep_warm("node", before)
    assert clock.asked == [], "that count is from before the launch"
    now = clock.count(1)
    assert not prestarter.awaits_news(now.asked_at)
    prestarter.keep_warm("node", now)
    assert clock.asked == [("node:1", IDLE_WORKERS - 1)]
