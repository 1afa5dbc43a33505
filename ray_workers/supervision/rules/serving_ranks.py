"""The ranks of a script whose end its job does not wait for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def serving_ranks(document: Mapping[str, Any]) -> frozenset[int]:
    """Ranks of roles that serve the others, such as parameter servers. document: the job's, as it
    was stored."""
    roles = (document.get("script") or {}).get("roles")
    if not roles:
        return frozenset()
    # Every worker process would take a quarter of a second for the import.
    from dray.spec import roles as of_script

    return of_script.serving_ranks(
        {name: of_script.Role.model_validate(role) for name, role in roles.items()}
    )
