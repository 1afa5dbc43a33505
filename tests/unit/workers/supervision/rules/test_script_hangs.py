"""A script hangs where two signs show it, or beyond the limit that its user set."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from ray_workers.shared.heartbeat import RankObservation
from ray_workers.shared.processes.procfs import Activity, activity_of
from ray_workers.supervision.rules import script_hangs
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
    assert signs_of(memory, None, Timings()) == Signs(0.0, 1000.0, LIMIT_S)
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
