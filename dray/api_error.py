"""The base class of errors with which the server responds. `dray.errors` re-exports it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from dray.client_errors import DrayError

if TYPE_CHECKING:  # to keep `dray --help` fast
    from dray.views import Problem

CODES: dict[str, type[ApiError]] = {}
"""Problem code -> exception class."""


class ApiError(DrayError):
    """The server responded with an error."""

    code: ClassVar[str] = ""
    http_status: ClassVar[int] = 0
    """HTTP status of responses with this code."""

    def __init_subclass__(cls, *, code: str = "", status: int = 0) -> None:
        cls.code = code or cls.code
        cls.http_status = status or cls.http_status
        if code:
            CODES[code] = cls

    def __init__(self, problem: Problem, *, retry_after_s: float | None = None) -> None:
        super().__init__(problem.detail)
        self.problem = problem
        self.retry_after_s = retry_after_s
        self.status = problem.status
        self.detail = problem.detail
        self.request_id = problem.request_id
        """Id of the request, as in the server's log."""
        self.pointer = problem.pointer
        """JSON pointer to the invalid field."""
        self.hint = problem.hint
        """How to fix the error; None if the server has no suggestion."""

    def __str__(self) -> str:
        where = f"{self.pointer}: " if self.pointer else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{where}{self.detail}{hint}"
