"""Limits follow the machine's speed, and hangs are found at any speed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from ray_workers.shared.contracts import Cause, Outcome
from ray_workers.shared.processes.machine_speed import (
    MAX_SLOWNESS,
    OVERLOADED,
    CpuTime,
    MachineSpeed,
    WaitMeter,
    cpu_time,
)
from ray_workers.supervision.rules.failure_attribution import excused


class Machine:
    """One process with its own clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.process: CpuTime | None = CpuTime(0.0, 0.0, is_runnable=False)
        self.meter = WaitMeter(lambda pid: self.process, lambda: self.now)

    def measure(self) -> float:
        return self.meter.sample([1])

    def passes(self, seconds: float, *, ran_s: float = 0.0, waited_s: float = 0.0) -> float:
        assert self.process is not None
        self.now += seconds
        ran, waited, _ = self.process
        self.process = CpuTime(ran + ran_s, waited + waited_s, is_runnable=waited_s > 0)
        return self.measure()


def test_a_process_that_waits_for_a_cpu_is_slow_by_how_long_it_waits() -> None:
    machine = Machine()
    machine.measure()
    assert machine.passes(10, ran_s=1, waited_s=9) == pytest.approx(10)
    assert machine.passes(10, ran_s=5, waited_s=5) == pytest.approx(2)


def test_a_process_that_sleeps_or_hangs_is_not_slow() -> None:
    machine = Machine()
    machine.measure()
    assert machine.passes(10) == 1
    assert machine.passes(10, ran_s=10) == 1


def test_a_process_that_gets_no_cpu_at_all_is_as_slow_as_can_be() -> None:
    machine = Machine()
    machine.process = CpuTime(1.0, 5.0, is_runnable=True)  # the kernel counts a wait once it ends
    machine.measure()
    machine.now += 10
    assert machine.measure() == MAX_SLOWNESS


def test_what_was_long_ago_and_what_has_just_begun_count_for_nothing() -> None:
    machine = Machine()
    machine.measure()
    machine.passes(10, ran_s=1, waited_s=9)
    assert machine.passes(10) == 1
    assert machine.passes(0.5, waited_s=0.5) < 1.1
    machine.process = None
    assert machine.measure() == 1
    machine.process = CpuTime(0.0, 0.0, is_runnable=True)
    assert machine.measure() == 1


def test_processes_that_share_a_cpu_are_seen_to_wait() -> None:
    if cpu_time(os.getpid()) is None:
        pytest.skip("this kernel does not count how long a process waits")
    cpu = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, [{cpu}])\nwhile 1: pass"
    busy = [subprocess.Popen([sys.executable, "-S", "-c", code]) for _ in range(4)]
    try:
        meter, deadline = WaitMeter(), time.monotonic() + 60.0
        # Four share a CPU with other processes: each gets a quarter of it, at most.
        while (slowness := meter.sample(process.pid for process in busy)) < 2.5:
            assert time.monotonic() < deadline, f"only {slowness:g} times slower"
            time.sleep(0.05)
        assert slowness <= MAX_SLOWNESS
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_the_time_of_a_thread_is_not_that_of_the_main_thread() -> None:
    """After a handover, the main thread of a rank sleeps until the rank ends."""
    if cpu_time(os.getpid()) is None:
        pytest.skip("this kernel does not count how long a process waits")
    used_s, may_end = 0.2, threading.Event()

    def work() -> None:
        while time.thread_time() < used_s:
            pass
        may_end.wait()

    before = cpu_time(threading.main_thread().native_id or 0)
    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert thread.native_id is not None
        while (of_thread := cpu_time(thread.native_id)) is None or of_thread.ran_s < used_s:
            time.sleep(0.05)
        of_main = cpu_time(threading.main_thread().native_id or 0)
    finally:
        may_end.set()
        thread.join()
    assert before is not None
    assert of_main is not None
    assert of_main.ran_s - before.ran_s < used_s


def test_seconds_count_less_while_the_machine_is_slow() -> None:
    hands = SimpleNamespace(now=0.0)
    speed = MachineSpeed(lambda: hands.now)
    hands.now += 10
    speed.learn(5.0)
    assert speed.time() == 10
    hands.now += 10
    assert speed.time() == 12
    speed.learn(1.0)
    hands.now += 1
    assert speed.time() == 13
    speed.learn(10_000.0)
    assert speed.stretched(1.0) == MAX_SLOWNESS
    speed.learn(0.0)
    assert speed.stretched(1.0) == 1.0


@pytest.mark.parametrize("slowness", [1.0, 10.0])
async def test_work_that_never_ends_is_cancelled_at_any_speed(slowness: float) -> None:
    hands = SimpleNamespace(now=0.0)

    def clock() -> float:
        hands.now += slowness  # with each sample
        return float(hands.now)

    speed = MachineSpeed(clock)
    speed.learn(slowness)
    never = asyncio.ensure_future(asyncio.Event().wait())
    began_at = hands.now
    with pytest.raises(TimeoutError, match="more than 1 s"):
        await speed.within(1.0, never)
    assert never.cancelled()
    assert hands.now - began_at >= slowness
    assert speed.overrun == slowness
    speed.caught_up()
    assert speed.overrun == 1.0


async def test_what_ends_in_time_gives_its_result() -> None:
    async def soon() -> str:
        await asyncio.sleep(0)
        return "done"

    speed = MachineSpeed()
    assert await speed.within(60.0, soon()) == "done"
    assert speed.overrun == 1.0


async def test_what_fails_in_time_raises_its_error() -> None:
    async def fails() -> None:
        raise LookupError

    with pytest.raises(LookupError):
        await MachineSpeed().within(60.0, fails())


LOST = Outcome.of(Cause.WORKER_LOST, "rank 1 was lost", 1, -9)


def test_an_end_on_an_overloaded_machine_names_the_overload() -> None:
    outcome = excused(LOST, 31.4)
    assert (outcome.cause, outcome.rank, outcome.exit_code) == (LOST.cause, 1, -9)
    assert outcome.slowness == 31.4
    assert (
        outcome.message == "rank 1 was lost (the machine is overloaded, 31 times slower than usual)"
    )


@pytest.mark.parametrize(
    ("outcome", "slowness"),
    [
        (LOST, 1.0),
        (LOST, OVERLOADED - 0.1),
        (Outcome.of(Cause.USER_ERROR, "it raised"), 31.4),
        (Outcome.of(Cause.SUCCEEDED, "well"), 31.4),
    ],
)
def test_no_other_end_is_excused(outcome: Outcome, slowness: float) -> None:
    assert excused(outcome, slowness) == outcome
