"""Small random clusters, jobs that hold slots, and queues."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from ray_workers.shared.slices import RoleSlots, Slice, by_bundle
from service.domain.scheduling.elastic.resizing import spare
from service.domain.scheduling.placement import shared_gpus
from service.domain.scheduling.placement.shared_gpus import parts_on, with_shared_gpus
from service.domain.scheduling.placement.slots import is_part_of_gpu
from service.domain.scheduling.policy import (
    Growing,
    Holder,
    Node,
    Request,
    RunningJob,
    Snapshot,
    WaitingJob,
)
from service.domain.scheduling.rules.dependencies import ArrayLimit, Dependency
from service.domain.scheduling.rules.queues import Queue
from tests.generated.plans import search

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LEVELS = ("zone", "rack")
GIB = 2.0**30
PARTS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.75, 0.9)
ARRAY = ArrayLimit("array-1", 2)
OWNERS = ("ann", "ben")
MIN_RUN_S = 300.0
RARE = ("growth", "packing")
"""Cases that are hardly ever generated otherwise: elastic groups that grow in a queue with a limit,
and a node whose GPUs are shared by many jobs. A tenth of the seeds generate them."""


@dataclass(frozen=True)
class Held:
    """A job that holds slots."""

    job: WaitingJob
    slices: tuple[Slice, ...]
    held_s: float = 1000.0
    lacking: int = 0
    is_leaving: bool = False
    is_asked: bool = False
    """The slots that the job was asked to release."""
    may_be_asked: bool = True

    @property
    def spare(self) -> tuple[Slice, ...]:
        least = self.job.request.min_workers
        return () if least is None or self.lacking else spare(self.slices, least)

    @property
    def recalled(self) -> tuple[Slice, ...]:
        return self.spare if self.is_asked and not self.is_leaving else ()

    @property
    def holder(self) -> Holder:
        job, request = self.job, self.job.request
        return Holder(job.job_id, self.slices, request.bundle, job.queue, job.owner, request.roles)


@dataclass(frozen=True)
class Case:
    """The input of one plan."""

    nodes: tuple[Node, ...]
    held: tuple[Held, ...]
    queue: tuple[WaitingJob, ...]
    queues: tuple[Queue, ...] = ()
    used_s: tuple[tuple[tuple[str, str], float], ...] = ()
    most_tried: int = shared_gpus.MOST_TRIED
    """Number of steps of the planner's search for GPUs."""

    def snapshot(self) -> Snapshot:
        holders = tuple(held.holder for held in self.held)
        asked = [*(job.request for job in self.queue), *(held.job.request for held in self.held)]
        shares = any(is_part_of_gpu(request.bundle) for request in asked)
        return Snapshot(
            self.queue,
            tuple(self._seen(node, holders, shares) for node in self.nodes),
            True,
            holders,
            growing=tuple(_growing(held) for held in self.held if _could_grow(held)),
            running=tuple(_running(held) for held in self.held if held.may_be_asked),
            min_run_s=MIN_RUN_S,
            queues=self.queues,
            used_s=dict(self.used_s),
            running_of_arrays=Counter(
                held.job.array.array_id for held in self.held if held.job.array is not None
            ),
            topology=LEVELS,
        )

    def _seen(self, node: Node, holders: Sequence[Holder], shares: bool) -> Node:
        free = dict(node.total)
        for holder in holders:
            for part, bundle in by_bundle(holder.slices, holder.bundle, holder.roles):
                for name, amount in bundle.items() if part.node_id == node.id else ():
                    if not name.startswith("label:"):
                        free[name] = free.get(name, 0.0) - part.num_workers * amount
        free = {name: max(0.0, amount) for name, amount in free.items()}
        if shares and node.total.get("GPU"):
            free = with_shared_gpus(free, parts_on(node.id, holders))
        return replace(node, available_to_us=free)


def _could_grow(held: Held) -> bool:
    request = held.job.request
    could = request.min_workers is not None and held.job.request.num_workers > _count(held.slices)
    return (could or held.lacking > 0) and not (held.is_leaving or held.recalled)


def _growing(held: Held) -> Growing:
    job = held.job
    facts = (1, job.priority, job.seq, job.request, held.slices, held.lacking)
    return Growing(job.job_id, *facts, job.queue, job.owner)


def _running(held: Held) -> RunningJob:
    job = held.job
    return RunningJob(
        *(job.job_id, job.priority, job.seq, job.request.of_size(_count(held.slices))),
        *(held.slices, held.held_s, job.left_s, job.waited_s),
        yields=job.yields,
        is_leaving=held.is_leaving,
        queue=job.queue,
        owner=job.owner,
        spare=() if held.recalled else held.spare,
        recalled=held.recalled,
    )


def _count(slices: Sequence[Slice]) -> int:
    return sum(part.num_workers for part in slices)


class Draw:
    """Return the case of a seed. Each case has only some of the features, so some are simple."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.rare = RARE[seed // 10 % len(RARE)] if seed % 10 == 7 else ""
        often = {"parts": 0.5, "levels": 0.4, "roles": 0.4, "silos": 0.2, "rules": 0.4}
        often |= {"memory": 0.4, "holders": 0.75, "waits": 0.3, "used": 0.4}
        self.has = {name: self.dice.random() < chance for name, chance in often.items()}

    def case(self) -> Case:
        dice = self.dice
        if self.rare:
            return self.growth() if self.rare == "growth" else self.packing()
        nodes = tuple(self.node(f"n{at}") for at in range(dice.randint(1, 4)))
        self.empty = [here for node in nodes if (here := search.Here.of(node)) and node.accepted]
        held: list[Held] = []
        for at in range(dice.randint(2, 8) if self.has["holders"] else 0):
            one = self.held(f"h{at}", at, nodes, held)
            held += [] if one is None else [one]
        queue = tuple(self.job(f"q{at}", 100 + at) for at in range(dice.randint(1, 5)))
        if self.has["waits"]:
            queue = tuple(map(self.kept_back, queue))
        queues = tuple(self.rules(name) for name in ("default", "night") if self.has["rules"])
        accounts = [(name, owner) for name in ("default", "night") for owner in OWNERS]
        used = [(each, dice.choice((0.0, 1e4, 1e5))) for each in accounts if self.has["used"]]
        return Case(nodes, tuple(held), queue, queues, tuple(used))

    def growth(self) -> Case:
        """Return elastic groups that are smaller than they want to be, next to idle slots, some of
        which their queue's limit lets them have."""
        dice = self.dice
        amount = {"CPU": 24.0, "GPU": 8.0}
        nodes = tuple(Node(f"n{at}", amount, amount) for at in range(dice.randint(1, 2)))
        held = []
        for at in range(dice.randint(2, 4)):
            bundle = dice.choice(({"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}, {"CPU": 2.0}))
            request = Request(dice.randint(2, 5), bundle, 1)
            job = WaitingJob(f"h{at}", 1, 50, at, request, waited_s=0.0, yields=True)
            queue = dice.choice(("night", "night", "default"))
            job = replace(job, queue=queue, owner=dice.choice(OWNERS))
            held.append(Held(job, (Slice(dice.choice(nodes).id, 1),)))
        waits = WaitingJob("q0", 0, 50, 100, Request(1, {"CPU": 1.0}), queue="night", held="ann")
        limits = {"CPU": float(dice.randint(5, 12)), "GPU": float(dice.randint(2, 5))}
        of_user = {"CPU": float(dice.randint(3, 8))}
        rules = Queue("night", limit=limits, user_limit=of_user if dice.random() < 0.5 else {})
        return Case(nodes, tuple(held), (waits,), (rules,))

    def packing(self) -> Case:
        """Return a node whose GPUs have little free space next to the parts of jobs, and a planner
        that soon gives up its search for GPUs."""
        dice = self.dice
        node = Node("n0", {"CPU": 64.0, "GPU": 4.0}, {})
        left: search.Left = (search.WHOLE,) * 4
        held = []
        for at in range(60):
            part, number = dice.choice(PARTS), dice.choice((1, 1, 2, 2, 3))
            ways = list(search.ways(left, search.units(part), number))
            if ways:
                left = ways[0] if dice.random() < 0.7 else dice.choice(ways)
                request = Request(number, {"CPU": 1.0, "GPU": part})
                job = WaitingJob(f"h{at}", 1, 50, at, request, waited_s=0.0)
                held.append(Held(job, (Slice("n0", number),), may_be_asked=False))
        part = next((each for each in PARTS if each > max(left) / search.WHOLE), 0.9)
        asks = Request(1, {"CPU": 1.0, "GPU": part})
        queue = tuple(WaitingJob(f"q{at}", 0, 50, 100 + at, asks) for at in range(2))
        there = (replace(node, available_to_us=node.total),)
        return Case(there, tuple(held), queue, most_tried=dice.choice((1, 3, 10)))

    def node(self, name: str) -> Node:
        dice = self.dice
        total = {"CPU": float(dice.randint(1, 12))}
        if self.has["parts"] and dice.random() < 0.5:
            total["CPU"] = 24.0  # so that only GPUs are scarce
        if gpus := dice.choice((0, 1, 2, 3, 4, 4)):
            total["GPU"] = float(gpus)
        if self.has["memory"]:
            total["memory"] = dice.choice((2, 4, 8)) * GIB
        labels: dict[str, str] = {}
        if self.has["levels"]:
            labels |= {"zone": dice.choice("yz")} if dice.random() < 0.8 else {}
            labels |= {"rack": dice.choice("12")} if dice.random() < 0.8 else {}
        if dice.random() < 0.3:
            labels["disk"] = "fast"
        if self.has["silos"]:
            labels["home"] = dice.choice("ab")
            labels |= {"dray.io/silo": "true"} if dice.random() < 0.5 else {}
        return Node.labelled(name, total, total, labels, accepted=dice.random() < 0.95)

    def likely_request(self) -> Request:
        """Return a job that the empty cluster can hold, unless such a job is hard to find."""
        for _ in range(4):
            request = self.request()
            if search.most_of(request, self.empty, LEVELS) >= search.least_of(request):
                break
        return request

    def request(self) -> Request:
        dice = self.dice
        bundle = {"CPU": float(dice.choice((1, 1, 1, 2, 3)))}
        if dice.random() < (0.85 if self.has["parts"] else 0.6):
            bundle["GPU"] = float(dice.choice((1, 1, 1, 2)))
            if self.has["parts"] and dice.random() < 0.75:
                bundle["GPU"] = dice.choice(PARTS)
        if self.has["memory"] and dice.random() < 0.6:
            bundle["memory"] = dice.choice((1, 2, 3)) * GIB
        if dice.random() < 0.1:
            bundle["label:disk=fast"] = 0.001
        number = dice.choice((1, 1, 2, 2, 3, 4, 6))
        kind = dice.random()
        if self.has["silos"] and kind < 0.3:
            homes = tuple((f"label:home={dice.choice('ab')}",) for _ in range(number))
            return Request(number + 1, bundle, homes=homes)
        if self.has["roles"] and kind < 0.6:
            return self.with_roles(number + 1, bundle)
        least = dice.randint(1, number) if dice.random() < 0.35 else None
        level = None
        if self.has["levels"] and dice.random() < 0.4:
            level = dice.choice(("zone", "rack", "node"))
        return Request(number, bundle, least, level)

    def with_roles(self, number: int, bundle: Mapping[str, float]) -> Request:
        """Return up to three roles, with at least one rank that uses the job's resources."""
        dice, rank = self.dice, 0
        roles: list[RoleSlots] = []
        for name in ("chief", "server", "ps")[: dice.randint(1, 3)]:
            rank += dice.randint(0, 1)
            size = dice.randint(1, 2)
            if rank + size >= number + len(roles):
                break
            own = {"CPU": float(dice.choice((1, 2, 4)))}
            if self.has["memory"] and dice.random() < 0.5:
                own["memory"] = dice.choice((1, 2, 4)) * GIB
            labels = {each: n for each, n in bundle.items() if each.startswith("label:")}
            roles.append(RoleSlots(name, rank, size, {**own, **labels}))
            rank += size
        return Request(max(number, rank + 1), bundle, roles=tuple(roles))

    def job(self, name: str, seq: int) -> WaitingJob:
        dice = self.dice
        return WaitingJob(
            *(name, 0, dice.choice((40, 50, 50, 60)), seq, self.likely_request()),
            left_s=dice.choice((None, 100.0, 1000.0, 50000.0)),
            waited_s=dice.choice((0.0, 0.0, 0.0, 25 * 3600.0)),
            yields=dice.random() < 0.6,
            ends_within_s=dice.choice((None, None, 60.0, 2000.0)),
            queue=dice.choice(("default", "night")),
            owner=dice.choice(OWNERS),
            array=ARRAY if dice.random() < 0.1 else None,
        )

    def kept_back(self, job: WaitingJob) -> WaitingJob:
        changes: dict[str, Any] = self.dice.choice(
            (
                *({},) * 5,
                {"held": "ann"},
                {"preparing": "its environment is being prepared"},
                {"not_before": NOW + timedelta(seconds=self.dice.choice((5, 60)))},
                {"after": (Dependency("job-0", "end", "RUNNING"),)},
                {"place": -job.seq},
            )
        )
        return replace(job, **changes)

    def rules(self, name: str) -> Queue:
        def some(chance: float) -> dict[str, float]:
            names = ("CPU", "GPU")
            return {each: float(dice.randint(1, 6)) for each in names if dice.random() < chance}

        dice, numbers = self.dice, (None, None, 1, 2)
        limit = some(0.4)
        return Queue(
            name,
            quota={each: min(n, limit.get(each, n)) for each, n in some(0.3).items()},
            limit=limit,
            user_limit=some(0.3),
            max_running=dice.choice(numbers),
            max_running_per_user=dice.choice(numbers),
        )

    def held(
        self, name: str, seq: int, nodes: Sequence[Node], others: Sequence[Held]
    ) -> Held | None:
        """Return a job whose slots are free in addition to those of the others, on any nodes; None
        if it was given slots that don't exist."""
        dice, job = self.dice, self.job(name, seq)
        request = job.request
        number = request.num_workers
        if request.min_workers is not None:
            number = dice.randint(request.min_workers, number)
            request = replace(request, num_workers=max(number, request.num_workers))
        ranks = [bundle for size, bundle in request.runs for _ in range(size)][:number]
        node = dice.choice(nodes)
        slices = []
        for _ in ranks:
            if request.required_level is None and dice.random() < 0.5:
                node = dice.choice(nodes)
            slices.append(Slice(node.id, 1))
        if not (request.roles or request.homes) and dice.random() < 0.7:
            of_nodes = Counter(part.node_id for part in slices)
            slices = [Slice(node_id, there) for node_id, there in of_nodes.items()]
        held = Held(
            job,
            tuple(slices),
            held_s=dice.choice((10.0, 1000.0, 1000.0)),
            is_leaving=dice.random() < 0.15,
            is_asked=dice.random() < 0.15,
            may_be_asked=dice.random() < 0.85,
        )
        is_labelled = all(
            node.total.get(label)
            for node in nodes
            if any(part.node_id == node.id for part in slices)
            for label in request.bundle
            if label.startswith("label:")
        )
        if not is_labelled or not search.fits_on_all(
            nodes, [each.holder for each in (*others, held)]
        ):
            return None
        return self.lacks_one(held) if dice.random() < 0.2 else held

    def lacks_one(self, held: Held) -> Held:
        """Return the group without one of its slots, for which it waits."""
        request, slices = held.job.request, held.slices[1:]
        if not slices or request.roles or request.homes or held.is_leaving:
            return held
        lacking = max(0, search.least_of(request) - _count(slices))
        return replace(held, slices=slices, lacking=lacking, is_asked=False)


def smaller(case: Case) -> Iterator[Case]:
    """Yield cases with something left out."""
    for at, node in enumerate(case.nodes):
        held = [h for h in case.held if all(part.node_id != node.id for part in h.slices)]
        yield replace(case, nodes=_without(case.nodes, at), held=tuple(held))
    for at in range(len(case.queue)):
        yield replace(case, queue=_without(case.queue, at))
    for at in range(len(case.held)):
        yield replace(case, held=_without(case.held, at))
    for at in range(len(case.queues)):
        yield replace(case, queues=_without(case.queues, at))
    if case.used_s:
        yield replace(case, used_s=())
    for at, job in enumerate(case.queue):
        for less in _simpler(job):
            yield replace(case, queue=(*case.queue[:at], less, *case.queue[at + 1 :]))


def _without(some: tuple[Any, ...], at: int) -> tuple[Any, ...]:
    return (*some[:at], *some[at + 1 :])


def _simpler(job: WaitingJob) -> Iterator[WaitingJob]:
    plain: dict[str, Any] = {"left_s": None, "waited_s": 0.0, "ends_within_s": None, "array": None}
    plain |= {"queue": "default", "owner": "ann", "priority": 50, "not_before": None}
    for name, value in plain.items():
        if getattr(job, name) != value:
            yield replace(job, **{name: value})
    request = job.request
    if not (request.roles or request.homes) and request.num_workers > request.least:
        yield replace(job, request=replace(request, num_workers=request.num_workers - 1))
    for name in request.bundle.keys() - {"CPU"}:
        bundle = {other: amount for other, amount in request.bundle.items() if other != name}
        yield replace(job, request=replace(request, bundle=bundle))
