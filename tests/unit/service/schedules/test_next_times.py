"""The next times of schedules: where they are computed, and which of them are shown."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy.orm import Session

from service.db.models import ScheduleRow
from service.domain.errors import InvalidDocument
from service.domain.schedules.cron import Cron
from tests.unit.service.schedules.scheduled import ANN, MIDNIGHT, Scheduled

HOUR = timedelta(hours=1)


async def test_no_time_is_computed_in_a_write_or_on_the_event_loop(
    on_sqlite: Scheduled, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    search = Cron.next_after

    def watched(self: Cron, at: datetime) -> datetime | None:
        threads.append(threading.current_thread().name)
        return search(self, at)

    monkeypatch.setattr(Cron, "next_after", watched)
    await on_sqlite.create(missed="skip")
    await on_sqlite.change_schedule("night", paused=True)
    on_sqlite.now += HOUR * 2.5
    await on_sqlite.change_schedule("night", paused=False, time_zone="Asia/Tokyo")
    await on_sqlite.schedules.get("night", ANN)
    await on_sqlite.runner.refresh()
    assert len(threads) > 10
    assert all(name.startswith("asyncio") for name in threads), threads
    threads.clear()
    await on_sqlite.schedules.list(ANN)
    assert threads == []


async def test_a_list_shows_the_first_time_and_a_schedule_shows_three(scheduled: Scheduled) -> None:
    await scheduled.create(cron="30 2 * * *", time_zone="Asia/Tokyo")
    shown = (await scheduled.schedules.get("night", ANN)).next_times
    assert [at.isoformat() for at in shown] == [
        f"2027-03-0{day}T02:30:00+09:00" for day in (2, 3, 4)
    ]
    assert (await scheduled.schedules.list(ANN)).items[0].next_times == shown[:1]
    await scheduled.change_schedule("night", paused=True)
    assert (await scheduled.schedules.list(ANN)).items[0].next_times == []


async def test_a_rare_time_is_refused_and_pauses_a_stored_schedule(scheduled: Scheduled) -> None:
    rare = "*/100 0 */100,29 2 THU#5"
    with pytest.raises(InvalidDocument, match="no day in the next 10 years") as refused:
        await scheduled.create(cron=rare, time_zone="Africa/Casablanca")
    assert refused.value.pointer == "/cron"
    scheduled.now = datetime.fromisoformat("2044-02-01T00:00+00:00")
    await scheduled.create(cron="0 0 */100,29 2 MON#5")
    await scheduled.until(datetime.fromisoformat("2044-02-29T00:00+00:00"))
    shown = await scheduled.schedules.get("night", ANN)
    assert (shown.paused, shown.paused_reason) == (
        True,
        "the cron expression matches no time in the next 10 years",
    )


async def test_a_change_is_computed_again_if_a_run_was_decided_in_the_meantime(
    scheduled: Scheduled, monkeypatch: pytest.MonkeyPatch
) -> None:
    await scheduled.create(overlap="queue")
    write = scheduled.database.write

    async def run_first(work: Any) -> Any:
        monkeypatch.setattr(scheduled.database, "write", write)
        await scheduled.until(MIDNIGHT + HOUR)
        return await write(work)

    monkeypatch.setattr(scheduled.database, "write", run_first)
    changed = await scheduled.change_schedule("night", deadline_s=60)
    assert changed.deadline_s == 60
    assert changed.next_times[0] == MIDNIGHT + HOUR * 2
    await scheduled.until(scheduled.now)
    assert len(await scheduled.jobs_of()) == 1, "the run is not submitted again"


async def test_a_zone_that_is_missing_on_this_host_is_an_error_of_its_field(
    scheduled: Scheduled,
) -> None:
    schedule_id = await scheduled.create()

    def lost(session: Session) -> None:
        row = session.get(ScheduleRow, schedule_id)
        assert row is not None
        row.time_zone = "Europe/Atlantis"

    scheduled.database.write_sync(lost)
    assert (await scheduled.schedules.get("night", ANN)).next_times == [MIDNIGHT + HOUR]
    assert (await scheduled.schedules.list(ANN)).items[0].next_times == [MIDNIGHT + HOUR]
    with pytest.raises(InvalidDocument, match="'Europe/Atlantis' is not a known") as refused:
        await scheduled.change_schedule("night", cron="@daily")
    assert refused.value.pointer == "/time_zone"
    changed = await scheduled.change_schedule("night", cron="@daily", time_zone="UTC")
    assert changed.next_times[0] == MIDNIGHT + HOUR * 24


async def test_an_expression_is_stored_with_single_spaces(scheduled: Scheduled) -> None:
    await scheduled.create(cron="\u001c 0\t2 * *  MON\u00a0")
    assert (await scheduled.schedules.get("night", ANN)).cron == "0 2 * * MON"
    assert (await scheduled.change_schedule("night", cron="@daily\u00a0")).cron == "@daily"
