"""The progress of ranks. In a broken group, the ranks compare their progress to find the rank with
the most progress. If ranks have no group, the first rank records the completion of the job in the
attempt's store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from ray_workers.shared.heartbeat import HeartbeatPage, RankPhase, TimeCategory
from ray_workers.training.core.compat_torch import Store

NOTHING = -1
"""The progress of a rank that has no state yet."""
TORN = -3
"""The progress of a rank whose state is partly before and partly after a step."""


@dataclass(frozen=True)
class Progress:
    """The progress of one rank; a greater number means more progress."""

    number: int
    """Twice the number of completed optimizer steps, plus one if all tasks that were due after the
    last step (such as an evaluation or a checkpoint) are also done."""

    @classmethod
    def at(cls, step: int) -> Self:
        """Return the progress when `step` steps, and all tasks due after these steps, are done."""
        return cls(2 * step + 1)

    @classmethod
    def just_after(cls, step: int) -> Self:
        """Return the progress directly after `step` steps, before the tasks that are due after
        these steps."""
        return cls(2 * step)

    @property
    def step(self) -> int:
        return self.number // 2

    @property
    def is_settled(self) -> bool:
        return self.number % 2 == 1

    def settled(self) -> Self:
        return type(self)(self.number | 1)


NO_STATE = Progress(NOTHING)


FINISHED_KEY: Final = "finished"
"""Key in the store whose value is the job's last step. The key is set once the result of the job is
stored."""


def mark_finished(store: Store, step: int) -> None:
    store.set(FINISHED_KEY, str(step))


def finish_if_marked(store: Store, page: HeartbeatPage, generation: int) -> bool:
    """Return whether the job is over. If so, also begin the phase FINISH on the heartbeat page: a
    replacement that joins after the last step runs no steps that would show that it has joined."""
    if not store.check([FINISHED_KEY]):
        return False
    if not page.has_stepped:
        page.begin(generation, int(store.get(FINISHED_KEY)))
    page.enter(RankPhase.FINISH, TimeCategory.USEFUL)
    return True
