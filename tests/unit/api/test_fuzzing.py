"""Calls the whole API, according to its OpenAPI description, with input that schemathesis
generates.

Each operation is called with generated ids and with the ids of a job that has one of everything.
All checks of schemathesis are enabled: no undeclared status or content type, bodies match the
description, no 5xx, input that the description forbids is refused, and input that it allows is
accepted.
"""

from __future__ import annotations

import hashlib
import json
import os
import re

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis import Case
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.unit.api.serving import DEADLINE_S, LiveServer
from tests.unit.api.test_openapi import SNAPSHOT
from tests.unit.media import files
from tests.unit.service.helpers import hang, log, metrics, regrouped, regrouping, spent
from tests.unit.service.ingest.test_media import reported

WHOLE = os.environ.get("DRAY_FUZZ") == "whole"
"""As run by `make soak`: more examples, and one for each rule of the description."""
BOUNDED = settings(
    max_examples=20 if WHOLE else 4,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate] if WHOLE else [Phase.generate],
    suppress_health_check=list(HealthCheck),
)
MAX_WAIT_S = 0.01
NOT_HTTP = b"the request is not valid HTTP/1.1"
"""An answer that is sent before there is a request."""
TOO_LONG = 431
"""The status of the answer if headers or a URL are too long to be read to the end."""
WITH_MORE_RULES = (
    *("GET /v1/costs", "GET /v1/diff"),
    *("POST /v1/jobs", "POST /v1/plan", "POST /v1/code", "POST /v1/code/parts"),
    *("PATCH /v1/jobs/{job_id}/annotations", "PATCH /v1/experiments/{name}"),
    "POST /v1/jobs/{job_id}/downloads",
    "POST /v1/jobs/{job_id}/clients",  # a schema accepts 3.0 as an integer
    *("POST /v1/webhooks", "PATCH /v1/webhooks/{webhook_id}"),
    *("POST /v1/schedules", "PATCH /v1/schedules/{schedule_id}"),
    *("POST /v1/models", "PUT /v1/models/{name}/aliases/{alias}"),  # Unicode; 3.0
    *("PATCH /v1/arrays/{array_id}", "POST /v1/jobs/bulk"),
    "PUT /v1/views/{name}",
    *("POST /v1/reports", "POST /v1/reports/preview", "PATCH /v1/reports/{report_id}"),
    *("POST /v1/reservations", "PATCH /v1/reservations/{name}"),
    *("PATCH /v1/jobs/{job_id}", "PUT /v1/queues/{name}", "PATCH /v1/queues/{name}"),
)


BY_THE_SCHEMA = ("malformed_request", "invalid_document", "invalid_parameter")
"""Codes of problems that the description forbids. Other codes are for rules that schemas can't
express."""


def made_of_examples(server: LiveServer) -> dict[str, str]:
    """Call each POST for a list with its example, and return the new ids by the path parameter of
    an item."""
    found = {}
    paths = schema.raw_schema["paths"]
    for path, methods in paths.items():
        items = [each for each in paths if re.fullmatch(rf"{re.escape(path)}/{{\w+}}", each)]
        if "post" not in methods or "{" in path or not items:
            continue
        described = methods["post"]["requestBody"]["content"]["application/json"]
        answer = server.ask("POST", path, json=described["example"])
        if "location" in answer.headers:
            found[items[0].rpartition("{")[2][:-1]] = answer.headers["location"].rpartition("/")[2]
    return found


@pytest.fixture(scope="module", autouse=True)
def ids(server: LiveServer) -> dict[str, str | int]:
    """Path parameters that exist: a finished job with one of everything, and an array. They are
    created first, because generated calls create the maximum number of webhooks."""
    server.queue("fuzzed")
    job_id = server.submit(name="fuzzed", labels={"a": "b"}, resources={"num_workers": 2})
    picture = files.picture()
    frames = [metrics(1, {"train/loss": 1.0, "x": float("nan")}), log(0, "hello")]
    frames.append(reported(1, "image", "picture", picture))
    server.train(job_id, *frames, server.artifact(job_id, "out.bin", b"0123456789"))
    server.hands.report(job_id, 1, [server.hands.checkpoint(job_id, 1, 5)])
    faults = [regrouping(1), regrouped(1), hang(1), spent(useful=1.0)]
    server.hands.report(job_id, 1, faults)
    drill = server.ask("POST", f"/v1/jobs/{job_id}/drill", json={"kind": "kill"}).json()
    server.succeed(job_id)
    items = server.ask("GET", f"/v1/jobs/{job_id}/artifacts").json()["items"]
    of_array = server.submit(array={"size": 2})
    hook = server.ask("POST", "/v1/webhooks", json={"url": "https://93.184.216.34/hook"}).json()
    wanted = {"log": {"rank": 0}}
    link = server.ask("POST", f"/v1/jobs/{job_id}/downloads", json=wanted).json()
    swept = {"metric": "val/loss", "sampler": "grid", "parameters": {"train.seed": [1, 2]}}
    of_sweep = server.submit(sweep=swept)
    return {
        **made_of_examples(server),
        "sweep_id": server.ask("GET", f"/v1/jobs/{of_sweep}").json()["array_id"],
        "array_id": server.ask("GET", f"/v1/jobs/{of_array}").json()["array_id"],
        "job_id": job_id,
        "artifact_id": items[0]["id"],
        "drill_id": drill["id"],
        "step": 5,
        "path": "manifest.json",
        "sha256": hashlib.sha256(picture).hexdigest(),
        "name": "fuzzed",
        "version": "1",
        "alias": "best",
        "hostname": "gpu-7",  # nothing is withheld on it
        "webhook_id": hook["id"],
        "secret": link["url"].rpartition("/")[2],
        "round_name": "000000000001-0123456789abcdef",  # this round is not open
        "part": 0,
        "client": 0,
        "phase": "unmask",
        "number": 1,  # there is no such decision: this server doesn't plan
    }


# Another test checks that this file describes the API. To describe it anew takes each process of
# the tests seconds.
schema = schemathesis.openapi.from_dict(json.loads(SNAPSHOT.read_text()))


@schemathesis.serializer("application/x-tar")
def _as_tar(_: object, value: object) -> bytes:
    """Not an archive: schemathesis generates bytes, or any other value."""
    return value if isinstance(value, bytes) else repr(value).encode()


def call(case: Case, server: LiveServer) -> None:
    wait_s = case.query.get("wait_s")
    if isinstance(wait_s, int | float) and wait_s > MAX_WAIT_S:
        case.query["wait_s"] = MAX_WAIT_S  # fuzzing should not wait
    response = case.call(base_url=server.url, timeout=DEADLINE_S)
    if NOT_HTTP in response.content or response.status_code == TOO_LONG:
        return  # the application did not get the request
    # Cursors are opaque, searches are a language, and schemas can't express that strings must not
    # contain NUL or some rules between the fields of a document.
    is_plain = case.query.keys().isdisjoint(("cursor", "where"))
    is_plain = is_plain and "%00" not in str(response.request.url)
    says_all = is_plain and case.operation.label not in WITH_MORE_RULES
    if response.status_code == 422:  # the answer to HEAD has no code
        says_all &= bool(response.content) and response.json()["code"] in BY_THE_SCHEMA
    case.validate_response(response, excluded_checks=[] if says_all else [positive_data_acceptance])


@schema.parametrize()
@BOUNDED
def test_no_made_up_call_breaks_the_api(case: Case, server: LiveServer) -> None:
    call(case, server)


@schema.exclude(path_regex="^[^{]*$").parametrize()
@BOUNDED
def test_no_made_up_call_of_what_is_there_breaks_the_api(
    case: Case, server: LiveServer, ids: dict[str, str | int]
) -> None:
    case.path_parameters.update({name: ids[name] for name in case.path_parameters})
    call(case, server)
