"""Tokens of clients outside of the cluster: each is good for the rounds of one job."""

from __future__ import annotations

import hashlib
import secrets

JOIN_TOKEN = "dray-join-"
"""How these tokens begin, by which other routes know and refuse them."""


def new_token() -> str:
    return f"{JOIN_TOKEN}{secrets.token_urlsafe(32)}"


def digest_of(token: str) -> str:
    """The form in which the database has a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()
