"""Runs self-tests of a node's free GPUs, or of its processors if it has no GPU.

Each GPU is tested in a process of its own, so that a GPU that hangs or breaks its context does not
disturb the test of the others. A GPU on which a job or another program has a process is not tested.
If a job starts on a GPU during the test, the test is abandoned.

A device fails the test only if it returns a wrong value, if CUDA attributes an error to the
hardware, or if a step does not finish in either of two tries. Everything else, such as a missing
package or too little memory, means that the device could not be tested.
"""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ray_workers.node.self_test.minority import minority
from ray_workers.node.self_test.probe_process import (
    COMMAND,
    ProbeProcess,
    StepError,
    StepLimits,
    StepTimeout,
    WrongValue,
)
from ray_workers.node.session_records import SessionRecord
from ray_workers.shared.self_tests import (
    DeviceOutcome,
    NodeTest,
    TestedDevice,
    TestPhase,
    names_hardware,
)

STEPS = ("product", "memory", "copies")
NAMES = {
    "begin": "the creation of a context",
    "product": "the matrix product",
    "memory": "the memory test",
    "copies": "the copies to and from the host",
    "peers": "the copies between GPUs",
    "all_reduce": "the all-reduce",
}
GIVEN_UP = "the test was stopped, because a job started on"


@dataclass
class _Device:
    """A device that is being tested."""

    gpu: str
    index: int
    model: str
    kind: str
    """Name of the device in torch."""
    steps: tuple[str, ...]
    tested: TestedDevice
    step: str = ""
    """The step that failed."""
    alike: str = ""
    hashed: str | None = None

    @classmethod
    def of(cls, gpu: str, index: int, model: str, kind: str, steps: tuple[str, ...]) -> _Device:
        tested = TestedDevice(gpu, index, model, DeviceOutcome.PASSED, "")
        return cls(gpu, index, model, kind, steps, tested)

    def end(self, outcome: DeviceOutcome, reason: str) -> None:
        self.tested = replace(self.tested, outcome=outcome, reason=reason)

    @property
    def has_passed(self) -> bool:
        return self.tested.outcome is DeviceOutcome.PASSED


class SelfTests:
    """The self-tests of one node. Only one test runs at a time."""

    def __init__(
        self,
        records: Callable[[], Iterable[SessionRecord]],
        command: Sequence[str] = COMMAND,
        limits: StepLimits | None = None,
    ) -> None:
        """`records` returns the records of the node's sessions. `command` starts `probe`."""
        self._records = records
        self._command = command
        self._limits = limits or StepLimits()
        self._id = ""
        self._task: asyncio.Task[NodeTest] | None = None
        self._copying = asyncio.Lock()

    async def check(self, check_id: str, num_held: int) -> NodeTest:
        """Return the state of a test, and start it if it is new. A test with another id is ended.

        num_held: the number of GPUs of this node that the service has given to jobs. If jobs have
        processes on fewer than `num_held` GPUs, a job is about to use one of the other GPUs, and
        the test waits.
        """
        if self._task is not None and check_id != self._id:
            await self.stop()
        if self._task is None:
            self._id = check_id
            self._task = asyncio.create_task(self._test(num_held))
        if not self._task.done():
            return NodeTest(TestPhase.RUNNING)
        try:
            test = self._task.result()
        except Exception as error:
            traceback.print_exc()
            message = f"the self-test failed: {type(error).__name__}: {error}"
            return NodeTest(TestPhase.DONE, message=message)
        if test.phase is TestPhase.WAITING:
            self._task = None
        return test

    async def stop(self) -> None:
        """End the test that is running, with all of its processes."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _test(self, num_held: int) -> NodeTest:
        try:
            async with self._probe("") as probe:
                await probe.start("list")
                gpus = await probe.step("list", self._limits.begin_s)
        except (StepError, StepTimeout) as error:
            return NodeTest(TestPhase.DONE, message=f"the GPUs could not be listed: {error}")
        if not gpus:
            return await self._test_processors()
        jobs = self._jobs_on(gpus)
        if len(jobs) < num_held:
            return NodeTest(TestPhase.WAITING, message="a job is about to use one of the GPUs")
        return await self._test_gpus(gpus, jobs)

    def _jobs_on(self, gpus: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Return the job on each GPU that is in use, keyed by UUID. A part of a divided GPU (a MIG
        instance) counts under its own UUID, because Ray counts it as a GPU."""
        found: dict[str, str] = {}
        for record in self._records():
            if not record.job_id or not record.is_of_this_boot:
                continue
            for name in record.gpu_names:
                uuids = [gpu["uuid"] for gpu in gpus if _is(gpu, name)]
                parts = [name] if name.startswith("MIG-") else []
                found |= dict.fromkeys([*uuids, *parts], record.job_id)
        return found

    async def _test_processors(self) -> NodeTest:
        device = _Device.of("", 0, "", "cpu", ("product",))
        await self._run(device)
        return NodeTest(TestPhase.DONE, (device.tested,), "the node has no GPU")

    async def _test_gpus(
        self, gpus: Sequence[Mapping[str, Any]], jobs: Mapping[str, str]
    ) -> NodeTest:
        devices = []
        for gpu in gpus:
            device = _Device.of(gpu["uuid"], gpu["index"], gpu["model"], "cuda:0", STEPS)
            devices.append(device)
            if gpu["uuid"] in jobs:
                device.end(DeviceOutcome.HELD, f"{jobs[gpu['uuid']]} uses the GPU")
            elif gpu["pids"]:
                device.end(DeviceOutcome.HELD, f"process {gpu['pids'][0]} uses the GPU")
            elif gpu.get("error"):
                why = str(gpu["error"])
                is_sick = names_hardware(why)
                device.end(DeviceOutcome.FAILED if is_sick else DeviceOutcome.UNTESTED, why)
        free = [device for device in devices if device.has_passed]
        try:
            message, is_failed = await self._while_free(gpus, free, self._run_all(free))
        except _Interrupted as interruption:
            for device in free:
                device.end(DeviceOutcome.UNTESTED, str(interruption))
            message, is_failed = str(interruption), False
        tested = tuple(device.tested for device in devices)
        return NodeTest(TestPhase.DONE, tested, message, is_failed)

    async def _while_free(
        self,
        gpus: Sequence[Mapping[str, Any]],
        free: Sequence[_Device],
        work: Coroutine[Any, Any, tuple[str, bool]],
    ) -> tuple[str, bool]:
        """Run `work`. Raises _Interrupted if a job starts on one of the GPUs."""
        task = asyncio.create_task(work)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=self._limits.watch_period_s)
                taken = self._jobs_on(gpus)
                for device in free:
                    if device.gpu in taken:
                        raise _Interrupted(f"{GIVEN_UP} GPU {device.index}: {taken[device.gpu]}")
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run_all(self, free: Sequence[_Device]) -> tuple[str, bool]:
        """Test the GPUs and the connections between them. Return a result that belongs to several
        GPUs, and whether it is a failure."""
        await asyncio.gather(*(self._run(device) for device in free))
        message, is_failed = _compare(free)
        if not is_failed:
            message, is_failed = _distrust(free) or (message, is_failed)
        well = [device for device in free if device.has_passed]
        if is_failed or len(well) < 2:
            return message, is_failed
        connections, is_failed = await self._connections(well)
        return "; ".join(filter(None, [message, connections])), is_failed

    async def _run(self, device: _Device) -> None:
        """Test one device. A step that doesn't finish is repeated once in another process."""
        steps = device.steps
        for is_last in (False, True):
            async with self._probe(device.gpu) as probe:
                hung = await self._run_steps(device, probe, steps)
                is_slow = hung is not None and probe.is_overloaded()
            if hung is None:
                return
            stuck = ", and its process can't be ended" if probe.is_stuck else ""
            reason = f"{NAMES[hung]} did not finish within {self._limits.step_s:g} s{stuck}"
            if is_slow:
                device.end(DeviceOutcome.UNTESTED, f"{reason}; the node is overloaded")
                return
            if is_last or probe.is_stuck:
                device.step = hung
                twice = "" if probe.is_stuck else ", twice"
                device.end(DeviceOutcome.FAILED, f"{reason}{twice}")
                return
            steps = steps[steps.index(hung) :]

    async def _run_steps(
        self, device: _Device, probe: ProbeProcess, steps: Sequence[str]
    ) -> str | None:
        """Run the steps in this process. Return the step that hung, if any."""
        step = "begin"
        try:
            await probe.start(device.kind)
            device.alike = (await probe.step(step, self._limits.begin_s))["alike"]
            for step in steps:
                async with self._alone(step):
                    found = await probe.step(step, self._limits.step_s)
                values = {**device.tested.values, **found["values"]}
                device.tested = replace(device.tested, values=values)
                device.hashed = found.get("hash", device.hashed)
        except StepTimeout as error:
            if step != "begin":
                return step
            device.end(DeviceOutcome.UNTESTED, f"{NAMES[step]} {error}")
        except WrongValue as error:
            device.step = step
            device.end(DeviceOutcome.FAILED, str(error))
        except (StepError, OSError) as error:
            device.step = step
            is_sick = names_hardware(str(error))
            outcome = DeviceOutcome.FAILED if is_sick else DeviceOutcome.UNTESTED
            device.end(outcome, f"{NAMES[step]}: {error}")
        return None

    def _alone(self, step: str) -> contextlib.AbstractAsyncContextManager[Any]:
        """Copies from and to the host all use the host's memory, so they are measured one at a
        time."""
        return self._copying if step == "copies" else contextlib.nullcontext()

    async def _connections(self, devices: Sequence[_Device]) -> tuple[str, bool]:
        async with self._probe(",".join(device.gpu for device in devices)) as probe:
            step = "begin"
            try:
                await probe.start("group")
                await probe.step(step, self._limits.begin_s)
                step = "peers"
                rates = (await probe.step(step, self._limits.step_s))["rates"]
                for device, rate in zip(devices, rates, strict=True):
                    _add(device, "peer_bytes_per_s", rate)
                step = "all_reduce"
                rate = (await probe.step(step, self._limits.step_s))["rate"]
                for device in devices:
                    _add(device, "all_reduce_bytes_per_s", rate)
            except WrongValue as error:
                named = ", ".join(f"cuda:{n} is GPU {d.index}" for n, d in enumerate(devices))
                return f"{NAMES[step]}: {error} ({named})", True
            except (StepError, StepTimeout, OSError) as error:
                return f"{NAMES[step]} could not be tested: {error}", False
        return "", False

    def _probe(self, visible: str) -> ProbeProcess:
        return ProbeProcess(self._command, visible)


class _Interrupted(Exception):
    """A job started on a GPU that was being tested."""


def _add(device: _Device, name: str, value: float) -> None:
    device.tested = replace(device.tested, values={**device.tested.values, name: value})


def _is(gpu: Mapping[str, Any], name: str) -> bool:
    """Whether a name in CUDA_VISIBLE_DEVICES denotes this GPU."""
    if name.isdecimal():
        return int(name) == int(gpu["index"])
    return str(gpu["uuid"]).startswith(name)


def _compare(devices: Sequence[_Device]) -> tuple[str, bool]:
    """Compare the products of GPUs of the same model. If most of the products are equal, the GPUs
    with a different product have failed. If there is no such majority, it is unknown which of the
    GPUs are wrong."""
    of_model: dict[str, dict[int, str]] = {}
    for number, device in enumerate(devices):
        if device.hashed is not None and device.has_passed:
            of_model.setdefault(device.alike, {})[number] = device.hashed
    for hashes in of_model.values():
        wrong = minority(hashes)
        if wrong and len(wrong) == len(hashes):
            named = ", ".join(f"GPU {devices[n].index}" for n in wrong)
            return (
                f"{named} computed different matrix products; it is not known which product is "
                "wrong",
                True,
            )
        for number in wrong:
            devices[number].step = "product"
            devices[number].end(
                DeviceOutcome.FAILED,
                "the matrix product differs from the product on the other GPUs of the same model",
            )
    return "", False


def _distrust(devices: Sequence[_Device]) -> tuple[str, bool] | None:
    """If several GPUs were tested and all of them failed the same step, the test itself is more
    likely to be wrong, so the GPUs count as not tested."""
    failed = [device for device in devices if device.tested.outcome is DeviceOutcome.FAILED]
    if len(failed) < 2 or len(failed) < len(devices) or len({d.step for d in failed}) > 1:
        return None
    for device in failed:
        device.end(DeviceOutcome.UNTESTED, device.tested.reason)
    return f"all GPUs failed {NAMES[failed[0].step]}, so the test itself might be wrong", False
