"""The usage of the cluster over time, with the usage of the attempts that have ended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from alembic import op

from service.db.types import UtcDateTime, from_json
from service.domain.costs.slot_history import SlotHistory
from service.domain.costs.usage import OF_HOUR, QUARTER_S, quarter_bounds, quarter_of
from service.lifecycle.resizing import held_request

revision = "0065"
down_revision = "0062"

CHUNK = 500
_AMOUNTS = ("slot_seconds", "cpu_seconds", "gpu_seconds", "gpu_measured_s", "gpu_idle_s", "cost")
_COUNTS = ("num_started", "num_succeeded", "num_failed", "num_cancelled")
Cells = defaultdict[tuple[Any, ...], dict[str, float]]


def upgrade() -> None:
    zero = sa.text("0")
    op.create_table(
        "usage",
        sa.Column("length", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("quarter", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("owner", sa.String(255), primary_key=True),
        sa.Column("queue", sa.String(64), primary_key=True),
        sa.Column("currency", sa.String(16), primary_key=True),
        *(sa.Column(n, sa.Float(53), server_default=zero, nullable=False) for n in _AMOUNTS),
        *(sa.Column(n, sa.BigInteger(), server_default=zero, nullable=False) for n in _COUNTS),
        sqlite_with_rowid=False,  # rows are read in the order of their keys
    )
    op.create_table(
        "capacity",
        sa.Column("quarter", sa.BigInteger(), primary_key=True, autoincrement=False),
        *(
            sa.Column(name, sa.Float(53), nullable=False)
            for name in ("measured_s", "cpu_seconds", "gpu_seconds")
        ),
    )
    op.create_table(
        "waits",
        sa.Column("quarter", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("queue", sa.String(64), primary_key=True),
        sa.Column("code", sa.String(64), primary_key=True),
        sa.Column("job_seconds", sa.Float(53), nullable=False),
    )
    cells: Cells = defaultdict(lambda: dict.fromkeys((*_AMOUNTS, *_COUNTS), 0))
    currencies: dict[tuple[str, int], str] = {}
    for row in _read(_COSTS):
        currencies[row["job_id"], row["attempt"]] = row["currency"]
        _add_shares(cells, row, row["since"], row["until"], {"cost": row["total"]}, row["currency"])
    for row in _read(_ATTEMPTS):
        if row["started_at"] is None or row["held_until"] is None:
            continue
        currency = currencies.get((row["job_id"], row["attempt"]), "")
        held = sum(each["slot_seconds"] for each in (row["held"] or {}).values())
        bundle = held_request(row["slices"], row["bundle"], row["roles"]).mean_bundle
        amounts = {
            "slot_seconds": held,
            "cpu_seconds": held * bundle.get("CPU", 0.0),
            "gpu_seconds": held * bundle.get("GPU", 0.0),
        }
        _add_shares(cells, row, row["started_at"], row["held_until"], amounts, currency)
    for row in _read("SELECT owner, queue, state, started_at, finished_at FROM jobs"):
        ended = f"num_{row['state'].lower()}"
        for at, name in ((row["started_at"], "num_started"), (row["finished_at"], ended)):
            if at is not None and name in _COUNTS:
                cells[quarter_of(at), row["owner"], row["queue"], ""][name] += 1
    _insert(cells)


# The usage of a running attempt is added when it ends.
_COSTS = """
    SELECT * FROM attempt_costs WHERE NOT EXISTS (
        SELECT 1 FROM attempts WHERE attempts.job_id = attempt_costs.job_id
            AND attempts.attempt = attempt_costs.attempt AND attempts.finished_at IS NULL
    )
"""
_ATTEMPTS = """
    SELECT a.job_id, a.attempt, jobs.owner, coalesce(a.queue, jobs.queue) AS queue, a.started_at,
        a.held, a.held_until, a.sizes, a.slices, a.bundle, a.roles
    FROM attempts AS a JOIN jobs ON jobs.id = a.job_id WHERE a.finished_at IS NOT NULL
    UNION ALL
    SELECT job_id, attempt, owner, queue, started_at, held, held_until, sizes, slices, bundle, roles
    FROM deleted_attempts
"""
_TIMES = ("since", "until", "started_at", "held_until", "finished_at")
_JSON = ("held", "sizes", "slices", "bundle", "roles")


def _read(query: str) -> Iterator[Mapping[str, Any]]:
    connection = op.get_bind()
    parse_time = UtcDateTime().result_processor(connection.dialect, None)
    assert parse_time is not None
    assert parse_time is not None
    for row in connection.execute(sa.text(query)).mappings():
        found = dict(row)
        for name in found.keys() & _TIMES:
            found[name] = parse_time(found[name])
        for name in found.keys() & _JSON:
            if isinstance(found[name], str):
                found[name] = from_json(found[name])
        yield found


def _add_shares(
    cells: Cells,
    row: Mapping[str, Any],
    since: datetime,
    until: datetime,
    amounts: Mapping[str, float],
    currency: str,
) -> None:
    bounds = quarter_bounds(since, until)
    for index, share in SlotHistory(since, until, row["sizes"]).shares(bounds).items():
        cell = cells[bounds[index] // QUARTER_S, row["owner"], row["queue"], currency]
        for name, amount in amounts.items():
            cell[name] += share * amount


def _insert(cells: Cells) -> None:
    keys = ("length", "quarter", "owner", "queue", "currency")
    hours: Cells = defaultdict(lambda: dict.fromkeys((*_AMOUNTS, *_COUNTS), 0))
    for (quarter, *of), cell in cells.items():
        hour = hours[quarter - quarter % OF_HOUR, *of]
        for name, amount in cell.items():
            hour[name] += amount
    rows = [
        {**dict(zip(keys, (length, *key), strict=True)), **cell}
        for length, all_cells in ((1, cells), (OF_HOUR, hours))
        for key, cell in sorted(all_cells.items())
    ]
    names = (*keys, *_AMOUNTS, *_COUNTS)
    table = sa.table("usage", *map(sa.column, names))
    for start in range(0, len(rows), CHUNK):
        op.bulk_insert(table, rows[start : start + CHUNK])
