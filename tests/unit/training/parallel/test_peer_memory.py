"""A rank of a divided model without replicas is replaced from the memory of another rank."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from dray.spec import JobSpec
from ray_workers.shared.contracts import Cause, RankTask
from ray_workers.training.checkpoint import peer_memory
from ray_workers.training.checkpoint.peer_memory import PeerMemory
from ray_workers.training.core.errors import HostMemoryError
from ray_workers.training.core.faultpoints import FaultPoint, arm
from ray_workers.training.core.progress import Progress
from service.planning.model.memory import copies_bytes
from service.planning.model.shapes import shapes_of
from tests.marks import soak
from tests.unit.training.elastic.test_recovery import die, once
from tests.unit.training.jobs import assert_same, series, weights
from tests.unit.training.parallel.test_model_parallel import brief
from tests.unit.training.ranks import frames, replaced, run_ranks

STEP = 7
EVERY_3 = {"in_memory": {"every_steps": 3}}
OFF = {"in_memory": "off"}
IN_STEP = [
    FaultPoint.STEP_BEGINS,
    FaultPoint.DATA_LOADED,
    FaultPoint.SHARE_BEGINS,
    FaultPoint.BEFORE_EXCHANGE,
    FaultPoint.BACKWARD_DONE,
    FaultPoint.BEFORE_OPTIMIZER,
    FaultPoint.AFTER_OPTIMIZER,
    FaultPoint.STEP_ENDS,
]
IN_COPY = [FaultPoint.BEFORE_PEER_COPY, FaultPoint.PEER_COPY_SENT]
"""Points in the copy of the state after step 6."""
OF_STEP = {point: 6 if point in IN_COPY else STEP for point in IN_STEP + IN_COPY}
ZERO_1 = {"ema": {"decay": 0.9}}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Returns the results of jobs that keep no copies and lose no rank."""

    @functools.cache
    def run(num_ranks: int, parallel: tuple[tuple[str, Any], ...], has_ema: bool) -> Path:
        home = tmp_path_factory.mktemp("uninterrupted")
        options = ZERO_1 if has_ema else {}
        spec = brief(home, num_ranks, dict(parallel), **options) | {"checkpoint": OFF}
        assert run_ranks(home, spec, world_size=num_ranks) == [0] * num_ranks
        return home

    return run


def kill(task: RankTask, *, rank: int, point: FaultPoint, step: int) -> None:
    if task.rank == rank and task.incarnation == 0:
        arm(point, die, at_step=step)


def assert_equal_end(home: Path, alone: Path) -> None:
    assert_same(weights(home), weights(alone))
    for key in ("train/loss", "val/loss"):
        assert once(home, key) == series(alone, key)


MESHES = {
    "2 shards": (2, {"shard": 2}),
    "3 shards": (3, {"shard": 3}),
    "ZeRO 1": (2, {"shard": 2, "zero": 1}),
    "tensor": (2, {"tensor": 2}),
    "pipeline": (2, {"pipeline": 2}),
    "context": (2, {"context": 2}),
    "shard x pipeline": (4, {"shard": 2, "pipeline": 2}),
}
QUICK = [
    ("3 shards", FaultPoint.AFTER_OPTIMIZER, 1),
    ("ZeRO 1", FaultPoint.AFTER_OPTIMIZER, 1),
    ("pipeline", FaultPoint.BEFORE_PEER_COPY, 1),
]
ALL = [
    (mesh, point, rank)
    for mesh, (size, _) in MESHES.items()
    for point in OF_STEP
    for rank in range(size)
]


@pytest.mark.parametrize(
    ("mesh", "point", "rank"), [*QUICK, *(soak(*one) for one in ALL if one not in QUICK)]
)
def test_a_killed_rank_gets_its_share_from_its_keeper(
    tmp_path: Path, uninterrupted: Callable[..., Path], mesh: str, point: FaultPoint, rank: int
) -> None:
    num_ranks, parallel = MESHES[mesh]
    is_zero_1 = mesh == "ZeRO 1"
    spec = brief(tmp_path, num_ranks, parallel, **(ZERO_1 if is_zero_1 else {}))
    fault = functools.partial(kill, rank=rank, point=point, step=OF_STEP[point])
    codes = run_ranks(
        *(tmp_path, spec | {"checkpoint": EVERY_3}),
        world_size=num_ranks,
        before=fault,
        recovers=True,
    )
    assert codes == [0] * num_ranks
    assert replaced(tmp_path) == [rank]
    assert_equal_end(tmp_path, uninterrupted(num_ranks, tuple(parallel.items()), is_zero_1))


def test_a_rank_lost_with_its_keeper_ends_the_attempt(tmp_path: Path) -> None:
    """Rank 2 keeps rank 1's share, so only rank 0 is left, which keeps rank 2's share."""
    spec = brief(tmp_path, 3, {"shard": 3}) | {"checkpoint": EVERY_3}
    die_both = functools.partial(_die_with_keeper, folder=tmp_path)
    codes = run_ranks(tmp_path, spec, world_size=3, before=die_both, recovers=True)
    assert codes == [1] * 3
    (error,) = frames(tmp_path, rank=0, kind="error")
    assert error["cause"] == Cause.WORKER_LOST
    assert "together with the ranks that kept copies" in error["message"]
    assert "the job resumes from its latest checkpoint" in error["message"]


def _die_with_keeper(task: RankTask, folder: Path) -> None:
    if task.rank in (1, 2) and task.incarnation == 0:
        act = functools.partial(_die_together, task.rank, folder)
        arm(FaultPoint.DATA_LOADED, act, at_step=STEP)


def _die_together(rank: int, folder: Path) -> None:
    (folder / f"ready-{rank}").touch()
    while len(list(folder.glob("ready-*"))) < 2:
        time.sleep(0.001)
    die()


def test_with_two_copies_two_ranks_may_be_lost_at_once(
    tmp_path: Path, uninterrupted: Callable[..., Path]
) -> None:
    rule = {"in_memory": {"every_steps": 3, "copies": 2}}
    spec = brief(tmp_path, 3, {"shard": 3}) | {"checkpoint": rule}
    die_both = functools.partial(_die_with_keeper, folder=tmp_path)
    codes = run_ranks(tmp_path, spec, world_size=3, before=die_both, recovers=True)
    assert codes == [0] * 3
    assert_equal_end(tmp_path, uninterrupted(3, (("shard", 3),), False))


def _lose_node(task: RankTask, folder: Path) -> None:
    """Put two ranks on each of two nodes, and lose the second node."""
    peer_memory.platform.node = lambda: f"node-{task.rank // 2}"
    if task.rank >= 2 and task.incarnation == 0:
        act = functools.partial(_die_together, task.rank, folder)
        arm(FaultPoint.DATA_LOADED, act, at_step=STEP)


def test_a_lost_node_costs_no_share(tmp_path: Path, uninterrupted: Callable[..., Path]) -> None:
    spec = brief(tmp_path, 4, {"shard": 4}) | {"checkpoint": EVERY_3}
    lose = functools.partial(_lose_node, folder=tmp_path)
    codes = run_ranks(tmp_path, spec, world_size=4, before=lose, recovers=True)
    assert codes == [0] * 4
    assert sorted(replaced(tmp_path)) == [2, 3]
    assert_equal_end(tmp_path, uninterrupted(4, (("shard", 4),), False))


def _kill_while_recovering(task: RankTask, *, rank: int, point: FaultPoint) -> None:
    kill(task, rank=1, point=FaultPoint.DATA_LOADED, step=STEP)
    if task.rank == rank and (rank != 1 or task.incarnation == 1):
        arm(point, die, at_step=6 if point is FaultPoint.RESTORED else 0)


@pytest.mark.parametrize(
    ("rank", "point"),
    [soak(1, FaultPoint.GROUP_JOINED), soak(1, FaultPoint.RESTORED), (2, FaultPoint.RESTORED)],
)
def test_another_process_may_be_lost_during_the_recovery(
    tmp_path: Path, uninterrupted: Callable[..., Path], rank: int, point: FaultPoint
) -> None:
    """Rank 2 keeps rank 1's share, and rank 0 keeps rank 2's share."""
    spec = brief(tmp_path, 3, {"shard": 3}) | {"checkpoint": EVERY_3}
    fault = functools.partial(_kill_while_recovering, rank=rank, point=point)
    codes = run_ranks(tmp_path, spec, world_size=3, before=fault, recovers=True)
    assert codes == [0] * 3
    assert_equal_end(tmp_path, uninterrupted(3, (("shard", 3),), False))


def test_auto_keeps_copies_from_the_first_step(
    tmp_path: Path, uninterrupted: Callable[..., Path]
) -> None:
    """The first copy is of the state at step 0, and the second is due after 16 steps."""
    spec = brief(tmp_path, 2, {"shard": 2})
    fault = functools.partial(kill, rank=1, point=FaultPoint.DATA_LOADED, step=STEP)
    codes = run_ranks(tmp_path, spec, world_size=2, before=fault, recovers=True)
    assert codes == [0, 0]
    assert replaced(tmp_path) == [1]
    assert_equal_end(tmp_path, uninterrupted(2, (("shard", 2),), False))


def test_copies_are_not_older_than_the_newest_checkpoint(
    tmp_path: Path, uninterrupted: Callable[..., Path]
) -> None:
    rule = {"every_steps": 5, "in_memory": {"every_steps": 100}}
    spec = brief(tmp_path, 2, {"shard": 2}) | {"checkpoint": rule}
    fault = functools.partial(kill, rank=1, point=FaultPoint.DATA_LOADED, step=STEP)
    assert run_ranks(tmp_path, spec, world_size=2, before=fault, recovers=True) == [0, 0]
    assert replaced(tmp_path) == [1]
    steps = [body["step"] for body in frames(tmp_path, kind="metrics") if LOSS in body["values"]]
    assert steps.count(5) == 1
    assert steps.count(6) == 2
    assert_equal_end(tmp_path, uninterrupted(2, (("shard", 2),), False))
    copied = [
        body["values"] for body in frames(tmp_path, kind="metrics") if COPIED in body["values"]
    ]
    assert copied
    assert all(values["perf/copy_bytes"] > 0 for values in copied)


LOSS, COPIED = "train/loss", "perf/copy_time_s"


def _note_reports(task: RankTask, folder: Path) -> None:
    """Rank 1 completes the copy of step 3 only when rank 0 is in step 6. Note the step in which
    rank 0 reports each copy."""
    peer_memory.REPORT_S = 0.0
    if task.rank == 1:
        arm(FaultPoint.PEER_COPY_SENT, functools.partial(_await, folder / "in-step-6"), at_step=3)
    if task.rank == 0:
        arm(FaultPoint.STEP_BEGINS, (folder / "in-step-6").touch, at_step=6)
        arm(FaultPoint.STEP_ENDS, functools.partial(_await_copy, folder), at_step=6)


def _await(path: Path) -> None:
    while not path.exists():
        time.sleep(0.001)


SENDING: list[PeerMemory] = []


def _await_copy(folder: Path) -> None:
    """Let the copy of step 3 be complete in step 6."""
    (memory,) = SENDING
    assert memory._sending is not None
    memory._sending.result(60.0)


def _found_by_rank_0(task: RankTask, folder: Path) -> None:
    _note_reports(task, folder)
    begun = PeerMemory.begin_copy

    def noted(self: PeerMemory, *given: Any) -> None:
        SENDING[:] = [self]
        begun(self, *given)

    PeerMemory.begin_copy = noted  # type: ignore[method-assign]


def test_a_copy_is_reported_when_it_is_complete_on_all_ranks(tmp_path: Path) -> None:
    spec = brief(tmp_path, 2, {"shard": 2}) | {"checkpoint": EVERY_3}
    before = functools.partial(_found_by_rank_0, folder=tmp_path)
    assert run_ranks(tmp_path, spec, world_size=2, before=before) == [0, 0]
    last_step, seen = 0, {}
    for frame in frames(tmp_path):
        if frame["kind"] == "metrics" and LOSS in frame["body"]["values"]:
            last_step = frame["body"]["step"]
        elif frame["kind"] == "memory_copies":
            seen[frame["body"]["step"]] = last_step
            sizes = frame["body"]["state_bytes"], frame["body"]["worker_bytes"]
    assert seen[3] >= 5
    job = JobSpec.model_validate(spec)
    planned = copies_bytes(job, shapes_of(job))
    assert planned <= sizes[1] <= 1.2 * planned  # the model is small, and names have a size, too
    assert sizes[0] == sizes[1] / 2  # each of two slots contains the shares of both ranks


def test_ranks_rarely_ask_each_other_while_a_copy_is_being_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    document = {
        "recipe": "image_classification",
        "resources": {"num_workers": 2},
        "parallel": {"shard": 2},
        "checkpoint": {"in_memory": {"every_steps": 3}},
    }
    asked: list[int] = []
    built: list[int] = []
    monkeypatch.setattr(
        peer_memory, "everyones", lambda number, *_: asked.append(number) or [number]
    )
    memory = PeerMemory(JobSpec.model_validate(document), lambda: built.append(1) or {})
    memory._is_on, memory._sending, memory._due = True, Future(), 1
    for step in range(1, 1001):
        memory.begin_copy(Progress.at(step), ())
    assert set(asked) == {peer_memory.BUSY}
    assert len(asked) < 40
    assert not built


def _has_little_memory(task: RankTask) -> None:
    if task.rank == 1:
        peer_memory.available_memory = lambda: 1 << 10  # type: ignore[assignment,misc]


def test_auto_keeps_no_copies_that_do_not_fit(
    tmp_path: Path, uninterrupted: Callable[..., Path]
) -> None:
    spec = brief(tmp_path, 2, {"shard": 2})
    assert run_ranks(tmp_path, spec, world_size=2, before=_has_little_memory) == [0, 0]
    (event,) = frames(tmp_path, kind="no_memory_copies")
    assert re.search(
        r"need \d+\.\d [KM]iB on the node of rank 1, more than 50% of the 1\.0 KiB that are "
        r"available there\. No copies are kept",
        event["message"],
    )
    assert frames(tmp_path, kind="memory_copies") == []
    assert_equal_end(tmp_path, uninterrupted(2, (("shard", 2),), False))


def test_explicit_copies_that_do_not_fit_end_the_job(tmp_path: Path) -> None:
    spec = brief(tmp_path, 2, {"shard": 2}) | {"checkpoint": EVERY_3}
    codes = run_ranks(tmp_path, spec, world_size=2, before=_has_little_memory)
    assert codes == [1, 1]
    (error,) = frames(tmp_path, rank=0, kind="error")
    assert error["cause"] == Cause.CANNOT_RUN
    assert re.search(
        r"need \d+\.\d [KM]iB on the node of rank 1, more than 50% of the 1\.0 KiB that are "
        r"available there: set checkpoint\.in_memory to off$",
        error["message"],
    )


@pytest.mark.parametrize("available", [200, 300, 400, 500, 600, 700, 799])
def test_the_number_of_copies_that_would_fit_is_proposed(
    monkeypatch: pytest.MonkeyPatch, available: int
) -> None:
    """Two slots with the own share and three copies of 50 bytes on each of two ranks of a node."""
    document = {
        "recipe": "image_classification",
        "resources": {"num_workers": 4},
        "parallel": {"shard": 4},
        "checkpoint": {"in_memory": {"every_steps": 3, "copies": 3}},
    }
    monkeypatch.setattr(peer_memory, "available_memory", lambda: 2 * available)
    monkeypatch.setattr(peer_memory, "everyones", lambda number, *_: [number])
    state = {"weights": torch.zeros(50, dtype=torch.uint8)}
    memory = PeerMemory(JobSpec.model_validate(document), lambda: state)
    memory._is_on, memory._num_on_node = True, 2
    with pytest.raises(HostMemoryError) as raised:
        memory.begin_copy(Progress.at(1), ())
    fitting = [copies for copies in (1, 2) if 2 * (1 + copies) * 50 * 2 <= 0.5 * 2 * available]
    last = f"in_memory.copies to {max(fitting)}" if fitting else "in_memory to off"
    assert str(raised.value).endswith(f"set checkpoint.{last}")


def _killed_while_short_of_memory(task: RankTask) -> None:
    _has_little_memory(task)
    kill(task, rank=1, point=FaultPoint.DATA_LOADED, step=STEP)


def test_a_rank_without_copies_restarts_the_job_and_does_not_hang(tmp_path: Path) -> None:
    spec = brief(tmp_path, 2, {"shard": 2})
    before = _killed_while_short_of_memory
    assert run_ranks(tmp_path, spec, world_size=2, before=before, recovers=True) == [1, 1]
    (error,) = frames(tmp_path, rank=0, kind="error")
    assert error["cause"] == Cause.WORKER_LOST
