"""A change to a job's state is stored together with a message for each notified webhook, or not at
all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, event

from dray.views import JobState
from ray_workers.shared.contracts import Cause, Phase
from service.db.models import WebhookRow
from service.db.session import Database
from service.domain.errors import Unsatisfiable
from service.storage.storage import Storage
from tests.marks import ON_SQLITE
from tests.unit.service.helpers import Service, metrics, spec
from tests.unit.service.webhooks.hooked import Hooked

ALL = [state.value for state in JobState]


async def test_each_way_to_change_a_state_leaves_a_message(hooked: Hooked) -> None:
    await hooked.hook(states=ALL)
    job_id = await hooked.submit()
    hooked.claim(job_id)
    hooked.report(job_id, 1, phase=Phase.RUNNING)
    hooked.end(job_id, 1, Cause.NODE_LOST)
    hooked.claim(job_id, 1)
    hooked.report(job_id, 2, phase=Phase.RUNNING)
    await hooked.jobs.cancel(job_id)
    hooked.end(job_id, 2, Cause.STOPPED)
    states = ("queued", "starting", "running", "queued", "starting", "running", "cancelling")
    assert hooked.written() == [(f"job.{state}", job_id) for state in (*states, "cancelled")]


async def test_many_jobs_that_change_at_once_leave_a_message_each(hooked: Hooked) -> None:
    await hooked.hook(states=["QUEUED", "CANCELLED"])
    first = await hooked.submit(array={"size": 3})
    array_id = (await hooked.jobs.get(first)).array_id
    assert array_id is not None
    waiter = await hooked.submit(after=[{"job": array_id, "on": "success"}])
    assert [kind for kind, _ in hooked.written()] == ["job.queued"] * 4
    await hooked.jobs.arrays.cancel(array_id)
    ended = hooked.written()[4:]
    assert [kind for kind, _ in ended] == ["job.cancelled"] * 4
    assert len({job_id for _, job_id in ended}) == 4
    assert ended[-1][1] == waiter, "it waited for a success that can't come any more"


async def test_a_start_and_an_end_in_one_report_are_two_messages(hooked: Hooked) -> None:
    hook = await hooked.hook(states=["RUNNING", "SUCCEEDED"])
    job_id = await hooked.submit()
    hooked.claim(job_id)
    hooked.end(job_id, 1, frames=[metrics(1, {"train/loss": 0.5})])
    await hooked.round()
    running, ended = (sent.data for sent in hooked.sent)
    assert (running["state"], running["finished_at"]) == ("RUNNING", None)
    assert (ended["state"], ended["seq"]) == ("SUCCEEDED", running["seq"] + 1)
    assert ended["finished_at"] is not None
    assert (await hooked.webhooks.get(hook.id, owner=None)).num_waiting == 0


@ON_SQLITE
async def test_the_message_shows_the_job_as_it_entered_the_state(hooked: Hooked) -> None:
    await hooked.queue("night")
    await hooked.hook(states=["FAILED"])
    job_id = await hooked.submit(
        name="digits", labels={"team": "vision"}, queue="night", max_retries=0
    )
    hooked.claim(job_id)
    frames = [metrics(7, {"train/loss": 0.5, "val/accuracy": 0.9})]
    hooked.end(job_id, 1, Cause.USER_ERROR, "x" * 2000, frames)
    await hooked.jobs.delete(job_id)
    await hooked.round()
    (sent,) = hooked.sent
    job = sent.data
    assert sent.headers["webhook-id"].endswith("-1")
    at = hooked.now.isoformat().replace("+00:00", "Z")
    assert {name: job[name] for name in ("id", "name", "state", "from_state", "attempt")} == {
        "id": job_id,
        "name": "digits",
        "state": "FAILED",
        "from_state": "RUNNING",
        "attempt": 1,
    }
    assert (job["owner"], job["queue"], job["labels"]) == ("ann", "night", {"team": "vision"})
    assert job["metrics"] == {"train/loss": 0.5, "val/accuracy": 0.9}
    assert (job["reason"]["code"], len(job["reason"]["message"])) == ("user_error", 1000)
    assert (job["created_at"], job["finished_at"], job["time"]) == (at, at, at)
    assert job["link"] == f"http://127.0.0.1:8420/#/jobs/{job_id}"


async def test_a_change_that_is_not_stored_sends_no_message(hooked: Hooked) -> None:
    await hooked.hook(states=ALL)
    await hooked.jobs.dry_run(spec(), owner="ann")
    await hooked.queue("small", limit={"CPU": 1})
    with pytest.raises(Unsatisfiable):
        await hooked.submit(queue="small", resources={"num_workers": 9})
    assert hooked.written() == []


@pytest.mark.parametrize(
    ("filters", "is_notified"),
    [
        ({}, True),
        ({"states": ["FAILED"]}, False),
        ({"owner": "bob"}, False),
        ({"owner": "bob", "all_users": True}, True),
        ({"queue": "night"}, True),
        ({"queue": "lab"}, True),
        ({"queue": "default"}, False),
        ({"labels": {"team": "vision"}}, True),
        ({"labels": {"team": "vision", "run": "2"}}, True),
        ({"labels": {"team": "vision", "run": "3"}}, False),
        ({"labels": {"team": "vision"}, "queue": "night", "states": ["CANCELLED"]}, True),
    ],
)
@ON_SQLITE
async def test_a_webhook_is_notified_of_jobs_that_its_filters_match(
    hooked: Hooked, filters: dict[str, Any], is_notified: bool
) -> None:
    await hooked.queue("lab")
    await hooked.queue("night", parent="lab")
    await hooked.hook(**filters)
    job_id = await hooked.submit(queue="night", labels={"team": "vision", "run": "2"})
    await hooked.jobs.cancel(job_id)
    assert hooked.written() == ([("job.cancelled", job_id)] if is_notified else [])


@ON_SQLITE
async def test_a_disabled_webhook_gets_nothing_and_an_enabled_one_later_changes(
    hooked: Hooked,
) -> None:
    hook = await hooked.hook()
    waits = await hooked.submit()
    await hooked.jobs.cancel(waits)
    disabled = await hooked.webhooks.set_enabled(hook.id, enabled=False, owner="ann", actor="ann")
    assert (disabled.enabled, disabled.num_waiting) == (False, 0)
    await hooked.jobs.cancel(await hooked.submit())
    assert (
        await hooked.webhooks.set_enabled(hook.id, enabled=True, owner="ann", actor="ann")
    ).enabled
    later_job = await hooked.submit()
    await hooked.jobs.cancel(later_job)
    await hooked.round()
    assert [sent.data["id"] for sent in hooked.sent] == [later_job]
    assert (await hooked.webhooks.deliveries(hook.id, owner="ann")).items[1].status == "dropped"


@ON_SQLITE
async def test_without_webhooks_a_change_costs_one_statement(service: Service) -> None:
    job_id = await service.submit()
    statements: list[str] = []

    @event.listens_for(service.database.engine, "before_cursor_execute")
    def note(_c: object, _k: object, statement: str, *_: object) -> None:
        statements.append(statement)

    service.claim(job_id)
    (asked,) = [one for one in statements if "webhook" in one]
    assert asked.startswith("SELECT (SELECT cluster.connected")
    statements.clear()
    service.report(job_id, 1, phase=Phase.RUNNING)
    service.report(job_id, 1, [metrics(1, {"x": 1.0})])
    assert len([one for one in statements if "webhook" in one]) == 1, "steps are no changes"


async def test_a_change_never_waits_for_whoever_deletes_the_webhook(
    postgres_url: str, storage: Storage, tmp_path: Path
) -> None:
    database = Database(postgres_url)
    hooked = Hooked(database, storage, tmp_path)
    hooked.now = database.clock()
    await hooked.hook(states=["QUEUED"])
    with database.engine.begin() as connection:
        connection.execute(delete(WebhookRow))
        job_id = await hooked.submit()
    assert hooked.written() == [("job.queued", job_id)]
    await hooked.sender._sweep()
    assert hooked.written() == [], "messages of no webhook are swept away"
    database.close()
