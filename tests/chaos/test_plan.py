"""Turns can be replayed from a seed, and every fault occurs."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from dray.spec import JobSpec
from tests.chaos import plan, report
from tests.chaos.__main__ import PLAYED, Played
from tests.chaos.faults import FAULTS, UNDISTURBED
from tests.chaos.kinds import kinds
from tests.chaos.plan import Strike, Turn
from tests.chaos.promises import of_batches, of_copies
from tests.chaos.turn import ENDED, FROM_CHECKPOINT, IN_PLACE, Blown, Result

GROUNDS = [plan.EMBEDDED, plan.CLUSTER]


@pytest.mark.parametrize("ground", GROUNDS)
def test_a_seed_replays_its_turns(ground: str) -> None:
    assert list(islice(plan.turns(7, ground), 20)) == list(islice(plan.turns(7, ground), 20))
    assert list(islice(plan.turns(7, ground), 20)) != list(islice(plan.turns(8, ground), 20))


@pytest.mark.parametrize("ground", GROUNDS)
def test_every_blow_comes_on_each_ground_whatever_the_seed(ground: str) -> None:
    for seed in range(10):
        turns = islice(plan.turns(seed, ground), plan.TURNS)
        dealt = {strike.blow for turn in turns for strike in turn.strikes}
        assert dealt >= set(plan.BLOWS[ground]) | set(plan.LAST)


def fits(blow: plan.Blow, ground: str) -> frozenset[str]:
    """Return the kinds that a blow fits, including blows whose processes the plan drew."""
    if blow in plan.BLOWS[ground] or blow in plan.LAST:
        return {**plan.BLOWS[ground], **plan.LAST}[blow]
    kinds = [name.removesuffix(" briefly").removesuffix(" stopped") for name in blow]
    return frozenset.intersection(*(plan.STOPPABLE[ground][kind] for kind in kinds))


@pytest.mark.parametrize("ground", GROUNDS)
def test_two_different_processes_are_stopped_together_and_some_briefly(ground: str) -> None:
    dealt = [s.blow for turn in islice(plan.turns(7, ground, "stopped"), 20) for s in turn.strikes]
    assert all("stopped" in " ".join(blow) for blow in dealt)
    pairs = {b for b in dealt if len(b) == 2 and all(name.endswith(" stopped") for name in b)}
    assert len(pairs) > 3
    assert all(one != other for one, other in pairs)
    assert any(blow[0].endswith(" stopped briefly") for blow in dealt)


@pytest.mark.parametrize("ground", GROUNDS)
def test_a_blow_strikes_only_whom_it_fits_and_in_order(ground: str, tmp_path: Path) -> None:
    known = kinds(tmp_path)
    assert {*plan.VICTIMS[ground], *plan.BYSTANDERS} <= set(known)
    for kind in known.values():
        JobSpec.model_validate(kind.spec)
    for turn in islice(plan.turns(7, ground), 50):
        assert {turn.victim, turn.bystander} <= set(known)
        assert all(turn.victim in fits(strike.blow, ground) for strike in turn.strikes)
        shares = [strike.at for strike in turn.strikes]
        assert shares == sorted(shares)
        assert 0 < shares[0] < shares[-1] < 1
        assert not any(strike.blow in plan.LAST for strike in turn.strikes[:-1])


def test_rank_actors_are_struck_only_where_the_ranks_have_actors(tmp_path: Path) -> None:
    """A blow that never finds its target would be skipped."""
    known = kinds(tmp_path)
    struck = 0
    for only in ("", "rank actor"):
        for turn in islice(plan.turns(7, plan.EMBEDDED, only), 100):
            kind = known[turn.victim]
            has_actors = kind.num_ranks > 1 or "elastic" in kind.spec
            blows = [
                strike.blow for strike in turn.strikes if "rank actor" in " ".join(strike.blow)
            ]
            assert has_actors or not blows, (turn.victim, blows)
            struck += len(blows)
    assert struck


def test_copies_whose_mean_is_not_the_model_are_a_breach() -> None:
    copies = [
        {"model": {"w": torch.full((2,), value)}, "push_weight": weight}
        for value, weight in ((1.0, 0.5), (3.0, 1.5))
    ]
    state: dict[str, Any] = {"model": {"w": torch.full((2,), 2.5)}, "gossip": {"copies": copies}}
    assert not list(of_copies(state))
    assert not list(of_copies({"model": {}}))
    copies[0]["push_weight"] = 1.0
    told = list(of_copies(state))
    assert len(told) == 2
    assert all("I13" in breach for breach in told)


def test_servers_that_have_not_all_batches_at_the_end_are_a_breach() -> None:
    whole: dict[str, Any] = {"servers": {"done": [(9, []), (9, [])]}}
    assert not list(of_batches(whole, 9, is_last=True))
    late: dict[str, Any] = {"servers": {"done": [(7, [9, 10]), (6, [8])]}}
    assert not list(of_batches(late, 9, is_last=False))
    assert len(list(of_batches(late, 9, is_last=True))) == 2
    assert len(list(of_batches(late, 8, is_last=False))) == 1


def test_every_fault_of_the_plan_can_be_injected() -> None:
    planned = {name for blows in [*plan.BLOWS.values(), plan.LAST] for b in blows for name in b}
    kinds = set().union(*plan.STOPPABLE.values())
    assert planned | {f"{kind} stopped briefly" for kind in kinds} == set(FAULTS)
    assert set(FAULTS) >= UNDISTURBED


def blown(blow: plan.Blow, how: str, recovery_s: float, steps_lost: int) -> Blown:
    return Blown(plan.EMBEDDED, blow, "two ranks", how, recovery_s, steps_lost)


def test_the_table_has_a_row_for_each_blow() -> None:
    turn = Turn(0, "two ranks", "short", (Strike(("rank killed",), 0.5),), 0)
    alone, together = ("rank killed",), ("rank killed", "service killed")
    seen = [
        *(blown(alone, IN_PLACE, seconds, 0) for seconds in (0.25, 0.5, 4.0)),
        blown(together, FROM_CHECKPOINT, 9.0, 12),
    ]
    results = [Result(turn, seen, num_jobs=2)]
    assert report.num_faults(results) == 5
    assert report.num_jobs(results) == 2
    _, _, first, second = report.table(results).splitlines()
    assert first == "| rank killed | 3 | 3 |  |  |  | 0.50 | 4.00 | 0 | 0 |"
    assert second == "| rank killed + service killed | 1 |  | 1 |  |  | 9.00 | 9.00 | 12 | 12 |"


def test_a_recorded_turn_is_read_back_as_it_was() -> None:
    result = Result(next(plan.turns(1, plan.EMBEDDED)), num_jobs=2, missed=[("rank killed",)])
    result.blown += [blown(("rank killed",), IN_PLACE, 0.25, 3), Blown("", ("a", "b"), "", ENDED)]
    played = Played(1, plan.EMBEDDED, "abc", 2.5, result)
    assert PLAYED.validate_json(json.dumps(asdict(played))) == played
