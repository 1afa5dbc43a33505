"""The topology of a cluster, whose nodes are grouped by label into domains, such as racks.

The operator lists label keys, from the widest level to the narrowest. Nodes are in the same domain
of a level if they have the same values for the labels of this level and of all wider levels. If a
node has no label for a level, or a label with an empty value, its domain of the next narrower level
is used instead. The last level is always the node itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from service.config.node_types import LABEL, NODE_LEVEL
from service.domain.scheduling.placement.slots import Node


class Domain:
    """A set of nodes that are close to each other."""

    __slots__ = ("children", "level", "name", "parent")

    def __init__(self, level: int, name: str, parent: Domain | None) -> None:
        self.level = level
        """Level, where 0 is the widest; -1 for the whole cluster."""
        self.name = name
        """The value of the label."""
        self.parent = parent
        self.children: list[Domain] = []

    @property
    def around(self) -> Iterator[Domain]:
        """The domain itself, followed by the domains that contain it, from the narrowest to the
        widest."""
        at: Domain | None = self
        while at is not None:
            yield at
            at = at.parent

    def at(self, level: int) -> Domain | None:
        """Return the widest domain that is or contains this domain and is not wider than `level`;
        None if this domain itself is wider."""
        found = None
        for domain in self.around:
            if domain.level < level:
                break
            found = domain
        return found


Place = Domain | str
"""A domain, or the id of a node."""


def name_of(place: Place) -> str:
    return place if isinstance(place, str) else place.name


def largest(capacities: Mapping[Place, int]) -> Place:
    """Return the place with the largest capacity; if several are equal, the first place by name."""
    return min(capacities, key=lambda place: (-capacities[place], name_of(place)))


class Domains:
    """The domains that are used for one level: the level's own domains, and narrower domains whose
    nodes have no label for the level."""

    def __init__(self, around: Mapping[Domain, Domain | None]) -> None:
        self.around = around
        """Maps each domain to the domain that its nodes belong to at this level, or to None if each
        of its nodes is a separate domain."""
        self.all = [domain for domain, found in around.items() if domain is found]
        self.wider = [domain for domain, found in around.items() if found is None]


class Topology:
    """The domains of a set of nodes."""

    def __init__(self, levels: Sequence[str], nodes: Iterable[Node]) -> None:
        """`levels` contains the label keys of all levels except the node level."""
        self.levels = (*levels, NODE_LEVEL)
        self._prefixes = [f"{LABEL}{key}=" for key in levels]
        self._found: dict[tuple[str | None, ...], Domain] = {}
        self.cluster = Domain(-1, "", None)
        """The domain that contains all nodes."""
        self.domain_of = {node.id: self._narrowest(node.total) for node in nodes}
        """The narrowest domain of each node."""
        self._of_levels: dict[str, Domains] = {}

    def has(self, level: str) -> bool:
        return level in self.levels

    def of_level(self, level: str) -> Domains:
        """Return the domains of a level."""
        found = self._of_levels.get(level)
        if found is None:
            number = self.levels.index(level)
            domain_of = {domain: domain.at(number) for domain in self._domains()}
            found = self._of_levels[level] = Domains(domain_of)
        return found

    def place_of(self, node_id: str, level: str) -> Place:
        """Return the node's domain at the given level, which can be the node itself."""
        return self.of_level(level).around[self.domain_of[node_id]] or node_id

    def capacities(self, sizes: Mapping[str, int], level: str) -> dict[Place, int]:
        """Return the number of workers in each domain of a level. `sizes` maps nodes to numbers of
        workers."""
        found: dict[Place, int] = {}
        for node_id, size in sizes.items():
            place = self.place_of(node_id, level)
            found[place] = found.get(place, 0) + size
        return found

    def labels_of(self, place: Place) -> dict[str, str]:
        """Return the topology labels that all nodes of a domain have in common."""
        around = () if isinstance(place, str) else place.around
        return {self.levels[each.level]: each.name for each in around if each is not self.cluster}

    def together(self, sizes: Mapping[str, int], level: str | None) -> int:
        """Return how many workers fit in the best domain of a level, or in total if `level` is
        None. `sizes` is the number of workers that fit on each node."""
        if level is None:
            return sum(sizes.values())
        return max(self.capacities(sizes, level).values(), default=0) if self.has(level) else 0

    def _domains(self) -> list[Domain]:
        return [self.cluster, *self._found.values()]

    def _narrowest(self, total: Mapping[str, float]) -> Domain:
        domain = self.cluster
        path: tuple[str | None, ...] = ()
        for level, prefix in enumerate(self._prefixes):
            value = next((n[len(prefix) :] for n in total if n.startswith(prefix)), None) or None
            path = (*path, value)
            if value is not None:
                known = self._found.get(path)
                if known is None:
                    known = self._found[path] = Domain(level, value, domain)
                    domain.children.append(known)
                domain = known
        return domain
