"""The nodes on which ranks can be placed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

import dray
from ray_workers.node.node_report import NodeReport
from ray_workers.shared.contracts import ProcessKind, SilentProcess
from ray_workers.shared.names import agent_name
from ray_workers.shared.processes.silence import AwakeClock, Silence
from service.cluster.ray import described_nodes, node_agents
from service.cluster.ray.node_agents import GatewayConfig, JoinedNode, NodeAgents, refusal

CONFIG = GatewayConfig(
    deployment_id="d",
    address="127.0.0.1:6379",
    dashboard_url=None,
    shared=True,
    storage_url="file:///srv/dray",
    storage_nonce="the-nonce",
    silence_limit_s=60.0,
)
SOUND = NodeReport(
    node_id="n",
    hostname="worker-1",
    address="127.0.0.1",
    version=dray.__version__,
    python="3.11.7",
    storage_nonce="the-nonce",
    problem=None,
    full=None,
    quarantined=(),
    idle_workers=None,
    has_silo_source=False,
    gpu_faults=(),
    memory_bytes=1 << 40,
)


def test_a_node_with_the_same_code_and_files_is_accepted() -> None:
    assert refusal(SOUND, CONFIG) is None


def test_a_node_with_another_version_is_refused_with_both_versions() -> None:
    sentence = refusal(replace(SOUND, version="0.0.1"), CONFIG)
    assert sentence is not None
    assert "0.0.1" in sentence
    assert dray.__version__ in sentence


def test_a_node_that_sees_other_files_is_refused_and_told_what_to_do() -> None:
    for nonce in (None, "another"):
        sentence = refusal(replace(SOUND, storage_nonce=nonce), CONFIG)
        assert sentence is not None
        assert "file:///srv/dray" in sentence
        assert "DRAY_STORAGE_URL" in sentence


def test_shared_object_storage_needs_no_nonce() -> None:
    assert refusal(SOUND, replace(CONFIG, storage_url="s3://bucket/dray", storage_nonce="")) is None


def test_a_failed_preload_is_the_nodes_stated_problem() -> None:
    problem = "the node's forkserver exited with code 1: No module named 'torch'"
    assert refusal(replace(SOUND, problem=problem), CONFIG) == problem


async def test_a_full_disk_is_reported_and_no_reason_to_refuse_the_node() -> None:
    full = "no file can be written to /tmp/dray-0/d/n: No space left on device"
    asked: asyncio.Future[NodeReport] = asyncio.Future()
    asked.set_result(replace(SOUND, full=full))
    unasked: Any = None
    node = JoinedNode(None, asked, 0.0, unasked)
    node.settle(CONFIG)
    assert (node.refused, node.full, node.memory_bytes) == (None, full, 1 << 40)


async def test_a_node_is_known_as_a_silos_once_it_may_carry_ranks() -> None:
    asked: asyncio.Future[NodeReport] = asyncio.Future()
    unasked: Any = None
    node = JoinedNode(None, asked, 0.0, unasked)
    assert node.refused is not None
    asked.set_result(replace(SOUND, has_silo_source=True))
    node.settle(CONFIG)
    assert (node.refused, node.has_silo_source) == (None, True)
    failed: asyncio.Future[NodeReport] = asyncio.Future()
    failed.set_exception(RuntimeError("does not answer"))
    node.asked = failed
    node.settle(CONFIG)
    assert node.has_silo_source
    named = described_nodes._labels(
        {"Labels": {"rack": "a", "ray.io/node-id": "n"}}, has_silo_source=True
    )
    assert named == {"rack": "a", "dray.io/silo": "true"}


def test_a_node_whose_forkserver_is_silent_gets_no_work_and_its_jobs_are_told() -> None:
    unasked: Any = None
    node = JoinedNode(None, unasked, 0.0, unasked, problem=None)
    agents = NodeAgents(CONFIG)
    agents._nodes["n"] = node
    assert node.refused is None
    assert agents.silent_forkservers(["n"]) == ()
    node.forkserver_silent_since = 1_767_268_800.0
    assert node.refused == "the forkserver has not responded since 2026-01-01 12:00:00 UTC"
    silent = SilentProcess(ProcessKind.FORKSERVER, "n", 1_767_268_800.0)
    assert agents.silent_forkservers(["n", "gone"]) == (silent,)
    node.silent_since = 1_767_268_810.0  # its forkserver's state is now unknown
    assert node.refused == "the node agent has not responded since 2026-01-01 12:00:10 UTC"
    assert agents.silent_forkservers(["n"]) == ()


async def test_an_agent_that_was_ended_is_shown_as_silent_until_its_successor_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[Any] = []
    monkeypatch.setattr(node_agents, "end_actor", lambda agent, may_restart: ended.append(agent))
    pings: list[asyncio.Future[float | None]] = []

    class Agent:
        class ping:  # noqa: N801  # the name in a Ray actor's handle
            @staticmethod
            def remote(silence_limit_s: float) -> asyncio.Future[float | None]:
                assert silence_limit_s == CONFIG.silence_limit_s
                pings.append(asyncio.get_running_loop().create_future())
                return pings[-1]

    now = 0.0
    agents = NodeAgents(CONFIG)
    agents._silence = Silence(AwakeClock(lambda: now))
    unasked: Any = None
    agent = Agent()
    node = agents._nodes["n"] = JoinedNode(agent, unasked, 0.0, agents._ping(agent))
    node.has_answered = True
    agents._silence.asked("n")
    await asyncio.sleep(0)  # the ping is sent
    while now < CONFIG.silence_limit_s + 4.0:
        assert not ended
        now += 4.0
        agents._listen("n", node)
        await asyncio.sleep(0)
    assert node.ending is not None
    await node.ending
    assert ended == [agent]

    agents._listen("n", node)
    assert node.silent_since is not None
    pings[-1].set_result(None)
    async with asyncio.timeout(30):
        await node.ping
    agents._listen("n", node)
    assert node.silent_since is None


async def test_a_released_node_has_no_agent_and_gets_one_when_it_is_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[str] = []
    unasked: Any = None
    agents = NodeAgents(CONFIG)
    met: list[str] = []

    def meets(node_id: str, _: object) -> JoinedNode:
        met.append(node_id)
        return JoinedNode(f"agent of {node_id}", unasked, 0.0, unasked)

    def elsewhere(name: str) -> str:
        if name == agent_name("unseen"):
            return "agent of unseen"
        raise ValueError(name)

    monkeypatch.setattr(agents, "_met", meets)
    monkeypatch.setattr(node_agents, "end_actor", ended.append)
    monkeypatch.setattr(node_agents.ray, "get_actor", elsewhere)
    there = ["head", "n", "m"]
    agents.meet(there, ["head"], wants_news=lambda _: False)
    await agents.release(["head", "n", "unseen", "gone"])
    assert sorted(ended) == ["agent of n", "agent of unseen"]
    met.clear()
    agents.meet(there, ["head"], wants_news=lambda _: False)
    assert (met, agents.node_ids, "n" in agents) == (["head", "m"], ("head", "m"), False)
    await agents.release(["n"])
    assert len(ended) == 2, "it is ended once"
    await agents.release([])
    agents.meet(there, ["head"], wants_news=lambda _: False)
    assert agents.node_ids == ("head", "n", "m")
