"""Silence counts only the time in which the asking process itself was running."""

from __future__ import annotations

import asyncio
import time

import pytest

from ray_workers.shared.processes.silence import MAX_GAP_S, AwakeClock, Silence, SilenceLimits


class Hands:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def watched(hands: Hands) -> Silence:
    return Silence(AwakeClock(hands), wall=lambda: 1e9 + hands.now)


def pass_time(hands: Hands, silence: Silence, seconds: int) -> None:
    for _ in range(seconds):
        hands.now += 1.0
        silence.seconds("somebody else")


def test_a_process_is_silent_from_its_oldest_open_question_until_it_answers() -> None:
    hands = Hands()
    silence = watched(hands)
    assert silence.seconds("a") == 0.0
    silence.asked("a")
    pass_time(hands, silence, 10)
    silence.asked("a")
    pass_time(hands, silence, 10)
    assert silence.seconds("a") == 20.0
    assert silence.since("a") == 1e9 + 100.0
    silence.answered("a")
    assert silence.seconds("a") == 0.0
    assert silence.since("a") == 1e9 + hands.now


async def test_an_answer_that_comes_late_is_a_sign_of_life() -> None:
    hands = Hands()
    silence = watched(hands)
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    with pytest.raises(TimeoutError):
        await silence.ask("a", 0.01, answer)
    pass_time(hands, silence, 10)
    assert silence.seconds("a") == 10.0
    answer.set_result("late")
    await asyncio.sleep(0)
    assert silence.seconds("a") == 0.0


async def test_all_of_a_long_wait_for_an_answer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_workers.shared.processes.silence.MAX_GAP_S", 0.02)
    readings: list[float] = []

    def now() -> float:
        readings.append(time.monotonic())
        return readings[-1]

    silence = Silence(AwakeClock(now))
    with pytest.raises(TimeoutError):
        await silence.ask("a", 0.5, asyncio.get_running_loop().create_future())
    assert len(readings) > 5, "seconds between two readings further apart are not counted"


async def test_a_question_that_fails_is_no_answer() -> None:
    hands = Hands()
    silence = watched(hands)
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    answer.set_exception(LookupError())
    with pytest.raises(LookupError):
        await silence.ask("a", 1.0, answer)
    pass_time(hands, silence, 10)
    assert silence.seconds("a") == 10.0
    answered: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    answered.set_result("here")
    assert await silence.ask("a", 1.0, answered) == "here"
    await asyncio.sleep(0)
    assert silence.seconds("a") == 0.0


def test_an_hour_in_which_the_asker_stood_still_too_makes_no_process_silent() -> None:
    hands = Hands()
    silence = watched(hands)
    silence.asked("a")
    hands.now += 3600.0
    assert silence.seconds("a") == MAX_GAP_S
    pass_time(hands, silence, 3)
    assert silence.seconds("a") == MAX_GAP_S + 3.0


def test_a_clock_that_is_set_back_takes_nothing_away() -> None:
    hands = Hands()
    clock = AwakeClock(hands)
    hands.now += 2.0
    assert clock.time() == 2.0
    hands.now -= 50.0
    assert clock.time() == 2.0
    hands.now += 1.0
    assert clock.time() == 3.0


def test_users_are_notified_before_anything_is_replaced_and_work_is_given_up_last() -> None:
    limits = SilenceLimits(60.0)
    order = [
        limits.report_s,
        limits.gateway_s,
        limits.replace_s,
        limits.ray_s,
        limits.start_s,
        limits.last_reports_s,
    ]
    assert order == sorted(order)
    assert limits.last_reports_s == 600.0
