# Written by `make blocking` from dray/_async/cluster.py: change that file instead.
"""The catalogue of models, queues, costs, scheduling decisions, and the cluster."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from datetime import datetime
from typing import Any, Literal

from dray import views
from dray._http import references
from dray._http.transport import Call, params, segment
from dray._sync.calls import Calls
from dray.filters import AccountingFilter, States, label_texts, states_of

CHECK_PERIOD_S = 0.5
"""Seconds between two requests for the state of self-tests."""


class ClusterCalls(Calls):
    def caller(self) -> views.CallerInfo:
        """Return the name of the user who owns the client's token, and whether the user is an
        admin."""
        return self._read(views.CallerInfo, Call("GET", "/v1/caller"))

    def base_models(self) -> list[views.CatalogueEntry]:
        """Return the base models for fine-tuning in the server's catalogue."""
        return self._list(views.CataloguePage, "/v1/base-models")

    def base_model(self, name: str) -> views.CatalogueEntry:
        """Return a base model of the catalogue with the text of its licence. Raises
        ModelNotFound."""
        return self._read(views.CatalogueEntry, Call("GET", f"/v1/base-models/{segment(name)}"))

    def queues(self) -> list[views.Queue]:
        """Return all queues sorted by name, with their rules and the jobs in them."""
        return self._list(views.QueuePage, "/v1/queues")

    def queue(self, name: str) -> views.Queue:
        """Return the queue. Raises QueueNotFound if the queue does not exist."""
        return self._read(views.Queue, Call("GET", f"/v1/queues/{segment(name)}"))

    def set_queue(self, name: str, **rules: Any) -> views.Queue:
        """Change the given rules of a queue, or create the queue with these rules. Only for admins.

        These rules are numbers: `weight`, `max_running`, `max_running_per_user`, `max_queued`,
        `max_queued_per_user`, `max_priority`, `budget` and `monthly_budget`.
        `default_max_runtime_s` and `max_runtime_s` are seconds, or durations such as `"2h"`.
        `quota`, `borrowing_limit`, `lending_limit`, `limit` and `user_limit` map Ray's resource
        names to amounts, for example `limit={"GPU": 8, "memory": "64GiB"}`. `user_weights` maps
        users to weights, for example `user_weights={"ann": 2}`. `parent` is the name of a queue.
        Resources and users that are not given remain unchanged. Pass None to restore the default of
        a rule, or to remove a resource or a user's weight. Raises InvalidQueue if the rules
        contradict each other, or contradict the rules of the queues above or below this queue.
        """
        path = f"/v1/queues/{segment(name)}"
        call = Call.with_json("PATCH", path, rules, params(create=True))
        return self._read(views.Queue, call)

    def delete_queue(self, name: str) -> None:
        """Delete a queue. Only for admins. Raises QueueInUse if the queue has child queues, or jobs
        that have not ended."""
        self._send(Call("DELETE", f"/v1/queues/{segment(name)}"))

    def costs(
        self,
        by: Literal["user", "queue"] = "user",
        *,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> views.CostReport:
        """Return the cost of each user, or of each queue's jobs, in a period. By default, the
        period is the current month in UTC. Times must include a time zone. Admins see the costs of
        all users; other users see only their own costs."""
        query = params(by=by, since=since, until=until)
        return self._read(views.CostReport, Call("GET", "/v1/costs", query))

    def usage(
        self,
        *,
        per: Literal["hour", "day"] = "day",
        by: Literal["user", "queue"] | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        time_zone: str = "UTC",
    ) -> views.UsageReport:
        """Return what jobs used in each hour or day, the capacity of the cluster, and why jobs
        waited.

        since, until: times with a time zone; the report contains the whole hours or days around
        them. By default, the last 7 days, or 24 hours with `per="hour"`. time_zone: IANA name of
        the time zone in which hours and days begin. by: also report each user or queue. Raises
        InvalidParameter if the report would cover more than 366 days, or 31 days with
        `per="hour"`. Users who are not admins get their own usage and the sum of all other users.
        """
        query = params(per=per, by=by, since=since, until=until, time_zone=time_zone)
        return self._read(views.UsageReport, Call("GET", "/v1/usage", query))

    def idle_gpus(self, *, min_idle_s: float = 900.0) -> views.IdleGpuReport:
        """Return the running jobs with GPUs that have been idle for at least `min_idle_s` seconds
        (60 s to 24 h), and the running jobs whose GPUs are not measured."""
        query = params(min_idle_s=min_idle_s)
        return self._read(views.IdleGpuReport, Call("GET", "/v1/usage/idle-gpus", query))

    def accounting(
        self,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        per: Literal["attempt", "job"] = "attempt",
        state: States | None = None,
        queue: str | None = None,
        label: Mapping[str, str] | None = None,
        owner: str | None = None,
        project: str | None = None,
        name: str | None = None,
        name_glob: str | None = None,
        text: str | None = None,
        array: str | None = None,
        array_index: int | None = None,
        schedule: str | None = None,
        reservation: str | None = None,
        page_size: int = 500,
    ) -> Generator[views.AccountingRow, None, None]:
        """Yield the attempts that began before `until` and had not ended before `since`, in the
        order in which their jobs were submitted, with the slots that each attempt held in between.
        Pages are fetched when they are needed.

        since, until: times with a time zone; by default, the beginning of the current month in UTC
        and the current time. per: `job` to add up the attempts of each job. The other arguments
        select jobs as in `jobs`; `state` is the current state of the job. Admins see the attempts
        of all users; other users see only their own. Attempts of deleted jobs are included.
        """
        chosen = AccountingFilter.model_construct(
            since=since,
            until=until,
            per=per,
            state=states_of(state),
            queue=queue,
            label=label_texts(label),
            owner=owner,
            project=project,
            name=name,
            name_glob=name_glob,
            text=text,
            array=array,
            array_index=array_index,
            schedule=schedule,
            reservation=reservation,
        )
        query = references.query_of(chosen)
        return self._items(views.AccountingPage, "/v1/accounting", query, page_size=page_size)

    def shares(self, *, queue: str | None = None, user: str | None = None) -> views.ShareReport:
        """Return the usage of each queue and user, or of only one queue or user, compared to their
        shares. Admins see all users; other users see only themselves."""
        query = params(queue=queue, user=user)
        return self._read(views.ShareReport, Call("GET", "/v1/shares", query))

    def decisions(self, *, before: int | None = None, limit: int = 100) -> list[views.Decision]:
        """Return the latest scheduling rounds that changed something. Rounds are stored for a few
        hours. With `before`, return rounds whose numbers are lower than this number."""
        return self._list(views.DecisionPage, "/v1/decisions", params(before=before, limit=limit))

    def decision(self, number: int) -> views.ReplayedDecision:
        """Return a scheduling round: the scheduler's view of the jobs, its decisions, and the
        decisions that the current policy would make in the same situation. Raises DecisionNotFound
        if the round is no longer stored."""
        return self._read(views.ReplayedDecision, Call("GET", f"/v1/decisions/{number}"))

    def forecast_errors(self) -> views.ForecastErrors:
        """Return the errors of the forecasts of the last 7 days. The forecasts predict when jobs
        start and end."""
        return self._read(views.ForecastErrors, Call("GET", "/v1/forecasts"))

    def cluster(self) -> views.Cluster:
        """Return the nodes, their slots, and the jobs that occupy the slots."""
        return self._read(views.Cluster, Call("GET", "/v1/cluster"))

    def release_node(self, hostname: str) -> views.ReleasedNode:
        """Allow a node that had faults to get new work again. Only for admins. Raises
        NothingWithheld if there is no withheld node with this name."""
        path = f"/v1/cluster/{segment(hostname)}/release"
        return self._read(views.ReleasedNode, Call("POST", path))

    def check_nodes(
        self, hostname: str | None = None, *, wait_s: float = 120.0
    ) -> list[views.NodeCheck]:
        """Test the free GPUs of a node, or of all nodes, and return the tests, sorted by node. Only
        for admins.

        Waits for the results for at most `wait_s` seconds; 0 returns at once. If a test is not over
        by then, its `state` is `waiting` or `running`, and `cluster` shows its result later. Raises
        NodeNotFound if there is no node with this name.
        """
        if hostname is None:
            asked = (self._read(views.NodeCheckList, Call("POST", "/v1/cluster/check"))).items
        else:
            path = f"/v1/cluster/{segment(hostname)}/check"
            asked = [self._read(views.NodeCheck, Call("POST", path))]
        until = time.monotonic() + wait_s
        ids = {one.hostname: one.id for one in asked}
        while _are_open(asked) and time.monotonic() < until:
            time.sleep(min(CHECK_PERIOD_S, max(0.0, until - time.monotonic())))
            newest = {one.hostname: one.check for one in (self.cluster()).nodes}
            asked = [_newer(one, newest.get(one.hostname), ids[one.hostname]) for one in asked]
        return asked


def _are_open(checks: list[views.NodeCheck]) -> bool:
    return any(one.state != "done" for one in checks)


def _newer(known: views.NodeCheck, found: views.NodeCheck | None, check_id: str) -> views.NodeCheck:
    """Return the state of a requested test. If another test of the node has been requested
    since then, the earlier test is over, and `found` has its result."""
    if known.state == "done" or found is None:
        return known
    return found if found.id == check_id else found.model_copy(update={"state": "done"})
