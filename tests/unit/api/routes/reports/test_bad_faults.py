"""Bad input, continued: requests to a running job."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.unit.api.matrix import GOOD, TOKEN, check, get_raw, held, post
from tests.unit.api.serving import LiveServer
from tests.unit.service.helpers import metrics

KILL = {"kind": "kill"}
UNREADABLE: dict[str, tuple[bytes, str]] = {
    "no body": (b"", ""),
    "not JSON": (b"{kind: kill}", "not JSON"),
    "a list": (b"[]", "object"),
    "a key twice": (b'{"kind": "kill", "kind": "stall"}', "twice"),
}
INVALID: dict[str, tuple[dict[str, Any] | bytes, str, str]] = {
    # description: (body, pointer, part of the detail or hint)
    "no kind": ({}, "/kind", "'kind' is missing"),
    "no kind, but a rank": ({"rank": 1}, "/kind", "'kind' is missing"),
    "null": ({"kind": None}, "/kind", ""),
    "another kind": ({"kind": "kil"}, "/kind", "did you mean 'kill'?"),
    "an unknown field": ({**KILL, "rnak": 1}, "/rnak", "did you mean 'rank'?"),
    "a field of a job": ({**KILL, "train": {}}, "/train", "there is no field 'train'"),
    "rank -1": ({**KILL, "rank": -1}, "/rank", "greater than"),
    "rank true": ({**KILL, "rank": True}, "/rank", "number"),
    "rank 1.5": ({**KILL, "rank": 1.5}, "/rank", "integer"),
    "rank 10^18": ({**KILL, "rank": 10**18}, "/rank", "less than"),
    "rank NaN": (b'{"kind": "kill", "rank": NaN}', "/rank", "finite"),
    "at step -1": ({**KILL, "at_step": -1}, "/at_step", "greater than"),
    "at step '5'": ({**KILL, "at_step": "5"}, "/at_step", "number"),
    "at step 10^18": ({**KILL, "at_step": 10**18}, "/at_step", "less than"),
}
IMPOSSIBLE: dict[str, tuple[dict[str, Any], str, str]] = {
    "a rank too many": ({**KILL, "rank": 2}, "/rank", "ranks 0 to 1"),
    "a step that is past": ({**KILL, "at_step": 10}, "/at_step", "already completed 10 steps"),
    "a step that never comes": ({**KILL, "at_step": 100}, "/at_step", "ends after step 100"),
    "a rank to preempt": ({"kind": "preempt", "rank": 1}, "/rank", "the whole job"),
}


@pytest.fixture(scope="module")
def running(site: LiveServer) -> str:
    """Ann's job, which is training on two ranks and has done 10 of 100 steps."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with site.client(headers=headers) as client:
        job_id: str = post(client, {**GOOD, "resources": {"num_workers": 2}}).json()["id"]
    site.hands.claim(job_id, workers=2)
    site.hands.report(job_id, 1, [metrics(10, {"x": 1.0}, total_steps=100)])
    return job_id


def ask(client: httpx.Client, path: str, body: Any, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Content-Type": "application/json", **headers}
    return client.post(path, content=content, headers=sent)


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_drill_that_is_no_json_document_is_400(
    site: LiveServer, ann: httpx.Client, running: str, name: str
) -> None:
    body, said = UNREADABLE[name]
    before = held(site)
    problem = check(site, ask(ann, f"/v1/jobs/{running}/drill", body), 400, "malformed_request")
    assert said in problem["detail"]
    assert held(site) == before


@pytest.mark.parametrize("name", [*INVALID, *IMPOSSIBLE])
def test_a_drill_at_fault_is_422_with_the_field(
    site: LiveServer, ann: httpx.Client, running: str, name: str
) -> None:
    body, pointer, said = {**INVALID, **IMPOSSIBLE}[name]
    code = "invalid_document" if name in INVALID else "drill_impossible"
    before = held(site)
    problem = check(site, ask(ann, f"/v1/jobs/{running}/drill", body), 422, code)
    assert problem["pointer"] == pointer
    assert said in problem["detail"] + problem.get("hint", "")
    assert held(site) == before


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"grace": 5}, "/grace"),
        ({"grace_s": -1}, "/grace_s"),
        ({"grace_s": "5"}, "/grace_s"),
        ({"grace_s": True}, "/grace_s"),
        ({"grace_s": 10**9}, "/grace_s"),
        (b'{"grace_s": NaN}', "/grace_s"),
        (b'{"grace_s": 1e999}', "/grace_s"),
        (b'{"grace_s": ' + b"9" * 400 + b"}", "/grace_s"),
    ],
)
def test_a_preemption_at_fault_is_422_with_the_field(
    site: LiveServer, ann: httpx.Client, running: str, body: Any, pointer: str
) -> None:
    before = held(site)
    response = ask(ann, f"/v1/jobs/{running}/preempt", body)
    assert check(site, response, 422, "invalid_document")["pointer"] == pointer
    assert held(site) == before


@pytest.mark.parametrize("call", ["drill", "preempt"])
def test_what_asks_something_of_a_job_is_read_as_a_submit_is(
    site: LiveServer, ann: httpx.Client, running: str, call: str
) -> None:
    path = f"/v1/jobs/{running}/{call}"
    before = held(site)
    check(site, ask(ann, path, b"null"), 400, "malformed_request")
    wrong_type = ask(ann, path, KILL, **{"Content-Type": "text/plain"})
    check(site, wrong_type, 415, "unsupported_media_type")
    check(site, ask(ann, path, b" " * (1 << 21)), 413, "body_too_large")
    check(site, ask(ann, f"{path}?x=1", KILL), 422, "invalid_parameter")
    body = KILL if call == "drill" else {}
    check(site, ask(ann, f"/v1/jobs/job-none/{call}", body), 404, "job_not_found")
    assert held(site) == before


def test_a_key_of_a_drill_is_checked_and_stands_for_that_request_alone(
    site: LiveServer, ann: httpx.Client, running: str
) -> None:
    path = f"/v1/jobs/{running}/drill"
    of_a_submit = {"Idempotency-Key": "of a submit"}
    assert post(ann, GOOD, **of_a_submit).status_code == 201
    before = held(site)
    too_long = {"Idempotency-Key": "x" * 256}
    check(site, ask(ann, path, KILL, **too_long), 400, "bad_idempotency_key")
    check(site, ask(ann, path, KILL, **of_a_submit), 422, "idempotency_key_reused")
    assert held(site) == before


@pytest.mark.parametrize(
    ("tail", "status", "code"),
    [
        ("drills/drill-none", 404, "drill_not_found"),
        ("drills/%ff", 404, "drill_not_found"),
        ("drills/%00", 400, "malformed_request"),
        ("drills/" + "x" * 5000, 404, "drill_not_found"),
        ("drills/drill-none?wait_s=61", 422, "invalid_parameter"),
        ("drills/drill-none?wait_s=nan", 422, "invalid_parameter"),
        ("drills/drill-none?wait=1", 422, "invalid_parameter"),
        ("drills?limit=1", 422, "invalid_parameter"),
        ("hangs?limit=1", 422, "invalid_parameter"),
    ],
)
def test_a_drill_or_parameter_that_is_none(
    site: LiveServer, ann: httpx.Client, running: str, tail: str, status: int, code: str
) -> None:
    check(site, get_raw(ann, f"/v1/jobs/{running}/{tail}"), status, code)
