"""/v1/schema: the JSON Schema that editors use to complete and check job documents."""

from __future__ import annotations

import json
from functools import cache

from fastapi import APIRouter, Response

from api.context import NoParameters
from api.problems import declare
from dray.spec.authoring.describing import job_schema

router = APIRouter(prefix="/v1/schema", tags=["jobs"])

MEDIA_TYPE = "application/schema+json"


@router.get(
    "",
    operation_id="get_job_schema",
    response_class=Response,
    dependencies=[NoParameters],
    responses={
        200: {"content": {MEDIA_TYPE: {"schema": {"type": "object"}}}},
        **declare("invalid_parameter"),
    },
)
async def get_schema() -> Response:
    """Return the JSON Schema of job documents. Requires no token, because editors can't send a
    token."""
    return Response(_schema(), media_type=MEDIA_TYPE)


@cache
def _schema() -> bytes:
    return json.dumps(job_schema()).encode()
