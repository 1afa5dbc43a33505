"""Identifiers that sort by the time they were made (after ULID, github.com/ulid/spec)."""

from __future__ import annotations

import hashlib
import secrets
from datetime import datetime

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base32, lower case


def _base32(value: int, length: int) -> str:
    digits = []
    for _ in range(length):
        value, digit = divmod(value, 32)
        digits.append(ALPHABET[digit])
    return "".join(reversed(digits))


def new_job_id(now: datetime) -> str:
    """`job-` and 26 characters: 48 bits of milliseconds, then 80 random bits."""
    milliseconds = int(now.timestamp() * 1000)
    return f"job-{_base32(milliseconds, 10)}{_base32(secrets.randbits(80), 16)}"


def new_deployment_id() -> str:
    return _base32(secrets.randbits(60), 12)


def artifact_id(job_id: str, path: str) -> str:
    """The same for each attempt that writes the same path, so that links stay good."""
    digest = hashlib.sha256(f"{job_id}\0{path}".encode()).digest()
    return f"artifact-{_base32(int.from_bytes(digest[:10]), 16)}"
