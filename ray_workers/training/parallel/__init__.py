"""The strategies by which the ranks of a group train one model together."""

from __future__ import annotations

from typing import assert_never

from dray.spec import AllReduce, AutoSync, Gossip, ParameterServer
from ray_workers.training.parallel.data_parallel.ddp import deterministic_ddp, plain_ddp
from ray_workers.training.parallel.data_parallel.load_balance import load_balanced_ddp
from ray_workers.training.parallel.data_parallel.local_sgd import local_sgd
from ray_workers.training.parallel.data_parallel.zero1 import zero1
from ray_workers.training.parallel.federated.aggregation.privacy import rounds_of
from ray_workers.training.parallel.federated.outside.strategy import OutsideStrategy
from ray_workers.training.parallel.federated.silos.aggregator import SiloAggregator
from ray_workers.training.parallel.federated.simulation.strategy import FederatedStrategy
from ray_workers.training.parallel.gossip.asynchronous import asynchronous_gossip
from ray_workers.training.parallel.gossip.synchronous import synchronous_gossip
from ray_workers.training.parallel.model_parallel.model_parallel import sharded
from ray_workers.training.parallel.parameter_server.strategy import ParameterServerWorker
from ray_workers.training.parallel.strategy import DataPart, Strategy, StrategyContext

__all__ = [
    "DataPart",
    "FederatedStrategy",
    "Strategy",
    "StrategyContext",
    "rounds_of",
    "strategy_of",
]


def strategy_of(given: StrategyContext) -> Strategy:
    """The one that the job document asks for."""
    spec = given.spec
    if spec.is_divided:
        return zero1(given) if spec.parallel.zero == 1 else sharded(given)
    if spec.federated is not None:
        if spec.federated.silos is not None:
            return SiloAggregator(given)
        is_outside = spec.federated.http is not None
        return OutsideStrategy(given) if is_outside else FederatedStrategy(given)
    match spec.sync:
        case None | AllReduce() | AutoSync():  # of a document that no service has resolved
            return _all_reduce(given)
        case Gossip():
            is_asynchronous = spec.sync.mode == "ad_psgd"
            return asynchronous_gossip(given) if is_asynchronous else synchronous_gossip(given)
        case ParameterServer():
            return ParameterServerWorker(given)
        case unknown:
            assert_never(unknown)


def _all_reduce(given: StrategyContext) -> Strategy:
    spec = given.spec
    if spec.takes_local_steps:
        return local_sgd(given)
    if spec.parallel.balance == "auto":
        return load_balanced_ddp(given)
    return deterministic_ddp(given) if spec.is_exact else plain_ddp(given)
