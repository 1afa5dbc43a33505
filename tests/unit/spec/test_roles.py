"""Roles of a script: the ranks of each role, servers, and what a framework does not support."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from dray.spec import JobSpec
from dray.spec.program.roles import role_of

SERVERS: dict[str, Any] = {"chief": {}, "worker": {"num_workers": 2}, "ps": {"args": ["--serve"]}}


def job(roles: dict[str, Any], framework: str = "torch", **document: Any) -> JobSpec:
    script = {"entrypoint": "a.py", "args": ["x"], "framework": framework, "roles": roles}
    return JobSpec.model_validate({"script": script, **document})


def test_ranks_are_numbered_role_by_role_and_run_their_roles_command() -> None:
    roles = {**SERVERS, "evaluator": {"entrypoint": "eval.py"}}
    spec = job(roles, "tensorflow", resources={"cpus_per_worker": 2})
    assert spec.script is not None
    assert (spec.resources.num_workers, spec.resources.cpus_per_worker) == (5, 2)
    assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec
    found = [role_of(spec.script.roles, rank) for rank in range(5)]
    assert found == [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0), ("evaluator", 0)]
    commands = [spec.script.for_rank(rank) for rank in range(5)]
    assert [one.entrypoint for one in commands] == ["a.py"] * 4 + ["eval.py"]
    assert [one.args for one in commands] == [["x"]] * 3 + [["--serve"]] + [["x"]]
    with pytest.raises(IndexError, match="rank 5 does not exist: there are 5 ranks"):
        role_of(spec.script.roles, 5)


@pytest.mark.parametrize(
    ("roles", "serving"),
    [
        (SERVERS, {1, 2, 3}),
        ({**SERVERS, "evaluator": {}}, {1, 2, 3}),
        ({"worker": {"num_workers": 2}, "ps": {"num_workers": 2}}, {2, 3}),
        ({"scheduler": {}, "server": {}, "worker": {}}, {0, 1}),
        ({"actor": {}, "ps": {"serves": False}, "replay": {"serves": True}}, {2}),
        ({}, set()),
    ],
)
def test_the_job_does_not_wait_for_ranks_that_serve(
    roles: dict[str, Any], serving: set[int]
) -> None:
    script = job(roles).script
    assert script is not None
    assert script.serving_ranks == serving


@pytest.mark.parametrize(
    ("roles", "framework", "pointer", "words"),
    [
        ({"ps": {}, "server": {}}, "torch", "/script/roles", "would never end"),
        ({"master": {}}, "tensorflow", "/script/roles/master", "chief, worker, ps, evaluator"),
        ({"chief": {"num_workers": 2}}, "tensorflow", "/script/roles/chief/num_workers", "1"),
        (
            {"worker": {"resources": {}}, "ps": {"resources": {}}},
            "torch",
            "/script/roles",
            "all roles have their own resources, .* omit the resources of one role",
        ),
        ({}, "mxnet", "/script/roles", "lacks scheduler and server and worker"),
        ({"worker": {}, "server": {}}, "mxnet", "/script/roles", "lacks scheduler: "),
        (
            {"scheduler": {"num_workers": 2}, "server": {}, "worker": {}},
            "mxnet",
            "/script/roles/scheduler/num_workers",
            "must be 1",
        ),
    ],
)
def test_roles_that_a_framework_does_not_have_are_refused(
    roles: dict[str, Any], framework: str, pointer: str, words: str
) -> None:
    with pytest.raises(ValidationError, match=words) as caught:
        job(roles, framework)
    assert caught.value.errors()[0]["ctx"]["pointer"] == pointer


def test_a_number_of_workers_that_is_not_the_roles_is_refused() -> None:
    with pytest.raises(ValidationError, match="the roles of the script have 4 workers") as caught:
        job(SERVERS, resources={"num_workers": 3})
    assert caught.value.errors()[0]["ctx"]["pointer"] == "/resources/num_workers"
    assert job(SERVERS, resources={"num_workers": 4}).resources.num_workers == 4


@pytest.mark.parametrize(
    "roles", [{"ps": {"num_workers": True}}, {"ps": 3}, {"ps": {"num_workers": 0}}, {"P S": {}}, 7]
)
def test_a_role_that_is_none_is_refused_by_its_own_field(roles: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        job(roles)
    assert caught.value.errors()[0]["loc"][:2] == ("script", "roles")


def test_tensorflow_has_servers_also_without_a_chief() -> None:
    """In this case worker 0 is the chief, and the job ends with the workers."""
    script = job({"worker": {"num_workers": 2}, "ps": {}}, "tensorflow").script
    assert script is not None
    assert script.serving_ranks == {2}


@pytest.mark.parametrize(
    ("roles", "framework", "standalone"),
    [
        (SERVERS, "tensorflow", {1, 2}),
        ({**SERVERS, "evaluator": {}}, "tensorflow", {1, 2, 4}),
        ({"worker": {"num_workers": 2}, "ps": {}}, "tensorflow", set()),
        (SERVERS, "torch", set()),
        ({"actor": {"num_workers": 2, "restart": "rank"}, "learner": {}}, "torch", {0, 1}),
        ({**SERVERS, "worker": {"restart": "job"}}, "tensorflow", set()),
    ],
)
def test_ranks_that_the_others_can_do_without_are_started_again_alone(
    roles: dict[str, Any], framework: str, standalone: set[int]
) -> None:
    script = job(roles, framework).script
    assert script is not None
    assert script.standalone_ranks == standalone


def test_ranks_have_the_resources_of_their_role_or_those_of_the_job() -> None:
    servers = {"resources": {"cpus": 3}}
    roles = {"chief": {"resources": {}}, "worker": {"num_workers": 2}, "ps": servers}
    spec = job(roles, resources={"gpus_per_worker": 1, "cpus_per_worker": 2})
    assert [(one.role, list(one.ranks)) for one in spec.roles_with_resources] == [
        ("chief", [0]),
        ("ps", [3]),
    ]
    assert [spec.num_cpus_of(rank) for rank in range(4)] == [1, 2, 2, 3]
    assert job({"worker": {}}).roles_with_resources == []


@pytest.mark.parametrize(
    ("own", "resources", "pointer"),
    [
        ({}, {"gpus_per_worker": 0.5, "share_gpus": True}, "/resources/gpus_per_worker"),
        ({}, {"required_topology": "rack"}, "/resources/required_topology"),
        ({"cpus": 0}, {}, None),
        ({"gpus_per_worker": 1}, {}, None),
    ],
)
def test_resources_that_a_role_can_not_have_are_refused(
    own: dict[str, Any], resources: dict[str, Any], pointer: str | None
) -> None:
    with pytest.raises(ValidationError) as caught:
        job({"worker": {}, "ps": {"resources": own}}, resources=resources)
    (error,) = caught.value.errors()
    if pointer is None:
        assert error["loc"][:4] == ("script", "roles", "ps", "resources")
    else:
        assert error["ctx"]["pointer"] == pointer
        assert "script.roles.ps.resources" in error["msg"]


def test_roles_with_resources_of_their_own_are_not_elastic() -> None:
    with pytest.raises(
        ValidationError, match="can't be combined with roles, whose sizes are fixed"
    ):
        job({"worker": {}, "ps": {"resources": {}}}, elastic={"min_workers": 1})
