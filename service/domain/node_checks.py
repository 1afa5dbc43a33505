"""The rules of self-tests: which losses make a node suspect, when a failure withholds the node, and
which GPUs count as slow."""

from __future__ import annotations

import signal
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ray_workers.shared.contracts import Cause, Outcome
from ray_workers.shared.self_tests import (
    MEASURES,
    DeviceOutcome,
    NodeTest,
    TestedDevice,
    names_hardware,
)
from ray_workers.shared.slices import Slice

LEAST_TWINS = 3
"""Number of other GPUs of the same model without which no GPU counts as slow."""
SLOW_FACTORS: Mapping[str, float] = {"product_s": 1.25, "memory_bytes_per_s": 1.25}
SLOW_CONNECTION = 2.0
"""A GPU counts as slow if it is at least this many times slower than the median of the others. For
connections the factor is larger, because copies depend on the distance to the processor."""
WITHHELD_SHARE = 4
"""Self-tests withhold at most one of this many nodes, but at least one node."""


class CheckCause(StrEnum):
    """Why a node is tested."""

    ASKED = "asked"
    LOST_RANK = "lost_rank"


class CheckState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"


class CheckOutcome(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    UNTESTED = "untested"
    """Nothing was tested. This is not a fault of the node."""


def machine_fault(outcome: Outcome) -> str | None:
    """Return why the end of an attempt suggests a fault of the machine of the rank at fault; None
    if it does not. A program error or an external signal does not suggest such a fault."""
    if names_hardware(outcome.message):
        return f"CUDA reported a fault of the GPU of rank {outcome.rank}"
    if outcome.cause is not Cause.WORKER_LOST or outcome.slowness > 1.0:
        return None
    if outcome.exit_code is None:
        return f"the worker of rank {outcome.rank} vanished"
    if outcome.exit_code == -signal.SIGABRT:
        return f"the process of rank {outcome.rank} was aborted while it waited for other ranks"
    return None


def nodes_of_ranks(
    slices: Sequence[Slice], ranks: Collection[int], *, keeps_order: bool
) -> dict[int, str]:
    """Return the node of each of these ranks. `keeps_order` is true if ranks follow the order of
    the slices; otherwise the ranks of a node are consecutive."""
    order = list(dict.fromkeys(part.node_id for part in slices))
    parts = slices if keeps_order else sorted(slices, key=lambda part: order.index(part.node_id))
    of_rank = [part.node_id for part in parts for _ in range(part.num_workers)]
    return {rank: of_rank[rank] for rank in ranks if 0 <= rank < len(of_rank)}


def outcome_of(test: NodeTest) -> CheckOutcome:
    found = {device.outcome for device in test.devices}
    if test.is_failed or DeviceOutcome.FAILED in found:
        return CheckOutcome.FAILED
    return CheckOutcome.PASSED if DeviceOutcome.PASSED in found else CheckOutcome.UNTESTED


def sentence(test: NodeTest) -> str:
    """Describe the result of a test that is done."""
    by_outcome: dict[DeviceOutcome, list[TestedDevice]] = {}
    for device in test.devices:
        by_outcome.setdefault(device.outcome, []).append(device)
    passed = by_outcome.pop(DeviceOutcome.PASSED, [])
    parts = []
    if passed:
        parts.append(f"{_names(passed)} passed the self-test")
    verbs = {
        DeviceOutcome.FAILED: "failed the self-test",
        DeviceOutcome.UNTESTED: "could not be tested",
        DeviceOutcome.HELD: "was not tested",
    }
    for outcome, verb in verbs.items():
        parts += [
            f"{one.name} {_verb(one, verb)}: {one.reason}" for one in by_outcome.get(outcome, ())
        ]
    return "; ".join(filter(None, [*parts, test.message])) or "nothing was tested"


def _verb(device: TestedDevice, verb: str) -> str:
    return verb if device.gpu else verb.replace("was ", "were ")


def _names(devices: Sequence[TestedDevice]) -> str:
    if not devices[0].gpu:
        return "the processors"
    return "GPU " + ", ".join(str(device.index) for device in devices)


def why_not_withheld(
    hostname: str, hosts: Collection[str], by_tests: Collection[str], withheld: Collection[str]
) -> str | None:
    """Return why a failed self-test does not withhold the node; None if it does.

    An error in the test itself must not stop the whole cluster. hosts: the nodes of the cluster
    that could get the same work. by_tests: the nodes that self-tests withhold. withheld: all nodes
    that are withheld.
    """
    if hostname in by_tests:
        return None
    if not set(hosts) - {hostname} - set(withheld):
        return "no other node could take over its work"
    most = max(1, len(set(hosts) | {hostname}) // WITHHELD_SHARE)
    if len(by_tests) >= most:
        nodes = "1 node" if most == 1 else f"{most} nodes"
        return (
            f"at most {nodes} of this cluster can be withheld because of self-tests, and this "
            "number is already withheld"
        )
    return None


@dataclass(frozen=True)
class SlowMeasure:
    """A measurement in which a GPU is slower than other GPUs of the same model."""

    measure: str
    factor: float
    """How many times slower the GPU is than the median of the others."""
    num_twins: int


def slow(devices: Mapping[str, TestedDevice]) -> dict[str, list[SlowMeasure]]:
    """Return the GPUs that are much slower than the median of the other GPUs of the same model, if
    there are at least `LEAST_TWINS` others. `devices` are the newest results of all GPUs that were
    tested, keyed by UUID."""
    values: dict[tuple[str, str], dict[str, float]] = {}
    for key, device in devices.items():
        for measure, value in device.values.items():
            if device.model and measure in MEASURES and value > 0:
                values.setdefault((device.model, measure), {})[key] = value
    found: dict[str, list[SlowMeasure]] = {}
    for (_, measure), of_gpus in values.items():
        if len(of_gpus) <= LEAST_TWINS:
            continue
        in_order = sorted(of_gpus.values())
        is_rate = MEASURES[measure][1]
        for key, value in of_gpus.items():
            usual = _median_without(in_order, bisect_left(in_order, value))
            factor = usual / value if is_rate else value / usual
            if factor >= SLOW_FACTORS.get(measure, SLOW_CONNECTION):
                found.setdefault(key, []).append(SlowMeasure(measure, factor, len(of_gpus) - 1))
    return found


def _median_without(in_order: Sequence[float], at: int) -> float:
    """Return the median of the sorted values without the value at this index, in constant time."""
    last = len(in_order) - 2
    middle = (last // 2, (last + 1) // 2)
    low, high = (in_order[n + (n >= at)] for n in middle)
    return (low + high) / 2
