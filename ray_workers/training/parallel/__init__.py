"""Strategies by which the ranks of a group train one model together."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from dray.spec import AllReduce, AutoSync, Federated, Gossip, JobSpec, ParameterServer
from ray_workers.training.core.schedule import Calendar
from ray_workers.training.core.workload import Workload
from ray_workers.training.data.sampler import steps_per_epoch
from ray_workers.training.parallel.data_parallel.ddp import Ddp
from ray_workers.training.parallel.data_parallel.deterministic_ddp import DeterministicDdp
from ray_workers.training.parallel.data_parallel.load_balance import LoadBalancedDdp
from ray_workers.training.parallel.data_parallel.local_sgd import LocalSgd
from ray_workers.training.parallel.data_parallel.zero1 import Zero1
from ray_workers.training.parallel.federated.aggregation.privacy import rounds_of
from ray_workers.training.parallel.federated.outside.strategy import OutsideStrategy
from ray_workers.training.parallel.federated.silos.aggregator import SiloAggregator
from ray_workers.training.parallel.federated.simulation.strategy import FederatedStrategy
from ray_workers.training.parallel.gossip.asynchronous import AsynchronousGossip
from ray_workers.training.parallel.gossip.synchronous import SynchronousGossip
from ray_workers.training.parallel.model_parallel.model_parallel import Sharded
from ray_workers.training.parallel.parameter_server.strategy import ParameterServerWorker
from ray_workers.training.parallel.strategy import DataPart, Strategy, StrategyContext

__all__ = ["DataPart", "Strategy", "StrategyContext", "calendar_of", "strategy_of"]


def calendar_of(spec: JobSpec, workload: Workload) -> Calendar:
    """Return the calendar of the job. The steps of the calendar are optimizer steps or, in a
    federated job, rounds."""
    if spec.federated is not None:
        rounds = rounds_of(spec.federated)
        return Calendar.of_rounds(rounds, spec.federated.evaluate_every, spec.checkpoint)
    num_steps = steps_per_epoch(len(workload.train), spec.train.samples_per_step)
    return Calendar.of(spec.train, spec.checkpoint, num_steps)


def strategy_of(given: StrategyContext) -> Strategy:
    """Create the strategy that the job document specifies."""
    return _class_of(given.spec)(given)


def _class_of(spec: JobSpec) -> Callable[[StrategyContext], Strategy]:
    if spec.is_divided:
        return Zero1 if spec.parallel.zero == 1 else Sharded
    if spec.federated is not None:
        return _of_federated(spec.federated)
    match spec.sync:
        case (
            None | AllReduce() | AutoSync()
        ):  # AutoSync: no service has chosen the `sync` of this document
            return _all_reduce(spec)
        case Gossip():
            return AsynchronousGossip if spec.sync.mode == "ad_psgd" else SynchronousGossip
        case ParameterServer():
            return ParameterServerWorker
        case unknown:
            assert_never(unknown)


def _of_federated(options: Federated) -> Callable[[StrategyContext], Strategy]:
    if options.silos is not None:
        return SiloAggregator
    return FederatedStrategy if options.http is None else OutsideStrategy


def _all_reduce(spec: JobSpec) -> Callable[[StrategyContext], Strategy]:
    if spec.takes_local_steps:
        return LocalSgd
    if spec.parallel.balance == "auto":
        return LoadBalancedDdp
    return DeterministicDdp if spec.is_exact else Ddp
