"""The costs of attempts, users, and queues, with both databases."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session

from dray import views
from ray_workers.shared.contracts import Cause, FrameKind, Outcome, Phase
from ray_workers.shared.slices import Slice
from service.cluster.port import ClusterSnapshot
from service.costs.prices_file import PricesFile
from service.costs.reports import Costs
from service.costs.spending import FRESH_FOR, UsedUpBudgets
from service.db.models import AttemptCostRow
from service.db.repositories import attempts as attempts_repository
from service.db.repositories.scheduling import costs as costs_repository
from service.db.repositories.scheduling import queues as queues_repository
from service.db.session import Database
from service.lifecycle import resizing
from service.loops.shared.queue_view import snapshot
from service.nodes import node_table
from service.storage.storage import Storage
from tests.unit.service.helpers import START, Service, spent, told
from tests.wire import cluster_node

SPOT = {"ray.io/market-type": "spot"}
HOUR = 3600.0


@pytest.fixture
def prices(tmp_path: Path) -> Path:
    path = tmp_path / "prices.json"
    price(path, (1.0, SPOT), (2.0, {}))
    return path


def price(path: Path, *cpus: tuple[float, dict[str, str]], currency: str = "EUR") -> None:
    rules = [{"resource": "CPU", "per_hour": each, "labels": labels} for each, labels in cpus]
    path.write_text(json.dumps({"currency": currency, "prices": rules}))


@pytest.fixture
def priced(database: Database, storage: Storage, tmp_path: Path, prices: Path) -> Service:
    service = Service(database, storage, tmp_path, prices_file=prices)
    see(service, **{"node-a": {}, "node-b": SPOT})
    return service


def see(service: Service, **labels: dict[str, str]) -> None:
    nodes = (cluster_node(name, {"CPU": 8.0}, labels=each) for name, each in labels.items())
    seen = ClusterSnapshot("session-1", "ray://x", None, False, tuple(nodes))
    service.database.write_sync(lambda s: node_table.store(s, seen, None, service.now))


async def trains(service: Service, workers: int = 2, **fields: Any) -> str:
    job_id = await service.submit(**{"resources": {"num_workers": 4}, **fields})
    assert service.claim(job_id, workers=workers) is not None
    service.report(job_id, 1)
    return job_id


async def cost(service: Service, job_id: str) -> views.Cost:
    found = (await service.jobs.get(job_id)).cost
    assert found is not None
    return found


def by_name(report: views.CostReport) -> dict[str, float]:
    return {item.name: item.cost.total for item in report.items}


async def test_without_prices_nothing_costs_anything(service: Service) -> None:
    job_id = await trains(service)
    service.advance(HOUR)
    service.report(job_id, 1, [spent(at=service.now, useful=2 * HOUR)])
    service.end(job_id, 1)
    assert (await service.jobs.get(job_id)).cost is None
    report = await service.costs.report()
    assert (report.items, [w.code for w in report.warnings]) == ([], ["no_prices"])


async def test_a_node_whose_clock_is_ahead_costs_no_more(priced: Service) -> None:
    right, ahead = [await trains(priced, workers=2) for _ in range(2)]
    priced.advance(HOUR)
    for job_id, clock_s in ((right, 0.0), (ahead, 6 * HOUR)):
        at = priced.now + timedelta(seconds=clock_s)
        priced.report(job_id, 1, [spent(at=at, useful=2 * HOUR)])
        priced.end(job_id, 1)
    assert (await cost(priced, ahead)).total == (await cost(priced, right)).total > 0


async def test_a_node_whose_clock_is_years_behind_costs_no_more_and_uses_no_less(
    priced: Service,
) -> None:
    """The node's clock starts in 1970, as on a machine without a clock battery."""
    totals, used = [], []
    for behind in (timedelta(0), START - datetime(1970, 1, 2, tzinfo=UTC)):
        job_id = await priced.submit(resources={"num_workers": 2})
        priced.claim(job_id, workers=2)
        for seconds, phase in ((0.0, Phase.RUNNING), (HOUR, Phase.RUNNING), (0.0, Phase.ENDED)):
            priced.advance(seconds)
            at = priced.now - behind
            outcome = Outcome.of(Cause.SUCCEEDED, "it ended") if phase is Phase.ENDED else None
            frames = [spent(at=at, useful=2 * HOUR)] if seconds else []
            reply = priced.reply(job_id, 1, frames, phase=phase, outcome=outcome)
            times = dict.fromkeys(reply.phase_times, at.timestamp())
            priced.store(job_id, 1, replace(reply, phase_times=times))
        totals.append((await cost(priced, job_id)).total)
        (ended,) = priced.database.read_sync(
            lambda s, of=job_id: [*attempts_repository.ended_slots_of(s, [(of, 1)])]
        )
        used.append((ended.finished_at - ended.created_at).total_seconds())
    assert totals == [4.0, 4.0]
    assert used == [HOUR, HOUR]


async def test_a_job_costs_what_it_holds_divided_by_its_ledger(priced: Service) -> None:
    job_id = await trains(priced)
    assert (await priced.jobs.get(job_id)).cost is None
    priced.advance(HOUR)
    priced.report(job_id, 1, [spent(at=priced.now, useful=1.5 * HOUR, idle=0.5 * HOUR)])
    running = await cost(priced, job_id)
    assert running == views.Cost(currency="EUR", total=4.0, useful=3.0, wasted=1.0, unreported=0.0)
    priced.advance(HOUR)
    priced.end(job_id, 1)
    ended = await cost(priced, job_id)
    assert (ended.total, ended.useful) == (8.0, 6.0)
    (attempt,) = (await priced.queries.attempts(job_id)).items
    assert attempt.cost == ended


async def test_slots_cost_from_when_they_are_given_and_none_given_none(priced: Service) -> None:
    job_id = await priced.submit()
    assert priced.claim(job_id) is not None
    priced.advance(HOUR)
    priced.report(job_id, 1, phase=Phase.ACQUIRING)
    priced.end(job_id, 1, Cause.SLOTS_UNAVAILABLE)
    assert (await priced.jobs.get(job_id)).cost is None
    priced.advance(600)
    assert priced.claim(job_id, 1) is not None
    priced.advance(HOUR)
    priced.report(job_id, 2)
    priced.advance(HOUR)
    priced.end(job_id, 2)
    assert await cost(priced, job_id) == views.Cost(
        currency="EUR", total=2.0, useful=0.0, wasted=0.0, unreported=2.0
    )


async def test_the_price_is_that_of_the_node_also_once_it_is_gone(priced: Service) -> None:
    elastic = {"resources": {"num_workers": 4}, "elastic": {"min_workers": 1}}
    job_id = await trains(priced, **elastic)
    priced.advance(HOUR)
    _, (live,) = priced.database.read_sync(lambda s: snapshot(s, priced.now))
    assert live.growing is not None
    more = (Slice("node-b", 2),)
    assert priced.database.write_sync(lambda s: resizing.grant(s, live.growing, more, priced.now))
    priced.advance(HOUR)
    see(priced, **{"node-a": {}})
    priced.advance(HOUR)
    resized = told(
        FrameKind.RESIZED,
        {
            "world_size": 1,
            "lacking": 0,
            "grants": 1,
            "message": "node-b is gone",
            "slices": [{"node_id": "node-a", "num_workers": 1}],
        },
        at=priced.now - timedelta(hours=1),
    )
    priced.report(job_id, 1, [resized])
    priced.end(job_id, 1)
    # On node-a, two workers for two hours and one for a third hour; on node-b, two for one hour.
    assert (await cost(priced, job_id)).total == pytest.approx((4 + 1) * 2.0 + 2 * 1.0)


async def test_a_new_price_counts_for_attempts_that_live_alone(
    priced: Service, prices: Path
) -> None:
    ended, lives = await trains(priced), await trains(priced)
    priced.advance(HOUR)
    priced.end(ended, 1)
    priced.report(lives, 1, [spent(at=priced.now, useful=2 * HOUR)])
    price(prices, (10.0, {}))
    priced.report(lives, 1, [spent(at=priced.now, useful=2 * HOUR)])
    assert (await cost(priced, ended)).total == 4.0
    assert (await cost(priced, lives)).total == 20.0
    assert by_name(await priced.costs.report()) == {"ann": 24.0}


async def test_the_cost_of_a_job_is_that_of_all_its_attempts(priced: Service, prices: Path) -> None:
    job_id = await trains(priced)
    priced.advance(HOUR)
    priced.end(job_id, 1, Cause.NODE_LOST)
    priced.advance(600)
    assert priced.claim(job_id, 1, workers=4) is not None
    priced.report(job_id, 2)
    priced.advance(HOUR)
    priced.end(job_id, 2)
    assert (await cost(priced, job_id)).total == 12.0
    # Different currencies can't be added, so a job shows the currency of its latest attempt.
    other = await trains(priced)
    priced.advance(HOUR)
    priced.end(other, 1, Cause.NODE_LOST)
    price(prices, (1.0, {}), currency="USD")
    priced.advance(600)
    assert priced.claim(other, 1, workers=1) is not None
    priced.report(other, 2)
    priced.advance(HOUR)
    priced.end(other, 2)
    shown = await cost(priced, other)
    assert (shown.currency, shown.total) == ("USD", 1.0)
    costs = [(item.cost.currency, item.cost.total) for item in (await priced.costs.report()).items]
    assert costs == [("EUR", 16.0), ("USD", 1.0)]


async def test_reports_are_by_user_and_queue_over_a_span_and_outlive_jobs(priced: Service) -> None:
    await priced.queue("night")
    day = await trains(priced)
    night = await trains(priced, queue="night")
    priced.advance(2 * HOUR)
    for job_id in (day, night):
        priced.end(job_id, 1)
    priced.database.write_sync(lambda s: None)
    await priced.jobs.delete(day)
    report = await priced.costs.report("queue")
    assert by_name(report) == {"default": 8.0, "night": 8.0}
    assert [(item.num_jobs, item.slot_hours) for item in report.items] == [(1, 4.0), (1, 4.0)]
    user = await priced.costs.report("user", owner="ann")
    assert [(item.name, item.num_jobs) for item in user.items] == [("ann", 2)]
    assert (await priced.costs.report("user", owner="bob")).items == []
    half = await priced.costs.report(since=START + timedelta(hours=1))
    assert by_name(half) == {"ann": pytest.approx(8.0)}
    quarter = await priced.costs.report(
        since=START + timedelta(hours=1), until=START + timedelta(hours=1.5)
    )
    assert by_name(quarter) == {"ann": pytest.approx(4.0)}
    assert (await priced.costs.report(since=priced.now)).items == []


async def test_nodes_without_a_price_and_a_bad_file_are_told(priced: Service, prices: Path) -> None:
    price(prices, (1.0, SPOT))
    see(priced, **{"node-a": {}, "node-b": SPOT})
    (warning,) = (await priced.costs.report()).warnings
    assert (warning.code, warning.message) == (
        "nodes_without_price",
        "slots are free of charge on host: no price matches their resources and labels",
    )
    prices.write_text("nothing")
    codes = [warning.code for warning in (await priced.costs.report()).warnings]
    assert codes == ["prices_invalid", "nodes_without_price"]


async def test_a_budget_is_used_up_by_the_month_and_in_all(priced: Service) -> None:
    await priced.queue("night", monthly_budget=4)
    await priced.queue("rest", budget=1000)
    budgets = UsedUpBudgets(priced.prices)

    def used_up() -> dict[str, str]:
        return priced.database.read_sync(
            lambda s: budgets.get(s, queues_repository.every(s), priced.now)
        )

    assert used_up() == {}
    job_id = await trains(priced, queue="night")
    priced.advance(HOUR)
    priced.report(job_id, 1, [spent(at=priced.now, useful=HOUR)])
    (name,) = used_up()
    assert name == "night"
    shown = await priced.queues.get("night")
    assert (shown.spent, shown.spent_this_month, shown.currency) == (4.0, 4.0, "EUR")
    assert (shown.monthly_budget, shown.budget, shown.warnings) == (4.0, None, [])
    await priced.queue("night", monthly_budget=5)
    assert used_up() == {}, "a budget that is raised holds at once"
    priced.end(job_id, 1)
    priced.now = START.replace(month=2)
    await priced.queue("night", monthly_budget=1, budget=4)
    priced.now += FRESH_FOR
    assert "of 4 EUR: its jobs" in used_up()["night"]
    await priced.queue("night", monthly_budget=1)
    assert used_up() == {}, "another month has begun"
    assert (await priced.queues.get("night")).spent == 4.0


async def test_a_budget_counts_what_running_jobs_will_have_cost(priced: Service) -> None:
    """The job holds two slots of 2 EUR an hour, and can run for 4 hours in all."""
    await priced.queue("night", budget=10)
    job_id = await trains(priced, queue="night", max_runtime_s=4 * int(HOUR))
    priced.advance(HOUR)
    priced.report(job_id, 1, [spent(at=priced.now, useful=HOUR)])
    budgets = UsedUpBudgets(priced.prices)

    def used_up(left_s: float) -> dict[str, str]:
        def look(session: Session) -> dict[str, str]:
            _, live = snapshot(session, priced.now)
            running = [each.running for each in live if each.running is not None]
            (job,) = (replace(each, left_s=left_s) for each in running)
            return budgets.get(session, queues_repository.every(session), priced.now, [job])

        priced.advance(FRESH_FOR.total_seconds())
        return priced.database.read_sync(look)

    assert used_up(1.4 * HOUR) == {}
    assert "are expected to cost about 6 EUR more" in used_up(1.6 * HOUR)["night"]
    assert "about 10 EUR more" in used_up(20 * HOUR)["night"], "its limit ends it"
    priced.end(job_id, 1)


async def test_a_budget_without_prices_stops_nothing_and_says_so(service: Service) -> None:
    shown = await service.queue("night", budget=0)
    assert [warning.code for warning in shown.warnings] == ["budget_without_prices"]
    assert (shown.spent, shown.currency) == (None, None)
    budgets = UsedUpBudgets(PricesFile(None))
    found = service.database.read_sync(
        lambda s: budgets.get(s, queues_repository.every(s), service.now)
    )
    assert found == {}
    assert isinstance(service.costs, Costs)


async def test_a_first_cost_that_comes_while_a_report_is_read_breaks_nothing(
    service: Service,
) -> None:
    """On PostgreSQL, each statement in a transaction can see more recent rows than the previous
    one."""
    hour = {"since": START, "until": START + timedelta(hours=1), "currency": "EUR"}
    amounts = dict.fromkeys(costs_repository.AMOUNTS, 1.0)
    row = AttemptCostRow(job_id="j", attempt=1, queue="q", owner="ann", **hour, **amounts)

    def work(session: Session) -> dict[tuple[str, str], costs_repository.CostSum]:
        read = session.scalars

        def read_and_then(query: Any) -> list[Any]:
            found = list(read(query))
            costs_repository.put(session, row)
            return found

        session.scalars = read_and_then  # type: ignore[method-assign, assignment]
        return costs_repository.between(session, "owner", START, START + timedelta(days=1))

    ((key, found),) = service.database.write_sync(work).items()
    assert (key, found.num_jobs, found.amounts["total"]) == (("ann", "EUR"), 1, 0.0)


async def test_a_budget_binds_all_queues_under_it(priced: Service) -> None:
    await priced.queue("lab", budget=3)
    for name in ("a", "b"):
        await priced.queue(name, parent="lab")
    await priced.queue("rest")
    budgets = UsedUpBudgets(priced.prices)

    def used_up() -> dict[str, str]:
        return priced.database.read_sync(
            lambda s: budgets.get(s, queues_repository.every(s), priced.now)
        )

    job_id = await trains(priced, queue="a")
    priced.advance(HOUR)
    priced.report(job_id, 1, [spent(at=priced.now, useful=HOUR)])
    found = used_up()
    assert found.keys() == {"lab", "a", "b"}
    assert "the queue 'lab' has exhausted its budget" in found["b"]
    spent_by = {queue.name: queue.spent for queue in (await priced.queues.list()).items}
    assert (spent_by["lab"], spent_by["a"], spent_by["b"]) == (4.0, 4.0, 0.0)
    priced.end(job_id, 1)
    await priced.queue("a", parent="rest")
    assert used_up() == {}, "the costs of a queue move with it"
