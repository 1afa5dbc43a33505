from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from pydantic import BaseModel

from api import app, examples, openapi
from api.problems import STATUS
from api.routes.server import health
from dray import views
from dray.spec import JobSpec

SNAPSHOT = Path(__file__).with_name("openapi.json")
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


def test_no_path_of_one_router_matches_one_of_another() -> None:
    """Routers are found in the order of their modules, and that order must not matter."""
    paths = {
        (route.path, method): (router, route.path_regex)
        for router in app.ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute)
        for method in route.methods or ()
    }
    overlapping = [
        (path, other)
        for (path, method), (router, pattern) in paths.items()
        for (other, its_method), (its_router, _) in paths.items()
        if router is not its_router
        and method == its_method
        and pattern.match(re.sub(r"{\w+(:path)?}", "x", other))
    ]
    assert overlapping == []


def test_every_operation_has_a_name_of_its_own_a_tag_and_a_sentence(
    document: dict[str, Any],
) -> None:
    names = [operation["operationId"] for _, operation in operations(document)]
    assert len(names) == len(set(names))
    for _, operation in operations(document):
        assert len(operation["tags"]) == 1
        assert operation["description"]


def test_every_problem_is_declared_as_problem_json_with_its_codes(
    document: dict[str, Any],
) -> None:
    for path, operation in operations(document):
        for status, said in operation["responses"].items():
            if int(status) >= 400 and path != "/readyz":
                schema = said["content"]["application/problem+json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/Problem"}, (path, status)
                assert {STATUS[code] for code in said["x-problem-codes"]} == {int(status)}


def test_every_body_has_an_example(document: dict[str, Any]) -> None:
    for path, operation in operations(document):
        bodies = [said.get("content", {}) for said in operation["responses"].values()]
        bodies.append(operation.get("requestBody", {}).get("content", {}))
        for content in bodies:
            for media_type, described in content.items():
                assert described.get("example") or described.get("examples"), (path, media_type)


@pytest.mark.parametrize("name", sorted(examples.VIEWS))
def test_the_example_of_an_answer_is_one(name: str) -> None:
    kind = getattr(views, name, None) or getattr(health, name)
    assert set(examples.VIEWS[name]) == set(kind.model_fields)
    kind.model_validate_json(json.dumps(examples.VIEWS[name]))


def test_the_example_of_a_document_is_one() -> None:
    JobSpec.model_validate(dict(examples.DOCUMENT))


@pytest.mark.parametrize("kind", openapi.BODIES)
def test_the_example_of_a_request_is_one(kind: type[BaseModel]) -> None:
    assert kind.model_validate(dict(examples.REQUESTS[kind.__name__]))


def test_the_bounds_of_a_request_are_in_its_description(document: dict[str, Any]) -> None:
    fields = document["components"]["schemas"]["DrillRequest"]["properties"]
    assert (fields["rank"]["minimum"], fields["rank"]["default"]) == (0, 0)
    assert fields["at_step"]["anyOf"][0]["minimum"] == 0
    weight = document["components"]["schemas"]["QueueRequest"]["properties"]["weight"]
    assert (weight["exclusiveMinimum"], weight["maximum"]) == (0.0, 1e6)


@pytest.mark.parametrize("code", sorted(STATUS))
def test_the_example_of_a_problem_is_one(code: str) -> None:
    problem = views.Problem.model_validate(examples.problem(code, STATUS[code]))
    assert (problem.code, problem.status) == (code, STATUS[code])
    assert problem.detail


def test_the_description_is_the_one_that_was_agreed_on(capsys: pytest.CaptureFixture[str]) -> None:
    """After intended changes to the API, update the file with `make openapi`."""
    app.main()
    printed = capsys.readouterr().out
    agreed = SNAPSHOT.read_text()
    difference = "".join(
        difflib.unified_diff(
            agreed.splitlines(keepends=True), printed.splitlines(keepends=True), "agreed", "is", n=2
        )
    )
    assert not difference, f"the API's description has changed:\n{difference}"


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    references = set(re.findall(r'"\$ref": ?"([^"]+)"', re.sub("'", '"', str(document))))
    for reference in references:
        kind, _, name = reference.removeprefix("#/components/").partition("/")
        assert name in document["components"][kind]


def test_the_job_document_is_not_mixed_up_with_the_views(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    spec = schemas["JobSpec"]["properties"]["checkpoint"]
    assert "JobSpec.Checkpoint" in str(spec)
    assert "every_steps" in schemas["JobSpec.Checkpoint"]["properties"]
    assert "is_latest" in schemas["Checkpoint"]["properties"]
    body = document["paths"]["/v1/jobs"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"] == {"$ref": "#/components/schemas/JobSpec"}
