"""The values of gossip copies when ranks die, and when their replacements join."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_workers.shared import heartbeat
from ray_workers.shared.contracts import RankTask
from ray_workers.training.checkpoint import checkpoint_files
from ray_workers.training.core.faultpoints import FaultPoint, arm, arm_with
from ray_workers.training.elastic import state_transfer
from ray_workers.training.loop.trainer import Trainer
from ray_workers.training.parallel.gossip.copies import GossipReplicas
from ray_workers.training.parallel.gossip.mixing import FlatCopy, Mixing
from tests.marks import SOAK, soak
from tests.unit.training.jobs import series, weights
from tests.unit.training.parallel.gossip.test_lifecycle import HUB
from tests.unit.training.parallel.gossip.test_synchronous import (
    LR,
    MOMENTUM,
    THREE,
    UNEVEN,
    MatrixForm,
    job,
    three,
)
from tests.unit.training.ranks import DEADLINE_S, checkpoint_refs, replaced, run_ranks

third, half = 1 / 3, 1 / 2
Record = dict[str, Any]

WITHOUT_HUB = torch.full((3, 3), third)
"""The three ranks around the hub, connected in a ring."""
HUB_IS_LAST = torch.tensor(
    [[0.75, 0, 0, 0.25], [0, 0.75, 0, 0.25], [0, 0, 0.75, 0.25], [0.25, 0.25, 0.25, 0.25]]
)
UNEVEN_WITHOUT_1 = torch.tensor([[half, third, half], [half, third, 0], [0, third, half]])
UNEVEN_1_IS_LAST = torch.tensor(
    [[third, third, half, 0], [third, third, 0, half], [0, third, half, 0], [third, 0, 0, half]]
)
ALONE = torch.ones(1, 1)


class Tape:
    """Makes each rank record its state when a group begins, and after each step. Some ranks die
    once, and the others wait in later steps until these are replaced."""

    def __init__(
        self, folder: Path, dying: Mapping[int, FaultPoint], waits: Mapping[int, int]
    ) -> None:
        """waits: for each step, the round in which the group is complete again."""
        self._folder, self._dying, self._waits = folder, dying, waits

    def __call__(self, task: RankTask) -> None:
        self._numbers = itertools.count()
        arm_with(FaultPoint.RESTORED, functools.partial(self._note, task, is_start=True))
        arm_with(FaultPoint.STEP_ENDS, functools.partial(self._note, task, is_start=False))
        if task.incarnation:
            return
        point = self._dying.get(task.rank)
        if point is not None:
            arm(point, die, at_step=5)
            return
        for step, number in self._waits.items():
            wait = functools.partial(await_whole, task, number)
            arm(FaultPoint.STEP_BEGINS, wait, at_step=step)

    def _note(self, task: RankTask, trainer: Trainer, *, is_start: bool) -> None:
        weights = [p.detach() for p in trainer.workload.model.parameters()]
        update: Any = trainer.strategy.update
        momenta = (update._optimizer.state[p].get("momentum_buffer") for p in update._names)
        strategy: Any = trainer.strategy
        record = {
            "round": trainer.assignment.generation,
            "rank": trainer.rank,
            "step": trainer.progress.step + (not is_start),
            "weights": torch.cat([w.flatten() for w in weights]),
            "velocity": torch.cat(
                [
                    (torch.zeros_like(w) if m is None else m).flatten()
                    for w, m in zip(weights, momenta, strict=True)
                ]
            ),
            "push_weight": strategy.push_weight,
        }
        number = next(self._numbers)
        name = f"{task.rank}-{task.incarnation}-{number:03d}-{'start' if is_start else 'step'}.pt"
        torch.save(record, self._folder / f".{name}")
        (self._folder / f".{name}").rename(self._folder / name)

    def records(self, kind: str, round_number: int) -> list[tuple[int, Record]]:
        """Return (the worker, its state), ordered by rank in the round, and by time."""
        found = []
        for path in sorted(self._folder.glob(f"[!.]*-{kind}.pt")):
            record = torch.load(path)
            if record["round"] == round_number:
                found.append((int(path.name.split("-")[0]), record))
        return sorted(found, key=lambda one: one[1]["rank"])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def await_whole(task: RankTask, number: int) -> None:
    """Wait until a round of all ranks is announced, with this number or a later one."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        with contextlib.suppress(FileNotFoundError):  # none is announced before a rank has died
            assignment = heartbeat.announced(task.page_prefix)
            if assignment.generation >= number and assignment.world_size == task.world_size:
                return
        assert time.monotonic() < deadline, "no rank was added"
        time.sleep(0.005)


def check_round(
    tape: Tape, form: MatrixForm, round_number: int, mixed_by: Tensor, *, pushes: bool
) -> int:
    """Compare the steps of the round with the matrix form, and return the number of compared
    steps."""
    start = [record for _, record in tape.records("start", round_number)]
    assert len(start) == len(mixed_by)
    form.world_size = len(start)
    rows = torch.stack([one["weights"] for one in start])
    velocity = torch.stack([one["velocity"] for one in start])
    pushed = torch.tensor([[one["push_weight"]] for one in start])
    rows = rows * pushed
    done = {(r["rank"], r["step"]): r for _, r in tape.records("step", round_number)}
    for step in range(start[0]["step"] + 1, max(step for _, step in done) + 1):
        if pushes:
            rows, pushed = mixed_by @ rows, mixed_by @ pushed
            velocity = MOMENTUM * velocity + form.gradients(rows / pushed, step)
            rows = rows - LR * velocity
        else:
            velocity = MOMENTUM * velocity + form.gradients(rows, step)
            rows = mixed_by @ rows - LR * velocity
        for rank in range(len(rows)):
            if (rank, step) in done:
                found = done[rank, step]
                assert found["push_weight"] == pytest.approx(pushed[rank].item(), abs=1e-5)
                expected = rows[rank] / pushed[rank]
                torch.testing.assert_close(found["weights"], expected, rtol=0, atol=2e-6)
    return len(done)


def check_change(tape: Tape, number: int, *, pushes: bool) -> None:
    """Check that the round starts with the unchanged copies of the previous round, and with push
    weights in the same proportions that sum to the number of ranks; a new rank has the copy of the
    furthest rank."""
    before = {**dict(tape.records("start", number - 1)), **dict(_by_time(tape, number - 1))}
    start = tape.records("start", number)
    step = start[0][1]["step"]
    assert {record["step"] for _, record in start} == {step}
    old = [(worker_index, record) for worker_index, record in start if worker_index in before]
    new = [record for worker_index, record in start if worker_index not in before]
    assert [worker_index for worker_index, _ in start[: len(old)]] == [
        worker_index for worker_index, _ in old
    ], "they come last"
    factors = []
    for worker_index, record in old:
        assert torch.equal(record["weights"], before[worker_index]["weights"])
        assert torch.equal(record["velocity"], before[worker_index]["velocity"])
        factors.append(record["push_weight"] / before[worker_index]["push_weight"])
    furthest = next(record for worker_index, record in old if before[worker_index]["step"] == step)
    for record in new:
        assert torch.equal(record["weights"], furthest["weights"])
        assert torch.equal(record["velocity"], furthest["velocity"])
        factors.append(record["push_weight"])
    assert factors == pytest.approx([factors[0]] * len(start))
    assert sum(record["push_weight"] for _, record in start) == pytest.approx(len(start))
    assert pushes or factors[0] == 1.0


def _by_time(tape: Tape, round_number: int) -> list[tuple[int, Record]]:
    steps = tape.records("step", round_number)
    return sorted(steps, key=lambda one: one[1]["step"])


AT_OPTIMIZER, AT_EXCHANGE = FaultPoint.BEFORE_OPTIMIZER, FaultPoint.BEFORE_EXCHANGE


@SOAK
@pytest.mark.parametrize(
    ("sync", "dying", "mixed_by"),
    [
        soak({"edges": HUB}, {1: AT_OPTIMIZER}, [WITHOUT_HUB, HUB_IS_LAST]),
        (
            {"mode": "sgp", "edges": UNEVEN},
            {1: AT_EXCHANGE},
            [UNEVEN_WITHOUT_1, UNEVEN_1_IS_LAST],
        ),
    ],
    ids=["d_psgd", "sgp"],
)
def test_after_a_death_and_after_the_join_steps_are_those_of_the_matrix_form(
    tmp_path: Path, sync: dict[str, Any], dying: dict[int, FaultPoint], mixed_by: list[Tensor]
) -> None:
    spec = job(4, {"graph": "custom", **sync})
    tape = Tape(tmp_path, dying, {12: 2})
    assert run_ranks(tmp_path, spec, world_size=4, before=tape, goes_on=True) == [0] * 4
    form, pushes = MatrixForm(spec, 4), "mode" in sync
    for number, matrix in enumerate(mixed_by, start=1):
        assert check_round(tape, form, number, matrix, pushes=pushes) >= len(matrix)
        check_change(tape, number, pushes=pushes)


@SOAK
def test_two_of_three_die_at_once_and_the_last_one_steps_as_if_it_had_always_been_alone(
    tmp_path: Path,
) -> None:
    spec = job(3, {"graph": "custom", "mode": "sgp", "edges": THREE})
    tape = Tape(tmp_path, {1: AT_EXCHANGE, 2: AT_EXCHANGE}, {12: 1})
    assert run_ranks(tmp_path, spec, world_size=3, before=tape, goes_on=True) == [0] * 3
    form = MatrixForm(spec, 3)
    rounds = range(1, 5)
    alone = [n for n in rounds if len(tape.records("start", n)) == 1 and tape.records("step", n)]
    assert alone
    check_round(tape, form, alone[0], ALONE, pushes=True)
    whole = max(n for n in rounds if len(tape.records("start", n)) == 3)
    worker_indices = [
        worker_index for worker_index, _ in tape.records("start", whole)
    ]  # each keeps its position
    check_round(tape, form, whole, three(1)[worker_indices][:, worker_indices], pushes=True)
    copies = checkpoint_files.load(checkpoint_refs(tmp_path)[0]).state["gossip"]["copies"]
    assert sum(copy["push_weight"] for copy in copies) == pytest.approx(3.0)


def test_a_rank_that_is_left_alone_has_a_push_weight_of_one() -> None:
    mixing = Mixing(FlatCopy([torch.ones(4)]), pushes=True)
    mixing.push_weight = 0.25
    mixing.make_whole(1)
    assert mixing.push_weight == 1.0, "its learning rate is divided by it"


def test_a_copy_that_comes_late_is_not_mixed_in_by_the_next_group() -> None:
    mixing = Mixing(FlatCopy([torch.ones(4)]), pushes=False)
    mixing.form(None, 0, next_step=1)
    late = mixing.own
    mixing.form(None, 0, next_step=2)
    assert mixing.own[0].data_ptr() != late[0].data_ptr()


@pytest.mark.parametrize("sync", [soak({}), soak({"mode": "ad_psgd"})], ids=["d_psgd", "ad_psgd"])
def test_a_rank_that_dies_before_the_last_average_leaves_the_mean_of_those_that_are_there(
    tmp_path: Path, sync: dict[str, Any]
) -> None:
    spec = job(4, {"graph": "ring", **sync})
    before = functools.partial(_die_at_the_end, folder=tmp_path)
    assert run_ranks(tmp_path, spec, world_size=4, before=before, goes_on=True) == [0] * 4
    assert replaced(tmp_path) == [1]
    copies = [torch.load(tmp_path / f"copy-{rank}.pt") for rank in range(4)]
    newcomer, furthest = copies[1], copies[0]
    assert torch.equal(newcomer, furthest)
    mean = torch.stack(copies).mean(dim=0)
    stored = MatrixForm(spec, 1).named(mean)
    for name, weights_ in weights(tmp_path).items():
        torch.testing.assert_close(weights_, stored[name], rtol=0, atol=1e-6)
    assert (copies[2] - mean).norm() > 0.001


def _die_at_the_end(task: RankTask, folder: Path) -> None:
    if task.rank == 1 and not task.incarnation:
        arm(FaultPoint.BEFORE_RESULT, die)
        return
    arm_with(FaultPoint.RESTORED, functools.partial(_keep_copy, folder / f"copy-{task.rank}.pt"))
    if not task.incarnation:
        wait = functools.partial(await_whole, task, 2)
        arm(FaultPoint.BEFORE_RESULT, wait, at_step=16)


def _keep_copy(path: Path, trainer: Trainer) -> None:
    parts = [p.detach().flatten() for p in trainer.workload.model.parameters()]
    torch.save(torch.cat(parts), path)


def test_a_first_group_that_breaks_leaves_the_first_weights_as_they_are(tmp_path: Path) -> None:
    """This tests ad_psgd, in which the copy that is kept in addition to the model is still
    empty."""
    spec = job(2, {"mode": "ad_psgd"})
    before = functools.partial(_die_in_the_first_group, folder=tmp_path)
    assert run_ranks(tmp_path, spec, world_size=2, before=before, goes_on=True) == [0, 0]
    assert replaced(tmp_path) == [1]
    assert torch.equal(torch.load(tmp_path / "first.pt"), MatrixForm(spec, 1).first[0])


def _die_in_the_first_group(task: RankTask, folder: Path) -> None:
    if task.rank == 0:
        arm_with(FaultPoint.RESTORED, functools.partial(_keep_weights, folder / "first.pt"))
        arm(FaultPoint.STEP_BEGINS, functools.partial(await_whole, task, 2), at_step=5)
    elif not task.incarnation:
        arm(FaultPoint.GROUP_JOINED, die)


def _keep_weights(path: Path, trainer: Trainer) -> None:
    if not path.exists():
        parts = [p.detach().flatten() for p in trainer.workload.model.parameters()]
        torch.save(torch.cat(parts), path)


@SOAK
def test_a_newcomer_whose_group_breaks_at_once_keeps_the_copy_that_it_was_given(
    tmp_path: Path,
) -> None:
    spec = job(3, {"mode": "ad_psgd", "graph": "complete"})
    tape = Tape(tmp_path, {1: FaultPoint.STEP_BEGINS}, {12: 2, 14: 4})
    before = functools.partial(_die_beside_a_newcomer, tape=tape)
    codes = run_ranks(tmp_path, spec, world_size=3, before=before, goes_on=True)
    assert codes == [0] * 3
    assert replaced(tmp_path) == [1, 2]
    (_, one), (worker_index, newcomer) = tape.records("start", 3)
    assert worker_index == 1
    apart = (newcomer["weights"] - one["weights"]).norm() / one["weights"].norm()
    assert apart < 0.2


def _die_beside_a_newcomer(task: RankTask, tape: Tape) -> None:
    tape(task)
    if task.rank == 2 and not task.incarnation:
        prepare = GossipReplicas.prepare

        def prepare_or_die(strategy: GossipReplicas, feed: Any, step: int) -> None:
            if step and strategy.world_size == 3:
                die()
            prepare(strategy, feed, step)

        GossipReplicas.prepare = prepare_or_die  # type: ignore[method-assign]


def test_a_checkpoint_is_not_missed_where_a_rank_dies_before_its_copy_has_been_fetched(
    tmp_path: Path,
) -> None:
    """Rank 0 then has the copy of rank 1, which must not continue as if the copy were saved."""
    spec = job(3, {"graph": "complete"}, epochs=2)
    run_ranks(tmp_path, spec, world_size=3, before=_die_before_it_sends, goes_on=True)
    assert replaced(tmp_path) == [2]
    assert {ref.step for ref in checkpoint_refs(tmp_path)} == {8, 16}
    assert set(series(tmp_path, "train/loss")) == set(range(1, 17))


def _die_before_it_sends(task: RankTask) -> None:
    if task.rank != 2:
        arm(FaultPoint.STEP_BEGINS, functools.partial(await_whole, task, 2), at_step=12)
    elif not task.incarnation:
        gather = state_transfer.gather

        def gather_late(*given: Any) -> Any:
            time.sleep(0.3)  # the others have as much time as they need
            die()
            return gather(*given)

        state_transfer.gather = gather_late
