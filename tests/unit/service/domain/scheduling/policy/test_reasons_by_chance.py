"""Every sentence in a plan is true, as verified by a slow check on random snapshots."""

from __future__ import annotations

import random

import pytest

from service.domain.scheduling.policy import plan
from tests.marks import FRESH_SEEDS, soak
from tests.unit.service.domain.scheduling.policy.reasons import leaving as leaving
from tests.unit.service.domain.scheduling.policy.reasons import limits as limits
from tests.unit.service.domain.scheduling.policy.reasons import never as never
from tests.unit.service.domain.scheduling.policy.reasons import waiting as waiting
from tests.unit.service.domain.scheduling.policy.reasons.claims import Claims
from tests.unit.service.domain.scheduling.policy.reasons.drawn import Drawn
from tests.unit.service.domain.scheduling.snapshots import NOW


def check(seed: int) -> None:
    snapshot = Drawn(seed).snapshot
    errors: list[Exception] = []
    decisions = plan(snapshot, NOW, on_error=lambda _, error: errors.append(error))
    assert not errors, (seed, errors)
    Claims(snapshot, NOW, decisions).check()


@pytest.mark.parametrize("number", [1500, soak(20_000)])
def test_each_sentence_of_a_plan_is_true(number: int) -> None:
    first = random.randrange(10**9) if FRESH_SEEDS else 0
    for seed in range(first, first + number):
        try:
            check(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
