"""/v1/jobs/{id}/checkpoints."""

from __future__ import annotations

from fastapi import APIRouter, Response

from api.context import Caller, NoParameters, TheReading, answer
from api.problems import declare
from dray import views

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["checkpoints"])


@router.get(
    "/checkpoints",
    operation_id="get_checkpoints",
    response_model=views.CheckpointPage,
    dependencies=[NoParameters],
    responses=declare("invalid_parameter", "job_not_found"),
)
async def checkpoints(reading: TheReading, _: Caller, job_id: str) -> Response:
    """Committed checkpoints: step, size, hash, and which is the best and the latest."""
    return answer(await reading.checkpoints(job_id))
