"""Nodes are tested on request, and before they get work again after a suspicious loss."""

from __future__ import annotations

import random
import signal
import statistics
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from dray import views
from ray_workers.shared.contracts import Cause, FrameKind, Outcome, Phase
from ray_workers.shared.self_tests import DeviceOutcome, NodeTest, TestedDevice, TestPhase
from ray_workers.shared.slices import Slice
from service.cluster.port import DRAINED, ClusterNode, ClusterSnapshot, ClusterUnavailable
from service.db.repositories import attempts
from service.db.repositories.scheduling import node_checks as repository
from service.db.repositories.scheduling import withheld
from service.domain.errors import NodeNotFound
from service.domain.node_checks import CheckCause, machine_fault, nodes_of_ranks, slow
from service.lifecycle import node_checks
from service.lifecycle.withholding import withhold
from service.loops.scheduling.node_checker import ABSENT_LIMIT, LIMIT, RETURN_LIMIT, NodeChecker
from service.loops.shared.timings import LoopTimings
from service.nodes import node_table
from service.nodes.checks import NodeChecks
from service.nodes.withheld import WithheldNodes
from tests.unit.service.helpers import Service, frame, hang, regrouping, two_ranks
from tests.wire import cluster_node

HOSTS = ("gpu-1", "gpu-2", "gpu-3")
NODES = tuple(
    cluster_node(f"node-{letter}", {"CPU": 8.0, "GPU": 2.0}, hostname=host)
    for letter, host in zip("abc", HOSTS, strict=True)
)


def device(outcome: DeviceOutcome = DeviceOutcome.PASSED, reason: str = "") -> TestedDevice:
    return TestedDevice("GPU-1", 0, "H100", outcome, reason, {"product_s": 0.003})


def done(outcome: DeviceOutcome = DeviceOutcome.PASSED, reason: str = "") -> NodeTest:
    return NodeTest(TestPhase.DONE, (device(outcome, reason),))


PASSED = done()
FAILED = done(DeviceOutcome.FAILED, "2 words of memory differ")
HELD = NodeTest(TestPhase.DONE, (device(DeviceOutcome.HELD, "j uses the GPU"),))
RUNNING = NodeTest(TestPhase.RUNNING)


class _LoopDatabase:
    """The database of the test's service, with the test's clock."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def read(self, work: Any) -> Any:
        return await self._service.database.read(lambda s: work(s, self._service.now))

    async def write(self, work: Any) -> Any:
        return await self._service.database.write(lambda s: work(s, self._service.now))


class Lab:
    """A service with three nodes, and the loop that tests them. It is also the cluster and the
    cluster watcher of the loop."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.latest: ClusterSnapshot | None = None
        self.answers: dict[str, NodeTest | Exception] = {}
        self.asked: list[tuple[str, str, int]] = []
        service.database.time = lambda _: service.now  # type: ignore[method-assign]
        self.restart()
        self.see(*NODES)

    def restart(self) -> None:
        """Restart the service."""
        context: Any = self
        self.database = _LoopDatabase(self.service)
        self.cluster, self.signals, self.timings = self, None, LoopTimings()
        self.loop = NodeChecker(context, context)

    def see(self, *nodes: ClusterNode, session: str = "session-1") -> None:
        latest = self.latest = ClusterSnapshot(session, "ray://x", None, False, nodes)
        now = self.service.now
        self.service.database.write_sync(lambda s: node_table.store(s, latest, None, now))

    async def check(self, node_id: str, check_id: str, num_held: int) -> NodeTest:
        self.asked.append((node_id, check_id, num_held))
        answer = self.answers.get(node_id, PASSED)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def step(self) -> int:
        return await self.loop.run_once(wait=True)

    async def ask(self, hostname: str) -> views.NodeCheck:
        return await NodeChecks(self.service.database).check(hostname, actor="ann")

    async def shown(self, hostname: str) -> views.NodeCheck | None:
        nodes = (await self.service.queries.cluster()).nodes
        return next(node.check for node in nodes if node.hostname == hostname)

    async def withheld(self) -> list[str]:
        return [n.hostname for n in (await self.service.queries.cluster()).nodes if n.withheld]

    def closed(self) -> set[str]:
        """Return the hosts that get no new work because of a test."""
        return self.service.database.read_sync(node_checks.hosts_without_work)

    def end(self, job_id: str, outcome: Outcome) -> None:
        """End the first attempt of a job."""
        reply = self.service.reply(job_id, 1, phase=Phase.ENDED, outcome=outcome)
        self.service.store(job_id, 1, reply)

    def ranks_on(self, job_id: str, *node_ids: str) -> None:
        """Place the ranks of a job's attempt on these nodes, one on each."""

        def work(session: Any) -> None:
            row = attempts.live_of(session, [job_id])[job_id]
            row.slices = [{"node_id": node_id, "num_workers": 1} for node_id in node_ids]
            row.bundle = {"CPU": 1.0, "GPU": 1.0}

        self.service.database.write_sync(work)

    async def events(self, job_id: str) -> list[views.Event]:
        found = (await self.service.queries.events(job_id)).items
        return [event for event in found if event.type == "node_check"]


@pytest.fixture
def lab(service: Service) -> Lab:
    return Lab(service)


async def test_an_asked_test_closes_its_node_until_it_is_done(lab: Lab) -> None:
    lab.answers["node-b"] = RUNNING
    asked = await lab.ask("gpu-2")
    assert (asked.state, asked.cause, asked.why) == ("waiting", "asked", "ann asked for it")
    assert lab.closed() == {"gpu-2"}
    await lab.step()
    assert lab.closed() == {"gpu-2"}
    running = await lab.shown("gpu-2")
    assert running is not None
    assert (running.state, running.id, running.outcome) == ("running", asked.id, None)
    lab.answers["node-b"] = PASSED
    await lab.step()
    assert lab.closed() == set()
    result = await lab.shown("gpu-2")
    assert result is not None
    assert (result.state, result.outcome, result.id) == ("done", "passed", asked.id)
    assert result.message == "GPU 0 passed the self-test"
    assert {asked[:2] for asked in lab.asked} == {("node-b", asked.id)}
    assert await lab.shown("gpu-1") is None


async def test_two_requests_at_once_are_one_test(lab: Lab) -> None:
    first, second = await lab.ask("gpu-1"), await lab.ask("gpu-1")
    assert first.id == second.id
    await lab.step()
    assert (await lab.ask("gpu-1")).id != first.id
    everyone = await NodeChecks(lab.service.database).check_all(actor="ann")
    assert [one.hostname for one in everyone.items] == [*HOSTS]


async def test_an_unknown_node_can_not_be_tested(lab: Lab) -> None:
    for name in ("gpu-9", "x" * 300, "a\0b", "gpu-1/"):
        with pytest.raises(NodeNotFound):
            await lab.ask(name)


async def test_a_failure_withholds_the_node_until_an_admin_releases_it(lab: Lab) -> None:
    lab.answers["node-a"] = FAILED
    await lab.ask("gpu-1")
    await lab.step()
    assert await lab.withheld() == ["gpu-1"]
    shown = await lab.shown("gpu-1")
    assert shown is not None
    assert shown.message == (
        "GPU 0 failed the self-test: 2 words of memory differ; the node gets no new work until an "
        "admin releases it"
    )
    await WithheldNodes(lab.service.database).release("gpu-1")
    lab.see(*NODES)
    assert await lab.withheld() == []
    await lab.ask("gpu-1")
    await lab.step()
    assert await lab.withheld() == ["gpu-1"], "another test is another occurrence"


async def test_a_mistake_of_the_test_does_not_stop_the_cluster(lab: Lab) -> None:
    lab.answers = dict.fromkeys(("node-a", "node-b", "node-c"), FAILED)
    await NodeChecks(lab.service.database).check_all()
    await lab.step()
    assert len(await lab.withheld()) == 1
    messages = [shown.message for host in HOSTS if (shown := await lab.shown(host))]
    assert sum("at most 1 node of this cluster can be withheld" in m for m in messages) == 2


async def test_the_only_node_is_never_withheld_by_a_test(lab: Lab) -> None:
    lab.see(NODES[0])
    lab.answers["node-a"] = FAILED
    await lab.ask("gpu-1")
    await lab.step()
    assert await lab.withheld() == []
    shown = await lab.shown("gpu-1")
    assert shown is not None
    assert (shown.outcome, "no other node could take over its work" in shown.message) == (
        "failed",
        True,
    )


async def test_a_test_that_could_not_run_withholds_nothing(lab: Lab) -> None:
    lab.answers["node-a"] = done(DeviceOutcome.UNTESTED, "CUDA out of memory")
    await lab.ask("gpu-1")
    await lab.step()
    shown = await lab.shown("gpu-1")
    assert shown is not None
    assert (shown.outcome, await lab.withheld()) == ("untested", [])
    assert shown.message == "GPU 0 could not be tested: CUDA out of memory"


async def test_a_node_that_lost_a_rank_is_tested_before_it_gets_work(lab: Lab) -> None:
    job_id = await two_ranks(lab.service)
    lab.ranks_on(job_id, "node-a", "node-b")
    lost = Outcome.of(Cause.WORKER_LOST, "the worker of rank 1 vanished", 1)
    lab.end(job_id, lost)
    assert lab.closed() == {"gpu-2"}, "the other node gets work at once"
    lab.answers["node-b"] = FAILED
    await lab.step()
    assert await lab.withheld() == ["gpu-2"]
    (event,) = await lab.events(job_id)
    assert event.code == "failed"
    assert event.message.startswith(
        f"gpu-2 was tested, because the worker of rank 1 vanished ({job_id}): GPU 0 failed"
    )


@pytest.mark.parametrize(
    ("outcome", "is_suspect"),
    [
        (Outcome.of(Cause.WORKER_LOST, "vanished", 1), True),
        (Outcome.of(Cause.WORKER_LOST, "aborted", 1, -signal.SIGABRT), True),
        (Outcome.of(Cause.USER_ERROR, "CUDA error: uncorrectable ECC error", 1, 1), True),
        (Outcome.of(Cause.WORKER_LOST, "killed", 1, -signal.SIGKILL), False),
        (Outcome.of(Cause.WORKER_LOST, "killed", 1, -signal.SIGTERM), False),
        (Outcome.of(Cause.USER_ERROR, "CUDA error: an illegal memory access", 1, 1), False),
        (Outcome.of(Cause.USER_ERROR, "killed by signal 11", 1, -signal.SIGSEGV), False),
        (replace(Outcome.of(Cause.WORKER_LOST, "vanished", 1), slowness=9.0), False),
        (Outcome.of(Cause.PREEMPTED, "left", None), False),
    ],
)
def test_which_ends_suggest_a_fault_of_the_machine(outcome: Outcome, is_suspect: bool) -> None:
    assert (machine_fault(outcome) is not None) is is_suspect


async def test_slots_that_the_job_keeps_are_tested_after_it_has_left(lab: Lab) -> None:
    job_id = await two_ranks(lab.service)
    lab.ranks_on(job_id, "node-a", "node-b")
    lost = regrouping(1, message="rank 1 vanished")
    lost = replace(lost, body={**lost.body, "code": "lost"})
    lab.service.report(job_id, 1, [lost])
    assert lab.closed() == set(), "the job recovers in place, and the free slots get work"
    await lab.step()
    assert lab.asked == []
    asked = await lab.ask("gpu-2")
    assert lab.closed() == {"gpu-2"}
    lab.answers["node-b"] = HELD
    await lab.step()
    assert lab.asked == [("node-b", asked.id, 1)]
    shown = await lab.shown("gpu-2")
    assert shown is not None
    assert (shown.state, shown.outcome, lab.closed()) == ("waiting", "untested", set())
    lab.answers["node-b"] = PASSED
    lab.end(job_id, Outcome.of(Cause.PREEMPTED, "left", None))
    assert lab.closed() == {"gpu-2"}
    await lab.step()
    assert [event.code for event in await lab.events(job_id)] == ["untested", "passed"]


async def test_a_newer_loss_is_not_delayed_by_a_job_that_keeps_its_slots(lab: Lab) -> None:
    keeps, ends = await two_ranks(lab.service), await two_ranks(lab.service)
    for job_id in (keeps, ends):
        lab.ranks_on(job_id, "node-a", "node-b")
    lost = regrouping(1, message="rank 1 vanished")
    lab.service.report(keeps, 1, [replace(lost, body={**lost.body, "code": "lost"})])
    lab.end(ends, Outcome.of(Cause.WORKER_LOST, "the worker of rank 1 vanished", 1))
    assert lab.closed() == {"gpu-2"}


async def test_slow_ranks_are_named_with_their_nodes(lab: Lab) -> None:
    job_id = await two_ranks(lab.service)
    lab.ranks_on(job_id, "node-a", "node-c")
    report = {"step": 9, "ranks": [1], "slowdown": {"1": 1.5}, "lost_s": 0.5, "num_steps": 8}
    lab.service.report(job_id, 1, [frame(FrameKind.STRAGGLERS, report)])
    found = (await lab.service.queries.events(job_id)).items
    (event,) = [event for event in found if event.type == "stragglers"]
    assert "rank 1 on gpu-3 by a factor of 1.5" in event.message
    assert event.data["hostnames"] == {"1": "gpu-3"}


async def test_a_hang_makes_the_nodes_of_its_culprits_suspect(lab: Lab) -> None:
    job_id = await two_ranks(lab.service)
    lab.ranks_on(job_id, "node-a", "node-c")
    lab.service.report(job_id, 1, [hang(1)])
    lab.end(job_id, Outcome.of(Cause.PREEMPTED, "left", None))
    assert lab.closed() == {"gpu-3"}


async def test_a_killed_rank_makes_no_node_suspect(lab: Lab) -> None:
    job_id = await two_ranks(lab.service)
    lab.ranks_on(job_id, "node-a", "node-b")
    lab.service.report(job_id, 1, [regrouping(1)])
    lab.end(job_id, Outcome.of(Cause.WORKER_LOST, "rank 1 was killed", 1, -signal.SIGKILL))
    assert lab.closed() == set()


@pytest.mark.parametrize("is_silent_first", [False, True])
async def test_a_lost_node_is_tested_when_it_returns(lab: Lab, is_silent_first: bool) -> None:
    job_id = await two_ranks(lab.service)
    lab.ranks_on(job_id, "node-a", "node-b")
    if is_silent_first:
        lab.see(NODES[0], replace(NODES[1], accepted=False, problem="no response"), NODES[2])
    lab.see(NODES[0], NODES[2])
    lab.end(job_id, Outcome.of(Cause.NODE_LOST, "the node is gone", None))
    for _ in range(3):
        lab.service.advance(3600.0)
        await lab.step()
    assert lab.asked == []
    lab.see(NODES[0], NODES[2], replace(NODES[1], node_id="node-b2"))
    assert lab.closed() == {"gpu-2"}
    await lab.step()
    assert [asked[0] for asked in lab.asked] == ["node-b2"]
    assert [event.code for event in await lab.events(job_id)] == ["passed"]


async def test_nodes_that_leave_as_planned_or_with_ray_are_not_suspect(lab: Lab) -> None:
    job_id = await two_ranks(lab.service)
    lab.ranks_on(job_id, "node-a", "node-b")
    lab.see(NODES[0], replace(NODES[1], accepted=False, problem=f"{DRAINED} now"), NODES[2])
    lab.see(NODES[0], NODES[2])
    lab.see(session="session-2")
    rows = lab.service.database.read_sync(repository.every)
    assert list(rows) == []


async def test_a_test_survives_restarts_of_the_service_and_the_agent(lab: Lab) -> None:
    lab.answers["node-a"] = RUNNING
    asked = await lab.ask("gpu-1")
    await lab.step()
    lab.restart()
    lab.answers["node-a"] = ClusterUnavailable("the agent restarts")
    await lab.step()
    lab.answers["node-a"] = PASSED
    await lab.step()
    assert {check_id for _, check_id, _ in lab.asked} == {asked.id}
    shown = await lab.shown("gpu-1")
    assert shown is not None
    assert shown.outcome == "passed"


async def test_a_running_test_wakes_the_scheduler_once(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.answers["node-a"] = RUNNING
    await lab.ask("gpu-1")
    woken: list[tuple[str, ...]] = []
    monkeypatch.setattr(node_checks, "notify", lambda _, *channels: woken.append(channels))
    for _ in range(3):
        await lab.step()
    assert len(woken) == 1


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_test_is_not_waited_for_forever(lab: Lab, leaves: bool) -> None:
    lab.answers["node-a"] = RUNNING
    await lab.ask("gpu-1")
    if leaves:
        lab.see(*NODES[1:])
    await lab.step()
    lab.service.advance((ABSENT_LIMIT if leaves else LIMIT).total_seconds() - 1)
    assert await lab.step() == (0 if leaves else 1), "an absent node is not asked twice a second"
    assert lab.closed() == {"gpu-1"}
    lab.service.advance(2)
    await lab.step()
    assert lab.closed() == set()
    (row,) = lab.service.database.read_sync(repository.every)
    why = "the node left the cluster" if leaves else "the test did not finish within 240 s"
    assert (row.outcome, row.message) == ("untested", f"could not be tested: {why}")


async def test_a_test_that_only_waits_for_a_job_is_repeated_once(lab: Lab) -> None:
    waiting = "a job is about to use one of the GPUs"
    lab.answers["node-a"] = NodeTest(TestPhase.WAITING, message=waiting)
    asked = await lab.ask("gpu-1")
    ids = []
    for state in ("waiting", "done"):
        await lab.step()
        lab.service.advance(LIMIT.total_seconds() + 1)
        await lab.step()
        shown = await lab.shown("gpu-1")
        assert shown is not None
        assert shown.message == (
            f"could not be tested: the test did not finish within 240 s: {waiting}"
        )
        assert (shown.state, shown.outcome) == (state, "untested")
        ids.append(shown.id)
    assert ids[0] != asked.id, "the agent starts another test"
    assert (ids[0] == ids[1], lab.closed(), await lab.withheld()) == (True, set(), [])
    lab.answers["node-a"] = RUNNING
    await lab.ask("gpu-1")
    await lab.step()
    lab.service.advance(LIMIT.total_seconds() + 1)
    await lab.step()
    shown = await lab.shown("gpu-1")
    assert shown is not None
    assert shown.state == "done", "a test that ran is not repeated"


@pytest.mark.parametrize("is_asked", [False, True])
async def test_a_node_that_is_lost_during_its_test_is_tested_when_it_returns(
    lab: Lab, is_asked: bool
) -> None:
    lab.answers["node-b"] = RUNNING
    if is_asked:
        await lab.ask("gpu-2")
    else:
        job_id = await two_ranks(lab.service)
        lab.ranks_on(job_id, "node-a", "node-b")
        lab.end(job_id, Outcome.of(Cause.WORKER_LOST, "the worker of rank 1 vanished", 1))
    await lab.step()
    latest, lab.latest = lab.latest, None
    await lab.step()
    lab.latest = latest
    shown = await lab.shown("gpu-2")
    assert shown is not None
    assert shown.state == "running", "the service has only lost its connection to the cluster"
    lab.see(NODES[0], NODES[2])
    for _ in range(3):
        await lab.step()
        lab.service.advance(LIMIT.total_seconds() + 1)
    lab.asked.clear()
    lab.answers["node-b2"] = FAILED
    lab.see(NODES[0], NODES[2], replace(NODES[1], node_id="node-b2"))
    assert lab.closed() == {"gpu-2"}
    await lab.step()
    assert [asked[0] for asked in lab.asked] == ["node-b2"]
    assert await lab.withheld() == ["gpu-2"]


async def test_faults_of_hosts_that_have_left_for_long_are_forgotten(lab: Lab) -> None:
    kept = timedelta(days=30)

    def fault(session: Any) -> None:
        for host in HOSTS[:2]:
            withhold(session, host, "Xid 79", code="xid_79", now=lab.service.now, gpu="GPU-1")

    def left() -> list[str]:
        lab.service.database.write_sync(lambda s: withheld.forget(s, lab.service.now, kept))
        return sorted(row.hostname for row in lab.service.database.read_sync(withheld.every))

    lab.service.database.write_sync(fault)
    lab.service.advance(kept.total_seconds() + 1)
    assert left() == ["gpu-1", "gpu-2"], "the hosts are present, and an admin has to release them"
    lab.see(*NODES[1:])
    assert left() == ["gpu-1", "gpu-2"]
    lab.service.advance(kept.total_seconds() - 1)
    assert left() == ["gpu-1", "gpu-2"]
    lab.see(*NODES)
    assert left() == ["gpu-1", "gpu-2"], "it returns"
    lab.see(*NODES[1:])
    lab.service.advance(2)
    assert left() == ["gpu-1", "gpu-2"], "the time begins anew"
    lab.service.advance(kept.total_seconds() + 1)
    assert left() == ["gpu-2"]


async def test_an_event_does_not_claim_a_test_that_was_not_run(lab: Lab) -> None:
    job_id = await two_ranks(lab.service)
    lab.ranks_on(job_id, "node-a", "node-b")
    lab.see(NODES[0], NODES[2])
    lab.end(job_id, Outcome.of(Cause.NODE_LOST, "the node is gone", None))
    lab.service.advance(RETURN_LIMIT.total_seconds() + 1)
    await lab.step()
    (event,) = await lab.events(job_id)
    assert event.message == (
        f"gpu-2 was to be tested, because the node was lost while {job_id} ran on it: "
        "could not be tested: the node did not return"
    )


async def test_old_results_of_nodes_that_have_left_are_forgotten(lab: Lab) -> None:
    for host in HOSTS[:2]:
        await lab.ask(host)
    await lab.step()
    lab.see(*NODES[1:])

    def kept(before: Any) -> list[str]:
        lab.service.database.write_sync(lambda s: repository.forget(s, before))
        return [row.hostname for row in lab.service.database.read_sync(repository.every)]

    assert kept(lab.service.now) == ["gpu-1", "gpu-2"]
    assert kept(lab.service.now + timedelta(seconds=1)) == ["gpu-2"]


async def test_a_late_answer_changes_nothing(lab: Lab) -> None:
    asked = await lab.ask("gpu-1")
    await lab.step()

    def settle(session: Any) -> object:
        return node_checks.settle(session, "gpu-1", asked.id, FAILED, lab.service.now)

    assert lab.service.database.write_sync(settle) is None
    assert await lab.withheld() == []


async def test_a_claim_on_a_node_that_is_tested_is_skipped(lab: Lab) -> None:
    job_id = await lab.service.submit()

    def ask(session: Any) -> None:
        node_checks.ask(session, "gpu-1", CheckCause.ASKED, "ann", lab.service.now)

    lab.service.database.write_sync(ask)
    assert lab.service.claim(job_id) is None
    await lab.step()
    assert lab.service.claim(job_id) is not None


@pytest.mark.parametrize("seed", range(20))
def test_slow_gpus_are_those_far_from_the_median_of_their_twins(seed: int) -> None:
    draw = random.Random(seed)
    devices = {}
    for number in range(draw.randint(1, 14)):
        model = draw.choice(["A100", "H100", "H100"])
        values = {
            "product_s": draw.choice([1.0, 1.0, 1.1, 1.24, 1.26, 5.0]),
            "to_device_bytes_per_s": draw.choice([10.0, 10.0, 9.0, 6.0, 4.9, 1.0, 20.0]),
        }
        passed = DeviceOutcome.PASSED
        devices[f"GPU-{number}"] = TestedDevice(f"GPU-{number}", 0, model, passed, "", values)
    expected = set()
    for key, one in devices.items():
        twins = [t for other, t in devices.items() if other != key and t.model == one.model]
        if len(twins) < 3:
            continue
        usual = {m: statistics.median(t.values[m] for t in twins) for m in one.values}
        if one.values["product_s"] >= 1.25 * usual["product_s"]:
            expected.add((key, "product_s"))
        if one.values["to_device_bytes_per_s"] * 2 <= usual["to_device_bytes_per_s"]:
            expected.add((key, "to_device_bytes_per_s"))
    assert {
        (key, each.measure) for key, found in slow(devices).items() for each in found
    } == expected


async def test_slow_gpus_are_named_and_get_work(lab: Lab) -> None:
    for number, node in enumerate(NODES):
        values = {"memory_bytes_per_s": 1e12 if node.hostname == "gpu-3" else 2e12}
        pair = tuple(
            TestedDevice(f"GPU-{number}{n}", n, "H100", DeviceOutcome.PASSED, "", values)
            for n in range(2 if number < 2 else 1)
        )
        lab.answers[node.node_id] = NodeTest(TestPhase.DONE, pair)
    await NodeChecks(lab.service.database).check_all()
    await lab.step()
    found = {}
    for host in HOSTS:
        shown = await lab.shown(host)
        assert shown is not None
        found[host] = [len(device.slow) for device in shown.devices]
        for each in (each for device in shown.devices for each in device.slow):
            named = (each.measure, each.factor, each.num_twins)
            assert named == ("memory_bytes_per_s", 2.0, 4)
    assert found == {"gpu-1": [0, 0], "gpu-2": [0, 0], "gpu-3": [1]}
    assert (lab.closed(), await lab.withheld()) == (set(), [])


def test_ranks_of_a_node_are_consecutive_unless_their_order_is_kept() -> None:
    slices = [Slice("a", 1), Slice("b", 2), Slice("a", 1)]
    order = {True: "abba", False: "aabb"}
    for keeps_order, nodes in order.items():
        for rank, node_id in enumerate(nodes):
            assert nodes_of_ranks(slices, [rank], keeps_order=keeps_order) == {rank: node_id}
    assert nodes_of_ranks(slices, [7, -1], keeps_order=True) == {}
    assert timedelta(0) < ABSENT_LIMIT < LIMIT
