"""The price of a slot, and the cost of the slots that an attempt used.

A slot is one worker's bundle of resources on one node. The hourly price of a slot is the sum of
amount * price over its resources. The price of a resource is set by the first of the resource's
rules whose labels match the node.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from service.domain.attempts.ledger import Ledger, useful_and_unreported

SLOT = "slot"
"""Resource name for a flat price per worker, regardless of the worker's bundle."""
UNIT = {"memory": float(2**30)}
"""Amount for which a resource's price is set: memory is priced per GiB, and resources that are not
listed are priced per unit."""


@dataclass(frozen=True)
class PriceRule:
    """The price of a resource on nodes that have all of the given labels."""

    resource: str
    """`CPU`, `GPU`, `memory`, or `SLOT`."""
    per_hour: float
    labels: Mapping[str, str]

    def holds_on(self, labels: Mapping[str, str]) -> bool:
        """Whether the rule applies to a node with these labels."""
        return all(labels.get(key) == value for key, value in self.labels.items())


@dataclass(frozen=True)
class Prices:
    currency: str
    rules: tuple[PriceRule, ...]

    def rule(self, resource: str, labels: Mapping[str, str]) -> PriceRule | None:
        """Return the rule that applies to a resource on a node with these labels."""
        rules = (rule for rule in self.rules if rule.resource == resource)
        return next((rule for rule in rules if rule.holds_on(labels)), None)

    def slot_hour(self, bundle: Mapping[str, float], labels: Mapping[str, str]) -> float:
        """Return the hourly price of one worker's bundle on a node with these labels. Resources
        without a rule are free."""
        total = 0.0
        for resource, amount in {SLOT: 1.0, **bundle}.items():
            rule = self.rule(resource, labels)
            if rule is not None:
                total += rule.per_hour * amount / UNIT.get(resource, 1.0)
        return total


def unreachable(rules: Iterable[PriceRule]) -> tuple[int, int] | None:
    """Return the index of a rule that never applies, and the index of the earlier rule that always
    takes precedence over it. None if every rule can apply."""
    seen: list[tuple[int, PriceRule]] = []
    for index, rule in enumerate(rules):
        for earlier, other in seen:
            if other.resource == rule.resource and other.holds_on(rule.labels):
                return index, earlier
        seen.append((index, rule))
    return None


@dataclass(frozen=True)
class HeldOnNode:
    """How long an attempt held slots on one node, in slot-seconds."""

    labels: Mapping[str, str]
    """Labels of the node when the attempt acquired its slots."""
    slot_seconds: float


@dataclass(frozen=True)
class SlotCost:
    """The cost of slots, divided in proportion to the times in the ledger. The parts add up to
    `total`."""

    slot_seconds: float
    total: float
    useful: float
    unreported: float
    """Cost of the time whose use was not reported."""

    @property
    def wasted(self) -> float:
        return max(0.0, self.total - self.useful - self.unreported)


def cost_of(
    prices: Prices, bundle: Mapping[str, float], held: Iterable[HeldOnNode], ledger: Ledger
) -> SlotCost:
    """Return the cost of the slots in `held`. The total is divided according to the ledger's
    shares. If the ledger is empty, the whole cost is unreported."""
    held = list(held)
    seconds = math.fsum(each.slot_seconds for each in held)
    total = math.fsum(
        prices.slot_hour(bundle, each.labels) * each.slot_seconds / 3600 for each in held
    )
    useful, unreported = useful_and_unreported(ledger)
    return SlotCost(seconds, total, useful * total, unreported * total)
