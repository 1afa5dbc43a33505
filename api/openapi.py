"""The OpenAPI description: every operation with its examples and possible problems.

`make openapi` writes the stored description; a test compares the current description with the
stored description.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from api import examples
from api.http.downloads import BINARY
from api.problems import CODES, EVERYWHERE, STATUS, declare
from dray.spec import JobSpec
from dray.views import Problem

JOB_SPEC_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"$ref": "#/components/schemas/JobSpec"},
                "example": examples.DOCUMENT,
            },
            "application/yaml": {
                "schema": {"type": "string"},
                "example": yaml.safe_dump(examples.DOCUMENT),
            },
        },
    }
}
"""The body of a submission. FastAPI can't derive its schema, because `api.http.body` reads the
body."""

BODIES: list[type[BaseModel]] = []
"""Classes of all bodies that routes have described with `json_body`."""


def json_body(kind: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """Describe the body of a route that reads an object of the class `kind`."""
    name = kind.__name__
    BODIES.append(kind)
    content = {
        "schema": {"$ref": f"#/components/schemas/{name}"},
        "example": examples.REQUESTS[name],
    }
    return {"requestBody": {"required": required, "content": {"application/json": content}}}


PLAIN_EXAMPLES = {
    "text/event-stream": examples.EVENT_STREAM,
    "text/plain": examples.PROMETHEUS,
    "text/csv": examples.JOB_TABLE,
    "application/vnd.apache.parquet": "(bytes)",
    "application/schema+json": examples.SCHEMA,
    "text/html": "<!doctype html>",
    BINARY: "(bytes)",
}
UNGUARDED = ("/healthz", "/readyz", "/v1/schema")

_ETAG = {"ETag": {"description": "Version of this answer.", "schema": {"type": "string"}}}
_IF_NONE_MATCH = {
    "name": "If-None-Match",
    "in": "header",
    "required": False,
    "description": "ETags of the versions that the caller has cached.",
    "schema": {"type": "string"},
}
_NOT_MODIFIED = {"description": "`If-None-Match` contains the ETag of this response."}


def install(app: FastAPI) -> None:
    """Make `app.openapi` return the result of `describe`."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = describe(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI 3.1 description of all routes."""
    document = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas["Problem"] = Problem.model_json_schema(mode="serialization")
    bodies: list[type[BaseModel]] = [JobSpec, *BODIES]
    for kind in bodies:
        schemas |= _schemas_of(kind)
    for path, method, operation in _operations(document):
        _describe_problems(path, operation["responses"])
        _describe_conditions(path, method, operation)
        _describe_parameters(path, operation)
        _give_examples(operation["responses"])
        operation["responses"] = dict(sorted(operation["responses"].items()))
        if path not in UNGUARDED:
            operation["security"] = [{"token": []}, {}]
    document["components"]["examples"] = {
        code: {"value": examples.problem(code, status)} for code, status in sorted(STATUS.items())
    }
    document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    return document


def _schemas_of(kind: type[BaseModel]) -> dict[str, Any]:
    """Return the schemas of a body and of its parts, keyed by name. The names of a job document's
    parts are prefixed, because a view can have the same name."""
    prefix = "JobSpec." if issubclass(kind, JobSpec) else ""
    schema = kind.model_json_schema(ref_template=f"#/components/schemas/{prefix}{{model}}")
    parts = schema.pop("$defs", {})
    return {f"{prefix}{name}": part for name, part in parts.items()} | {kind.__name__: schema}


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def _describe_problems(path: str, responses: dict[str, Any]) -> None:
    """Replace FastAPI's own 422 response, and add the problems that any call can return."""
    if "application/json" in responses.get("422", {}).get("content", {}):
        responses["422"] = declare("invalid_parameter")[422]
    if path in UNGUARDED:
        return
    codes = [code for answer in responses.values() for code in answer.get(CODES, ())]
    for status, answer in declare(*sorted({*codes, *EVERYWHERE})).items():
        responses[str(status)] = answer


def _describe_conditions(path: str, method: str, operation: dict[str, Any]) -> None:
    """Describe `If-None-Match` and 304 for each response that has an ETag."""
    responses = operation["responses"]
    content = responses.get("200", {}).get("content", {})
    if method == "get" and path.startswith("/v1/") and "application/json" in content:
        responses["304"] = _NOT_MODIFIED
    if "304" in responses:
        responses["200"]["headers"] = _ETAG
        operation.setdefault("parameters", []).append(_IF_NONE_MATCH)


def _describe_parameters(path: str, operation: dict[str, Any]) -> None:
    """Sort a path's parameters by their order in the path, and remove null from all types.

    FastAPI lists parameters in the order of dependencies, and allows null, which a URL can't
    contain.
    """
    parameters, in_path = operation.get("parameters", []), re.findall(r"{(\w+)}", path)
    parameters.sort(key=lambda one: [*in_path, one["name"]].index(one["name"]))
    for parameter in parameters:
        options = parameter["schema"].get("anyOf", ())
        if {"type": "null"} in options:
            (kind,) = [option for option in options if option != {"type": "null"}]
            del parameter["schema"]["anyOf"]
            parameter["schema"] |= kind


def _give_examples(responses: dict[str, Any]) -> None:
    for answer in responses.values():
        for media_type, content in answer.get("content", {}).items():
            if codes := answer.get(CODES):
                reference = "#/components/examples/{}"
                content["examples"] = {code: {"$ref": reference.format(code)} for code in codes}
            elif media_type in PLAIN_EXAMPLES:
                content["example"] = PLAIN_EXAMPLES[media_type]
            else:
                content["example"] = examples.VIEWS[content["schema"]["$ref"].rpartition("/")[2]]
