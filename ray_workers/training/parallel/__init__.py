"""The strategies by which the ranks of a group train one model together: a class for each."""

from __future__ import annotations

from ray_workers.training.parallel.data_parallel.ddp import Ddp
from ray_workers.training.parallel.data_parallel.load_balance import LoadBalancedDdp
from ray_workers.training.parallel.data_parallel.local_sgd import LocalSgd
from ray_workers.training.parallel.data_parallel.zero1 import Zero1
from ray_workers.training.parallel.model_parallel.model_parallel import ModelParallel
from ray_workers.training.parallel.strategy import DataPart, Strategy, StrategyContext

__all__ = ["DataPart", "Strategy", "StrategyContext", "strategy_of"]


def strategy_of(given: StrategyContext) -> Strategy:
    """The one that the job document asks for."""
    if given.spec.is_divided:
        return Zero1(given) if given.spec.parallel.zero == 1 else ModelParallel(given)
    if given.spec.takes_local_steps:
        return LocalSgd(given)
    return LoadBalancedDdp(given) if given.spec.parallel.balance == "auto" else Ddp(given)
