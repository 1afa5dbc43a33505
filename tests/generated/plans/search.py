"""A slow but obvious placement: it tries every possibility, with integers, on single GPUs."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ray_workers.shared.slices import Slice
from service.domain.scheduling.policy import Holder, Node, Request

WHOLE = 10_000
"""Number of units of a GPU, and of all other resources."""
CLOSED = "open to all jobs"
"""A resource of which nodes with a silo's data have 0."""

Left = tuple[int, ...]
"""The free units of each GPU of a node, in order."""
Taken = Sequence[tuple[str, Slice, Mapping[str, float]]]
"""Jobs, and the number of their workers with one bundle on a node."""


def units(amount: float) -> int:
    return round(amount * WHOLE)


def taken_by(holders: Iterable[Holder]) -> list[tuple[str, Slice, Mapping[str, float]]]:
    found = []
    for holder in holders:
        rank = 0
        for part in holder.slices:
            bundle = holder.bundle
            for role in holder.roles:
                if role.first_rank <= rank < role.first_rank + role.number:
                    bundle = role.bundle
            found.append((holder.job_id, part, bundle))
            rank += part.num_workers
    return found


def fits_on_all(nodes: Sequence[Node], holders: Iterable[Holder]) -> bool:
    """Whether all requests fit together."""
    taken = taken_by(holders)
    there = {node.id for node in nodes}
    return all(part.node_id in there for _, part, _ in taken) and all(
        Here.of(node, taken) is not None for node in nodes
    )


def ways(left: Left, size: int, number: int) -> Iterator[Left]:
    """Return what can be left of the GPUs after this many workers of one job are placed."""
    num_full = size // WHOLE * number
    if num_full:
        if left.count(WHOLE) >= num_full:
            yield (0,) * num_full + left[: len(left) - num_full]
        return
    for chosen in itertools.combinations(range(len(left)), number):
        if all(left[at] >= size for at in chosen):
            yield tuple(sorted(n - size * (at in chosen) for at, n in enumerate(left)))


def as_ray(left: Left, size: int, number: int) -> Left | None:
    """The only placement that Ray makes: each worker is on the fullest GPU with free space."""
    return next(ways(left, size, number), None)


@dataclass(frozen=True)
class Here:
    """The free resources of a node."""

    node: Node
    amounts: Mapping[str, int]
    gpus: frozenset[Left]
    """Return every way in which the GPUs can be assigned."""

    @classmethod
    def of(
        cls,
        node: Node,
        taken: Taken = (),
        then: Sequence[tuple[str, Slice, Mapping[str, float]]] = (),
    ) -> Here | None:
        """Return None if these don't fit. taken: on any GPUs. then: jobs that start after those, on
        the GPUs that Ray chooses."""
        amounts = {name: units(amount) for name, amount in node.total.items()}
        of_jobs: defaultdict[tuple[str, int], int] = defaultdict(int)
        starting: defaultdict[tuple[str, int], int] = defaultdict(int)
        for jobs, some in ((of_jobs, taken), (starting, then)):
            for job_id, part, bundle in some:
                if part.node_id != node.id:
                    continue
                for name, amount in bundle.items():
                    if not name.startswith("label:"):
                        amounts[name] = amounts.get(name, 0) - part.num_workers * units(amount)
                if bundle.get("GPU"):
                    jobs[job_id, units(bundle["GPU"])] += part.num_workers
        if any(amount < 0 for amount in amounts.values()):
            return None
        gpus = {(WHOLE,) * int(node.total.get("GPU", 0))}
        for (_, size), number in of_jobs.items():
            gpus = {after for left in gpus for after in ways(left, size, number)}
        for (_, size), number in starting.items():
            gpus = {after for left in gpus if (after := as_ray(left, size, number)) is not None}
        return cls(node, amounts, frozenset(gpus)) if gpus else None

    def capacity(self, bundle: Mapping[str, float]) -> int:
        """Return how many workers of one job fit, however the GPUs are assigned."""
        most = [
            self.amounts.get(name, 0) // units(amount)
            if not name.startswith("label:")
            else (0 if not self.node.total.get(name) else 10**6)
            for name, amount in bundle.items()
        ]
        if size := units(bundle.get("GPU", 0.0)):
            most.append(min(self._on_gpus(left, size) for left in self.gpus))
        return max(0, min(most))

    @staticmethod
    def _on_gpus(left: Left, size: int) -> int:
        if size >= WHOLE:
            return left.count(WHOLE) // (size // WHOLE)
        return sum(each >= size for each in left)

    def has(self, some: Sequence[tuple[int, Mapping[str, float]]]) -> bool:
        """Whether these workers of one job fit together; with different bundles, only some of them
        need GPUs."""
        needed: Counter[str] = Counter()
        for number, bundle in some:
            if number > self.capacity(bundle):
                return False
            for name, amount in bundle.items():
                needed[name] += number * units(amount)
        return all(
            amount <= self.amounts.get(name, 0)
            for name, amount in needed.items()
            if not name.startswith("label:")
        )


def is_closed(node: Node) -> bool:
    return node.total.get(CLOSED) == 0


def domain(node: Node, levels: Sequence[str], level: str) -> object:
    """The domain of a level with a node: nodes with the same labels down to it, or the node."""
    labels = dict(
        name.removeprefix("label:").split("=", 1)
        for name in node.total
        if name.startswith("label:")
    )
    for at, name in enumerate(levels):
        if level in levels[: at + 1] and name in labels:
            return tuple(labels.get(wider) for wider in levels[: at + 1])
    return node.id


def least_of(request: Request) -> int:
    """Return with how few workers a job can start."""
    return request.num_workers if request.min_workers is None else request.min_workers


def most_of(request: Request, spaces: Sequence[Here], levels: Sequence[str]) -> int:
    """Return how many workers fit where they can be together, up to the size of the request. A gang
    whose slots differ or have pinned nodes fits completely or not at all."""
    size = request.num_workers
    if request.homes:
        return size if _at_home(request, spaces) else 0
    there = [here for here in spaces if not is_closed(here.node)]
    if request.roles:
        sorts = [(role.number, role.bundle) for role in request.roles]
        sorts.append((size - sum(number for number, _ in sorts), request.bundle))
        return size if _all_fit(tuple(n for n, _ in sorts), [b for _, b in sorts], there) else 0
    if request.required_level is None:
        return min(size, sum(here.capacity(request.bundle) for here in there))
    if request.required_level not in (*levels, "node"):
        return 0
    of_domains: Counter[object] = Counter()
    for here in there:
        place = domain(here.node, levels, request.required_level)
        of_domains[place] += here.capacity(request.bundle)
    return min(size, max(of_domains.values(), default=0))


def _all_fit(
    numbers: tuple[int, ...], bundles: Sequence[Mapping[str, float]], there: Sequence[Here]
) -> bool:
    """Whether this many workers of each bundle fit."""
    if not any(numbers):
        return True
    if not there:
        return False
    first, *others = there
    for some in itertools.product(*(range(n, -1, -1) for n in numbers)):
        if first.has(list(zip(some, bundles, strict=True))):
            rest = tuple(n - s for n, s in zip(numbers, some, strict=True))
            if _all_fit(rest, bundles, others):
                return True
    return False


def _at_home(request: Request, there: Sequence[Here]) -> bool:
    """Whether each worker fits on a node with its own labels, and the first on an open node."""
    may_take = [[here.node.id for here in there if not is_closed(here.node)]]
    for labels in request.homes:
        named = [here.node for here in there if all(here.node.total.get(n) for n in labels)]
        may_take.append([node.id for node in named])
    capacities = {here.node.id: here.capacity(request.bundle) for here in there}
    return any(
        all(number <= capacities[name] for name, number in Counter(chosen).items())
        for chosen in itertools.product(*may_take)
    )
