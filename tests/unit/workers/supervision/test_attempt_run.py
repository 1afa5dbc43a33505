"""The supervisor of an ended attempt waits for the last reports of its nodes, but not forever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dray.drills import DrillKind
from ray_workers.shared.commands import Drill, Grant, Stop
from ray_workers.shared.contracts import Cause, Outcome, Phase, PollReply, ProcessKind
from ray_workers.shared.names import agent_name
from ray_workers.shared.paths import NODE_TMPDIR
from ray_workers.shared.slices import Slice
from ray_workers.shared.spool_reader import SpoolRead
from ray_workers.supervision import attempt_run, node_clients
from ray_workers.supervision.attempt_run import AttemptRun
from ray_workers.supervision.rules.timings import Timings
from tests.wire import attempt_spec

PATIENCE_S = 30.0
MEMBERS = [
    SimpleNamespace(index=index, node_id=node, is_placed=False, is_spare=False)
    for index, node in enumerate("aab")
]
DONE = replace(
    Outcome.of(Cause.SUCCEEDED, "every rank exited with code 0"), log_lines_lost={0: 3, 1: 4}
)
FAILED = Outcome.of(Cause.USER_ERROR, "KeyError: 'income'", 2, 1)
LINE = b'{"kind":"log","time":1.0,"body":{"line":0,"text":"late"}}\n'


class Agent:
    """A node agent that does not answer while it is stopped."""

    def __init__(self) -> None:
        self.goes = asyncio.Event()
        self.goes.set()
        self.frames, self.has_more = b"", False
        self.waits_s: list[float] = []
        """How long each read should wait for frames."""
        self.read = SimpleNamespace(remote=self._read)

    async def _read(
        self, job_id: str, attempt: int, cursor: dict[str, int], max_bytes: int, wait_s: float
    ) -> SpoolRead:
        self.waits_s.append(wait_s)
        await self.goes.wait()
        unread = self.frames[cursor.get("r2.0.log", 0) :]
        return SpoolRead({"r2.0.log": unread} if unread else {}, more=self.has_more)


class Ended:
    """The supervisor, on node a, of an ended attempt on the nodes a and b."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        silence_limit_s: float = 600.0,
        left: Collection[str] = (),
    ) -> None:
        """left: nodes without an agent."""

        async def nothing(_: Any) -> None:
            pass

        def timings() -> Timings:
            return Timings(read_slack_s=0.05, silent_read_slack_s=0.05, poll_slack_s=0.2)

        self.agents = {"a": Agent(), "b": Agent()}
        self.alive = {"a", "b"}
        ray = attempt_run.ray

        def get_actor(name: str) -> Agent:
            for node_id, agent in self.agents.items():
                if name == agent_name(node_id) and node_id not in left:
                    return agent
            raise ValueError(f"no actor {name}")

        context = SimpleNamespace(get_node_id=lambda: "a")
        monkeypatch.setenv(NODE_TMPDIR, str(tmp_path))
        monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
        monkeypatch.setattr(ray, "get_actor", get_actor)
        monkeypatch.setattr(attempt_run, "Timings", timings)
        monkeypatch.setattr(node_clients.placement_groups, "alive_nodes", lambda: self.alive)
        monkeypatch.setattr(AttemptRun, "_run", nothing)
        slices = (Slice("a", 2), Slice("b", 1))
        spec = attempt_spec(spec={"name": "digits"}, slices=slices, silence_limit_s=silence_limit_s)
        self.run: Any = AttemptRun(spec)
        self.run._group.members = MEMBERS
        self.end(DONE)

    def end(self, outcome: Outcome) -> None:
        self.run._outcome = outcome
        self.run._enter(Phase.ENDED)

    async def poll(self, cursor: dict[str, int] | None = None) -> PollReply:
        reply: PollReply = await self.run.poll(cursor or {}, 0.0, 1 << 20)
        return reply

    async def until(self, probe: Callable[[PollReply], object]) -> PollReply:
        async with asyncio.timeout(PATIENCE_S):
            while not probe(reply := await self.poll()):
                pass
            return reply


@pytest.fixture
async def ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ended:
    return Ended(monkeypatch, tmp_path)


async def test_an_attempt_whose_nodes_answer_is_over_once_all_is_read(ended: Ended) -> None:
    ended.agents["b"].frames = LINE
    ended.agents["a"].has_more = True
    reply = await ended.poll()
    assert ([frame.rank for frame in reply.frames], reply.outcome) == ([2], None)
    ended.agents["a"].has_more = False
    assert (await ended.poll(dict(reply.cursor))).outcome == DONE


async def test_the_last_reports_and_the_outcome_come_together(ended: Ended) -> None:
    ended.agents["b"].frames = LINE
    reply = await ended.poll()
    assert ([frame.rank for frame in reply.frames], reply.outcome) == ([2], DONE)


async def test_a_late_answer_is_waited_for_and_taken(ended: Ended) -> None:
    ended.agents["b"].goes.clear()
    ended.agents["b"].frames = LINE
    for _ in range(3):
        assert (await ended.poll()).outcome is None
    ended.agents["b"].goes.set()
    reply = await ended.poll()
    assert [frame.body["text"] for frame in reply.frames] == ["late"]
    assert reply.outcome == DONE


async def test_the_reports_of_a_node_that_is_silent_for_too_long_are_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ended = Ended(monkeypatch, tmp_path, silence_limit_s=0.1)
    ended.agents["b"].goes.clear()
    assert (await ended.poll()).outcome is None
    reply = await ended.until(lambda reply: reply.silent)
    (silent,) = reply.silent
    assert (silent.kind, silent.node_id) == (ProcessKind.NODE_AGENT, "b")
    reply = await ended.until(lambda reply: reply.outcome)
    message = "every rank succeeded, but the last reports from a node never arrived"
    lost = {0: 3, 1: 4, 2: None}
    assert reply.outcome == replace(
        DONE, cause=Cause.NODE_LOST, message=message, log_lines_lost=lost
    )


async def test_the_reports_of_a_dead_node_are_not_waited_for(ended: Ended) -> None:
    ended.agents["a"].goes.clear()
    ended.alive = {"b"}
    outcome = (await ended.poll()).outcome
    assert outcome is not None
    assert (outcome.cause, outcome.log_lines_lost) == (Cause.NODE_LOST, {0: None, 1: None})


async def test_an_attempt_that_failed_has_failed_without_its_last_reports_too(
    ended: Ended,
) -> None:
    ended.end(FAILED)
    ended.agents["b"].goes.clear()
    ended.alive = {"a"}
    assert (await ended.poll()).outcome == replace(FAILED, log_lines_lost={2: None})


async def test_a_poll_is_answered_in_time_though_a_node_is_given_longer(ended: Ended) -> None:
    ended.run._nodes._speed.slowness = 1e6  # so the limit of a read is hours away
    ended.agents["b"].goes.clear()
    async with asyncio.timeout(PATIENCE_S):
        assert (await ended.poll()).outcome is None


@pytest.mark.parametrize(("left", "waits_s"), [((), 1.0), (("b",), 2.5)])
async def test_frames_of_one_node_do_not_wait_for_long_for_those_of_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, left: Collection[str], waits_s: float
) -> None:
    attempt = Ended(monkeypatch, tmp_path, left=left)
    attempt.run._phase = Phase.RUNNING
    await attempt.run._read({}, 1 << 20, 60.0)
    assert attempt.agents["a"].waits_s == [waits_s]


async def test_a_cancel_cuts_the_wait_for_a_silent_node_short(ended: Ended) -> None:
    ended.agents["b"].goes.clear()
    assert (await ended.poll()).outcome is None
    await ended.run.carry_out(Stop())
    outcome = (await ended.poll()).outcome
    assert outcome is not None
    assert outcome.cause is Cause.NODE_LOST


async def test_commands_that_are_sent_again_are_carried_out_once(ended: Ended) -> None:
    drill, grant = Drill("d", DrillKind.KILL, 0, None), Grant(1, (), None)
    for command in (drill, grant, drill, grant):
        await ended.run.carry_out(command)
    assert ended.run._drills.waiting == (drill,)
    assert ended.run._monitor._recovery.state.grants == (grant,)


async def test_system_metrics_are_asked_for_with_each_report_of_the_ledger(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class EnoughSeen(Exception):
        pass

    one, done = Ended(monkeypatch, tmp_path).run, []

    async def report() -> None:
        done.append("report")
        if len(done) == 4:
            raise EnoughSeen

    monkeypatch.setattr(one, "_timings", replace(Timings(), ledger_period_s=0.0))
    monkeypatch.setattr(one._system_metrics, "ask", lambda: done.append("ask"))
    monkeypatch.setattr(one, "_report_ledger", report)
    with pytest.raises(EnoughSeen):
        await one._keep_books()
    assert done == ["ask", "report"] * 2
