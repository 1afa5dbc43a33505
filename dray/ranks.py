"""Display names of ranks that have roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any


def role_names(document: Mapping[str, Any]) -> list[str]:
    """Return the role of each rank and its index in the role: `chief 0`, `worker 0`, `worker 1`.
    The list is empty if the job has no roles. A rank without a role has an empty name. document:
    the job document as stored by the server."""
    roles: Mapping[str, Any] = (document.get("script") or {}).get("roles") or {}
    counts = {name: role.get("num_workers", 1) for name, role in roles.items()}
    sync, silos = document.get("sync") or {}, (document.get("federated") or {}).get("silos")
    if silos:
        return ["aggregator", *(f"silo {silo['name']}" for silo in silos)]
    if sync.get("kind") == "parameter_server":
        servers = sync["servers"]
        counts = {"": document["resources"]["num_workers"] - servers, "server": servers}
    return [name and f"{name} {at}" for name, count in counts.items() for at in range(count)]


def role_of(rank: int, names: Sequence[str]) -> str:
    """Return the role of a rank, such as `ps 0`, or an empty string. names: the result of
    `role_names`."""
    return names[rank] if rank < len(names) else ""


def kind_of(rank: int, names: Sequence[str]) -> str:
    """Return the role without its index, such as `ps`; `worker` for ranks without a role."""
    return role_of(rank, names).partition(" ")[0] or "worker"


def with_role(rank: int, names: Sequence[str]) -> str:
    """Return the rank with its role, such as `3 (ps 0)`, or only the number."""
    role = role_of(rank, names)
    return f"{rank} ({role})" if role else str(rank)


def ranks_by_role(names: Sequence[str]) -> str:
    """Return the ranks of each role, such as `0 chief, 1-2 worker, 3 ps`. The result is empty if
    the job has no roles."""
    found = []
    for kind, group in groupby(range(len(names)), key=lambda rank: kind_of(rank, names)):
        ranks = [*group]
        first, last = ranks[0], ranks[-1]
        found.append(f"{first} {kind}" if first == last else f"{first}-{last} {kind}")
    return ", ".join(found)
