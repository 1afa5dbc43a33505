"""The `Idempotency-Key` of a request that creates something."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import Header

from api.problems import Refused
from service.jobs.idempotency import IdempotencyKey

PATTERN = r"^[!-~](?:[ -~]{0,253}[!-~])?$"
SCHEMA: dict[str, Any] = {"minLength": 1, "maxLength": 255, "pattern": PATTERN}
"""The key's schema for the API's description. The schema is not used for validation, because
`check_key` raises a specific problem code."""

KeyHeader = Annotated[str | None, Header(alias="Idempotency-Key", json_schema_extra=SCHEMA)]

PROBLEMS = ("bad_idempotency_key", "idempotency_key_reused", "idempotency_in_flight")


def check_key(key: str | None) -> str | None:
    """Return the key; raises Refused if it is malformed. Routes call this first."""
    if key is None or re.fullmatch(PATTERN, key):
        return key
    raise Refused(
        "bad_idempotency_key",
        f"the Idempotency-Key has {len(key)} characters, but must consist of 1 to 255 printable "
        "ASCII characters",
        hint="use a random UUID, for example",
    )


def named(key: str | None, fingerprint: str) -> IdempotencyKey | None:
    """Return the key with the fingerprint of its request; None for a request without a key."""
    return None if key is None else IdempotencyKey(key, fingerprint)
