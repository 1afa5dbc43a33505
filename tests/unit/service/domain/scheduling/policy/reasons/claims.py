"""A slow check of the reasons in a plan: each sentence is parsed, and its statements are verified
by computing them from the snapshot after all starts in the plan.

It shares no code with the policy. A sentence that matches no known pattern is an error.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from service.domain.scheduling.policy import (
    Decision,
    Grow,
    Growing,
    Node,
    Preempt,
    Request,
    RunningJob,
    Shrink,
    Snapshot,
    Start,
    Stay,
    Wait,
    WaitingJob,
)
from tests.unit.service.domain.scheduling.policy.reasons.search import (
    bundles_of,
    packs,
    runs_of,
    slots_of,
)
from tests.unit.service.domain.scheduling.policy.reasons.words import bundle_matches, some_jobs

Amounts = Mapping[str, float]
Checked = Callable[..., None]
FORMS: list[tuple[re.Pattern[str], Checked]] = []
"""The pattern of each sentence, and the check of its statements."""
OPEN = "open to all jobs"


def says(pattern: str) -> Callable[[Checked], Checked]:
    """Register the check for a pattern. The groups of the pattern are the arguments of the
    check."""

    def register(check: Checked) -> Checked:
        FORMS.append((re.compile(pattern), check))
        return check

    return register


class Claims:
    """The cluster after all starts in a plan."""

    def __init__(self, snapshot: Snapshot, now: datetime, decisions: Sequence[Decision]) -> None:
        self.snapshot, self.now, self.decisions = snapshot, now, decisions
        self.nodes = {n.id: n for n in snapshot.nodes if n.accepted and snapshot.connected}
        self.all_nodes = {**self.nodes, **{n.id: n for n in snapshot.to_come}}
        self.waiting = {job.job_id: job for job in snapshot.queue}
        self.groups = {group.job_id: group for group in snapshot.growing}
        self.running = {job.job_id: job for job in snapshot.running}
        self.queues = {queue.name: queue for queue in snapshot.queues}
        self.decided = {
            d.job_id: d for d in decisions if not isinstance(d, Preempt | Shrink | Grow | Stay)
        }
        self.holding: dict[str, list[tuple[str, Amounts, int]]] = defaultdict(list)
        """The slots of each job as (node, bundle, number)."""
        self.account: dict[str, tuple[str, str]] = {}
        self.free = {name: dict(node.available_to_us) for name, node in self.nodes.items()}
        for holder in snapshot.holders:
            self.account[holder.job_id] = holder.queue, holder.owner
            self.holding[holder.job_id] += slots_of(holder.request, holder.slices)
        for decision in decisions:
            if isinstance(decision, Start | Grow):
                self.carry_out(decision)

    def carry_out(self, decision: Start | Grow) -> None:
        job: WaitingJob | Growing
        if isinstance(decision, Start):
            job = self.waiting[decision.job_id]
        else:
            job = self.groups[decision.job_id]
        self.account[job.job_id] = job.queue, job.owner
        for node, bundle, number in slots_of(job.request, decision.slices):
            self.holding[job.job_id].append((node, bundle, number))
            for name, amount in bundle.items():
                self.free[node][name] -= number * amount

    # Room for workers.

    def fits(
        self, node: Node, bundle: Amounts, free: Amounts, parts: Any = (), *, spread: bool = False
    ) -> int:
        """Return how many workers of one job fit on a node. parts: (size, number) of the GPU parts
        in use on it."""
        gpus = bundle.get("GPU", 0.0)
        most = 10**6
        for name, amount in bundle.items():
            if amount > 0 and not (name == "GPU" and (parts or gpus < 1)):
                most = min(most, int((free.get(name, 0.0) + 1e-6) // amount))
        if gpus and (parts or gpus < 1):
            taken = sum(size * number for size, number in parts)
            whole = round(free.get("GPU", 0.0) + taken)
            if spread:
                whole, parts = max(0, whole - sum(n for _, n in parts)), ()
            while most and not packs(whole, [*parts, (gpus, most)] if most < 99 else None):
                most = min(most - 1, whole)
        return max(0, most)

    def parts(self, node_id: str) -> list[tuple[float, int]]:
        return [
            (bundle["GPU"], number)
            for slots in self.holding.values()
            for node, bundle, number in slots
            if node == node_id and 0 < bundle.get("GPU", 0.0) < 1
        ]

    def is_open(self, node: Node, request: Request) -> bool:
        return bool(request.homes) or node.total.get(OPEN, 1.0) > 0

    def place(self, node: Node, level: str) -> object:
        """Return a node's domain at a level."""
        labels = dict(
            name.removeprefix("label:").split("=")
            for name in node.total
            if name.startswith("label:")
        )
        names = self.snapshot.topology
        for at in range(names.index(level) if level in names else len(names), len(names)):
            if names[at] in labels:
                return tuple(labels.get(name) for name in names[: at + 1])
        return node.id

    def has_level(self, level: str) -> bool:
        return level in (*self.snapshot.topology, "node")

    def capacities(
        self, request: Request, sizes: Mapping[str, int], nodes: Mapping[str, Node]
    ) -> Any:
        """Return how many workers fit in each domain of the required level, or in total."""
        level = request.required_level
        found: Counter[object] = Counter()
        for name, size in sizes.items():
            if level is None:
                found[None] += size
            elif self.has_level(level):
                found[self.place(nodes[name], level)] += size
        return found

    def empty_sizes(self, request: Request, nodes: Mapping[str, Node]) -> dict[str, int]:
        return {
            name: self.fits(node, request.bundle, node.total) * self.is_open(node, request)
            for name, node in nodes.items()
        }

    def whole_free(self) -> dict[str, dict[str, float]]:
        """Return the free resources, excluding GPUs of which any job has a part."""
        one = Request(1, {"GPU": 1.0})
        return {
            name: {
                **free,
                "GPU": float(self.fits(self.nodes[name], one.bundle, free, self.parts(name))),
            }
            for name, free in self.free.items()
        }

    def free_sizes(
        self, request: Request, *, opened: bool = False, spread: bool = False
    ) -> dict[str, int]:
        """opened: include nodes that accept only ranks of silos. spread: assume that no GPU has two
        parts."""
        return {
            name: self.fits(
                node,
                request.bundle,
                self.free[name],
                [(each, n) for each, n in self.parts(name)],
                spread=spread,
            )
            for name, node in self.nodes.items()
            if self.is_open(node, request) != opened
        }

    def suitable(self, request: Request) -> set[str]:
        """Return the nodes on which some worker could run if they were empty."""
        bundles = [bundle for _, bundle in runs_of(request)]
        sizes = self.empty_sizes(request, self.nodes)
        capacities = self.capacities(request, sizes, self.nodes)
        return {
            name
            for name, node in self.nodes.items()
            if self.is_open(node, request)
            and any(self.fits(node, bundle, node.total) for bundle in bundles)
            and (
                request.required_level is None
                or capacities[self.place(node, request.required_level)] >= request.least
            )
        }

    def all_fit(self, request: Request, there: Mapping[str, Amounts]) -> bool:
        """Whether all ranks of a gang with roles or silos fit at the same time, by search."""
        ranks: list[tuple[Amounts, tuple[str, ...], bool]] = []
        for at, (bundle, labels) in enumerate(
            zip(bundles_of(request), ((), *request.homes), strict=False)
            if request.homes
            else ((bundle, ()) for bundle in bundles_of(request))
        ):
            ranks.append((bundle, tuple(labels), bool(request.homes) and at > 0))
        left = {name: dict(has) for name, has in there.items()}
        tried: set[object] = set()

        def search(at: int) -> bool:
            if at == len(ranks):
                return True
            state = at, tuple(tuple(sorted(has.items())) for has in left.values())
            if state in tried:
                return False
            tried.add(state)
            bundle, labels, of_silo = ranks[at]
            for name, has in left.items():
                total = self.all_nodes[name].total
                if not of_silo and not total.get(OPEN, 1.0) > 0:
                    continue
                if not all(total.get(label) for label in labels):
                    continue
                if all(has.get(each, 0.0) + 1e-6 >= amount for each, amount in bundle.items()):
                    for each, amount in bundle.items():
                        has[each] = has.get(each, 0.0) - amount
                    if search(at + 1):
                        return True
                    for each, amount in bundle.items():
                        has[each] += amount
            return False

        return search(0)

    # Sentences.

    def check(self) -> None:
        for decision in self.decisions:
            if not isinstance(decision, Start | Grow):
                self.check_sentence(decision, decision.reason.message)

    def check_sentence(self, decision: Decision, message: str) -> None:
        if isinstance(decision, Stay) and decision.reason.code == "asked_for_slots":
            asked = [d for d in self.decisions if isinstance(d, Preempt | Shrink)]
            decision = next(d for d in asked if d.job_id == decision.job_id)
        for pattern, check in FORMS:
            found = pattern.fullmatch(message)
            if found:
                check(self, decision, *found.groups())
                return
        raise AssertionError(f"no check knows the sentence {message!r}")

    def job(self, decision: Decision) -> WaitingJob | Growing | RunningJob:
        name = decision.job_id
        if isinstance(decision, Preempt | Shrink):
            return self.running[name]
        return self.groups[name] if isinstance(decision, Stay) else self.waiting[name]

    def request(self, decision: Decision) -> Request:
        return self.job(decision).request

    def least(self, decision: Decision) -> int:
        """Return the number of workers that the job needs to start, or the group needs to grow."""
        job = self.job(decision)
        return max(1, job.lacking) if isinstance(job, Growing) else job.request.least

    def check_opening(self, decision: Decision, words: str) -> None:
        """Check the beginning of a sentence, which states what the job needs."""
        request, job = self.request(decision), self.job(decision)
        if isinstance(job, Growing):
            pattern = r"(could grow by|continues without|waits for) (\d+) workers?( more)? of (.*)"
            found = re.fullmatch(pattern, words)
            assert found, words
            held = sum(part.num_workers for part in job.slices)
            lacks = job.lacking or job.request.num_workers - held
            how = "continues without" if job.trains else "waits for"
            assert found[1] == (how if job.lacking else "could grow by"), words
            assert int(found[2]) == lacks, words
            assert bundle_matches(found[4], request.bundle), words
            return
        self.check_needs(request, words)

    def check_needs(self, request: Request, words: str) -> None:
        words = words.removesuffix(", each silo on a node that has its data")
        if request.required_level is not None:
            assert words.endswith(f" within one {request.required_level}"), words
            words = words.removesuffix(f" within one {request.required_level}")
        words = words.removeprefix("needs ")
        if not request.roles:
            assert words.startswith("at least ") == (request.min_workers is not None), words
            self.check_workers(words.removeprefix("at least "), request.least, request.bundle)
            return
        alike, role = re.split(r", (?:and )?(?=\d+ servers? of)", words)
        (own,) = request.roles
        self.check_workers(alike, request.num_workers - own.number, request.bundle)
        self.check_workers(role, own.number, own.bundle)

    def check_workers(self, words: str, number: int, bundle: Amounts) -> None:
        found = re.fullmatch(r"(\d+) (?:worker|server)s? of (.*)", words)
        assert found, words
        assert int(found[1]) == number, words
        assert bundle_matches(found[2], bundle), words

    def check_free(self, decision: Decision, number: int) -> None:
        request, job = self.request(decision), self.job(decision)
        sizes = self.free_sizes(request)
        capacities = self.capacities(request, sizes, self.nodes)
        if request.homes or request.roles:
            assert number == request.num_workers, "all of them, or no number"
            assert self.all_fit(request, self.whole_free())
        elif isinstance(job, Growing) and request.required_level:
            near = [p.node_id for p in job.slices if p.node_id in self.nodes]
            place = self.place(self.nodes[near[0]], request.required_level) if near else ""
            assert number == capacities[place], (number, capacities)
        else:
            assert number <= max(capacities.values(), default=0), (number, capacities)
            # It is unknown which parts share a GPU. In the worst case, each part has its own GPU.
            spread = self.capacities(request, self.free_sizes(request, spread=True), self.nodes)
            assert number >= max(spread.values(), default=0), (number, spread)

    def check_holders(self, decision: Decision, words: str, number: int) -> None:
        names, total = some_jobs(words)
        suitable = self.suitable(self.request(decision))
        there = {
            job: held
            for job, slots in self.holding.items()
            if job != decision.job_id
            and (held := sum(n for node, _, n in slots if node in suitable))
        }
        assert set(names) <= set(there), (names, there)
        assert total == len(there), (total, there)
        assert number == sum(there.values()), (number, there)

    def blocked_ahead(self, decision: Decision) -> tuple[set[str], set[str]]:
        """Return the jobs ahead of it for which slots are kept, if some node could run workers of
        both, and the jobs that back off or are being prepared, of which only some keep slots."""
        mine = self.suitable(self.request(decision))
        found: set[str] = set()
        back_off: set[str] = set()
        position = getattr(decision, "position", None) or 10**9
        waits = [d for d in self.decided.values() if isinstance(d, Wait)]
        blocked = [d.position for d in waits if d.reason.code in RESERVE and d.position]
        for name, each in self.decided.items():
            if not isinstance(each, Wait) or name == decision.job_id or each.position is None:
                continue
            keeps = each.reason.code in KEEP_SLOTS
            if each.reason.code in RESERVE:  # only the first of them
                keeps = each.position == min(blocked)
            if isinstance(decision, Stay) and each.reason.code == "preparing_environment":
                keeps = True
            if (
                keeps
                and each.position < position
                and mine & self.suitable(self.waiting[name].request)
            ):
                is_sure = each.reason.code not in ("backing_off", "preparing_environment")
                (found if is_sure else back_off).add(name)
        for each in self.decisions:
            if not isinstance(each, Stay) or each.job_id == decision.job_id:
                continue
            group = self.groups[each.job_id]
            if group.lacking and mine & self.suitable(group.request):
                found.add(each.job_id)
        return found, back_off

    def work(self, job: WaitingJob | RunningJob) -> float:
        """Return the remaining work as defined in the manual: (remaining seconds + 300) * cluster
        share ** 0.7."""
        total: Counter[str] = Counter()
        for node in self.snapshot.nodes:
            if node.accepted:
                total.update(dict.fromkeys(node.total, 0.0))
                for name, amount in node.total.items():
                    total[name] += amount
        held: Counter[str] = Counter()
        for number, bundle in runs_of(job.request):
            for name, amount in bundle.items():
                held[name] += number * amount
        share = max((held[name] / total[name] for name in held if total[name]), default=0.0)
        assert job.left_s is not None
        return (job.left_s + 300.0) * float(share**0.7)


RESERVE = {"waiting_for_slots", "waiting_for_domain", "behind_in_queue", "waiting_for_nodes"}
"""Reasons of jobs of which the first reserves slots."""
KEEP_SLOTS = {*RESERVE, "room_is_made", "backing_off"}
