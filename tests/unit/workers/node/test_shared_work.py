"""Work for which several jobs may wait is done once, and its failure is reported for a while."""

from __future__ import annotations

import asyncio

import pytest

from ray_workers.node import shared_work
from ray_workers.node.shared_work import NotDone, SharedWork
from ray_workers.shared.node_needs import BuildState


class Work:
    """Ends as the test determines; counts how often it began."""

    def __init__(self, *ends: Exception | None) -> None:
        self.ends = list(ends)
        self.num_begun = 0

    async def __call__(self) -> None:
        self.num_begun += 1
        end = self.ends.pop(0)
        await asyncio.sleep(0)
        if end is not None:
            raise end


async def test_many_who_ask_begin_it_once() -> None:
    work, shared = Work(None), SharedWork()
    answers = await asyncio.gather(*(shared.standing("k", work) for _ in range(5)))
    assert {answer.state for answer in answers} == {BuildState.READY}
    assert work.num_begun == 1


async def test_a_final_failure_is_reported_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    work, shared = Work(NotDone("no such package"), None), SharedWork()
    for _ in range(2):
        answer = await shared.standing("k", work)
        assert (answer.state, answer.message) == (BuildState.FAILED, "no such package")
    assert work.num_begun == 1
    monkeypatch.setattr(shared_work, "FAILURE_KEPT_S", -1.0)
    other = Work(NotDone("no such package"), None)
    assert (await shared.standing("other", other)).state is BuildState.FAILED
    assert (await shared.standing("other", other)).state is BuildState.READY


async def test_some_failures_are_final_after_a_number_of_tries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_work, "RETRY_PAUSES_S", (-1.0,))
    killed = NotDone("was killed", most_tries=3)
    work, shared = Work(killed, killed, killed), SharedWork()
    states = [(await shared.standing("k", work)).state for _ in range(4)]
    assert states == [BuildState.UNREACHABLE] * 2 + [BuildState.FAILED] * 2
    assert work.num_begun == 3


async def test_other_errors_are_tried_again_and_failures_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_work, "RETRY_PAUSES_S", (-1.0,))
    work, shared = Work(OSError("disk full"), None), SharedWork()
    answer = await shared.standing("k", work)
    assert (answer.state, answer.message) == (BuildState.UNREACHABLE, "OSError: disk full")
    assert shared._failed
    monkeypatch.setattr(shared_work, "KNOWN_S", 0.0)
    assert (await shared.standing("other", Work(None))).state is BuildState.READY
    assert not shared._failed
