"""Ranks with a part of their own: servers, and the aggregator of silos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dray.spec import Script

AGGREGATOR = 0
"""The rank that aggregates what silos send."""


def has_silos(document: Mapping[str, Any]) -> bool:
    return bool((document.get("federated") or {}).get("silos"))


def irreplaceable_ranks(document: Mapping[str, Any]) -> frozenset[int]:
    """Ranks of a recipe that hold their part of the state alone, or with a replica on another of
    them. The others are in no group with them, and go on by themselves when one of their own number
    is lost."""
    if document.get("script"):
        return frozenset()
    return frozenset({AGGREGATOR}) if has_silos(document) else serving_ranks(document)


def serving_ranks(document: Mapping[str, Any]) -> frozenset[int]:
    """Ranks whose end their job does not wait for: parameter servers, and ranks of a script's roles
    that serve the others. document: the job's, as it was stored."""
    sync = document.get("sync") or {}
    if sync.get("kind") == "parameter_server":
        num_ranks = document["resources"]["num_workers"]
        return frozenset(range(num_ranks - sync["servers"], num_ranks))
    script = _script_with_roles(document)
    return script.serving_ranks if script else frozenset()


def lone_ranks(document: Mapping[str, Any]) -> frozenset[int]:
    """Ranks of a script that are started again alone when their process is killed."""
    script = _script_with_roles(document)
    return script.lone_ranks if script else frozenset()


def _script_with_roles(document: Mapping[str, Any]) -> Script | None:
    script = document.get("script") or {}
    if not script.get("roles"):
        return None
    # Every worker process would take a quarter of a second for the import.
    from dray.spec import Script

    return Script.model_validate(script)


def replica_ranks(document: Mapping[str, Any]) -> Mapping[int, int]:
    """By each parameter server that has a replica, the rank of the server that holds it."""
    sync = document.get("sync") or {}
    if sync.get("shards_kept_by") != "replica":
        return {}
    servers = sorted(serving_ranks(document))
    return dict(zip(servers, [*servers[1:], servers[0]], strict=True))
