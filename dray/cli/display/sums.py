"""Sums of accounting rows. Only the sums are kept in memory, and not the rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dray.views import AccountingRow


@dataclass
class AccountingSum:
    """The sum of rows that are added in the order in which the server lists them."""

    num_jobs: int = 0
    num_attempts: int = 0
    slot_seconds: float = 0.0
    cpu_seconds: float = 0.0
    gpu_seconds: float = 0.0
    cost: float = 0.0
    _last_job: str = ""

    def add(self, row: AccountingRow) -> None:
        self.num_jobs += row.job_id != self._last_job
        self._last_job = row.job_id
        self.num_attempts += row.num_attempts
        self.slot_seconds += row.slot_seconds
        self.cpu_seconds += row.cpu_seconds
        self.gpu_seconds += row.gpu_seconds
        self.cost += 0.0 if row.cost is None else row.cost.total


class AccountingSums:
    """A sum for each name and currency. Costs in different currencies are never added."""

    def __init__(self) -> None:
        self.sums: dict[tuple[str, str | None], AccountingSum] = {}

    def add(self, name: str, row: AccountingRow) -> None:
        key = name, None if row.cost is None else row.cost.currency
        self.sums.setdefault(key, AccountingSum()).add(row)
