"""The record of launches, which is shared by the scheduler and the reconciler."""

from __future__ import annotations

from service.loops.shared.term import Launches


def test_a_launch_is_under_way_until_it_is_answered_and_ours_until_its_end() -> None:
    launches = Launches()
    launches.begin("job-a", 2)
    assert launches.is_under_way("job-a", 2)
    assert not launches.is_ours("job-a", 2), "it is not known yet whether the claim succeeds"
    launches.claimed("job-a", 2)
    launches.answered("job-a", 2)
    assert not launches.is_under_way("job-a", 2)
    assert launches.is_ours("job-a", 2)
    launches.ended("job-a", 2)
    assert not launches.is_ours("job-a", 2)


def test_attempts_are_told_apart() -> None:
    launches = Launches()
    launches.begin("job-a", 1)
    launches.claimed("job-a", 1)
    for other in (("job-a", 2), ("job-b", 1)):
        assert not launches.is_under_way(*other)
        assert not launches.is_ours(*other)
        launches.answered(*other)
        launches.ended(*other)
    assert launches.is_under_way("job-a", 1)
    assert launches.is_ours("job-a", 1)


def test_a_lost_claim_leaves_nothing() -> None:
    launches = Launches()
    launches.begin("job-a", 1)
    launches.answered("job-a", 1)
    assert not launches.is_under_way("job-a", 1)
    assert not launches.is_ours("job-a", 1)
