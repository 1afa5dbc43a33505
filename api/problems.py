"""Turns errors into responses in problem+json (RFC 9457).

Each code has one status, defined by its class in `dray.errors`. Codes of the domain come from
`service.domain.errors`; codes that concern only HTTP are raised as `Refused`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match, Route

from api.http.sign_in_page import is_navigation, sign_in_page
from api.openai import errors as openai
from dray import errors
from dray.input.validation import plainly
from dray.views import Problem
from service.domain.errors import DomainError

MEDIA_TYPE = "application/problem+json"

STATUS: Mapping[str, int] = {code: kind.http_status for code, kind in errors.CODES.items()}

RETRY_AFTER_S = 1
RETRIED = frozenset({"idempotency_in_flight", "too_many_requests"})
"""Problem codes for which a retry can succeed, in addition to all codes with status 503."""


@dataclass
class Refused(Exception):
    """A request is refused before any use case is called."""

    code: str
    detail: str
    pointer: str | None = None
    hint: str | None = None
    headers: Mapping[str, str] | None = None


def problem(
    request: Request,
    code: str,
    detail: str,
    *,
    pointer: str | None = None,
    hint: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return the problem for `code` as a response: a problem document, or an error in the form of
    the API whose paths begin with `openai.PREFIX`."""
    status = STATUS[code]
    body = Problem(
        type=f"urn:dray:problem:{code}",
        title=title(status),
        status=status,
        detail=detail,
        code=code,
        pointer=pointer,
        hint=hint,
        instance=request.url.path,
        request_id=getattr(request.state, "request_id", None),
    )
    extra = {"Cache-Control": "no-store"}
    extra |= {"Retry-After": str(RETRY_AFTER_S)} if status == 503 or code in RETRIED else {}
    extra |= headers or {}
    if request.url.path.startswith(openai.PREFIX):
        return openai.response(body, extra)
    return Response(
        body.model_dump_json(exclude_none=True),
        status_code=status,
        media_type=MEDIA_TYPE,
        headers=extra,
    )


def title(status: int) -> str:
    """Return the name that RFC 9110 gives to the status; the names in Python differ between Python
    versions."""
    renamed = {
        413: "Content Too Large",
        416: "Range Not Satisfiable",
        422: "Unprocessable Content",
    }
    return renamed.get(status) or HTTPStatus(status).phrase


async def _domain_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, DomainError)
    return problem(request, error.code, error.message, pointer=error.pointer, hint=error.hint)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    if error.code == "unauthorized" and is_navigation(request):
        return sign_in_page(request, error.detail, (error.headers or {})["WWW-Authenticate"])
    return refusal(request, error)


def refusal(request: Request, error: Refused) -> Response:
    return problem(
        request,
        error.code,
        error.detail,
        pointer=error.pointer,
        hint=error.hint,
        headers=error.headers,
    )


async def _bad_parameter(request: Request, error: Exception) -> Response:
    """Refuse a request with an invalid parameter. Bodies are not validated by FastAPI, but by
    `api.http.body`."""
    assert isinstance(error, RequestValidationError)
    first: Mapping[str, Any] = error.errors()[0]
    name = str((*first["loc"], "?")[1])  # after "query" or "path"
    if first["type"] == "extra_forbidden":
        known = _query_names(request)
        hint = f"it takes {', '.join(known)}" if known else None
        return problem(request, "invalid_parameter", f"there is no parameter {name!r}", hint=hint)
    detail = f"the parameter {name!r} {plainly(str(first['msg']))}"
    return problem(request, "invalid_parameter", detail)


def _query_names(request: Request) -> Sequence[str]:
    """Return the query parameters of the route that was matched."""
    dependant = getattr(request.scope.get("route"), "dependant", None)
    names: list[str] = []
    for field in getattr(dependant, "query_params", ()):
        model = field.field_info.annotation
        names += getattr(model, "model_fields", {field.alias: None})
    return names


async def _http_error(request: Request, error: Exception) -> Response:
    """Respond to a request whose path or method the router refuses."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405:
        allowed = ", ".join(sorted(_methods(request)))
        detail = f"{request.method} is not allowed on {path}"
        headers = {"Allow": allowed}
        return problem(
            request, "method_not_allowed", detail, hint=f"it takes {allowed}", headers=headers
        )
    if error.status_code == 404:
        return problem(request, "not_found", f"there is nothing at {path}")
    return problem(request, "malformed_request", str(error.detail))


def _methods(request: Request) -> set[str]:
    """Return all methods of this path; the router lists only the methods of the first matching
    route. A path such as `/v1/jobs/bulk` also matches `/v1/jobs/{job_id}`, but does not refer to a
    job."""
    routes = [
        route
        for route in request.app.state.routes
        if route.matches(request.scope)[0] is not Match.NONE
    ]
    exact = [route for route in routes if not route.param_convertors]
    return {method for route in exact or routes for method in route.methods}


def unexpected(request: Request) -> Response:
    """Respond to a request that failed because of a bug in dray. The traceback is logged, but not
    sent to the caller."""
    detail = "dray failed to process this request: see the error in the server's log"
    return problem(request, "internal_error", detail, hint="search the log for this request_id")


def install(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Make `app`, which has these `routes`, return every error as a problem."""
    app.state.routes = [route for route in routes if isinstance(route, Route)]
    app.add_exception_handler(DomainError, _domain_error)
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(RequestValidationError, _bad_parameter)
    app.add_exception_handler(HTTPException, _http_error)


CODES = "x-problem-codes"
"""Key in a response's description for the machine-readable list of problem codes."""


def declare(*codes: str) -> dict[int | str, dict[str, Any]]:
    """Describe the problems that a route can return, in addition to the problems of every route."""
    schema = {"$ref": "#/components/schemas/Problem"}
    by_status: dict[int | str, list[str]] = {}
    for code in codes:
        by_status.setdefault(STATUS[code], []).append(code)
    return {
        status: {
            "description": ", ".join(f"`{code}`" for code in named),
            "content": {MEDIA_TYPE: {"schema": schema}},
            CODES: named,
        }
        for status, named in by_status.items()
    }


BODY = (
    *("malformed_request", "body_too_large", "unsupported_media_type", "invalid_document"),
    "invalid_parameter",
)
"""Problems of a call with a JSON body."""

SUBMISSION = (
    *("data_source_forbidden", "unknown_queue", "queue_holds_no_jobs", "queue_full"),
    *("priority_too_high", "runtime_too_long", "unsatisfiable", "out_of_memory"),
    *("code_unfit", "licence_not_accepted", "array_too_large", "reservation_unfit"),
    *("invalid_trial", "sampler_unavailable", "init_from_not_found", "init_from_differs"),
    *("quota_exceeded", "storage_unavailable"),
)
"""Problems of a job document that is submitted."""

EVERYWHERE = (
    "malformed_request",
    "unauthorized",
    "forbidden",
    "request_too_slow",
    "headers_too_large",
    "internal_error",
    "unavailable",
    "database_unavailable",
)
"""Problems that `/metrics` and any call under `/v1` can return."""
