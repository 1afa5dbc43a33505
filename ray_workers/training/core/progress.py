"""A rank's progress, by which the ranks of a broken group know which one is the furthest; and the
end of a job whose ranks are in no group, which its first rank writes to the attempt's store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from ray_workers.shared.heartbeat import HeartbeatPage, RankPhase, TimeCategory
from ray_workers.training.core.compat_torch import Store

NOTHING = -1
"""The progress of a rank that has no state yet."""
TORN = -3
"""The progress of a rank whose state is neither that before a step nor that after it."""


@dataclass(frozen=True)
class Progress:
    """How far one rank has come; the greater number is the further."""

    number: int
    """Twice the optimizer steps done, and one more once everything that was due after the last one
    (evaluation, a checkpoint) is done too."""

    @classmethod
    def at(cls, step: int) -> Self:
        """With `step` steps done, and all that was due."""
        return cls(2 * step + 1)

    @classmethod
    def just_after(cls, step: int) -> Self:
        """With `step` steps done, and nothing yet of what is due."""
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
