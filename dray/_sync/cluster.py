# Written by `make blocking` from dray/_async/cluster.py: change that file instead.
"""Queues, costs, decisions of the scheduler, and the cluster."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from dray import views
from dray._http.transport import Call, params, segment
from dray._sync.calls import Calls


class ClusterCalls(Calls):
    def queues(self) -> list[views.Queue]:
        """All queues by name, with their rules and the jobs in them."""
        return self._list(views.QueuePage, "/v1/queues")

    def queue(self, name: str) -> views.Queue:
        """The queue; raises QueueNotFound if there is none."""
        return self._read(views.Queue, Call("GET", f"/v1/queues/{segment(name)}"))

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
        path = f"/v1/queues/{segment(name)}"
        call = Call.with_json("PATCH", path, rules, params(create=True))
        return self._read(views.Queue, call)

    def delete_queue(self, name: str) -> None:
        """Remove a queue; raises QueueInUse while jobs that have not ended are in it. For
        admins."""
        self._send(Call("DELETE", f"/v1/queues/{segment(name)}"))

    def costs(
        self,
        by: Literal["user", "queue"] = "user",
        *,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> views.CostReport:
        """The cost of each user, or of the jobs of each queue, from one time to another, with a
        time zone; by default since this month began, in UTC. Admins see the costs of all users,
        others their own."""
        query = params(by=by, since=since, until=until)
        return self._read(views.CostReport, Call("GET", "/v1/costs", query))

    def decisions(self, *, before: int | None = None, limit: int = 100) -> list[views.Decision]:
        """The newest rounds of the scheduler that changed something, of the last hours; with
        `before` those of lower numbers."""
        return self._list(views.DecisionPage, "/v1/decisions", params(before=before, limit=limit))

    def decision(self, number: int) -> views.ReplayedDecision:
        """A round of the scheduler: its view of the jobs, its decisions, and those of the policy on
        the same view now. Raises DecisionNotFound if that round is not kept."""
        return self._read(views.ReplayedDecision, Call("GET", f"/v1/decisions/{number}"))

    def forecast_errors(self) -> views.ForecastErrors:
        """How far off the forecasts of starts and ends were of the last 7 days."""
        return self._read(views.ForecastErrors, Call("GET", "/v1/forecasts"))

    def cluster(self) -> views.Cluster:
        """The nodes, their slots, and the jobs that hold the slots."""
        return self._read(views.Cluster, Call("GET", "/v1/cluster"))
