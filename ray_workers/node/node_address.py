"""The address at which processes on other nodes reach this node."""

from __future__ import annotations

import os

import ray

from ray_workers.node.rank_environment import NODE_ADDRESS


def own_address() -> str:
    """Return the address at which other nodes reach this node."""
    address: str = (
        os.environ.get(NODE_ADDRESS) or ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    )
    return address
