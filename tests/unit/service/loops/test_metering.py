"""All processes add to the same totals, which persist across restarts; nothing is lost or counted
twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy.orm import Session

from service.db.session import Database, measure
from service.domain.errors import DatabaseUnavailable
from service.domain.meter import JOB_ENDS, JOB_START, Meter
from service.loops.metering import Metering
from service.loops.shared.timings import LoopTimings


def metering(database: Database) -> Metering:
    return Metering(database, LoopTimings())


async def test_the_sums_of_all_processes_are_read_by_each(
    database: Database, database_url: str
) -> None:
    other = Database(database_url)
    for number, one in enumerate((database, other), 1):
        one.meter.add(JOB_ENDS, number, "FAILED")
        one.meter.add(JOB_START, 0.7 * number)
    if not database.is_sqlite:  # SQLite has one writing process
        await metering(other).flush()
    else:
        database.meter.add_all(other.meter.take())
    cells = (await metering(database).watched()).cells
    assert cells == {
        ("dray_job_ends", "FAILED", "count"): 3.0,
        ("dray_job_start_seconds", "", "1"): 1.0,
        ("dray_job_start_seconds", "", "2.5"): 1.0,
        ("dray_job_start_seconds", "", "sum"): pytest.approx(2.1),
    }
    other.close()


async def test_what_is_measured_in_a_transaction_counts_if_that_is_kept(
    database: Database,
) -> None:
    def fails(session: Session) -> None:
        measure(session, JOB_ENDS, label="FAILED")
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        await database.write(fails)
    assert database.meter.take() == {}
    await database.write(lambda s: measure(s, JOB_ENDS, label="FAILED"))
    assert database.meter.take() == {("dray_job_ends", "FAILED", "count"): 1.0}


async def test_sums_are_kept_while_the_database_is_away(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def is_away(_: Callable[[Session], Any]) -> None:
        raise DatabaseUnavailable("away")

    database.meter.add(JOB_ENDS, label="FAILED")
    with monkeypatch.context() as patch:
        patch.setattr(database, "write", is_away)
        await metering(database).flush()
    cells = (await metering(database).watched()).cells
    assert cells == {("dray_job_ends", "FAILED", "count"): 1.0}


@pytest.mark.parametrize(
    ("seconds", "bucket"), [(0.0, "0.25"), (0.25, "0.25"), (0.26, "0.5"), (1e9, "+Inf")]
)
def test_a_duration_is_in_the_first_bucket_that_holds_it(seconds: float, bucket: str) -> None:
    meter = Meter()
    meter.add(JOB_START, seconds)
    assert meter.take()["dray_job_start_seconds", "", bucket] == 1.0
