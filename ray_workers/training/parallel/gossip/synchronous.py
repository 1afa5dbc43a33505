"""Synchronous gossip: all ranks take the same steps, and in each step, a rank mixes its copy with
the copies of some other ranks.

D-PSGD (Lian et al. 2017, arXiv:1705.09056, algorithm 1): the gradient is computed for the previous
copy while the copies are exchanged, and the optimizer's step is then applied to the mixture. SGP
(Assran et al. 2019, arXiv:1811.10792, algorithm 1): the copies are mixed, and the gradient is then
computed for the mixture. In the paper, mixing is the last part of a step. The only difference is
that dray also mixes before the first step, which has no effect, because all copies are equal.

All ranks synchronize only for evaluations, checkpoints and the result.
"""

from __future__ import annotations

from torch import Tensor

from dray.spec import Gossip
from ray_workers.shared.heartbeat import HeartbeatPage
from ray_workers.training.data.prefetcher import Feed
from ray_workers.training.parallel.data_parallel.local_sgd import LocalGradientEngine
from ray_workers.training.parallel.gossip.copies import GossipReplicas, weights_of
from ray_workers.training.parallel.gossip.graphs import Graph, all_have_heard, graph_of
from ray_workers.training.parallel.gossip.mixing import Mixing
from ray_workers.training.parallel.gradients import EngineParts, Pass
from ray_workers.training.parallel.optim.optimizer_step import OptimizerStep
from ray_workers.training.parallel.strategy import StrategyContext


class MixingGradientEngine(LocalGradientEngine):
    """Computes the gradient of this rank's share, and averages this rank's weights with the weights
    of its neighbours. With `sgp`, the weights are averaged before the gradient is computed; with
    `d_psgd`, afterwards."""

    def __init__(self, parts: EngineParts, mixing: Mixing, page: HeartbeatPage) -> None:
        super().__init__(parts)
        self._mixing = mixing
        self._page = page

    def backward(self, work: Pass) -> None:
        self.keep_buffers()
        self._mixing.begin()
        if self._mixing.pushes:
            self._mix(work)
            self._page.compute()
        super().backward(work)
        if not self._mixing.pushes:
            self._mix(work)
        self._in_backward = False

    def _mix(self, work: Pass) -> None:
        work.before_exchange()
        self._mixing.finish()
        self._mixing.apply()  # after this, the step no longer depends on other ranks


class PushSumStep(OptimizerStep):
    """The optimizer step for weights that are a copy divided by its push weight. The gradient is
    applied to the copy (Assran et al. 2019, algorithm 1, line 3), so the change to the weights is
    divided by the push weight."""

    def __init__(
        self, given: StrategyContext, gradients: MixingGradientEngine, mixing: Mixing
    ) -> None:
        super().__init__(given.workload.model, gradients, given.spec.train, given.device)
        self._mixing = mixing

    def step(self, lr: float) -> Tensor:
        return super().step(lr / self._mixing.push_weight)


class SynchronousGossip(GossipReplicas):
    """D-PSGD or SGP: gossip among ranks that take the same steps."""

    def __init__(self, given: StrategyContext) -> None:
        parts, options = given.engine_parts(), given.spec.sync
        assert isinstance(options, Gossip)
        self.mixing = Mixing(weights_of(given.workload.model), pushes=options.mode == "sgp")
        gradients = MixingGradientEngine(parts, self.mixing, given.page)
        super().__init__(given, gradients, PushSumStep(given, gradients, self.mixing))
        self._graph: Graph | None = None

    @property
    def push_weight(self) -> float:
        return self.mixing.push_weight

    @push_weight.setter
    def push_weight(self, weight: float) -> None:
        self.mixing.push_weight = weight

    @property
    def preemption_requested(self) -> bool:
        return self.mixing.leaves_after == self.mixing.next_step - 1

    def prepare(self, feed: Feed, step: int) -> None:
        super().prepare(feed, step)
        self._graph = None
        if self.world_size > 1:
            self._graph = graph_of(self.graph_options, self.world_size, self.options.seed)
        self.mixing.make_whole(self.world_size)
        self.mixing.form(self._graph, self.rank, step + 1)

    def after_step(self, step: int) -> None:
        """If this rank is asked to leave, choose the step after which all ranks leave: the first
        step by which the notes sent with the copies have reached all ranks."""
        mixing, graph = self.mixing, self._graph
        mixing.next_step = step + 1
        if self.given.page.is_asked_to_leave and mixing.leaves_after is None:
            heard_at = step if graph is None else all_have_heard(graph, self.rank, step + 1)
            mixing.leaves_after = heard_at
