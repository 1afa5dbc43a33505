"""Errors in the form of OpenAI's API: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

from typing import Any, Final

from fastapi.responses import JSONResponse, Response

from dray.views import Problem

PREFIX: Final = "/openai/"
RETRIED_BY_CLIENTS: Final = (408, 409, 429)
"""Statuses below 500 after which OpenAI's client repeats a request by itself."""
IN_FLIGHT: Final = "idempotency_in_flight"
NOT_RETRIED: Final = {"x-should-retry": "false"}
"""Header with which OpenAI's client does not repeat a request."""


def error_body(problem: Problem) -> dict[str, Any]:
    """Return the body of an error."""
    return {
        "error": {
            "message": "; ".join(filter(None, (problem.detail, problem.hint))),
            "type": _type(problem.status),
            "param": _param(problem.pointer),
            "code": "invalid_api_key" if problem.status == 401 else problem.code,
        }
    }


def status_of(problem: Problem) -> int:
    """Return the HTTP status. 400 replaces 422, as in OpenAI's API. 400 also replaces 409, because
    the client would repeat the request, which helps only while an earlier try is processed."""
    if problem.code == IN_FLIGHT:
        return problem.status
    return 400 if problem.status in (409, 422) else problem.status


def response(problem: Problem, headers: dict[str, str]) -> Response:
    if problem.status == 507:  # a full storage; the request can be a file of hundreds of megabytes
        headers = {**headers, **NOT_RETRIED}
    return JSONResponse(error_body(problem), status_of(problem), headers)


def _type(status: int) -> str:
    if status >= 500:
        return "server_error"
    return {403: "permission_error", 429: "rate_limit_error"}.get(status, "invalid_request_error")


def _param(pointer: str | None) -> str | None:
    """Return a JSON pointer as a path with dots."""
    path = (pointer or "").strip("/").replace("/", ".")
    return path.replace("~1", "/").replace("~0", "~") or None
