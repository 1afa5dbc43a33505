"""Convert error responses to exceptions of `dray.errors`."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx

from dray import errors
from dray.views import Problem

_BASES = (errors.Unauthorized, errors.Forbidden, errors.NotFound, errors.Conflict)
_BY_STATUS: dict[int, type[errors.ApiError]] = {kind.http_status: kind for kind in _BASES}
_BY_STATUS[errors.AnnotationsChanged.http_status] = errors.Conflict


def _by_status(status: int) -> type[errors.ApiError]:
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    if status >= 500:
        return errors.ServerError
    return errors.BadRequest if status >= 400 else errors.ApiError


def from_response(response: httpx.Response) -> errors.ApiError:
    """Return the exception for an error response, whose body must have been read."""
    problem = _problem(response)
    kind = errors.CODES.get(problem.code) or _by_status(response.status_code)
    return kind(problem, retry_after_s=_seconds(response.headers.get("retry-after", "")))


def _seconds(retry_after: str) -> float | None:
    """Return the number of seconds that a Retry-After header (RFC 9110, 10.2.3) specifies. The
    header can also contain a date. None if the header is invalid."""
    if retry_after.isascii() and retry_after.isdigit():
        return float(retry_after)
    try:
        when = parsedate_to_datetime(retry_after)
    except ValueError:
        return None
    return max(0.0, (when.astimezone(UTC) - datetime.now(UTC)).total_seconds())


def _problem(response: httpx.Response) -> Problem:
    """Parse the body as a problem. For any other body, such as the error page of a proxy, return a
    problem that describes the response."""
    try:
        return Problem.model_validate_json(response.content)
    except ValueError:
        answer = f"{response.status_code} {response.reason_phrase}".strip()
        return Problem(
            type="about:blank",
            title=response.reason_phrase,
            status=response.status_code,
            detail=(
                f"{response.request.url} responded with {answer}, which is not a response from a "
                "dray server"
            ),
            code="",
        )
