"""/healthz, /readyz and /metrics: for those who keep the service running."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from api.context import Caller, TheContext

router = APIRouter(tags=["health"])


@router.get("/healthz", operation_id="get_liveness")
async def healthz() -> dict[str, str]:
    """The process answers. Needs no token."""
    return {"status": "ok"}


@router.get(
    "/readyz",
    operation_id="get_readiness",
    responses={503: {"description": "Something it stands on does not answer; same body."}},
)
async def readyz(context: TheContext) -> JSONResponse:
    """Whether jobs can be taken and run, and what each part says. Needs no token."""
    readiness = await context.runtime.ready()
    status = "ok" if readiness.ok else "not ready"
    return JSONResponse(
        {"status": status, "checks": readiness.checks}, 200 if readiness.ok else 503
    )


@router.get(
    "/metrics",
    operation_id="get_prometheus_metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(context: TheContext, _: Caller) -> Response:
    """Requests, jobs by state and slots, in Prometheus' format; nothing is labelled by job."""
    text = await context.telemetry.render(context.runtime)
    return Response(text, media_type=CONTENT_TYPE_LATEST)
