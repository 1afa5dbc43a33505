"""The guard of a running group: sees what befalls it, and mends what can be mended in place.

It looks at the ranks' pages on every node, again and again, and waits for their ends. Who is to
blame, whether a loss is mended, what counts as a hang is decided in `verdict`, `mending` and
`watchdog`, which are pure; here it is done and told.
"""

from __future__ import annotations

import asyncio
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayActorError

from ray_workers import mending, releasing
from ray_workers.contracts import (
    LEFT_EXIT_CODE,
    AttemptSpec,
    Cause,
    Drill,
    DrillKind,
    DrillState,
    FrameKind,
    Grant,
    Outcome,
)
from ray_workers.forking import ForkFailed
from ray_workers.group import WorkerGroup
from ray_workers.pages import Doing, Sight, Use
from ray_workers.seeing import Nodes, hang_bundle
from ray_workers.telling import Teller
from ray_workers.verdict import RankExit
from ray_workers.watchdog import Hang, Watchdog

LOOK_S = 0.5
QUICK_LOOK_S = 0.03
"""Between two looks while something is awaited: a step to strike at, a group to be whole."""
REPLACE_LIMIT_S = 30.0
"""Longest that a replacement may take to run."""
WHOLE_LIMIT_S = 150.0
"""Longest from a loss to the next step: a replacement may have to read the data anew."""
STRAY_S = 1.0
"""How long ranks may stand by though nobody is lost: then a connection broke between the living."""
ECHO_S = 1.0
DRILL_GRACE_S = 30.0


@dataclass
class Regrouping:
    """A group that is being mended."""

    generation: int
    ranks: tuple[int, ...]
    """Who is replaced."""
    began_at: float
    """Unix seconds at which the loss was seen."""
    furthest_step: int
    """That anybody had committed before."""
    drill: Drill | None = None


@dataclass
class Guard:
    """Watches one group from its start to its end."""

    spec: AttemptSpec
    group: WorkerGroup
    nodes: Nodes
    teller: Teller
    stop_asked: asyncio.Event
    leave_asked: asyncio.Event
    grace_s: float = 0.0
    """From being asked to leave to having to."""
    regrouping: Regrouping | None = None
    sights: list[Sight] = field(default_factory=list)
    """Of every process, as last seen."""
    _generation: int = 0
    _without_a_step: int = 0
    _hung: set[int] = field(default_factory=set)
    _drills: list[Drill] = field(default_factory=list)
    _known_drills: set[str] = field(default_factory=set)
    _struck: dict[int, tuple[Drill, float]] = field(default_factory=dict)
    _stray_since: float | None = None
    _watchdog: Watchdog = field(default_factory=Watchdog)

    @property
    def use(self) -> Use:
        """What the slots are used for that no process accounts for."""
        if self.regrouping is not None:
            return Use.RECOVERING
        return Use.IDLE if any(sight.look.step for sight in self.sights) else Use.STARTING

    def add_drill(self, drill: Drill) -> None:
        """Strike when it is time; once by the drill's id."""
        if drill.id not in self._known_drills:
            self._known_drills.add(drill.id)
            self._drills.append(drill)
            self._tell_drill(drill, DrillState.WAITING)

    def grow(self, grant: Grant) -> None:
        """Take these slots in as soon as may be."""

    async def watch(self) -> Outcome | None:
        """Until the group has ended; an Outcome if it was not the ranks' own end."""
        stop = asyncio.ensure_future(self.stop_asked.wait())
        left = asyncio.ensure_future(self._left())
        looking = asyncio.ensure_future(self._look_around())
        store = asyncio.ensure_future(self.group.store_is_lost())
        chores: list[asyncio.Future[Any]] = [stop, left, looking, store]
        try:
            return await self._wait_for_the_end(stop, left, looking, store)
        finally:
            for chore in chores:
                chore.cancel()
            await asyncio.gather(*chores, return_exceptions=True)

    async def _wait_for_the_end(
        self,
        stop: asyncio.Future[Any],
        left: asyncio.Future[Outcome],
        looking: asyncio.Future[Outcome],
        store: asyncio.Future[None],
    ) -> Outcome | None:
        runtime_s = self.spec.max_runtime_s
        deadline = None if runtime_s is None else time.monotonic() + runtime_s
        handled: set[asyncio.Future[RankExit]] = set()
        while running := self._exits() - handled:
            timeout = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            either: set[asyncio.Future[Any]] = {stop, left, looking, store, *running}
            done, _ = await asyncio.wait(
                either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if stop in done:
                return Outcome(Cause.STOPPED, "stopped as asked")
            for ended_by_us in (left, looking):
                if ended_by_us in done:
                    return ended_by_us.result()
            if store in done:
                return Outcome(Cause.WORKER_LOST, "the group's rendezvous store is gone")
            if not done:
                return Outcome(
                    Cause.RUNTIME_EXCEEDED,
                    f"ran for max_runtime_s, {runtime_s:g} s in this attempt",
                )
            ended = running & done
            handled |= ended
            lost = [rank for exit_ in ended if (rank := exit_.result()).exit_code != 0]
            if lost and (outcome := self._as_asked(lost)):
                return outcome
            if lost and not await self._mend(lost):
                await self._let_echoes_end(lost)
                return None
        self._settle()
        return None

    def _exits(self) -> set[asyncio.Future[RankExit]]:
        """Of the newest process of each rank, ended or not."""
        return {member.exit for member in self.group.members if member.exit is not None}

    # Leaving.

    async def _left(self) -> Outcome:
        """Once asked to leave: the group's time to do so."""
        await self.leave_asked.wait()
        await self.group.ask_to_leave()
        deadline = time.monotonic() + self.grace_s
        while self.group.running and time.monotonic() < deadline:
            exits = [m.exit for m in self.group.running if m.exit is not None]
            await asyncio.wait(exits, timeout=max(0.0, deadline - time.monotonic()))
            if not self.spec.spec.get("script"):
                # Rank 0's end is looked at where all ends are.
                await asyncio.sleep(QUICK_LOOK_S)
        return Outcome(
            Cause.PREEMPTED,
            f"asked to leave its slots; it did not end by itself within {self.grace_s:g} s",
        )

    def _as_asked(self, lost: Sequence[RankExit]) -> Outcome | None:
        """An Outcome if ranks ended because the group was asked to leave."""
        if not self.leave_asked.is_set():
            return None
        if self.spec.spec.get("script"):
            return Outcome(Cause.PREEMPTED, "left its slots as asked")
        if any(rank.exit_code == LEFT_EXIT_CODE for rank in lost):
            return Outcome(Cause.PREEMPTED, "saved a checkpoint and left its slots as asked")
        return None

    # Mending.

    async def _mend(self, lost: Sequence[RankExit]) -> bool:
        """Replace these ranks, and have the others wait for them; False if that is not to be."""
        seen_at = time.time()
        if not mending.is_mendable(self.spec):
            return False
        errors = await self.nodes.errors()
        why_not = mending.refused(
            lost,
            {rank.rank: errors[rank.rank] for rank in lost if rank.rank in errors},
            num_survivors=len(self.group.running),
            without_a_step=self._without_a_step,
        )
        if why_not is None and await self._is_on_a_dead_node(lost):
            why_not = "its node is gone"
        if why_not is not None:
            print(f"not mended in place: {why_not}", flush=True)  # noqa: T201
            return False
        return await self._regroup(lost, seen_at)

    async def _is_on_a_dead_node(self, lost: Sequence[RankExit]) -> bool:
        nodes = {
            self.group.members[rank.rank].part.node_id for rank in lost if rank.exit_code is None
        }
        return bool(nodes and nodes - await asyncio.to_thread(releasing.alive_nodes))

    async def _regroup(self, lost: Sequence[RankExit], seen_at: float) -> bool:
        """Begin the next generation of the group, with replacements for the lost."""
        before = self.regrouping
        ranks = tuple(sorted({rank.rank for rank in lost} | set(before.ranks if before else ())))
        self._generation += 1
        self._without_a_step += 1
        struck = [self._struck.pop(rank) for rank in ranks if rank in self._struck]
        await self.see()
        self.regrouping = Regrouping(
            self._generation,
            ranks,
            struck[0][1] if struck else before.began_at if before else seen_at,
            max((sight.look.step for sight in self.sights), default=0),
            struck[0][0] if struck else before.drill if before else None,
        )
        self._tell_loss(lost)
        gone = [rank.rank for rank in lost]
        stay = [member.rank for member in self.group.running]
        try:
            async with asyncio.timeout(REPLACE_LIMIT_S):
                await asyncio.gather(
                    self.group.announce(self._generation, stay),
                    self.group.replace(gone, self._generation),
                )
        except (ForkFailed, RayActorError, TimeoutError):
            traceback.print_exc()
            return False
        return True

    def _tell_loss(self, lost: Sequence[RankExit]) -> None:
        assert self.regrouping is not None
        ranks = [rank.rank for rank in lost]
        if self._hung & set(ranks):
            code, message = "hang", f"rank {_listed(ranks)} hung and was ended"
        elif not lost:
            code, message = "lost", "ranks lost each other, though all of them live"
        else:
            code = "lost" if any(rank.exit_code is None for rank in lost) else "killed"
            message = "; ".join(mending.how(rank) for rank in lost)
        self._hung -= set(ranks)
        self.teller.tell(
            FrameKind.REGROUPING,
            {
                "generation": self._generation,
                "ranks": ranks,
                "code": code,
                "message": f"{message}; the others keep their state",
            },
        )

    def _settle(self) -> None:
        """Tell that the group trains again, if it was being mended and does."""
        mended = self.regrouping
        if mended is None:
            return
        looks = [sight.look for sight in self._newest()]
        resumed = max((look.resumed_step for look in looks), default=0)
        first_at = max((look.first_at for look in looks), default=0.0) or time.time()
        recovery_s = max(0.0, first_at - mended.began_at)
        steps_lost = max(0, mended.furthest_step - resumed)
        self.regrouping = None
        self._without_a_step = 0
        figures = {"step": resumed, "steps_lost": steps_lost, "recovery_s": recovery_s}
        self.teller.tell(
            FrameKind.REGROUPED,
            {
                "generation": mended.generation,
                "ranks": list(mended.ranks),
                "world_size": self.spec.world_size,
                **figures,
            },
        )
        if mended.drill is not None:
            self._tell_drill(mended.drill, DrillState.PASSED, **figures)

    async def _let_echoes_end(self, lost: Sequence[RankExit]) -> None:
        """Give the others a moment to fail by themselves, so that their last words are kept.

        Not where they wait for a place in a next group, which will not come.
        """
        running = [m.exit for m in self.group.running if m.exit is not None]
        if running and not mending.is_mendable(self.spec):
            await asyncio.wait(running, timeout=ECHO_S)

    # Looking.

    async def _look_around(self) -> Outcome:
        """Until something is found that ends the attempt."""
        while True:
            quick = self._drills or self.regrouping is not None
            await asyncio.sleep(QUICK_LOOK_S if quick else LOOK_S)
            try:
                outcome = await self._look()
            except Exception:
                traceback.print_exc()  # a node that does not answer is no reason to end
                continue
            if outcome is not None:
                return outcome

    async def _look(self) -> Outcome | None:
        await self.see()
        newest = self._newest()
        for drill in list(self._drills):
            await self._strike(drill, newest)
        if self.regrouping is not None:
            return self._look_at_regrouping(newest)
        if not mending.is_mendable(self.spec):
            return None
        if await self._look_for_strays(newest):
            return None
        if self._hung:
            return None  # who is to blame was killed, and is not seen gone yet
        hang = self._watchdog.look(newest, time.monotonic())
        return None if hang is None else await self._end_hang(hang)

    def _look_at_regrouping(self, newest: Sequence[Sight]) -> Outcome | None:
        assert self.regrouping is not None
        looks = [sight.look for sight in newest]
        whole = len(looks) == len(self.group.running) == self.spec.world_size
        here = whole and all(look.generation >= self.regrouping.generation for look in looks)
        if here and all(look.first_at or look.doing is Doing.FINISH for look in looks):
            self._settle()
        elif time.time() - self.regrouping.began_at > WHOLE_LIMIT_S:
            return Outcome(
                Cause.WORKER_LOST, f"the group was not whole again within {WHOLE_LIMIT_S:g} s"
            )
        return None

    async def _look_for_strays(self, newest: Sequence[Sight]) -> bool:
        """Whether ranks stand by though nobody is lost: they get another generation, and the
        others come along."""
        if not any(sight.look.doing is Doing.STAND_BY for sight in newest):
            self._stray_since = None
            return False
        now = time.monotonic()
        self._stray_since = self._stray_since or now
        ended = any(not member.is_running for member in self.group.members)
        if now - self._stray_since > STRAY_S and not ended and not self.leave_asked.is_set():
            self._stray_since = None
            await self._regroup([], time.time())
        return True

    async def _end_hang(self, hang: Hang) -> Outcome | None:
        """Tell what everyone was at, and kill who is to blame; an Outcome if nobody is."""
        culprits = [sight.rank for sight in hang.culprits]
        stacks = await self.nodes.stacks([member.rank for member in self.group.running])
        self.teller.tell(FrameKind.HANG, hang_bundle(hang, self._newest(), stacks))
        if not culprits:
            return Outcome(
                Cause.WORKER_LOST,
                f"all ranks stood still at the same place for {hang.waited_s:.1f} s",
            )
        self._hung |= set(culprits)
        for rank in culprits:
            await self._signal(rank, signal.SIGKILL)
        return None

    async def see(self) -> list[Sight]:
        """Look at every process of the attempt, also the dead."""
        self.sights = await self.nodes.sights()
        return self.sights

    def _newest(self) -> list[Sight]:
        """Of the processes that run now, by rank."""
        running = {(m.rank, m.incarnation) for m in self.group.running}
        return sorted(
            (s for s in self.sights if (s.rank, s.incarnation) in running), key=lambda s: s.rank
        )

    async def _signal(self, rank: int, number: int) -> bool:
        return await self.nodes.signal(self.group.members[rank].part.node_id, rank, number)

    # Drills.

    async def _strike(self, drill: Drill, newest: Sequence[Sight]) -> None:
        step = max((sight.look.step for sight in newest), default=0)
        if self.regrouping is not None or (drill.at_step is not None and step < drill.at_step):
            return
        self._drills.remove(drill)
        if drill.kind is DrillKind.PREEMPT:
            self._tell_drill(drill, DrillState.STRUCK, step=step)
            self.grace_s = self.grace_s or DRILL_GRACE_S
            self.leave_asked.set()
            return
        number = signal.SIGSTOP if drill.kind is DrillKind.STALL else signal.SIGKILL
        self._struck[drill.rank] = (drill, time.time())
        self._tell_drill(drill, DrillState.STRUCK, step=step)
        if not await self._signal(drill.rank, number):
            del self._struck[drill.rank]
            message = f"rank {drill.rank} has no process that could be struck"
            self._tell_drill(drill, DrillState.FAILED, message=message)

    def _tell_drill(self, drill: Drill, state: DrillState, **more: Any) -> None:
        self.teller.tell(FrameKind.DRILL, {"id": drill.id, "state": state, **more})


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
