"""What accounting lists, compared with a minute-by-minute count of what the jobs did, with both
databases."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dray import views
from dray.filters import AccountingFilter
from ray_workers.shared.contracts import Cause, FrameKind
from ray_workers.shared.slices import Slice
from service.db.repositories import attempts as attempts_repository
from service.db.repositories.scheduling import accounting as repository
from service.db.session import Database
from service.domain.errors import BadCursor
from service.jobs.accounting import Accounting
from service.lifecycle import resizing
from service.loops.shared.queue_view import snapshot
from service.storage.storage import Storage
from tests.seeds import drawn
from tests.unit.service.helpers import START, Service, spent, told

MINUTE = timedelta(minutes=1)
ELASTIC = {"resources": {"num_workers": 4}, "elastic": {"min_workers": 1}}


@pytest.fixture
def priced(database: Database, storage: Storage, tmp_path: Path) -> Service:
    path = tmp_path / "prices.json"
    rules = [{"resource": "CPU", "per_hour": 6.0}]
    path.write_text(json.dumps({"currency": "EUR", "prices": rules}))
    return Service(database, storage, tmp_path, prices_file=path)


async def rows(service: Service, *, limit: int = 500, **wanted: Any) -> list[views.AccountingRow]:
    """Return all rows, fetched page by page."""
    accounting = Accounting(service.database, clock=lambda: service.now)
    chosen, found, cursor = AccountingFilter(**wanted), [], None
    while True:
        page = await accounting.page(chosen, limit=limit, cursor=cursor)
        assert len(page.items) <= limit
        found += page.items
        cursor = page.next_cursor
        if cursor is None:
            return found
        assert page.items


class Jobs:
    """Jobs that do what users' jobs do, and a record of the slots that they held in each minute."""

    def __init__(self, service: Service, seed: int) -> None:
        self.service = service
        self.random = random.Random(seed)
        self.held: dict[tuple[str, int], list[tuple[datetime, int]]] = defaultdict(list)
        """For each attempt, the minutes in which it held slots, and how many."""
        self.charged: dict[tuple[str, int], list[tuple[datetime, int]]] = {}
        """The minutes that have been charged: a change of a group's size charges nothing."""
        self.live: dict[str, tuple[int, int]] = {}
        """The attempt's number and size, keyed by job."""
        self.unreported: dict[str, list[tuple[datetime, int]]] = defaultdict(list)
        self.waiting: dict[str, int] = {}
        self.ended: list[str] = []
        self.deleted: set[str] = set()

    async def minute(self) -> None:
        service, die = self.service, self.random
        if die.random() < 0.2:
            self.waiting[await service.submit(**ELASTIC)] = 0
        for job_id, attempt in list(self.waiting.items()):
            if die.random() < 0.3:
                size = die.randint(1, 4)
                assert service.claim(job_id, attempt, workers=size) is not None
                service.report(job_id, attempt + 1)
                self.live[job_id] = attempt + 1, size
                del self.waiting[job_id]
        for job_id in list(self.live):
            action = die.choice(("nothing",) * 6 + ("report", "grow", "shrink", "leave", "end"))
            getattr(self, action)(job_id)
        if self.ended and die.random() < 0.3:
            job_id = self.ended.pop(die.randrange(len(self.ended)))
            await service.jobs.delete(job_id)
            self.deleted.add(job_id)
        for job_id, (_, size) in self.live.items():
            self.unreported[job_id].append((service.now, size))
        service.now += MINUTE

    def nothing(self, job_id: str) -> None:
        pass

    def report(self, job_id: str) -> None:
        attempt, _ = self.live[job_id]
        self.service.report(job_id, attempt, [spent(at=self.service.now, useful=1.0)])
        self.counted(job_id)

    def counted(self, job_id: str, *, charges: bool = True) -> None:
        """The slots up to now are counted and, if `charges` is set, charged."""
        key = job_id, self.live[job_id][0]
        self.held[key] += self.unreported.pop(job_id, [])
        if charges:
            self.charged[key] = list(self.held[key])

    def grow(self, job_id: str) -> None:
        service = self.service
        _, live = service.database.read_sync(lambda s: snapshot(s, service.now))
        (one,) = (each for each in live if each.job_id == job_id)
        attempt, size = self.live[job_id]
        if size == 4 or one.growing is None:
            return
        growing, more = one.growing, (Slice("node-b", 1),)
        if service.database.write_sync(lambda s: resizing.grant(s, growing, more, service.now)):
            self.counted(job_id, charges=False)
            self.live[job_id] = attempt, size + 1

    def shrink(self, job_id: str) -> None:
        service = self.service
        attempt, size = self.live[job_id]
        row = service.database.read_sync(lambda s: attempts_repository.get(s, job_id, attempt))
        assert row is not None
        on_a = sum(each["num_workers"] for each in row.slices if each["node_id"] == "node-a")
        body = {"world_size": 1, "lacking": 0, "grants": row.grants, "message": "shrinks"}
        kept = [{"node_id": "node-a", "num_workers": 1}]
        if on_a == size == 1:
            return
        service.report(
            job_id, attempt, [told(FrameKind.RESIZED, {**body, "slices": kept}, at=service.now)]
        )
        self.counted(job_id, charges=False)
        self.live[job_id] = attempt, 1

    def leave(self, job_id: str) -> None:
        attempt, _ = self.live[job_id]
        self.service.end(job_id, attempt, Cause.NODE_LOST)
        self.counted(job_id)
        self.waiting[job_id] = self.live.pop(job_id)[0]

    def end(self, job_id: str) -> None:
        attempt, _ = self.live[job_id]
        self.service.end(job_id, attempt)
        self.counted(job_id)
        del self.live[job_id]
        self.ended.append(job_id)

    def slot_seconds(self, since: datetime, until: datetime) -> dict[tuple[str, int], float]:
        """Count 60 slot-seconds for each minute and slot in the period."""
        found: dict[tuple[str, int], float] = {}
        for attempt, minutes in self.held.items():
            counted = [60.0 * size for at, size in minutes if since <= at < until]
            if counted:
                found[attempt] = sum(counted)
        return found


@pytest.mark.parametrize("seed", drawn(2))
async def test_rows_match_a_count_by_minute_and_adjacent_periods_add_up(
    priced: Service, seed: int
) -> None:
    jobs = Jobs(priced, seed)
    for _ in range(40):
        await jobs.minute()
    end = priced.now
    whole = await rows(priced, since=START, until=end)
    cuts = sorted({START, end, *(START + jobs.random.randint(1, 39) * MINUTE for _ in range(2))})
    parts: dict[tuple[str, int], float] = defaultdict(float)
    spans = [(START, end), *pairwise(cuts)]
    for since, until in spans:
        found = await rows(priced, since=since, until=until, limit=jobs.random.randint(1, 9))
        keys = [(row.job_id, row.attempt) for row in found]
        assert keys == sorted(set(keys))
        counted = jobs.slot_seconds(since, until)
        seconds = {(row.job_id, row.attempt): row.slot_seconds for row in found}
        assert {key: s for key, s in seconds.items() if s} == pytest.approx(counted)
        costs = await priced.costs.report(since=since, until=until)
        total = sum(row.cost.total for row in found if row.cost is not None)
        assert total == pytest.approx(sum(item.cost.total for item in costs.items))
        charged = [60 * n for one in jobs.charged.values() for at, n in one if since <= at < until]
        assert total == pytest.approx(sum(charged) / 600)
        per_job = await rows(priced, since=since, until=until, per="job", limit=3)
        assert len({row.job_id for row in per_job}) == len(per_job)
        by_job: dict[str, float] = defaultdict(float)
        for row in found:
            by_job[row.job_id] += row.slot_seconds
        assert {row.job_id: row.slot_seconds for row in per_job} == pytest.approx(dict(by_job))
        assert sum(row.num_attempts for row in per_job) == len(found)
        if (since, until) != (START, end):
            for key, part in seconds.items():
                parts[key] += part
    assert dict(parts) == pytest.approx({(r.job_id, r.attempt): r.slot_seconds for r in whole})
    assert {row.job_id for row in whole if row.is_deleted} == jobs.deleted
    assert {row.job_id for row in whole if row.finished_at is None} == set(jobs.live)


async def test_a_row_shows_the_times_the_resources_and_the_outcome(service: Service) -> None:
    job_id = await service.submit(name="=cmd", labels={"team": "a"})
    service.advance(60)
    service.claim(job_id, workers=2)
    service.report(job_id, 1)
    service.advance(600)
    service.end(job_id, 1, Cause.NODE_LOST, "node-a is gone")
    service.advance(300)
    service.claim(job_id, 1, workers=1)
    service.report(job_id, 2)
    service.advance(600)
    service.end(job_id, 2)
    first, second = await rows(service)
    assert (first.name, first.labels, first.owner, first.project) == (
        *("=cmd", {"team": "a"}, "ann", "vision"),
    )
    assert (first.reason, second.reason, first.state) == (
        *("node_lost", "succeeded", views.JobState.SUCCEEDED),
    )
    assert (first.eligible_at, first.waited_s, first.elapsed_s) == (START, 60.0, 600.0)
    assert (first.slot_seconds, first.cpu_seconds, first.gpu_seconds) == (1200.0, 1200.0, 0.0)
    assert (first.resources, first.nodes, first.cost) == ({"CPU": 2.0}, ["node-a"], None)
    # A pause before the retry is not time in which the job could have started.
    assert second.eligible_at is not None
    assert START + timedelta(seconds=660) < second.eligible_at < START + timedelta(seconds=960)
    (job,) = await rows(service, per="job")
    assert (job.num_attempts, job.began_at, job.finished_at, job.elapsed_s) == (
        *(2, first.began_at, second.finished_at, 1200.0),
    )
    await service.jobs.delete(job_id)
    deleted = await rows(service)
    assert [row.is_deleted for row in deleted] == [True, True]
    assert [row.model_copy(update={"is_deleted": False}) for row in deleted] == [first, second]


@pytest.mark.parametrize("is_deleted", [False, True])
async def test_filters_also_apply_to_deleted_jobs(service: Service, is_deleted: bool) -> None:
    await service.queue("night")
    fields: dict[str, Any] = {"name": "a_b", "labels": {"team": "x"}, "queue": "night"}
    for more in (fields, {"name": "axb", "labels": {"team": "y"}}):
        job_id = await service.submit(**more)
        service.claim(job_id)
        service.report(job_id, 1)
        service.end(job_id, 1)
        if is_deleted:
            await service.jobs.delete(job_id)
    service.advance(60)
    one = (
        *({"queue": "night"}, {"name": "a_b"}, {"text": "A_B"}, {"name_glob": "a_?"}),
        *({"label": ("team=x",)}, {"label": ("team=x", "team=x")}),
    )
    for wanted in one:
        assert [row.name for row in await rows(service, **wanted)] == ["a_b"], wanted
    both = ({"owner": "ann"}, {"project": "vision"}, {"state": ("SUCCEEDED", "FAILED")})
    for wanted in both:
        assert len(await rows(service, **wanted)) == 2, wanted
    none: tuple[dict[str, Any], ...] = (
        *({"owner": "bob"}, {"state": ("FAILED",)}, {"label": ('a"b=x',)}, {"label": ("a\\=x",)}),
        *({"label": ("team=x", "team=y")}, {"name": "a\0"}, {"array_index": 0}),
        {"since": service.now + timedelta(days=1), "until": service.now + timedelta(days=2)},
    )
    for wanted in none:
        assert await rows(service, **wanted) == [], wanted


async def test_the_queue_is_the_queue_in_which_the_attempt_began(service: Service) -> None:
    await service.queue("night")
    job_id = await service.submit()
    service.claim(job_id)
    service.report(job_id, 1)
    service.end(job_id, 1, Cause.NODE_LOST)
    await service.change(job_id, queue="night")
    service.advance(60)
    assert [row.queue for row in await rows(service)] == ["default"]
    assert await rows(service, queue="night") == []


async def test_an_attempt_is_in_the_periods_that_it_overlaps(service: Service) -> None:
    job_id = await service.submit()
    service.claim(job_id)
    service.end(job_id, 1, Cause.SLOTS_UNAVAILABLE)  # it ends at once
    service.advance(3600)
    service.claim(job_id, 1)
    service.report(job_id, 2)
    service.advance(3600)
    hours = [START + timedelta(hours=n) for n in range(-1, 4)]
    found = [
        [row.attempt for row in await rows(service, since=since, until=until)]
        for since, until in pairwise(hours)
    ]
    assert found == [[], [1], [2], [2]]


async def test_a_cursor_keeps_the_period_and_belongs_to_one_filter(service: Service) -> None:
    for _ in range(3):
        job_id = await service.submit()
        service.claim(job_id)
    service.advance(60)
    accounting = Accounting(service.database, clock=lambda: service.now)
    page = await accounting.page(AccountingFilter(), limit=1)
    until = page.until
    service.advance(60)
    page = await accounting.page(AccountingFilter(), limit=1, cursor=page.next_cursor)
    assert (page.until, len(page.items)) == (until, 1)
    for other in (AccountingFilter(per="job"), AccountingFilter(queue="night")):
        with pytest.raises(BadCursor):
            await accounting.page(other, limit=1, cursor=page.next_cursor)


async def test_deleted_attempts_are_forgotten_after_the_time_of_the_setting(
    service: Service,
) -> None:
    job_id = await service.submit()
    service.claim(job_id)
    service.report(job_id, 1)
    service.end(job_id, 1)
    await service.jobs.delete(job_id)
    service.advance(60)
    for before, left in ((service.now - MINUTE, 1), (service.now, 0)):
        service.database.write_sync(lambda s, at=before: repository.forget(s, at))
        assert len(await rows(service)) == left
