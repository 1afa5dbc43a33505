"""Self-tests of pretended GPUs: which results count as faults, and which don't."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ray_workers.node.self_test.probe_process import StepLimits
from ray_workers.node.self_test.runner import SelfTests
from ray_workers.node.session_records import SessionRecord
from ray_workers.shared.processes.procfs import started_ticks
from ray_workers.shared.self_tests import DeviceOutcome, NodeTest, TestedDevice, TestPhase
from tests.fakes import pretend_probe
from tests.unit.workers.node.test_orphans import record

LIMITS = StepLimits(begin_s=60.0, step_s=60.0, watch_period_s=0.02)
HASTY = StepLimits(begin_s=60.0, step_s=1.5, watch_period_s=0.02)


class Node:
    """A node with pretended GPUs."""

    def __init__(
        self, path: Path, num_gpus: int, limits: StepLimits = LIMITS, **answers: Any
    ) -> None:
        self.path = path / "node.json"
        self.gpus = [
            {"index": n, "uuid": f"GPU-{n}", "model": "H100", "pids": []} for n in range(num_gpus)
        ]
        self.answers = {step.replace("__", "@GPU-"): answer for step, answer in answers.items()}
        self.records: list[SessionRecord] = []
        command = (sys.executable, pretend_probe.__file__, str(self.path))
        self.tests = SelfTests(lambda: self.records, command, limits)

    async def begin(self, check_id: str = "a", num_held: int = 0) -> NodeTest:
        self.path.write_text(json.dumps({"gpus": self.gpus, "answers": self.answers}))
        return await self.tests.check(check_id, num_held)

    async def run(self, check_id: str = "a", num_held: int = 0) -> NodeTest:
        found = await self.begin(check_id, num_held)
        while found.phase is TestPhase.RUNNING:
            await asyncio.sleep(0.01)
            found = await self.tests.check(check_id, num_held)
        return found

    def steps(self) -> list[tuple[str, int]]:
        """Return the steps that have begun, each with the pid of its process."""
        log = self.path.with_suffix(".log")
        lines = log.read_text().splitlines() if log.exists() else []
        return [(line.split()[0], int(line.split()[1])) for line in lines]

    async def until_step(self, name: str) -> int:
        while True:
            for step, pid in self.steps():
                if step.endswith(f":{name}"):
                    return pid
            await asyncio.sleep(0.01)


def outcomes(test: NodeTest) -> list[str]:
    return [device.outcome.value for device in test.devices]


async def test_healthy_gpus_pass_and_are_measured(tmp_path: Path) -> None:
    node = Node(tmp_path, 2)
    test = await node.run()
    assert outcomes(test) == ["passed", "passed"]
    assert not test.is_failed
    assert test.message == ""
    assert set(test.devices[1].values) == {
        *("product_s", "memory_bytes_per_s", "to_device_bytes_per_s"),
        *("peer_bytes_per_s", "all_reduce_bytes_per_s"),
    }
    pids = {pid for _, pid in node.steps()}
    assert len(pids) == 4, "one lists the GPUs, one tests each, and one their connections"
    assert not any(started_ticks(pid) for pid in pids)


async def test_a_wrong_value_is_a_fault_of_its_gpu_alone(tmp_path: Path) -> None:
    node = Node(tmp_path, 3, memory__1={"wrong": "2 words of memory differ"})
    test = await node.run()
    assert outcomes(test) == ["passed", "failed", "passed"]
    assert test.devices[1].reason == "2 words of memory differ"


@pytest.mark.parametrize(
    ("message", "outcome"),
    [
        ("OutOfMemoryError: CUDA out of memory", "untested"),
        ("ModuleNotFoundError: No module named 'torch'", "untested"),
        ("AcceleratorError: CUDA error: uncorrectable ECC error encountered", "failed"),
    ],
)
async def test_only_errors_of_the_hardware_are_faults(
    tmp_path: Path, message: str, outcome: str
) -> None:
    test = await Node(tmp_path, 2, memory__0={"error": message}).run()
    assert outcomes(test) == [outcome, "passed"]
    assert message in test.devices[0].reason


async def test_a_gpu_that_hangs_twice_is_at_fault_and_delays_no_other(tmp_path: Path) -> None:
    node = Node(tmp_path, 3, HASTY, product__2="hang", memory__1=["hang", {"ok": {"values": {}}}])
    test = await node.run()
    assert outcomes(test) == ["passed", "passed", "failed"]
    assert test.devices[2].reason == "the matrix product did not finish within 1.5 s, twice"
    assert not any(started_ticks(pid) for _, pid in node.steps()), "all processes have ended"


async def test_a_process_that_dies_is_no_fault(tmp_path: Path) -> None:
    test = await Node(tmp_path, 1, product="die").run()
    assert outcomes(test) == ["untested"]
    assert "ended with exit code 7" in test.devices[0].reason


async def test_if_all_gpus_fail_alike_the_test_is_doubted(tmp_path: Path) -> None:
    test = await Node(tmp_path, 3, product={"wrong": "a product differed"}).run()
    assert outcomes(test) == ["untested"] * 3
    assert "the test itself might be wrong" in test.message
    single = await Node(tmp_path, 1, product={"wrong": "a product differed"}).run()
    assert outcomes(single) == ["failed"]


async def test_gpus_of_jobs_and_other_programs_are_left_alone(tmp_path: Path) -> None:
    node = Node(tmp_path, 4)
    node.records = [record(job_id="by-index", gpus="0"), record(job_id="by-uuid", gpus="GPU-1")]
    node.gpus[2]["pids"] = [4711]
    test = await node.run(num_held=2)
    assert outcomes(test) == ["held", "held", "held", "passed"]
    assert [device.reason for device in test.devices[:3]] == [
        *("by-index uses the GPU", "by-uuid uses the GPU", "process 4711 uses the GPU"),
    ]
    assert {step.rsplit(":", 2)[1] for step, _ in node.steps()} == {"", "GPU-3"}


async def test_the_test_waits_for_a_job_that_has_no_process_yet(tmp_path: Path) -> None:
    node = Node(tmp_path, 2)
    assert (await node.run(num_held=1)).phase is TestPhase.WAITING
    node.records = [record(job_id="j", gpus="1")]
    assert outcomes(await node.run(num_held=1)) == ["passed", "held"]


async def test_the_test_is_given_up_when_a_job_starts_on_its_gpu(tmp_path: Path) -> None:
    node = Node(tmp_path, 2, memory__1="hang")
    await node.begin()
    pid = await node.until_step("memory")
    node.records = [record(job_id="j", gpus="GPU-1")]
    test = await node.run()
    assert outcomes(test) == ["untested", "untested"]
    assert test.message == "the test was stopped, because a job started on GPU 1: j"
    assert not started_ticks(pid)


async def test_one_test_runs_at_a_time(tmp_path: Path) -> None:
    node = Node(tmp_path, 1, product=["hang", pretend_probe.USUAL["product"]])
    await node.begin("a")
    pid = await node.until_step("product")
    assert (await node.tests.check("a", 0)).phase is TestPhase.RUNNING
    test = await node.run("b")
    assert outcomes(test) == ["passed"]
    assert not started_ticks(pid), "the first test was ended"
    assert await node.tests.check("b", 0) == test, "an answer can be asked for again"


async def test_connections_have_no_single_culprit(tmp_path: Path) -> None:
    test = await Node(tmp_path, 2, all_reduce={"wrong": "a wrong sum on cuda:1"}).run()
    assert outcomes(test) == ["passed", "passed"]
    assert test.is_failed
    assert "a wrong sum on cuda:1 (cuda:0 is GPU 0, cuda:1 is GPU 1)" in test.message
    other = tmp_path / "other"
    other.mkdir()
    test = await Node(other, 2, all_reduce={"error": "NCCL Error 2: no /dev/shm"}).run()
    assert (outcomes(test), test.is_failed) == (["passed", "passed"], False)
    assert "the all-reduce could not be tested" in test.message


async def test_a_node_without_gpus_tests_its_processors(tmp_path: Path) -> None:
    answers = {"ok": {"values": {"product_s": 0.01}}}
    test = await Node(tmp_path, 0, product=answers).run()
    assert test.message == "the node has no GPU"
    assert test.devices == (TestedDevice("", 0, "", DeviceOutcome.PASSED, "", {"product_s": 0.01}),)


@pytest.mark.parametrize("seed", range(3))
async def test_drawn_nodes(tmp_path: Path, seed: int) -> None:
    """The outcome of each GPU, as a table says it."""
    draw = random.Random(seed)
    number = draw.randint(1, 4)
    kinds = [draw.choice(["well", "well", "wrong", "odd", "lacks"]) for _ in range(number)]
    node = Node(tmp_path, number)
    for n, kind in enumerate(kinds):
        if kind == "wrong":
            node.answers[f"copies@GPU-{n}"] = {"wrong": "changed"}
        if kind == "odd":
            node.answers[f"product@GPU-{n}"] = {"ok": {"hash": f"odd {n}", "values": {}}}
        if kind == "lacks":
            node.answers[f"memory@GPU-{n}"] = {"error": "no memory"}
    test = await node.run()
    hashes = Counter(
        "a" if kind == "well" else f"odd {n}"
        for n, kind in enumerate(kinds)
        if kind in ("well", "odd")
    )
    has_majority = bool(hashes) and 2 * max(hashes.values()) > sum(hashes.values())
    expected = {"well": "passed", "wrong": "failed", "lacks": "untested"}
    expected["odd"] = "failed" if has_majority and len(hashes) > 1 else "passed"
    if number > 1 and set(kinds) == {"wrong"}:
        expected["wrong"] = "untested"
    if hashes["a"] == 0 and len(hashes) == 1:
        expected["odd"] = "passed"
    assert outcomes(test) == [expected[kind] for kind in kinds], kinds
    assert test.is_failed is (len(hashes) > 1 and not has_majority)


async def test_jobs_on_parts_of_a_divided_gpu_delay_no_test(tmp_path: Path) -> None:
    node = Node(tmp_path, 2)
    node.gpus[0]["error"] = "the GPU is divided (Multi-Instance GPU)"
    node.records = [record(job_id="one", gpus="MIG-1"), record(job_id="other", gpus="MIG-2")]
    test = await node.run(num_held=2)
    assert outcomes(test) == ["untested", "passed"]
