"""Runs a generated program with dray in several ways, and compares the results."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dray.train.prepared.exchange import GradientExchange
from ray_workers.shared.contracts import RankTask
from ray_workers.training.core.faultpoints import FaultPoint
from tests.fakes import pretend_gpu, pretend_nccl
from tests.generated.programs.drawing import NUM_BATCHES
from tests.generated.programs.references import run_all
from tests.generated.programs.script import (
    CHANGED_LATER,
    FROM_DRAY,
    FROM_REFERENCE,
    DrawnProgram,
)
from tests.unit.training.prepared.programs import Leash, assert_same
from tests.unit.training.ranks import checkpoint_refs, frames, run_in_group, run_ranks

State = list[dict[str, Any]]
BUFFERS = ("running_mean", "running_var", "num_batches_tracked", "calls")
REFUSED = {
    **dict.fromkeys(CHANGED_LATER, "after prepare()"),
    "own_resume": "ended before",
}
"""Features that dray can refuse, each with a word of the reason."""
ALONE_KNOWN = {"counts_itself", "own_resume", *CHANGED_LATER}
"""Features that make a program depend on something that prepare() does not know."""
CHANGES_MIDWAY = {"group_added", "thawed", *ALONE_KNOWN}
"""Features by which a later batch applies, or adds to, the gradients of earlier batches."""
ON_A_GPU = 6
"""Seeds that end with this also run on a pretended GPU, if the program allows it."""


def world_size_of(seed: int) -> int:
    return random.Random(f"ranks {seed}").choice((2, 2, 3))


class LosesResult:
    """Make a rank lose the result of an exchange, as if a connection broke after all had sent their
    parts, and make another rank die as soon as it has that result."""

    def __init__(self, dying: int, behind: int, number: int) -> None:
        self._dying, self._behind, self._number = dying, behind, number

    def __call__(self, task: RankTask) -> None:
        if task.incarnation or task.attempt > 1 or task.rank not in (self._dying, self._behind):
            return
        run, numbers = GradientExchange.run, itertools.count()

        def failing(*given: Any) -> list[Tensor]:
            result = run(*given)
            if next(numbers) == self._number:
                if task.rank == self._dying:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("Connection closed by peer")
            return result

        GradientExchange.run = failing  # type: ignore[method-assign]


class Checked:
    """One program, its folder, and how it is checked."""

    def __init__(
        self, program: DrawnProgram, home: Path, references: Mapping[int, Path] | None = None
    ) -> None:
        """references: folders of torch's states by number of ranks, if they were computed."""
        self.program, self.home = program, home
        self.world_size = world_size_of(program.seed)
        self._dice = random.Random(f"kills {program.seed}")
        folder = (references or {}).get(self.world_size, home / "references")
        if not references:
            run_in_group(_as_member, self.world_size, str(folder), program)
        self._references = folder / str(program.seed)

    def check(self) -> None:
        """Raise AssertionError if dray trains differently than torch, or differently after a
        kill."""
        codes = self._run("undisturbed")
        if any(codes):
            assert self._is_refused("undisturbed"), ("not refused", self._errors("undisturbed"))
            return
        undisturbed = self._state("undisturbed")
        if not self.program.is_noisy:
            close(undisturbed, self._reference(), self._tolerance)
        for number in range(2):
            self._check_kills(f"killed-{number}", self._kills(number + 1), undisturbed)
        if self.world_size > 2:
            self._check_lost_result(undisturbed)
        if self.program.seed % 2:
            self._check_as_it_is()
        elif self.program.is_alike_alone:
            self._check_other_sizes(undisturbed)
        if self.program.seed % 10 == ON_A_GPU and self.program.may_be_on_gpu:
            self._check_on_a_gpu(undisturbed)

    # What dray does.

    def _run(
        self,
        name: str,
        *,
        kills: Sequence[Sequence[int]] = (),
        imports: str = FROM_DRAY,
        every: int | None = None,
        world_size: int | None = None,
        device: str = "cpu",
        **how: Any,
    ) -> list[int | None]:
        folder = self.home / name
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "drawn.py"
        listed = [list(kill) for kill in kills]
        text = self.program.text(folder, imports, kills=listed, every=every, device=device)
        path.write_text(text)
        document = {"script": {"entrypoint": str(path)}, **how.pop("document", {})}
        size = world_size or self.world_size
        how |= {"world_size": size, "device": device, "ends_with_error": True}
        return run_ranks(folder, document, **how)

    def _state(self, name: str, ranks: Sequence[int] = ()) -> State:
        """Return the state at the end, which is the same on all ranks."""
        ranks = ranks or range(self.world_size)
        loaded: list[State] = [torch.load(self.home / name / f"state-{rank}.pt") for rank in ranks]
        states = [self._compared(state) for state in loaded]
        for state in states[1:]:
            assert_same(states[0], state)
        return states[0]

    def _compared(self, state: State) -> State:
        """Compare without buffers, which are different on each rank."""
        if "buffers_apart" not in self.program.features:
            return state
        return [without_buffers(one) for one in state]

    def _reference(self) -> State:
        """Use torch's DDP if it accepts the program and its ranks end alike, otherwise by hand."""
        ranks = range(self.world_size)
        paths = [self._references / f"ddp-{rank}.pt" for rank in ranks]
        if all(path.exists() for path in paths):
            states = [torch.load(path) for path in paths]
            if all(_alike(states[0], state) for state in states[1:]):
                return self._compared(states[0])
        by_hand: State = torch.load(self._references / "hand-0.pt")
        return self._compared(by_hand)

    @property
    def _tolerance(self) -> float:
        return 5e-2 if "bf16" in self.program.features else 1e-8

    def _check_lost_result(self, undisturbed: State) -> None:
        """A rank dies after an exchange that one of the others has completed, and one has not;
        later another rank dies."""
        dice = self._dice
        dying, behind = dice.sample(range(self.world_size), 2)
        before = LosesResult(dying, behind, dice.randint(1, 4))
        kills = [kill for kill in self._kills(1) if kill[2] > 2]
        self._check_kills("lost-result", kills, undisturbed, before)

    def _check_kills(
        self,
        name: str,
        kills: Sequence[Sequence[int]],
        undisturbed: State,
        before: LosesResult | None = None,
    ) -> None:
        every = self._dice.choice((None, 2))
        codes = self._run(name, kills=kills, every=every, recovers=True, before=before)
        if any(codes):
            if "own_resume" in self.program.features and self._is_refused(name):
                return
            assert before or not self._recovers_from(kills), (
                "did not go on in place",
                self._errors(name),
            )
            self._went_back(name)
            refs = checkpoint_refs(self.home / name)
            if not refs and "own_checkpoint" in self.program.features:
                return  # it continues from its own, in another order
            codes = self._run(
                name, kills=kills, every=every, recovers=True, attempt=2, resume_from=refs
            )
            if self.program.features & {"counts_itself"}:
                if any(codes):  # the count starts anew, so the second attempt can differ or end
                    self._went_back(name, attempt=2)
                return
            assert codes == [0] * self.world_size, ("the second attempt failed", kills)
        try:
            assert_same(self._state(name), undisturbed)
        except AssertionError as error:
            raise AssertionError(f"other bits after the kills {kills}, every={every}") from error

    def _kills(self, number: int) -> list[list[int]]:
        """Lose one or two ranks, possibly a rank that was lost before."""
        dice = self._dice
        first, second = dice.sample(range(self.world_size), 2)
        incarnation = 0
        if dice.random() < 0.3:
            second, incarnation = first, 1
        chosen = [(first, 0), (second, incarnation)][:number]
        points = range(self.program.num_points)
        places = sorted(dice.randrange(NUM_BATCHES) for _ in chosen)
        return [
            [*one, place, dice.choice(points)] for one, place in zip(chosen, places, strict=True)
        ]

    def _recovers_from(self, kills: Sequence[Sequence[int]]) -> bool:
        """Whether the ranks are sure to continue in place: a single loss, once they know from
        earlier batches what must be kept with each batch."""
        features = self.program.features
        learnt = 4 if features & {"break", "continue"} else 2
        is_early = any(place < learnt for _, _, place, _ in kills)
        return len(kills) == 1 and not is_early and not features & CHANGES_MIDWAY

    def _errors(self, name: str, attempt: int = 1) -> list[Any]:
        ranks = range(self.world_size)
        folder = self.home / name
        return [
            error
            for rank in ranks
            for error in frames(folder, rank=rank, attempt=attempt, kind="error")
        ]

    def _went_back(self, name: str, attempt: int = 1) -> None:
        """Check that each failed rank blamed its error on the loss of a peer."""
        errors = self._errors(name, attempt)
        assert errors, "ranks ended without a word"
        assert {error["cause"] for error in errors} == {"worker_lost"}, errors
        assert any("checkpoint" in error["message"] for error in errors), errors
        if not self.program.features & ALONE_KNOWN:
            assert not any("different weights" in error["message"] for error in errors), errors

    def _is_refused(self, name: str) -> bool:
        words = [word for each, word in REFUSED.items() if each in self.program.features]
        messages = [error["message"] for error in self._errors(name)]
        return any(word in message for word in words for message in messages)

    def _check_as_it_is(self) -> None:
        """A script that does not call prepare() ends as under torchrun, bitwise."""
        if not (self._references / "ddp-0.pt").exists():
            return
        codes = self._run("as-it-is", imports=FROM_REFERENCE)
        assert codes == [0] * self.world_size, "as it is"
        ranks = range(self.world_size)
        states = [torch.load(self.home / "as-it-is" / f"state-{rank}.pt") for rank in ranks]
        for rank, state in enumerate(states):
            assert_same(state, torch.load(self._references / f"ddp-{rank}.pt"))
        are_alike = all(_alike(states[0], state) for state in states)
        if self.program.resumes_itself and are_alike:  # the checkpoint is rank 0's
            self._check_own_checkpoint(states)

    def _check_own_checkpoint(self, undisturbed: Sequence[State]) -> None:
        """A script that is killed resumes from a checkpoint that it saved under its own path."""
        kills = self._kills(1)
        how: dict[str, Any] = {"imports": FROM_REFERENCE, "kills": kills}
        if any(self._run("own-checkpoint", **how)):
            codes = self._run("own-checkpoint", attempt=2, **how)
            assert codes == [0] * self.world_size, ("from its own checkpoint", kills)
        for rank, expected in enumerate(undisturbed):
            found: State = torch.load(self.home / "own-checkpoint" / f"state-{rank}.pt")
            try:
                assert_same(self._compared(found), self._compared(expected))
            except AssertionError as error:
                raise AssertionError(f"from its own checkpoint, after {kills}") from error

    def _check_on_a_gpu(self, undisturbed: State) -> None:
        """On pretended GPUs, with the rules of NCCL, the result is the same as on a CPU."""
        codes = self._run("on-a-gpu", device=pretend_gpu.NAME, before=pretend_nccl.install)
        assert codes == [0] * self.world_size, self._errors("on-a-gpu")
        assert_same(self._state("on-a-gpu"), undisturbed)

    def _check_other_sizes(self, undisturbed: State) -> None:
        """Run alone, and with ranks that are lost and return while the others continue."""
        assert self._run("alone", world_size=1) == [0], "alone"
        close(self._state("alone", [0]), undisturbed, 1e-6)
        elastic = {"elastic": {"min_workers": 1}, "resources": {"num_workers": self.world_size}}
        kills = self._kills(1)
        codes = self._run("resized", kills=kills, goes_on=True, document=elastic)
        if any(code for code in codes if code != -signal.SIGKILL):
            self._went_back("resized")
            return
        # One that is killed came too late.
        ended = [rank for rank, code in enumerate(codes) if code == 0]
        assert len(ended) >= self.world_size - 1, ("resized", kills)
        resized = self._state("resized", ended)
        if "counts_itself" in self.program.features:
            return  # a batch that is repeated by fewer ranks is counted twice
        close(resized, undisturbed, 1e-6)
        self._check_growth(undisturbed)

    def _check_growth(self, undisturbed: State) -> None:
        """Run a group that gains a rank, which is ready at a random step."""
        dice = self._dice
        size = dice.randint(1, self.world_size)
        point = dice.choice((FaultPoint.BEFORE_EXCHANGE, FaultPoint.STEP_ENDS))
        leash = Leash(point, dice.randint(1, NUM_BATCHES))
        elastic = {"elastic": {"min_workers": 1}, "resources": {"num_workers": size + 1}}
        codes = self._run("grown", world_size=size, gains=True, before=leash, document=elastic)
        if any(code for code in codes if code != -signal.SIGKILL):
            self._went_back("grown")
            return
        ended = [rank for rank, code in enumerate(codes) if code == 0]
        assert len(ended) >= size, ("grown", codes)
        close(self._state("grown", ended), undisturbed, 1e-6)


def _as_member(rank: int, folder: str, program: DrawnProgram) -> None:
    run_all(rank, world_size_of(program.seed), folder, [program])


def _alike(one: State, other: State) -> bool:
    try:
        assert_same([without_buffers(each) for each in one], [without_buffers(e) for e in other])
    except AssertionError:
        return False
    return True


def without_buffers(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if not str(key).endswith(BUFFERS)}


def close(one: Any, other: Any, tolerance: float) -> None:
    """Equal up to rounding. A drawn program can diverge, also with torch."""
    if isinstance(one, Tensor):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            close(one[key], other[key], tolerance)
    elif isinstance(one, list | tuple):
        for a, b in zip(one, other, strict=True):
            close(a, b, tolerance)
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=max(tolerance, 1e-9), nan_ok=True)
