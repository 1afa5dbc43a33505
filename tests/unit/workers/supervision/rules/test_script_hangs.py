"""A script hangs where two signs show it, or beyond the limit that its user set."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ray_workers.shared.heartbeat import RankObservation
from ray_workers.shared.processes.collectives import GroupRecord
from ray_workers.shared.processes.procfs import Activity, activity_of
from ray_workers.supervision.rules import collective_hangs, script_hangs
from ray_workers.supervision.rules.script_hangs import ScriptLook, ScriptMemory, Signs, signs_of
from ray_workers.supervision.rules.timings import Timings
from tests.unit.workers.supervision.observed import observation

LIMIT_S = Timings().script_hang_s


def stack(*frames: tuple[str, str]) -> str:
    lines = [f'  File "{path}", line 3 in {function}' for path, function in frames]
    main = "\n".join(["Current thread 0x01 (most recent call first):", *lines])
    return f"{main}\n\nThread 0x02 [loader] (most recent call first):\n  File x\n"


_C10D = "/v/site-packages/torch/distributed/distributed_c10d.py"
LOGGER = ("/v/site-packages/torch/distributed/c10d_logger.py", "wrapper")
ALL_REDUCE = stack((_C10D, "all_reduce"), LOGGER, ("/s/train.py", "step"))
BARRIER = stack((_C10D, "barrier"), LOGGER, ("/s/train.py", "step"))
READS = stack(("/s/data.py", "read"), ("/s/train.py", "step"))


def look(
    at: float, ranks: Sequence[RankObservation], cpu_s: float = 1.0, read: int = 0
) -> ScriptLook:
    done = {one.rank: Activity(cpu_s, read) for one in ranks}
    return ScriptLook(at, tuple(ranks), done)


def seen(*looks: ScriptLook) -> ScriptMemory:
    memory = ScriptMemory()
    for each in looks:
        memory = memory.after(each)
    return memory


def silent(age_s: float, *, steps: Sequence[int] = (10, 10)) -> list[RankObservation]:
    return [observation(rank, age_s=age_s, step=step) for rank, step in enumerate(steps)]


def mute() -> list[RankObservation]:
    """Ranks of a script that has never reported."""
    return [observation(rank, age_s=9e6, step=0, first_at=0.0) for rank in (0, 1)]


def test_ranks_that_use_no_cpu_and_move_no_bytes_stand_still() -> None:
    ranks = mute()
    memory = seen(look(0.0, ranks), look(500.0, ranks, 1.1, 900), look(1000.0, ranks, 1.2, 1800))
    assert signs_of(memory, None, Timings()) == Signs(0.0, 1000.0, LIMIT_S, mute_s=1000.0)
    for cpu_s, num_bytes in ((8.0, 0), (1.0, 1 << 20)):
        awake = memory.after(look(1500.0, ranks, cpu_s, num_bytes))
        assert signs_of(awake, None, Timings()).still_s == 0.0
    unknown = memory.after(ScriptLook(1500.0, tuple(ranks), {0: Activity(1.2, 1800)}))
    assert signs_of(unknown, None, Timings()).still_s == 0.0


def test_a_script_is_silent_by_its_own_usual_interval_and_at_the_least_by_the_limit() -> None:
    memory = seen(look(0.0, silent(0.0)), look(400.0, silent(0.0, steps=(12, 12))))
    signs = signs_of(memory.after(look(2000.0, silent(1500.0, steps=(12, 12)))), None, Timings())
    assert (signs.silent_s, signs.limit_s) == (1500.0, 2000.0), "ten of its steps of 200 s"
    assert not signs.is_suspect
    assert signs_of(memory, 60.0, Timings()).limit_s == 60.0, "the user knows better"


@pytest.mark.parametrize(
    ("silent_s", "still_s", "earlier", "later", "found"),
    [
        (901.0, 0.0, ALL_REDUCE, ALL_REDUCE, True),  # NCCL uses a CPU while it waits
        (0.0, 901.0, ALL_REDUCE, ALL_REDUCE, True),  # never reports
        (901.0, 901.0, READS, READS, True),
        (901.0, 901.0, "", "", True),
        (901.0, 0.0, READS, READS, False),
        (0.0, 901.0, READS, READS, False),
        (901.0, 0.0, ALL_REDUCE, BARRIER, False),
        (901.0, 0.0, "", "", False),
        (10.0, 10.0, ALL_REDUCE, ALL_REDUCE, False),
    ],
)
def test_no_sign_alone_is_a_hang(
    silent_s: float, still_s: float, earlier: str, later: str, found: bool
) -> None:
    ranks = silent(silent_s)
    signs = Signs(silent_s, still_s, LIMIT_S)
    stacks = dict.fromkeys((0, 1), earlier), dict.fromkeys((0, 1), later)
    hang = script_hangs.hang_of(look(0.0, ranks), signs, *stacks)
    assert (hang is not None) is found


def below(stack: str, *records: GroupRecord) -> str:
    """The stacks with a process's collectives below."""
    lines = "\n".join(one.line() for one in records)
    return f"{stack}\nCollectives of torch.distributed:\n{lines}\n"


WAITS = GroupRecord("0", 7, 7, "nccl:all_reduce", 950.0)
ABSENT = GroupRecord("0", 6)


@pytest.mark.parametrize(
    ("earlier", "later", "idle", "found"),
    [
        ([WAITS, ABSENT], [WAITS, ABSENT], {1}, True),
        ([WAITS, WAITS], [WAITS, WAITS], set(), True),  # NCCL uses a CPU while it waits
        ([WAITS, ABSENT], [WAITS, ABSENT], {0}, False),  # rank 1 computes
        ([WAITS, ABSENT], [WAITS, replace(ABSENT, begun=7)], {1}, False),
        ([WAITS, ABSENT], [replace(WAITS, begun=8), ABSENT], {1}, False),
        ([replace(WAITS, waits_s=9.0), ABSENT], [replace(WAITS, waits_s=39.0), ABSENT], {1}, False),
        ([ABSENT, ABSENT], [ABSENT, ABSENT], {0, 1}, False),
        ([WAITS], [WAITS], {0, 1}, False),  # of rank 1 nothing is known
    ],
)
def test_a_mute_script_hangs_if_a_collective_stands_still_and_so_do_the_stacks(
    earlier: Sequence[GroupRecord], later: Sequence[GroupRecord], idle: set[int], found: bool
) -> None:
    memory = seen(look(0.0, mute(), 1.0), look(LIMIT_S + 1.0, mute(), 900.0))
    signs = signs_of(memory, None, Timings())
    assert (signs.is_seen, signs.is_suspect) == (False, True)
    before, now = (
        {0: below(READS, *records[:1]), 1: below(READS, *records[1:])}
        for records in (earlier, later)
    )
    at = look(0.0, mute())
    assert (script_hangs.hang_of(at, signs, before, now, idle) is not None) is found
    reads_on = {**now, 0: below(ALL_REDUCE, *later[:1])}
    assert script_hangs.hang_of(at, signs, before, reads_on, idle) is None
    long = script_hangs.is_worth_a_second_look(signs, now)
    assert long is (collective_hangs.longest_wait_s(now) > LIMIT_S)


@pytest.mark.parametrize(
    ("records", "culprits"),
    [
        ([[WAITS], [ABSENT], [WAITS]], [1]),
        # Rank 1 is in another group's collective, for which rank 2 lacks.
        ([[WAITS], [ABSENT, replace(WAITS, group="1")], [ABSENT, replace(ABSENT, group="1")]], [2]),
        ([[WAITS], [replace(WAITS, begun=8, waits_in=8)], [WAITS]], []),
    ],
)
def test_the_ranks_that_have_not_joined_a_collective_are_to_blame(
    records: Sequence[Sequence[GroupRecord]], culprits: list[int]
) -> None:
    stacks = {rank: below(READS, *own) for rank, own in enumerate(records)}
    hang = script_hangs.blame(
        look(0.0, silent(70.0, steps=(9, 9, 9))), Signs(70.0, 3.0, 60.0), stacks
    )
    assert [one.rank for one in hang.culprits] == culprits


@pytest.mark.parametrize(
    ("stacks", "steps", "culprits"),
    [
        ((ALL_REDUCE, READS, ALL_REDUCE), (9, 9, 9), [1]),
        ((READS, ALL_REDUCE, READS), (9, 9, 9), [0, 2]),
        ((ALL_REDUCE, ALL_REDUCE, BARRIER), (9, 9, 9), [2]),
        ((ALL_REDUCE, BARRIER), (9, 9), []),
        ((ALL_REDUCE, ALL_REDUCE), (9, 9), []),
        ((ALL_REDUCE, ALL_REDUCE), (9, 8), [1]),
        ((READS, READS), (8, 9), [0]),
        ((READS,), (8,), [0]),
    ],
)
def test_the_ranks_that_stand_apart_are_to_blame(
    stacks: Sequence[str], steps: Sequence[int], culprits: list[int]
) -> None:
    at = look(0.0, silent(70.0, steps=steps))
    hang = script_hangs.blame(at, Signs(70.0, 3.0, 60.0), dict(enumerate(stacks)))
    assert [one.rank for one in hang.culprits] == culprits
    assert (hang.waited_s, hang.limit_s) == (70.0, 60.0)


def test_a_user_limit_goes_by_the_reports_where_there_are_any() -> None:
    assert script_hangs.is_over_limit(Signs(61.0, 0.0, 60.0), has_reported=True)
    assert not script_hangs.is_over_limit(Signs(0.0, 61.0, 60.0), has_reported=True)
    assert script_hangs.is_over_limit(Signs(0.0, 61.0, 60.0), has_reported=False)


def test_a_process_is_active_with_its_children() -> None:
    burns = "import time\nt = time.process_time()\nwhile time.process_time() < t + 0.2: pass\n"
    before = activity_of(os.getpid())
    subprocess.run([sys.executable, "-c", burns], check=True)
    assert activity_of(os.getpid()).cpu_s >= before.cpu_s + 0.2
    assert activity_of(2**22 + 1) == Activity(0.0, 0)
