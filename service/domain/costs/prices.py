"""The price of a slot, and the cost of the slots that an attempt held.

A slot is the place of one worker: its bundle of resources on one node. An hour of it costs the sum
over its resources of amount times price. The price of a resource is that of its first rule whose
labels the node has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from service.domain.attempts.ledger import Ledger, useful_and_unreported

SLOT = "slot"
"""In the place of a resource: of each worker, whatever its bundle."""
UNIT = {"memory": float(2**30)}
"""Amount of a resource that a price is for, where it is not 1: memory is priced by the GiB."""


@dataclass(frozen=True)
class PriceRule:
    """The price of a resource on the nodes that have all of these labels."""

    resource: str
    """`CPU`, `GPU`, `memory`, or `SLOT`."""
    per_hour: float
    labels: Mapping[str, str]

    def holds_on(self, labels: Mapping[str, str]) -> bool:
        """Whether a node with these labels is one that the rule is for."""
        return all(labels.get(key) == value for key, value in self.labels.items())


@dataclass(frozen=True)
class Prices:
    currency: str
    rules: tuple[PriceRule, ...]

    def rule(self, resource: str, labels: Mapping[str, str]) -> PriceRule | None:
        """The rule that holds for a resource of a node with these labels."""
        rules = (rule for rule in self.rules if rule.resource == resource)
        return next((rule for rule in rules if rule.holds_on(labels)), None)

    def slot_hour(self, bundle: Mapping[str, float], labels: Mapping[str, str]) -> float:
        """The price of an hour of one worker's bundle on a node with these labels; a resource that
        no rule prices is free."""
        total = 0.0
        for resource, amount in {SLOT: 1.0, **bundle}.items():
            rule = self.rule(resource, labels)
            if rule is not None:
                total += rule.per_hour * amount / UNIT.get(resource, 1.0)
        return total


def unreachable(rules: Iterable[PriceRule]) -> tuple[int, int] | None:
    """Indices of a rule that no node comes to, and of the one before it that holds wherever it
    does; None if each rule is of use."""
    seen: list[tuple[int, PriceRule]] = []
    for index, rule in enumerate(rules):
        for earlier, other in seen:
            if other.resource == rule.resource and other.holds_on(rule.labels):
                return index, earlier
        seen.append((index, rule))
    return None


@dataclass(frozen=True)
class HeldOnNode:
    """The slot-seconds that an attempt held on one node."""

    labels: Mapping[str, str]
    """Those that the node had when the attempt got its slots there."""
    slot_seconds: float


@dataclass(frozen=True)
class SlotCost:
    """The cost of slots, divided as the ledger divides their time. The parts add up to `total`."""

    slot_seconds: float
    total: float
    useful: float
    unreported: float
    """Of time whose use nobody can say."""

    @property
    def wasted(self) -> float:
        return max(0.0, self.total - self.useful - self.unreported)


def cost_of(
    prices: Prices, bundle: Mapping[str, float], held: Iterable[HeldOnNode], ledger: Ledger
) -> SlotCost:
    """The cost of these slots at these prices. The parts are the ledger's shares of the total, and
    all of it is unreported while the ledger is empty."""
    held = list(held)
    seconds = math.fsum(each.slot_seconds for each in held)
    total = math.fsum(
        prices.slot_hour(bundle, each.labels) * each.slot_seconds / 3600 for each in held
    )
    useful, unreported = useful_and_unreported(ledger)
    return SlotCost(seconds, total, useful * total, unreported * total)
