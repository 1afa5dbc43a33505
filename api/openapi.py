"""The description of the API: the job document and the problems are in it by name."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from api.problems import EVERYWHERE, declare
from dray.spec import JobSpec
from dray.views import Problem

SPEC_REF = "#/components/schemas/JobSpec.{model}"
"""The parts of a job document have names of their own: a view may be called alike."""

JOB_SPEC_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/JobSpec"}}},
    }
}
"""Submit reads its body itself (see `api.body`), so it says here what that is."""


def install(app: FastAPI) -> None:
    """Serve the description that `describe` makes."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = describe(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def describe(app: FastAPI) -> dict[str, Any]:
    """OpenAPI 3.1 of all routes."""
    document = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    spec = JobSpec.model_json_schema(ref_template=SPEC_REF)
    parts = spec.pop("$defs")
    schemas |= {f"JobSpec.{name}": schema for name, schema in parts.items()}
    schemas |= {"JobSpec": spec, "Problem": Problem.model_json_schema(mode="serialization")}
    everywhere = {str(status): said for status, said in declare(*EVERYWHERE).items()}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _describe_problems(path, operation["responses"], everywhere)
            if path not in ("/healthz", "/readyz"):
                operation["security"] = [{"token": []}, {}]
    document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    return document


def _describe_problems(path: str, responses: dict[str, Any], everywhere: dict[str, Any]) -> None:
    """FastAPI's own 422 is not what this API answers; what any call may answer is added."""
    own = responses.get("422", {}).get("content", {}).get("application/json")
    if own is not None:
        responses["422"] = declare("invalid_parameter")[422]
    if path.startswith("/v1/") or path == "/metrics":
        for status, said in everywhere.items():
            responses.setdefault(status, said)
