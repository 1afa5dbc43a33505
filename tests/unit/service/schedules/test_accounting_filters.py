"""Accounting and lists of the jobs of a schedule or a reservation, with both databases."""

from __future__ import annotations

from datetime import timedelta

import pytest

from dray.filters import AccountingFilter, JobFilter
from dray.reservations import ReservationRequest
from service.jobs.accounting import Accounting
from service.queues.reservations import Reservations
from tests.unit.service.schedules.scheduled import MIDNIGHT, SCRIPT, Scheduled

HOUR = timedelta(hours=1)


@pytest.mark.parametrize("is_deleted", [False, True])
async def test_jobs_are_found_by_schedule_and_by_reservation(
    scheduled: Scheduled, is_deleted: bool
) -> None:
    wanted = {"name": "class", "duration_s": 86400, "users": ["ann"], "nodes": ["node-a"]}
    await Reservations(scheduled.database).create(ReservationRequest.model_validate(wanted))
    ids = {
        "ann's": await scheduled.create(job={**SCRIPT, "reservation": "class"}),
        "bob's": await scheduled.create(owner="bob"),
        "ann's other": await scheduled.create("weekly", cron="30 * * * *"),
    }
    await scheduled.until(MIDNIGHT + HOUR)
    single = await scheduled.submit()
    job_of = {job.schedule_id: job.id for job in (await scheduled.jobs.list()).items}
    of = {name: job_of[schedule_id] for name, schedule_id in ids.items()}
    for job_id in (*of.values(), single):
        scheduled.claim(job_id)
        scheduled.report(job_id, 1)
        scheduled.end(job_id, 1)
    scheduled.now += HOUR
    expected: list[tuple[dict[str, str], set[str]]] = [
        ({"schedule": "night"}, {of["ann's"], of["bob's"]}),
        ({"schedule": "night", "owner": "bob"}, {of["bob's"]}),
        ({"schedule": ids["ann's other"]}, {of["ann's other"]}),
        *(({"schedule": name}, set()) for name in ("none", "nigh", "%", "night\0", "x" * 64)),
        ({"reservation": "class"}, {of["ann's"]}),
        ({"reservation": "class", "schedule": "weekly"}, set()),
        *(({"reservation": name}, set()) for name in ("clas", "\0")),
    ]
    for given, found in expected:
        listed = await scheduled.jobs.list(JobFilter.model_validate(given))
        assert {job.id for job in listed.items} == found, given
    if is_deleted:
        for job_id in (*of.values(), single):
            await scheduled.jobs.delete(job_id)
    accounting = Accounting(scheduled.database)
    for given, found in expected:
        for per in ("attempt", "job"):
            page = await accounting.page(
                AccountingFilter.model_validate({**given, "per": per}), limit=100
            )
            assert {row.job_id for row in page.items} == found, given
    every = (await accounting.page(AccountingFilter(), limit=100)).items
    shown = {row.job_id: (row.schedule_id, row.reservation) for row in every}
    assert shown[of["ann's"]] == (ids["ann's"], "class")
    assert shown[single] == (None, None)
