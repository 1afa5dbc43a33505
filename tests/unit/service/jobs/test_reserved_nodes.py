"""The reservations that the cluster's view shows on each node, with both databases."""

from __future__ import annotations

import random
from collections import defaultdict
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.orm import Session

from service.domain.errors import DomainError
from service.jobs import cluster_view
from service.queues.reservations import Reservations
from tests.seeds import drawn
from tests.unit.service.helpers import Service
from tests.unit.service.queues.test_reservations import use, wanted

__all__ = ["use"]

WEEK_H = 7 * 24
Shown = dict[str, list[tuple[Any, ...]]]


def shown(service: Service, user: str | None) -> Shown:
    def read(session: Session) -> Any:
        return cluster_view.cluster(session, service.settings, user=user, now=service.now)

    nodes = service.database.read_sync(read).nodes
    return {node.hostname: [as_row(one) for one in node.reservations] for node in nodes}


def as_row(one: Any) -> tuple[Any, ...]:
    whose = (one.maintenance, one.users, one.queues, one.projects)
    return (one.name, one.begins_at, one.ends_at, *whose)


@pytest.mark.parametrize("seed", drawn(3))
async def test_nodes_show_what_the_caller_can_list(
    use: Reservations, service: Service, seed: int
) -> None:
    die = random.Random(seed)
    for number in range(30):
        begin_h = die.choice((-1, 0, 1, WEEK_H - 1, WEEK_H, WEEK_H + 1)) + die.random() * 2
        end_h = max(0, begin_h) + die.choice((0.1, 1, 300))
        whose = die.choice(({"users": ["ann"]}, {"queues": ["night"]}, {"maintenance": True}))
        if not whose.get("maintenance"):
            whose = {"users": None, "projects": die.choice((["p"], None)), **whose}
        nodes = die.choice(
            (
                {"nodes": ["node-a", "node-x"]},
                {"nodes": ["id-node-b"]},
                {"nodes": None, "node_labels": {"rack": "r1"}},
                {"nodes": None, "num_nodes": 1},
                {"nodes": None, "all_nodes": True},
            )
        )
        try:
            await use.create(wanted(f"r{number}", begin_h, end_h, **{**nodes, **whose}))
        except DomainError:
            continue  # overlaps another one
    service.advance(die.choice((0, 3600, 86400)))
    for user in (None, "ann", "bob"):
        expected: Shown = defaultdict(list)
        for one in (await use.list(user=user)).items:
            if one.begins_at - service.now <= timedelta(hours=WEEK_H):
                for node in one.includes:
                    expected[node.hostname].append(as_row(one))
        found = shown(service, user)
        assert found.keys() == {"node-a", "node-b", "node-c"}
        assert {name: rows for name, rows in found.items() if rows} == expected
        assert user is not None or expected
