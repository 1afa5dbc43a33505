from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

METHODS = ("get", "head", "post", "delete", "put", "patch")


@pytest.fixture
def document(http: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = http.get("/openapi.json").json()
    return found


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert method in METHODS
            yield path, operation


def test_the_surface_is_what_the_design_says(document: dict[str, Any]) -> None:
    job = "/v1/jobs/{job_id}"
    assert set(document["paths"]) == {
        "/v1/jobs",
        job,
        *(
            f"{job}/{name}"
            for name in (
                *("cancel", "metrics", "logs", "events", "attempts", "checkpoints", "artifacts"),
                *("artifacts/{artifact_id}", "explain"),
                *("checkpoints/{step}/files", "checkpoints/{step}/files/{path}"),
            )
        ),
        "/v1/cluster",
        "/healthz",
        "/readyz",
        "/metrics",
    }


def test_every_operation_has_a_name_of_its_own_a_tag_and_a_sentence(
    document: dict[str, Any],
) -> None:
    names = [operation["operationId"] for _, operation in operations(document)]
    assert len(names) == len(set(names))
    for _, operation in operations(document):
        assert len(operation["tags"]) == 1
        assert operation["description"]


def test_every_problem_is_declared_as_problem_json(document: dict[str, Any]) -> None:
    for path, operation in operations(document):
        for status, said in operation["responses"].items():
            if int(status) >= 400 and path != "/readyz":
                schema = said["content"]["application/problem+json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/Problem"}, (path, status)


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    references = set(re.findall(r'"\$ref": ?"([^"]+)"', re.sub("'", '"', str(document))))
    for reference in references:
        name = reference.removeprefix("#/components/schemas/")
        assert name in document["components"]["schemas"]


def test_the_job_document_is_not_mixed_up_with_the_views(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    spec = schemas["JobSpec"]["properties"]["checkpoint"]
    assert "JobSpec.Checkpoint" in str(spec)
    assert "every_steps" in schemas["JobSpec.Checkpoint"]["properties"]
    assert "is_latest" in schemas["Checkpoint"]["properties"]
    body = document["paths"]["/v1/jobs"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"] == {"$ref": "#/components/schemas/JobSpec"}
