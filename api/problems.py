"""The one table from errors to answers: RFC 9457 problem+json.

A code always means the same status. Codes of the domain come from `service.domain.errors`; codes
that only HTTP has are raised as `Refused`.
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

from dray.input.validation import plainly
from dray.views import Problem
from service.domain.errors import DomainError

MEDIA_TYPE = "application/problem+json"

STATUS: Mapping[str, int] = {
    "malformed_request": 400,
    "bad_idempotency_key": 400,
    "bad_cursor": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "data_source_forbidden": 403,
    "webhook_url_forbidden": 403,
    "job_not_found": 404,
    "artifact_not_found": 404,
    "checkpoint_not_found": 404,
    "drill_not_found": 404,
    "code_not_found": 404,
    "queue_not_found": 404,
    "decision_not_found": 404,
    "array_not_found": 404,
    "sweep_not_found": 404,
    "experiment_not_found": 404,
    "webhook_not_found": 404,
    "download_link_not_found": 404,
    "client_not_found": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "request_too_slow": 408,
    "conflict": 409,
    "idempotency_in_flight": 409,
    "job_finished": 409,
    "job_live": 409,
    "job_not_running": 409,
    "job_not_waiting": 409,
    "queue_full": 409,  # 429 would be a rate, which a pause resolves; the SDK retries it by itself
    "queue_in_use": 409,
    "checkpoint_in_use": 409,
    "annotations_changed": 412,
    "too_many_webhooks": 409,
    "webhook_disabled": 409,
    "not_federated": 409,
    "too_many_clients": 409,
    "round_over": 409,
    "update_refused": 409,
    "body_too_large": 413,
    "upload_too_large": 413,
    "unsupported_media_type": 415,
    "range_not_satisfiable": 416,
    "invalid_document": 422,
    "invalid_parameter": 422,
    "unsatisfiable": 422,
    "out_of_memory": 422,
    "not_plannable": 422,
    "drill_impossible": 422,
    "idempotency_key_reused": 422,
    "bad_upload": 422,
    "bad_update": 422,
    "code_unfit": 422,
    "unknown_queue": 422,
    "priority_too_high": 422,
    "invalid_queue": 422,
    "array_too_large": 422,
    "invalid_trial": 422,
    "sampler_unavailable": 422,
    "dependency_not_found": 422,
    "dependency_never_satisfied": 422,
    "init_from_not_found": 422,
    "init_from_differs": 422,
    "invalid_search": 422,
    "not_comparable": 422,
    "too_many_tags": 422,
    "too_many_requests": 429,
    "headers_too_large": 431,
    "internal_error": 500,
    "unavailable": 503,
    "database_unavailable": 503,
    "storage_unavailable": 503,
    "quota_exceeded": 507,
}

RETRY_AFTER_S = 1
RETRIED = frozenset({"idempotency_in_flight", "too_many_requests"})
"""Codes that are worth a retry, besides all of status 503."""


@dataclass
class Refused(Exception):
    """The edge refuses a request before any use case is called."""

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
    """The problem document for `code` as a response."""
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
    return Response(
        body.model_dump_json(exclude_none=True),
        status_code=status,
        media_type=MEDIA_TYPE,
        headers={**extra, **(headers or {})},
    )


def title(status: int) -> str:
    """The name of the status in RFC 9110; Python's own names differ between its versions."""
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
    """Answer for a parameter at fault; FastAPI validates no bodies, which `api.http.body` reads."""
    assert isinstance(error, RequestValidationError)
    first: Mapping[str, Any] = error.errors()[0]
    name = str((*first["loc"], "?")[1])  # before it "query" or "path", after it an index
    if first["type"] == "extra_forbidden":
        known = _query_names(request)
        hint = f"it takes {', '.join(known)}" if known else None
        return problem(request, "invalid_parameter", f"there is no parameter {name!r}", hint=hint)
    detail = f"the parameter {name!r} {plainly(str(first['msg']))}"
    return problem(request, "invalid_parameter", detail)


def _query_names(request: Request) -> Sequence[str]:
    """The query parameters of the route that was matched."""
    dependant = getattr(request.scope.get("route"), "dependant", None)
    names: list[str] = []
    for field in getattr(dependant, "query_params", ()):
        model = field.field_info.annotation
        names += getattr(model, "model_fields", {field.alias: None})
    return names


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer for paths and methods that the router refuses by itself."""
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
    """All methods of this path; the router names only those of the first route it found."""
    found: set[str] = set()
    for route in request.app.state.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods
    return found


def unexpected(request: Request) -> Response:
    """Answer for a bug in dray: the log has the traceback, the caller gets none of it."""
    detail = "dray failed to answer this request; the server's log says why"
    return problem(
        request, "internal_error", detail, hint="its lines there have the same request_id"
    )


def install(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Answer every error of `app`, which has these `routes`, as a problem."""
    app.state.routes = [route for route in routes if isinstance(route, Route)]
    app.add_exception_handler(DomainError, _domain_error)
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(RequestValidationError, _bad_parameter)
    app.add_exception_handler(HTTPException, _http_error)


CODES = "x-problem-codes"
"""Key under which the description of an answer lists its problem codes, for programs."""


def declare(*codes: str) -> dict[int | str, dict[str, Any]]:
    """The problems that a route may answer, for OpenAPI, besides those of every route."""
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
"""Problems that any call under /v1, and /metrics, may answer."""
