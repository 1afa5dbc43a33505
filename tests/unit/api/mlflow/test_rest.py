"""MLflow's REST API at the HTTP level, without its client: answers, errors, and refusals."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest

from tests.unit.api.serving import LiveServer
from tests.unit.service.helpers import START, metrics

API = "/api/2.0/mlflow"


def get(http: httpx.Client, path: str, **query: Any) -> Any:
    answer = http.get(f"{API}/{path}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture
def job_id(server: LiveServer) -> str:
    job_id = server.submit(name="one", labels={"experiment": "rest"})
    frames = [metrics(n, {"loss": math.nan if n == 3 else n}) for n in range(4)]
    server.train(job_id, *frames, server.artifact(job_id, "a/b.txt", b"text"))
    return job_id


def test_a_run_and_its_history(http: httpx.Client, job_id: str) -> None:
    at = START.timestamp() * 1000
    (found,) = [e for e in get(http, "experiments/search")["experiments"] if e["name"] == "rest"]
    by_id = get(http, "experiments/get", experiment_id=found["experiment_id"])
    by_name = get(http, "experiments/get-by-name", experiment_name="rest")
    assert by_id == by_name == {"experiment": found}
    run = get(http, "runs/get", run_id=job_id, run_uuid=job_id)["run"]
    assert run["info"]["experiment_id"] == found["experiment_id"]
    assert run["info"]["status"] == "RUNNING"
    assert "end_time" not in run["info"]
    assert run["data"]["metrics"] == [{"key": "loss", "value": "NaN", "timestamp": at, "step": 3}]
    body = {"experiment_ids": [found["experiment_id"]], "filter": "status = 'RUNNING'", "new": 1}
    answer = http.post(f"{API}/runs/search", json=body)
    assert answer.json()["runs"][0]["info"] == run["info"]
    first = get(http, "metrics/get-history", run_id=job_id, metric_key="loss", max_results=3)
    token = first["next_page_token"]
    last = get(http, "metrics/get-history", run_id=job_id, metric_key="loss", page_token=token)
    assert [(p["step"], p["value"]) for p in first["metrics"] + last["metrics"]] == [
        *((0, 0.0), (1, 1.0), (2, 2.0), (3, "NaN"))
    ]
    assert "next_page_token" not in last


def test_artifacts(http: httpx.Client, job_id: str) -> None:
    listed = get(http, "artifacts/list", run_id=job_id)
    assert listed == {
        "root_uri": f"mlflow-artifacts:/{job_id}",
        "files": [{"path": "a", "is_dir": True}],
    }
    root = "/api/2.0/mlflow-artifacts/artifacts"
    answer = http.get(root, params={"path": f"{job_id}/a"})
    assert answer.json() == {"files": [{"path": "b.txt", "is_dir": False, "file_size": 4}]}
    answer = http.get(f"{root}/{job_id}/a/b.txt", headers={"Range": "bytes=1-2"})
    assert (answer.status_code, answer.content) == (206, b"ex")
    answer = http.get(f"{root}/{job_id}/a/../../secret")
    assert answer.status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code", "words"),
    [
        ("GET", "runs/get?run_id=no", None, 404, "RESOURCE_DOES_NOT_EXIST", "no job no"),
        ("GET", "runs/get", None, 400, "INVALID_PARAMETER_VALUE", "'run_id'"),
        ("GET", "experiments/get?experiment_id=9", None, 404, "RESOURCE_DOES_NOT_EXIST", "'9'"),
        ("POST", "runs/search", {"filter": "x"}, 400, "INVALID_PARAMETER_VALUE", "attribute 'x'"),
        ("POST", "runs/search", {"filter": "\0"}, 400, "INVALID_PARAMETER_VALUE", ""),
        ("POST", "runs/search", {"max_results": "many"}, 400, "INVALID_PARAMETER_VALUE", ""),
        ("POST", "runs/search", {"page_token": "?"}, 400, "INVALID_PARAMETER_VALUE", "cursor"),
        ("POST", "runs/log-batch", {}, 403, "PERMISSION_DENIED", "is read-only"),
        ("POST", "runs/create", {}, 403, "PERMISSION_DENIED", "is read-only"),
        ("PUT", "runs/get", {}, 403, "PERMISSION_DENIED", "is read-only"),
        ("GET", "none", None, 404, "ENDPOINT_NOT_FOUND", "does not support"),
        ("POST", "traces/search", {}, 404, "ENDPOINT_NOT_FOUND", "does not support"),
    ],
)
def test_errors_have_the_form_of_mlflow(
    http: httpx.Client, method: str, path: str, body: Any, status: int, code: str, words: str
) -> None:
    answer = http.request(method, f"{API}/{path}", json=body)
    error = answer.json()
    assert (answer.status_code, error["error_code"]) == (status, code), error
    assert words in error["message"]
