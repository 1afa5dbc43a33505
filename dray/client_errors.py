"""The base class of all exceptions of the SDK, and the exceptions that are not responses of the
server. `dray.errors` re-exports them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # to keep `dray --help` fast
    from dray.views import Job, JobArray


class DrayError(Exception):
    """Base class of all exceptions that dray raises on purpose."""


class SpecError(DrayError, ValueError):
    """A job document is unreadable or not a valid job. Nothing was sent."""

    def __init__(
        self,
        detail: str,
        *,
        source: str | None = None,
        pointer: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.source = source
        """The file from which the document was read."""
        self.pointer = pointer
        """JSON pointer to the invalid field, as in the server's responses."""
        self.hint = hint

    def __str__(self) -> str:
        parts = [part for part in (self.source, self.pointer, self.detail) if part]
        return ": ".join(parts) + (f" ({self.hint})" if self.hint else "")


class IntegrityError(DrayError):
    """A download does not match its hash, or its path would leave the destination."""


class WaitTimeout(DrayError, TimeoutError):
    """`wait` timed out before the job reached the requested state. The job continues."""

    def __init__(self, job: Job, timeout_s: float) -> None:
        super().__init__(f"job {job.id} is still {job.state} after {round(timeout_s, 1):g} s")
        self.job = job


class ArrayWaitTimeout(DrayError, TimeoutError):
    """`wait_array` timed out before all jobs of the array had ended. The jobs continue."""

    def __init__(self, array: JobArray, timeout_s: float) -> None:
        super().__init__(f"array {array.id} is still {array.state} after {round(timeout_s, 1):g} s")
        self.array = array


class JobFailed(DrayError):
    """A job that was being followed failed or was cancelled."""

    def __init__(self, job: Job) -> None:
        super().__init__(f"job {job.id} is {job.state}: {job.reason.message}")
        self.job = job


class AmbiguousJob(DrayError, LookupError):
    """Several jobs match a name or the beginning of an id. No job was changed."""

    def __init__(
        self, detail: str, reference: str, candidates: Mapping[str, Job], *, more: bool
    ) -> None:
        super().__init__(detail)
        self.reference = reference
        self.candidates = list(candidates.values())
        """The matching jobs, newest first."""
        self.ids = list(candidates)
        """The id of each candidate, or of the array that it represents."""
        self.more = more
        """Whether there are more matching jobs than `candidates`."""


class TransportError(DrayError, ConnectionError):
    """The server did not respond."""


class ServerUnreachable(TransportError):
    """No server is listening at the address."""


class RequestTimeout(TransportError, TimeoutError):
    """The server took longer than the client's `timeout`."""
