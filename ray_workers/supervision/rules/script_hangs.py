"""Detects whether a script hangs. The module is pure, and imports neither Ray nor torch.

A script does not report phases, and can spend hours on a single task. Therefore, two of four signs
must be observed, unless the user has set a limit. The signs are: the ranks have stopped reporting;
all their processes are idle (no CPU time, no bytes read or written); their stacks do not change
while some ranks are in a collective; and torch's flight recorder shows a collective that started
long ago, while no rank starts or finishes another collective.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from ray_workers.shared.heartbeat import RankObservation
from ray_workers.shared.processes.procfs import Activity
from ray_workers.shared.supervisor_frames import HangReport
from ray_workers.supervision.rules import collective_hangs
from ray_workers.supervision.rules.hang_detector import FACTOR, Hang
from ray_workers.supervision.rules.timings import Timings

BUSY_CPU = 0.01
"""Share of a CPU, and number of bytes per second, above which a rank counts as busy. These limits
are not 0, because the threads of a waiting rank wake up periodically."""
BUSY_BYTES = 1024.0


@dataclass(frozen=True)
class ScriptLook:
    """An observation of all ranks of a script."""

    at: float
    """Time of the observation in seconds, as measured by `MachineSpeed.time`."""
    ranks: tuple[RankObservation, ...]
    activity: Mapping[int, Activity]
    """The CPU time and I/O that each rank has used so far."""


@dataclass(frozen=True)
class ScriptMemory:
    """The state that is passed from one observation to the next."""

    last: ScriptLook | None = None
    begun_at: float | None = None
    """When the processes were first observed."""
    still_since: float | None = None
    """Time since which all ranks have been idle; None if a rank was busy."""
    step: int = 0
    stepped_at: float | None = None
    """When a new step was last observed."""
    slowest_s: float = 0.0
    """Longest time between reported steps."""

    def after(self, look: ScriptLook) -> ScriptMemory:
        """Return the state after another observation of the same processes."""
        step = max(one.status.step for one in look.ranks)
        begun_at = look.at if self.begun_at is None else self.begun_at
        memory = replace(self, last=look, begun_at=begun_at)
        if step != self.step:
            memory = replace(memory, step=step, stepped_at=look.at)
            if self.stepped_at is not None and step > self.step:
                took_s = (look.at - self.stepped_at) / (step - self.step)
                memory = replace(memory, slowest_s=max(self.slowest_s, took_s))
        if self.last is None or not _is_still(self.last, look):
            return replace(memory, still_since=None)
        since = self.last.at if self.still_since is None else self.still_since
        return replace(memory, still_since=since)


@dataclass(frozen=True)
class Signs:
    """The number of seconds for which each sign of a hang has been observed; 0.0 for an absent
    sign."""

    silent_s: float
    still_s: float
    limit_s: float
    mute_s: float = 0.0
    """Seconds since the start of a script that has not reported anything. A script without reports
    is not a sign of a hang, but a reason to look for signs."""

    @property
    def is_seen(self) -> bool:
        return max(self.silent_s, self.still_s) > self.limit_s

    @property
    def is_suspect(self) -> bool:
        return self.is_seen or self.mute_s > self.limit_s


def signs_of(memory: ScriptMemory, limit_s: float | None, timings: Timings) -> Signs:
    """Return the signs of a hang, as of the last observation. `limit_s` is the user's limit, if
    any."""
    look = memory.last
    assert look is not None
    least_s = timings.script_hang_s if limit_s is None else limit_s
    still_s = 0.0 if memory.still_since is None else look.at - memory.still_since
    silent_s = mute_s = 0.0
    if any(one.status.first_at for one in look.ranks):  # silence is a sign only after a report
        silent_s = min(one.age_s for one in look.ranks)
        if limit_s is None:
            least_s = max(least_s, FACTOR * memory.slowest_s)
    elif memory.begun_at is not None:
        mute_s = look.at - memory.begun_at
    return Signs(silent_s, still_s, least_s, mute_s)


def is_over_limit(signs: Signs, *, has_reported: bool) -> bool:
    """Whether the time without reports exceeds the user's limit. For a script that never reports,
    the idle time is compared with the limit instead."""
    return (signs.silent_s if has_reported else signs.still_s) > signs.limit_s


def is_worth_a_second_look(signs: Signs, stacks: Mapping[int, str]) -> bool:
    """Whether two signs of a hang might be found if the stacks are read again."""
    return signs.is_seen or collective_hangs.longest_wait_s(stacks) > signs.limit_s


def hang_of(
    look: ScriptLook,
    signs: Signs,
    earlier: Mapping[int, str],
    later: Mapping[int, str],
    idle: Set[int] = frozenset(),
) -> Hang | None:
    """Return the hang if at least two signs are observed; otherwise, None. `earlier` and `later`
    are the stacks by rank at two times, and `idle` contains the ranks that were idle between these
    times."""
    both = [
        (main_stack(earlier.get(r.rank, "")), main_stack(later.get(r.rank, ""))) for r in look.ranks
    ]
    is_fixed = all(one == other and one for one, other in both)
    waits_s = 0.0
    if collective_hangs.stood_still(earlier, later, idle):
        waits_s = collective_hangs.longest_wait_s(later)
    stands = is_fixed and (waits_s > 0.0 or any(collective_in(stack) for stack, _ in both))
    seen = (signs.silent_s, signs.still_s, waits_s)
    if stands + sum(seconds > signs.limit_s for seconds in seen) < 2:
        return None
    return replace(blame(look, signs, later), waited_s=max(seen))


def blame(look: ScriptLook, signs: Signs, stacks: Mapping[int, str]) -> Hang:
    """Return the hang, attributed to the ranks that differ from the other ranks (the culprits).

    The culprits are the ranks that, according to torch's flight recorder, have not joined a
    collective. If there are no such ranks, the culprits are the ranks whose stacks show no
    collective although the stacks of other ranks do, or whose stacks show a different collective
    than most stacks. If the stacks show no such difference, the culprits are the ranks that have
    completed fewer steps. If no rank differs from the other ranks, the hang has no culprits.
    """
    collectives = {
        one.rank: collective_in(main_stack(stacks.get(one.rank, ""))) for one in look.ranks
    }
    apart = collective_hangs.absent_ranks(stacks) & collectives.keys()
    if not apart and any(collectives.values()):
        apart = {rank for rank, collective in collectives.items() if not collective}
        if not apart:
            [(usual, number), *others] = Counter(collectives.values()).most_common()
            if not others or others[0][1] < number:
                apart = {rank for rank, collective in collectives.items() if collective != usual}
    if not apart and len(steps := {one.status.step for one in look.ranks}) > 1:
        apart = {one.rank for one in look.ranks if one.status.step == min(steps)}
    culprits = tuple(one for one in look.ranks if one.rank in apart)
    if len(look.ranks) == 1:
        culprits = look.ranks
    return Hang(culprits, max(signs.silent_s, signs.still_s), signs.limit_s)


def main_stack(text: str) -> str:
    """Return the stack of the main thread, which is written first."""
    return text.split("\n\n")[0].strip()


_FRAME = re.compile(r'File "(.+?)", line \d+ in (\S+)')
_WRAPPERS = ("wrapper", "_object_to_tensor")
_BACKWARD = "_engine_run_backward"
"""A function of the backward pass. The backward pass can wait for the gradients of other ranks."""


def collective_in(stack: str) -> str:
    """Return the torch.distributed function in the stack, or an empty string."""
    for path, function in _FRAME.findall(stack):
        if "/torch/distributed/" in path and function not in _WRAPPERS:
            return str(function)
        if function == _BACKWARD and "/torch/autograd/" in path:
            return _BACKWARD
    return ""


def with_collectives(report: HangReport) -> HangReport:
    """Return the report, with phases derived from the collectives in the ranks' stacks. Scripts do
    not report phases, so in the original report the phase of every rank is `compute`."""
    names = {one.rank: collective_in(main_stack(one.stack or "")) for one in report.ranks}
    names = {rank: "backward" if name == _BACKWARD else name for rank, name in names.items()}
    ranks = [replace(one, collective=names[one.rank] or one.collective) for one in report.ranks]
    of_culprits = {names.get(rank, "") for rank in report.culprits}
    shared = of_culprits.pop() if len(of_culprits) == 1 else ""
    return replace(report, ranks=ranks, phase=shared or report.phase)


def _is_still(before: ScriptLook, now: ScriptLook) -> bool:
    """Whether all ranks are known to have been idle between two observations."""
    return before.activity.keys() == now.activity.keys() == idle_ranks(before, now) and (
        len(now.activity) == len(now.ranks)
    )


def idle_ranks(before: ScriptLook, now: ScriptLook) -> set[int]:
    """Return the ranks that are known to have been idle between two observations."""
    elapsed_s = now.at - before.at
    idle = set()
    for rank in before.activity.keys() & now.activity.keys():
        cpu_s = abs(now.activity[rank].cpu_s - before.activity[rank].cpu_s)
        num_bytes = abs(now.activity[rank].num_bytes - before.activity[rank].num_bytes)
        if cpu_s <= BUSY_CPU * elapsed_s and num_bytes <= BUSY_BYTES * elapsed_s:
            idle.add(rank)
    return idle


def same_processes(one: Sequence[RankObservation], other: Sequence[RankObservation]) -> bool:
    return [(r.rank, r.incarnation) for r in one] == [(r.rank, r.incarnation) for r in other]
