"""Queues, costs, decisions of the scheduler, and the cluster."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from dray import views
from dray._clients.base import AsyncCalls, BlockingCalls
from dray._http import costs, outlook, queues


class ClusterCalls(BlockingCalls):
    def queues(self) -> list[views.Queue]:
        """All queues by name, with their rules and the jobs in them."""
        return self._driver.run(queues.every(self._flows))

    def queue(self, name: str) -> views.Queue:
        """The queue; raises QueueNotFound if there is none."""
        return self._driver.run(queues.get(self._flows, name))

    def set_queue(self, name: str, **rules: Any) -> views.Queue:
        """Change the rules that are given of a queue, or make one with them; for admins.

        Rules are `weight`, `max_running`, `max_running_per_user`, `max_queued`,
        `max_queued_per_user`, `max_priority`, `budget`, `monthly_budget`, amounts of resources by
        Ray's names: `quota`, `limit` and `user_limit`, such as
        `limit={"GPU": 8, "memory": "64GiB"}`, and the weights of users: `user_weights={"ann": 2}`.
        Within these only the resources and users that are given change. None stands for the
        default, and removes a resource or a weight.
        Raises InvalidQueue if the rules contradict each other.
        """
        return self._driver.run(queues.set_rules(self._flows, name, rules))

    def delete_queue(self, name: str) -> None:
        """Remove a queue; raises QueueInUse while jobs that have not ended are in it. For
        admins."""
        self._driver.run(queues.delete(self._flows, name))

    def costs(
        self,
        by: Literal["user", "queue"] = "user",
        *,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> views.CostReport:
        """The cost of each user, or of the jobs of each queue, from one time to another, with a
        time zone; by default since this month began, in UTC. Admins see everybody's costs, others
        their own."""
        return self._driver.run(costs.report(self._flows, by, since, until))

    def decisions(self, *, before: int | None = None, limit: int = 100) -> list[views.Decision]:
        """The newest rounds of the scheduler that changed something, of the last hours; with
        `before` those of lower numbers."""
        return self._driver.run(outlook.decisions(self._flows, before, limit))

    def decision(self, number: int) -> views.ReplayedDecision:
        """A round of the scheduler: its view of the jobs, its decisions, and those of the policy on
        the same view now. Raises DecisionNotFound if that round is not kept."""
        return self._driver.run(outlook.decision(self._flows, number))

    def forecast_errors(self) -> views.ForecastErrors:
        """How far off the forecasts of starts and ends were of the last 7 days."""
        return self._driver.run(outlook.forecast_errors(self._flows))

    def cluster(self) -> views.Cluster:
        """The nodes, their slots, and the jobs that hold the slots."""
        return self._driver.run(self._flows.cluster())


class AsyncClusterCalls(AsyncCalls):
    """See `ClusterCalls`, which has the same arguments, answers and errors."""

    async def queues(self) -> list[views.Queue]:
        return await self._driver.run(queues.every(self._flows))

    async def queue(self, name: str) -> views.Queue:
        return await self._driver.run(queues.get(self._flows, name))

    async def set_queue(self, name: str, **rules: Any) -> views.Queue:
        return await self._driver.run(queues.set_rules(self._flows, name, rules))

    async def delete_queue(self, name: str) -> None:
        await self._driver.run(queues.delete(self._flows, name))

    async def costs(
        self,
        by: Literal["user", "queue"] = "user",
        *,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> views.CostReport:
        return await self._driver.run(costs.report(self._flows, by, since, until))

    async def decisions(
        self, *, before: int | None = None, limit: int = 100
    ) -> list[views.Decision]:
        return await self._driver.run(outlook.decisions(self._flows, before, limit))

    async def decision(self, number: int) -> views.ReplayedDecision:
        return await self._driver.run(outlook.decision(self._flows, number))

    async def forecast_errors(self) -> views.ForecastErrors:
        return await self._driver.run(outlook.forecast_errors(self._flows))

    async def cluster(self) -> views.Cluster:
        return await self._driver.run(self._flows.cluster())
