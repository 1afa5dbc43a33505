"""The driver terminates unresponsive processes, and reads frames from dead nodes; tested without
Ray."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from ray_workers.node.folders.job_folders import FilesKept
from ray_workers.shared.contracts import Cause, Outcome, PollReply
from ray_workers.shared.processes.silence import Silence
from ray_workers.shared.spool_reader import SpoolRead
from service.cluster.port import AttemptRef
from service.cluster.ray import driver
from service.cluster.ray.described_nodes import CONTROL_RESOURCE, HEAD_RESOURCE
from service.cluster.ray.driver import RayCluster
from service.cluster.ray.node_agents import GatewayConfig

LIMIT_S = 60.0
CONFIG = GatewayConfig(
    deployment_id="d",
    address="127.0.0.1:6379",
    dashboard_url=None,
    shared=True,
    storage_url="file:///s",
    storage_nonce="",
    silence_limit_s=LIMIT_S,
)
KEPT = FilesKept(0, None, "", "")
KEY = ("job-a", 1)


class Clock:
    now = 0.0

    def time(self) -> float:
        return self.now


class Released:
    """A replacement for `UnownedSlots` in which all slots are free."""

    async def are_released(self, *_: Any) -> bool:
        return True

    async def sweep(self, *_: Any) -> None:
        pass


class Ground:
    """A driver with one suspended supervisor and the agent of its node."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slowness: float | None) -> None:
        self.cluster = RayCluster(CONFIG)
        self.cluster._session = "session"
        self.ref = AttemptRef(*KEY, "session", ("n",))
        self.clock = Clock()
        self.cluster._silence = Silence(self.clock, self.clock.time)
        self.cluster._silence.asked(KEY)
        self.cluster._heard.add(KEY)
        self.ended: list[Any] = []
        self.supervisor = SimpleNamespace()
        self.cluster._supervisors[KEY] = self.supervisor

        async def answer(value: Any) -> Any:
            if value is None:
                raise TimeoutError
            return value

        read = SpoolRead({}, more=False)
        self.left: dict[str, bytes] = {}
        """The spools of dead nodes on the agent's machine."""

        def read_left(_job: str, _attempt: int, cursor: dict[str, int], _max_bytes: int) -> Any:
            rest = {key: data[cursor.get(key, 0) :] for key, data in self.left.items()}
            return answer({key: data for key, data in rest.items() if data})

        self.read_left = read_left
        self.agent = SimpleNamespace(
            slowness=SimpleNamespace(remote=lambda *_: answer(slowness)),
            read=SimpleNamespace(remote=lambda *_: answer(read)),
            keep_output=SimpleNamespace(remote=lambda *_: answer(KEPT)),
            read_left=SimpleNamespace(remote=read_left),
        )
        self.node = SimpleNamespace(agent=self.agent, is_starting=False, is_dead=False)
        agents = SimpleNamespace(
            of=lambda _: {"n": self.agent}, get=lambda _: self, joined=[self.node]
        )
        monkeypatch.setattr(self.cluster, "_agents", agents)
        agents.look_again = lambda _: None
        monkeypatch.setattr(self.cluster, "snapshot", lambda: answer("seen"))
        monkeypatch.setattr(self.cluster, "_unowned", Released())
        monkeypatch.setattr(driver, "end_actor", self.ended.append)

    async def silent_for(self, seconds: float) -> bool:
        """Whether the supervisor was terminated."""
        self.clock.now = seconds
        await self.cluster._silent_reply(self.ref, {})
        return self.ended == [self.supervisor]

    async def outcome(self) -> Outcome:
        reply = await self.cluster._poll_unsupervised(self.ref, {}, 100, "the actor died")
        assert reply.outcome is not None
        return reply.outcome


async def test_a_supervisor_has_as_many_times_longer_to_answer_as_its_machine_is_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ground = Ground(monkeypatch, slowness=10.0)
    assert not await ground.silent_for(10 * LIMIT_S - 1)
    assert await ground.silent_for(10 * LIMIT_S + 1)


async def refused(*_: Any) -> None:
    """The error that Ray raises if a new driver can't connect to a suspended actor."""
    raise ActorUnavailableError("the connection timed out", actor_id=None)


async def test_a_stopped_supervisor_to_which_a_new_gateway_cannot_connect_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ground = Ground(monkeypatch, slowness=1.0)
    ground.supervisor.poll = SimpleNamespace(remote=refused)
    for now, ended in ((LIMIT_S - 1, []), (LIMIT_S + 1, [ground.supervisor])):
        ground.clock.now = now
        reply = await ground.cluster.poll(ground.ref, {}, 5.0, 100)
        assert (reply.outcome, ground.ended) == (None, ended)


async def test_a_stopped_supervisor_of_an_ended_attempt_is_ended_by_a_new_gateway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ground = Ground(monkeypatch, slowness=1.0)
    ground.supervisor.acknowledge = SimpleNamespace(remote=refused)
    await ground.cluster.acknowledge(ground.ref)
    assert ground.ended == [ground.supervisor]


async def test_a_new_gateway_knows_a_supervisor_that_has_reported_from_one_that_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ground = Ground(monkeypatch, slowness=1.0)
    ground.cluster._heard.clear()
    assert not await ground.silent_for(LIMIT_S + 1)
    await ground.cluster._silent_reply(ground.ref, {"supervisor": 7})
    assert ground.ended == [ground.supervisor]


@pytest.mark.parametrize(("slowness", "excused"), [(10.0, 10.0), (2.0, 1.0), (None, 1.0)])
async def test_only_an_overloaded_machine_excuses_the_end_of_a_silent_supervisor(
    monkeypatch: pytest.MonkeyPatch, slowness: float | None, excused: float
) -> None:
    ground = Ground(monkeypatch, slowness)
    assert await ground.silent_for(LIMIT_S * (slowness or 1.0) + 1)
    outcome = await ground.outcome()
    assert (outcome.cause, outcome.slowness) == (Cause.SUPERVISOR_LOST, excused)
    assert "the supervisor did not respond" in outcome.message
    assert ("overloaded" in outcome.message) is (excused > 1.0)
    assert outcome.log_lines_lost is None


async def test_a_supervisor_that_died_by_itself_is_not_excused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ground = Ground(monkeypatch, slowness=10.0)
    assert (await ground.outcome()).slowness == 1.0


async def test_the_last_reports_of_an_attempt_without_a_supervisor_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ground = Ground(monkeypatch, slowness=1.0)
    never = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(driver, "ANSWER_LIMIT_S", 0.01)
    answers = ground.agent.read
    ground.agent.read = SimpleNamespace(remote=lambda *_: never)
    for now, is_silent in ((0.0, False), (LIMIT_S, True), (10 * LIMIT_S, True)):
        ground.clock.now = now
        reply = await ground.cluster._poll_unsupervised(ground.ref, {}, 100, "the actor died")
        assert (reply.outcome, [one.node_id for one in reply.silent]) == (
            None,
            ["n"] if is_silent else [],
        )
    ground.agent.read = answers
    assert (await ground.outcome()).cause is Cause.SUPERVISOR_LOST, "a late answer counts"


async def test_the_reports_of_a_node_that_is_silent_for_too_long_are_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ground = Ground(monkeypatch, slowness=1.0)
    never = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(driver, "ANSWER_LIMIT_S", 0.01)
    ground.agent.read = SimpleNamespace(remote=lambda *_: never)
    await ground.cluster._poll_unsupervised(ground.ref, {}, 100, "the actor died")
    ground.clock.now = 10 * LIMIT_S + 1
    outcome = await ground.outcome()
    assert (outcome.cause, outcome.log_lines_lost) == (Cause.NODE_LOST, None)


async def test_the_reports_of_a_dead_node_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ground = Ground(monkeypatch, slowness=1.0)
    ground.ref = AttemptRef(*KEY, "session", ("n", "gone"))
    assert (await ground.outcome()).cause is Cause.NODE_LOST


LINES = [b'{"kind": "metrics", "time": 1.0, "body": {"step": %d}}\n' % step for step in range(1, 4)]


@pytest.mark.parametrize("session", ["session", "another"])
async def test_what_the_dead_have_left_is_read_before_they_are_given_up(
    monkeypatch: pytest.MonkeyPatch, session: str
) -> None:
    ground = Ground(monkeypatch, slowness=1.0)
    ground.ref = AttemptRef(*KEY, session, ("n", "gone"))
    ground.left = {"r0.0.metrics": b"".join(LINES)}
    ground.node.is_starting = True

    async def poll(cursor: dict[str, int]) -> PollReply:
        if session == "another":
            return await ground.cluster.poll(ground.ref, cursor, 0.0, 100)
        return await ground.cluster._poll_unsupervised(ground.ref, cursor, 100, "the actor died")

    read = len(LINES[0])
    rest = await poll({"r0.0.metrics": read})
    assert [frame.body["step"] for frame in rest.frames] == [2, 3]
    assert (rest.outcome, rest.more) == (None, True)
    assert rest.cursor == {"r0.0.metrics": len(b"".join(LINES))}
    waits = await poll(dict(rest.cursor))
    assert (waits.frames, waits.outcome) == ((), None)
    ground.node.is_starting = False
    never = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(driver, "AGENT_WAIT_S", 0.01)
    ground.agent.read_left = SimpleNamespace(remote=lambda *_: never)
    waits = await poll(dict(rest.cursor))
    assert (waits.frames, waits.outcome) == ((), None), "it may be suspended"
    ground.agent.read_left = SimpleNamespace(remote=ground.read_left)
    last = await poll(dict(rest.cursor))
    assert last.outcome is not None
    assert last.outcome.cause is Cause.NODE_LOST


async def test_a_node_that_never_starts_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ground = Ground(monkeypatch, slowness=1.0)
    ground.ref = AttemptRef(*KEY, "session", ("n", "gone"))
    ground.node.is_starting = True
    ground.cluster._looking_since[KEY] = time.monotonic() - ground.cluster._limits.start_s
    assert (await ground.outcome()).cause is Cause.NODE_LOST


async def test_where_no_node_lives_a_new_ray_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ground = Ground(monkeypatch, slowness=1.0)
    ground.ref = AttemptRef(*KEY, "session", ("n", "gone"))
    ground.left = {"r0.0.metrics": b"".join(LINES)}
    ground.node.is_dead = True

    async def poll(cursor: dict[str, int]) -> PollReply:
        return await ground.cluster._poll_unsupervised(ground.ref, cursor, 100, "the actor died")

    waits = await poll({})
    assert (waits.frames, waits.outcome) == ((), None)
    ground.node.is_dead = False
    assert [frame.body["step"] for frame in (await poll({})).frames] == [1, 2, 3]
    ground.node.is_dead = True
    limits = ground.cluster._limits
    ground.cluster._looking_since[KEY] -= limits.ray_s + limits.join_s
    assert (await ground.outcome()).cause is Cause.NODE_LOST


def test_an_error_of_drays_own_is_told_in_words_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ruler = "=" * 20
    for _ in range(2):
        told = driver.as_unavailable(TypeError(f"{ruler}\ncan't send the agent\n{ruler}"))
        assert str(told) == "TypeError: can't send the agent"
    assert str(driver.as_unavailable(TimeoutError())) == "TimeoutError: TimeoutError"
    assert [record.exc_info is not None for record in caplog.records] == [True]


async def test_nodes_are_asked_for_by_resources_and_by_labels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(driver, "request_resources", lambda **named: asked.append(named))
    cluster = RayCluster(CONFIG)
    labelled = {"CPU": 1.0, "label:ray.io/market-type=on-demand": 0.001}
    await cluster.request_nodes([({"CPU": 4.0}, 1), (labelled, 2)], [])
    await cluster.request_nodes([({"CPU": 4.0}, 1)], [])
    await cluster.request_nodes([], [])
    on_demand = {"ray.io/market-type": "on-demand"}
    assert asked == [
        {
            "bundles": [{"CPU": 4.0}, {"CPU": 1.0}, {"CPU": 1.0}],
            "bundle_label_selectors": [{}, on_demand, on_demand],
        },
        {"bundles": [{"CPU": 4.0}]},
        {"bundles": []},
    ]


async def test_the_head_and_control_nodes_keep_their_agents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Supervisors run on this node, even if the autoscaler releases all nodes."""
    has = {
        "head": {"CPU": 4.0, HEAD_RESOURCE: 1.0},
        "control": {"CPU": 1.0, CONTROL_RESOURCE: 1.0},
        "worker": {"CPU": 4.0},
        "gone": {CONTROL_RESOURCE: 1.0},
    }
    nodes = [
        {"NodeID": name, "Alive": name != "gone", "Resources": r, "NodeManagerHostname": name}
        for name, r in has.items()
    ]
    monkeypatch.setattr(driver.ray, "nodes", lambda: nodes)
    for name in ("available_by_node", "drained_nodes"):
        monkeypatch.setattr(driver.compat_ray, name, dict)
    met: list[Any] = []

    class Agents(dict[str, Any]):
        def meet(self, there: Any, heads: Any, **_: Any) -> None:
            met.append((there, heads))

    cluster = RayCluster(CONFIG)
    cluster._session, cluster._dashboard_url = "session", None
    monkeypatch.setattr(cluster, "_agents", Agents())
    seen = await cluster.snapshot()
    assert [n.node_id for n in seen.nodes if n.is_never_released] == ["head", "control"]
    assert met == [(["head", "control", "worker"], {"head", "control"})]
