"""/v1/sweeps over HTTP, and sweeps that are refused."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from service.sweeps import optuna_sampler
from tests.unit.api.matrix import GOOD, check, post
from tests.unit.api.serving import LiveServer

SWEEP: dict[str, Any] = {
    "metric": "val/loss",
    "sampler": "grid",
    "parameters": {"train.optimizer.lr": [0.1, 0.01, 0.001]},
}


def submitted(http: httpx.Client, **changes: Any) -> str:
    response = http.post("/v1/jobs", json={**GOOD, "sweep": {**SWEEP, **changes}})
    assert response.status_code == 201, response.text
    assert response.json()["spec"]["sweep"] is None
    sweep_id: str = response.json()["array_id"]
    return sweep_id


def test_a_sweep_is_shown_with_its_trials_and_cancelled_as_an_array(http: httpx.Client) -> None:
    sweep_id = submitted(http, max_running=2)
    path = f"/v1/sweeps/{sweep_id}"
    sweep = http.get(path).json()
    assert (sweep["id"], sweep["size"], sweep["counts"]) == (sweep_id, 3, {"QUEUED": 3})
    assert (sweep["metric"], sweep["mode"], sweep["best"]) == ("val/loss", "min", None)
    assert sweep["sweep"]["max_running"] == 2
    first = http.get(f"{path}/trials", params={"limit": 2}).json()
    rest = http.get(f"{path}/trials", params={"cursor": first["next_cursor"]}).json()
    trials = first["items"] + rest["items"]
    assert rest["next_cursor"] is None
    values = [trial["parameters"]["train.optimizer.lr"] for trial in trials]
    assert values == [0.1, 0.01, 0.001]
    assert http.get(f"/v1/arrays/{sweep_id}").json()["is_sweep"] is True
    assert http.post(f"/v1/arrays/{sweep_id}/cancel").json()["counts"] == {"CANCELLED": 3}
    assert http.get(path, params={"wait_s": 60}).json()["counts"] == {"CANCELLED": 3}
    assert http.delete(f"/v1/arrays/{sweep_id}").status_code == 204
    for gone in (path, f"{path}/trials", "/v1/sweeps/array-none", "/v1/sweeps/job-1"):
        response = http.get(gone)
        assert (response.status_code, response.json()["code"]) == (404, "sweep_not_found")


@pytest.mark.parametrize("query", ["limit=0", "limit=501", "limit=x", "wait=1", "cursor=zz"])
def test_a_wrong_parameter_of_the_trials_is_refused(http: httpx.Client, query: str) -> None:
    response = http.get(f"/v1/sweeps/{submitted(http)}/trials?{query}")
    assert response.status_code in (400, 422)
    assert response.json()["code"] in ("bad_cursor", "invalid_parameter")


PARAMETERS = SWEEP["parameters"]
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"metric": None}, "invalid_document", "/sweep/metric"),
    ({"metric": "val/mae"}, "invalid_document", "/sweep/metric"),
    ({"parameters": {}}, "invalid_document", "/sweep/parameters"),
    (
        {"parameters": {"train.epochs": []}},
        "invalid_document",
        "/sweep/parameters/train.epochs",
    ),
    (
        {"parameters": {"train.optimizer.rate": [1]}},
        "invalid_document",
        "/sweep/parameters/train.optimizer.rate",
    ),
    (
        {"parameters": {"train.seed": {"min": 0, "max": 1e999}}},
        "invalid_document",
        "/sweep/parameters/train.seed/max",
    ),
    (
        {"early_stopping": {"min_steps": 9, "max_steps": 1}},
        "invalid_document",
        "/sweep/early_stopping/min_steps",
    ),
    ({"sampler": "random", "trials": 10**7}, "array_too_large", "/sweep/trials"),
    (
        {
            "parameters": {
                "train.optimizer.name": ["sgd", "adamw"],
                "train.optimizer.momentum": [0.0, 0.9],
            }
        },
        "invalid_trial",
        "/sweep/parameters",
    ),
]


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(("changes", "code", "pointer"), REFUSED)
def test_a_wrong_sweep_is_422_with_the_pointer_and_stores_nothing(
    site: LiveServer, ann: httpx.Client, changes: dict[str, Any], code: str, pointer: str
) -> None:
    sweep = {name: value for name, value in {**SWEEP, **changes}.items() if value is not None}
    problem = check(site, post(ann, {**GOOD, "sweep": sweep}), 422, code)
    assert problem["pointer"] == pointer


@pytest.mark.usefixtures("unchanged")
def test_a_sweep_without_a_metric_says_what_to_write(site: LiveServer, ann: httpx.Client) -> None:
    problem = check(
        site, post(ann, {**GOOD, "sweep": {"parameters": PARAMETERS}}), 422, "invalid_document"
    )
    assert (
        "name the metric by which trials are compared, such as metric: val/loss"
        in (problem["detail"])
    )


@pytest.mark.usefixtures("unchanged")
def test_nan_and_names_that_appear_twice_are_refused(site: LiveServer, ann: httpx.Client) -> None:
    body = json.dumps({**GOOD, "sweep": {**SWEEP, "parameters": {"train.seed": {"min": 0}}}})
    nan = body.replace('"min": 0', '"min": NaN, "max": 3').encode()
    problem = check(site, post(ann, nan), 422, "invalid_document")
    assert problem["pointer"] == "/sweep/parameters/train.seed/min"
    twice = body.replace('{"min": 0}', '[1], "train.seed": [2]').encode()
    problem = check(site, post(ann, twice), 400, "malformed_request")
    assert problem["detail"] == "the key 'train.seed' appears twice"


@pytest.mark.usefixtures("unchanged")
def test_a_server_without_optuna_says_so(
    site: LiveServer, ann: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optuna_sampler, "is_installed", lambda: False)
    sweep = {**SWEEP, "sampler": "optuna", "trials": 3}
    problem = check(site, post(ann, {**GOOD, "sweep": sweep}), 422, "sampler_unavailable")
    assert problem["pointer"] == "/sweep/sampler"
    assert "pip install 'dray[optuna]'" in problem["hint"]


def test_the_document_of_a_trial_can_be_submitted_by_itself(http: httpx.Client) -> None:
    sweep_id = submitted(http)
    trial = http.get(f"/v1/sweeps/{sweep_id}/trials").json()["items"][1]
    spec = http.get(f"/v1/jobs/{trial['job_id']}").json()["spec"]
    alone = http.post("/v1/jobs", json=spec).json()
    assert alone["array_id"] is None
    assert alone["spec"]["train"]["optimizer"]["lr"] == 0.01
