"""The `Idempotency-Key` of a request that makes something."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import Header

from api.problems import Refused
from service.jobs.idempotency import IdempotencyKey

PATTERN = r"^[!-~](?:[ -~]{0,253}[!-~])?$"
SCHEMA: dict[str, Any] = {"minLength": 1, "maxLength": 255, "pattern": PATTERN}
"""Said to readers of the description; the code of a bad key is its own, so it is checked here."""

KeyHeader = Annotated[str | None, Header(alias="Idempotency-Key", json_schema_extra=SCHEMA)]

PROBLEMS = ("bad_idempotency_key", "idempotency_key_reused", "idempotency_in_flight")


def check_key(key: str | None) -> str | None:
    """Before anything else of the request is looked at."""
    if key is None or re.fullmatch(PATTERN, key):
        return key
    raise Refused(
        "bad_idempotency_key",
        f"the Idempotency-Key has {len(key)} characters; it may have 1 to 255, printable ASCII",
        hint="a random UUID does well",
    )


def named(key: str | None, fingerprint: str) -> IdempotencyKey | None:
    """The request by its key, if it has one."""
    return None if key is None else IdempotencyKey(key, fingerprint)
