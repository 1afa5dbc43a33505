"""Tokens of clients outside the cluster. Each token is valid for the rounds of one job."""

from __future__ import annotations

import hashlib
import secrets

JOIN_TOKEN = "dray-join-"
"""Prefix of client tokens. Routes for users refuse tokens with this prefix."""


def new_token() -> str:
    return f"{JOIN_TOKEN}{secrets.token_urlsafe(32)}"


def digest_of(token: str) -> str:
    """Return the hash of a token, as stored in the database."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()
