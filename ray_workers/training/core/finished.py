"""The end of a job whose ranks are in no group, as its first rank tells the others in the attempt's
store."""

from __future__ import annotations

from typing import Final

from ray_workers.shared.heartbeat import HeartbeatPage, RankPhase, TimeCategory
from ray_workers.training.core.compat_torch import Store

FINISHED_KEY: Final = "finished"
"""Its value is the last step of the job, whose result is stored."""


def tell_finished(store: Store, step: int) -> None:
    store.set(FINISHED_KEY, str(step))


def finish_if_told(store: Store, page: HeartbeatPage, generation: int) -> bool:
    """Whether the job is over, which the page shows then. A rank that came back too late for a step
    begins, and ends, after the last one."""
    if not store.check([FINISHED_KEY]):
        return False
    if not page.has_stepped:
        page.begin(generation, int(store.get(FINISHED_KEY)))
    page.enter(RankPhase.FINISH, TimeCategory.USEFUL)
    return True
