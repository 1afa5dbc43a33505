"""Usage of the last days for the tests of the page and for its pictures."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

from sqlalchemy.orm import Session

from service.db.repositories.scheduling import usage as repository
from service.domain.costs.usage import QUARTER_S, UsageKey, quarter_of
from tests.unit.service.helpers import Service

OWNERS = {"ann": 9.0, "bert": 5.0, "chen": 3.0, "dora": 1.5}
"""The GPUs that each user uses on average."""
CODES = ("waiting_for_slots", "behind_in_queue", "held", "waiting_for_jobs")
GPUS, CPUS = 24.0, 224.0


def fill(hands: Service, num_days: int = 10) -> None:
    """Store the usage of the days before now."""
    die = random.Random(7)
    last = quarter_of(datetime.now(UTC))
    first = quarter_of(datetime.now(UTC) - timedelta(days=num_days))
    counted: dict[UsageKey, dict[str, float]] = {}
    capacity: dict[int, dict[str, float]] = {}
    waits: dict[tuple[int, str, str], float] = {}
    for quarter in range(first, last):
        is_day = 32 <= quarter % 96 < 76
        capacity[quarter] = {
            "measured_s": float(QUARTER_S),
            "cpu_seconds": CPUS * QUARTER_S,
            "gpu_seconds": GPUS * QUARTER_S,
        }
        for owner, mean in OWNERS.items():
            gpus = min(GPUS / 2, max(0.0, die.gauss(mean if is_day else mean / 2, 1.0)))
            seconds = gpus * QUARTER_S
            queue = "nightly" if owner == "chen" else "default"
            counted[UsageKey(quarter, owner, queue)] = {
                "slot_seconds": seconds,
                "gpu_seconds": seconds,
                "cpu_seconds": 4 * seconds,
                "gpu_measured_s": seconds,
                "gpu_idle_s": seconds * (0.3 if owner == "bert" else 0.02),
                "num_started": die.randint(0, 1),
                "num_succeeded": die.randint(0, 1),
                "num_failed": int(die.random() < 0.1),
            }
            cost = {"cost": seconds / 3600 * 2.5}
            counted[UsageKey(quarter, owner, queue, "EUR")] = cost
        for number, code in enumerate(CODES):
            jobs = die.randint(0, 6 - number) if is_day else 0
            waits[quarter, "default", code] = jobs * QUARTER_S

    def work(session: Session) -> None:
        repository.add(session, counted)
        repository.add_capacity(session, capacity)
        repository.add_waits(session, waits)

    hands.database.write_sync(work)
