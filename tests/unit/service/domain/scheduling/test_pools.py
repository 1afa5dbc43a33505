"""Pools keep track of the room on their nodes as it changes."""

from __future__ import annotations

import random

import pytest

from service.domain.scheduling.placement.gangs import Gangs
from service.domain.scheduling.placement.pools import Offer
from service.domain.scheduling.placement.slots import Node, Request
from service.domain.scheduling.placement.stock import Stock
from service.domain.scheduling.placement.topology import Topology
from tests.unit.service.domain.scheduling.snapshots import change

BUNDLES = ({"GPU": 1.0}, {"CPU": 2.0, "GPU": 1.0}, {"CPU": 1.0}, {"GPU": 4.0}, {"GPU": 0.5})
TOTALS = ({"CPU": 8.0, "GPU": 4.0}, {"CPU": 4.0}, {"CPU": 4.0, "GPU": 8.0})


@pytest.mark.parametrize("seed", range(20))
def test_the_capacity_is_what_fits_on_each_node_without_what_is_set_aside(seed: int) -> None:
    """Released slots can exceed a node's total, as with shared GPUs."""
    chance = random.Random(seed)
    totals = [chance.choice(TOTALS) for _ in range(6)]
    nodes = [
        Node(
            f"n{at}",
            total,
            {name: amount * chance.choice((0, 0.5, 1)) for name, amount in total.items()},
        )
        for at, total in enumerate(totals)
    ]
    gangs = Gangs({})
    kinds = [gangs.of(Request(1, bundle)).kind for bundle in BUNDLES]
    gangs.name_all()
    stock = Stock(nodes, gangs, Topology((), nodes))
    offer = Offer(stock)
    for _ in range(60):
        change(chance, stock, offer, chance.choice(kinds), chance.choice(nodes).id)
        for pool in (offer.now, offer.soon):
            asked = chance.choice(kinds)
            capacity = sum(asked.fits(*(pool.at(node.id) or ((),))) for node in nodes)
            assert pool.has(asked, max(1, capacity)) == (capacity > 0)
            assert not pool.has(asked, capacity + 1)
            assert pool.capacity(asked) == capacity
            packed = pool.pack_most(asked, 1, 100)
            assert sum(part.num_workers for part in packed or ()) == capacity
