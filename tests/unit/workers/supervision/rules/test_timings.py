"""The limits of the supervisor, compared with the limits of the ranks."""

from __future__ import annotations

from ray_workers.shared.processes.machine_speed import MAX_SLOWNESS
from ray_workers.supervision.rules.timings import Timings
from ray_workers.training.elastic import rendezvous


def test_a_rank_never_gives_a_round_up_before_the_supervisor_would() -> None:
    """The rank does not know the speed of its machine, and could not report it as the reason."""
    timings = Timings()
    whole_s = MAX_SLOWNESS * timings.whole_limit_s
    assert min(rendezvous.FORMING_LIMIT_S, rendezvous.MEETING_LIMIT_S) > whole_s
    assignment_s = MAX_SLOWNESS * (
        timings.replace_limit_s
        + timings.standby_limit_s
        + timings.grow_limit_s
        + timings.ready_limit_s
    )
    assert assignment_s < rendezvous.ASSIGNMENT_LIMIT_S
