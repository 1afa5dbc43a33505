"""The ranks whose end their job does not wait for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def serving_ranks(document: Mapping[str, Any]) -> frozenset[int]:
    """Parameter servers, and ranks of a script's roles that serve the others. document: the job's,
    as it was stored."""
    sync = document.get("sync") or {}
    if sync.get("kind") == "parameter_server":
        num_ranks = document["resources"]["num_workers"]
        return frozenset(range(num_ranks - sync["servers"], num_ranks))
    roles = (document.get("script") or {}).get("roles")
    if not roles:
        return frozenset()
    # Every worker process would take a quarter of a second for the import.
    from dray.spec import roles as of_script

    return of_script.serving_ranks(
        {name: of_script.Role.model_validate(role) for name, role in roles.items()}
    )
