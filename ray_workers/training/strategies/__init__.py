"""How the ranks of a group train one model together: a class for each way."""

from __future__ import annotations

from ray_workers.training.strategies.balance import Balanced
from ray_workers.training.strategies.base import DataPart, Given, Strategy
from ray_workers.training.strategies.divided import Divided
from ray_workers.training.strategies.localsteps import LocalSteps
from ray_workers.training.strategies.replicated import Replicated
from ray_workers.training.strategies.zero import ZeroOne

__all__ = ["DataPart", "Given", "Strategy", "strategy_of"]


def strategy_of(given: Given) -> Strategy:
    """The one that the job document asks for."""
    if given.spec.is_divided:
        return ZeroOne(given) if given.spec.parallel.zero == 1 else Divided(given)
    if given.spec.takes_local_steps:
        return LocalSteps(given)
    return Balanced(given) if given.spec.parallel.balance == "auto" else Replicated(given)
