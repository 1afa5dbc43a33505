"""The fake cluster in virtual time: its attempts follow a plan, and events are random.

It implements the port with Ray's awkward behavior: slots become free only after lingering processes
have exited, spools are lost with their node, and ranks outlive a dead supervisor for a while.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from ray_workers.shared.contracts import AttemptSpec
from ray_workers.shared.spool_reader import parse_key
from tests.fakes.attempt import Attempt
from tests.fakes.cluster import FakeCluster
from tests.fakes.node import FakeNode
from tests.simulation.attempt import SimAttempt


class SimCluster(FakeCluster):
    """The fake cluster, with the events that a storm can inject."""

    def __init__(
        self,
        chance: random.Random,
        now: Callable[[], float],
        on_start: Callable[[SimAttempt], None],
        on_take: Callable[[SimAttempt], None],
        note: Callable[[str], None],
    ) -> None:
        # There are no other users of the cluster, so changes of free slots would only be noise.
        super().__init__({}, now=now, shows_free=False)
        self.chance = chance
        self.on_start = on_start
        self.on_take = on_take
        self.note = note
        self.mute: dict[str, None] = {}
        """Jobs that lost unread reports of rank 0 together with a node."""
        self.written: set[tuple[int, str]] = set()
        """(step, url) of every saved checkpoint."""
        self.num_nodes = 0

    def begin(self, spec: AttemptSpec) -> Attempt:
        return SimAttempt(self, spec)

    def of_this_session(self) -> list[SimAttempt]:
        """Return the attempts that are not forgotten."""
        return [attempt for attempt in self.known.values() if isinstance(attempt, SimAttempt)]

    def linger_s(self) -> float:
        return self.chance.choice((0.0, 0.1, 2.0))

    def lasting_slots(self) -> int:
        """Number of slots on all nodes that are not draining."""
        return sum(slots_of(node) for node in self.nodes.values() if node.drained_by is None)

    def add_slots(self, slots: int) -> str:
        """Add a node with this many slots and return its ID."""
        self.num_nodes += 1
        node_id = f"node-{self.num_nodes}"
        self.add_node(node_id, {"CPU": float(slots)})
        return node_id

    def drain_and_lose(self, node_id: str, after_s: float) -> None:
        """Drain a node, and lose it later."""
        self.drain_node(node_id, self.now() + after_s)
        loop = asyncio.get_running_loop()
        loop.call_later(after_s, lambda: node_id in self.nodes and self.lose_node(node_id))

    def lose_node(self, node_id: str) -> None:
        for (job_id, _), spools in self.nodes[node_id].spools.items():
            if any(parse_key(key)[0] == 0 for key in spools):
                self.mute[job_id] = None
        super().lose_node(node_id)

    def restart(self) -> None:
        for node in self.nodes.values():
            self.mute |= dict.fromkeys(job_id for job_id, _ in node.spools)
        super().restart()
        self.gone.clear()

    def what_is_left(self) -> list[str]:
        """Everything of dray that is left on the cluster (I7)."""
        left = [f"the supervisor of {key}" for key, a in self.known.items() if a.supervised]
        left += [f"processes of {a.key}" for a in self.everyone() if a.num_processes]
        for node_id, node in self.nodes.items():
            left += [f"a spool of {key} on {node_id}" for key in node.spools]
            left += [f"{node.held} of {node_id}"] if any(node.held.values()) else []
        return left


def slots_of(node: FakeNode) -> int:
    return int(node.resources["CPU"])
