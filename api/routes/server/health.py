"""/healthz, /readyz and /metrics, for operators."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from api.context import Caller, NoParameters, TheContext
from api.http.caching import fresh
from api.problems import declare
from dray.views import View

router = APIRouter(tags=["health"])


class Liveness(View):
    status: str


class Readiness(View):
    status: str
    checks: dict[str, str]
    """The state of each part of the service: either `ok` or a description of the problem."""


@router.get("/healthz", operation_id="get_liveness", response_model=Liveness)
async def healthz() -> Response:
    """Check that the process responds. Requires no token."""
    return fresh(Liveness(status="ok"), 200)


@router.get(
    "/readyz",
    operation_id="get_readiness",
    response_model=Readiness,
    responses={
        503: {
            "description": "A component on which the service depends does not respond.",
            "model": Readiness,
        }
    },
)
async def readyz(request: Request, context: TheContext) -> Response:
    """Check whether jobs can be accepted and run, and show the state of each part of the service.

    Requires no token, but problems are described only to callers with a token.
    """
    found = await context.runtime.ready()
    checks = found.checks
    if not await context.sign_in.knows(request):
        checks = {part: "ok" if state == "ok" else "not ok" for part, state in checks.items()}
    status = "ok" if found.ok else "not ready"
    return fresh(Readiness(status=status, checks=checks), 200 if found.ok else 503)


@router.get(
    "/metrics",
    operation_id="get_prometheus_metrics",
    response_class=Response,
    dependencies=[NoParameters],
    responses={
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
        **declare("invalid_parameter"),
    },
)
async def metrics(context: TheContext, _: Caller) -> Response:
    """Export metrics about requests, slots and the number of jobs in each state, in the Prometheus
    format. There are no labels for individual jobs."""
    text = await context.telemetry.render(context.runtime)
    return Response(text, media_type=CONTENT_TYPE_LATEST, headers={"Cache-Control": "no-store"})
