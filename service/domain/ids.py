"""Identifiers that sort by creation time, like ULIDs (github.com/ulid/spec)."""

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
    """Return the last `length` digits (at most 16) of a number below 2**80."""
    return base64.b32encode(value.to_bytes(10)).translate(_FROM_RFC_4648)[-length:].decode()


def _milliseconds(at: datetime) -> int:
    """Return the milliseconds since 1970, clamped to the range of an id."""
    return max(0, min((at - _EPOCH) // _MILLISECOND, _MAX_MILLISECONDS))


class _Sequence:
    """Generates the numbers in this process's ids. The numbers are random, but increase within a
    millisecond."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = (-1, 0)

    def next(self, milliseconds: int) -> int:
        with self._lock:
            at, number = self._last
            # Use 79 of the 80 bits, so that the number can always be incremented.
            number = number + 1 if at == milliseconds else secrets.randbits(79)
            self._last = (milliseconds, number)
            return number


_sequence = _Sequence()


def new_job_id(now: datetime) -> str:
    """Return `job-` and 26 characters: 48 bits that encode the time in milliseconds, then 80 bits
    that are mostly random.

    Ids that a process creates for the same `now` are increasing.
    """
    milliseconds = _milliseconds(now)
    return f"job-{_base32(milliseconds, 10)}{_base32(_sequence.next(milliseconds), 16)}"


def new_array_id(now: datetime) -> str:
    """Return `array-` followed by 26 characters, as in a job id."""
    return new_job_id(now).replace("job-", ARRAY_PREFIX, 1)


def is_array_id(text: str) -> bool:
    """Whether a string has the prefix of an array id."""
    return text.startswith(ARRAY_PREFIX)


def new_drill_id(now: datetime) -> str:
    """Return `drill-` followed by 26 characters, as in a job id."""
    return new_job_id(now).replace("job-", "drill-", 1)


def new_webhook_id(now: datetime) -> str:
    """Return `webhook-` followed by 26 characters, as in a job id."""
    return new_job_id(now).replace("job-", "webhook-", 1)


def new_schedule_id(now: datetime) -> str:
    """Return `schedule-` followed by 26 characters, as in a job id."""
    return new_job_id(now).replace("job-", "schedule-", 1)


def new_report_id(now: datetime) -> str:
    """Return `report-` followed by 26 characters, as in a job id."""
    return new_job_id(now).replace("job-", "report-", 1)


def new_file_id(now: datetime) -> str:
    """Return `file-` followed by 26 characters, as in a job id."""
    return new_job_id(now).replace("job-", "file-", 1)


def is_job_id(text: str) -> bool:
    """Whether a string has the prefix of a job id."""
    return text.startswith("job-")


def ids_since(time: datetime) -> str:
    """Return a lower bound of all job ids created at or after `time`."""
    return f"job-{_base32(_milliseconds(time), 10)}"


def ids_up_to(time: datetime) -> str:
    """Return an exclusive upper bound of all job ids created at or before `time`."""
    return f"job-{_base32(_milliseconds(time) + 1, 10)}"


def last_id(prefix: str) -> str:
    """Return an upper bound for all job and array ids with this prefix."""
    longest = _JOB_ID_LENGTH - len("job-") + len(ARRAY_PREFIX)
    return prefix.ljust(longest, ALPHABET[-1])


def new_deployment_id() -> str:
    return _base32(secrets.randbits(60), 12)


def artifact_id(job_id: str, path: str) -> str:
    """Return an id that depends only on the job and the path, so that links remain valid when
    another attempt writes the path."""
    digest = hashlib.sha256(f"{job_id}\0{path}".encode()).digest()
    return f"artifact-{_base32(int.from_bytes(digest[:10]), 16)}"
