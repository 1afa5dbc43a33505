"""Identifiers that sort by the time they were made (after ULID, github.com/ulid/spec)."""

from __future__ import annotations

import base64
import hashlib
import secrets
import threading
from datetime import UTC, datetime, timedelta

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base32, lower case
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_MAX_MILLISECONDS = 2**48 - 1
_JOB_ID_LENGTH = 30
ARRAY_PREFIX = "array-"


_FROM_RFC_4648 = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", ALPHABET.encode())


def _base32(value: int, length: int) -> str:
    """The last digits of a number below 2**80; at most 16 of them."""
    return base64.b32encode(value.to_bytes(10)).translate(_FROM_RFC_4648)[-length:].decode()


def _milliseconds(at: datetime) -> int:
    """Since 1970, within what an id has room for."""
    return max(0, min((at - _EPOCH) // _MILLISECOND, _MAX_MILLISECONDS))


class _Sequence:
    """Numbers for the ids of one process: random, and rising within a millisecond."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = (-1, 0)

    def next(self, milliseconds: int) -> int:
        with self._lock:
            at, number = self._last
            # One bit short of the 80, so that there is always a next one.
            number = number + 1 if at == milliseconds else secrets.randbits(79)
            self._last = (milliseconds, number)
            return number


_sequence = _Sequence()


def new_job_id(now: datetime) -> str:
    """`job-` and 26 characters: 48 bits of milliseconds, then 80 bits, mostly random.

    Ids that one process makes at the same `now` rise.
    """
    milliseconds = _milliseconds(now)
    return f"job-{_base32(milliseconds, 10)}{_base32(_sequence.next(milliseconds), 16)}"


def new_array_id(now: datetime) -> str:
    """`array-` and 26 characters, as of a job."""
    return new_job_id(now).replace("job-", ARRAY_PREFIX, 1)


def is_array_id(text: str) -> bool:
    """Whether it looks like one."""
    return text.startswith(ARRAY_PREFIX)


def new_drill_id(now: datetime) -> str:
    """`drill-` and 26 characters, as of a job."""
    return new_job_id(now).replace("job-", "drill-", 1)


def new_webhook_id(now: datetime) -> str:
    """`webhook-` and 26 characters, as of a job."""
    return new_job_id(now).replace("job-", "webhook-", 1)


def is_job_id(text: str) -> bool:
    """Whether it looks like one."""
    return text.startswith("job-")


def ids_since(time: datetime) -> str:
    """No id made at `time` or later is below this one."""
    return f"job-{_base32(_milliseconds(time), 10)}"


def ids_up_to(time: datetime) -> str:
    """All ids made at `time` or earlier are below this one."""
    return f"job-{_base32(_milliseconds(time) + 1, 10)}"


def last_id(prefix: str) -> str:
    """No id of a job or array that begins so is above this one."""
    longest = _JOB_ID_LENGTH - len("job-") + len(ARRAY_PREFIX)
    return prefix.ljust(longest, ALPHABET[-1])


def new_deployment_id() -> str:
    return _base32(secrets.randbits(60), 12)


def artifact_id(job_id: str, path: str) -> str:
    """The same for each attempt that writes the same path, so that links stay good."""
    digest = hashlib.sha256(f"{job_id}\0{path}".encode()).digest()
    return f"artifact-{_base32(int.from_bytes(digest[:10]), 16)}"
