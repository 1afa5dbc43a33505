"""POST /v1/plan over HTTP."""

from __future__ import annotations

import httpx

JOB = {"recipe": "image_classification", "resources": {"num_workers": 2}}


def test_a_plan_is_answered_and_nothing_is_submitted(http: httpx.Client) -> None:
    before = len(http.get("/v1/jobs").json()["items"])
    answer = http.post("/v1/plan", json={**JOB, "memory_bytes_per_rank": 1 << 30})
    assert answer.status_code == 200, answer.text
    plan = answer.json()
    assert {mesh["name"] for mesh in plan["meshes"]} == {"data 2", "shard 2"}
    assert plan["chosen"] == plan["meshes"][0]["name"]
    assert plan["memory_source"] == "given in the request"
    assert len(http.get("/v1/jobs").json()["items"]) == before


def test_what_is_wrong_is_named_as_in_a_submit(http: httpx.Client) -> None:
    for body, code, pointer in (
        ({**JOB, "train": {"epocs": 1}}, "invalid_document", "/train/epocs"),
        ({**JOB, "memory_bytes_per_rank": 0}, "invalid_document", "/memory_bytes_per_rank"),
        ({"script": {"entrypoint": "train.py"}}, "not_plannable", None),
    ):
        answer = http.post("/v1/plan", json=body)
        assert (answer.status_code, answer.json()["code"]) == (422, code), answer.text
        assert answer.json().get("pointer") == pointer


def test_a_submit_that_cannot_fit_says_what_would_help(http: httpx.Client) -> None:
    document = {
        "recipe": "language_model",
        "data": {"source": "file:///text.txt"},
        "model": {"name": "gpt", "width": 512},
        "resources": {"memory_bytes": 300 << 20},
    }
    answer = http.post("/v1/jobs", json=document)
    assert (answer.status_code, answer.json()["code"]) == (422, "out_of_memory"), answer.text
    assert "bytes) are missing" in answer.json()["detail"]
    assert "train.micro_batch_size" in answer.json()["hint"]


def test_parallel_auto_is_short_for_a_field(http: httpx.Client) -> None:
    job = http.post("/v1/jobs", json={**JOB, "parallel": "auto"})
    assert job.status_code == 201, job.text
    assert job.json()["spec"]["parallel"]["auto"] == []
    both = http.post("/v1/jobs", json={**JOB, "parallel": {"auto": ["shard"], "shard": 2}})
    assert (both.status_code, both.json()["pointer"]) == (422, "/parallel/shard")


def test_axes_that_leave_no_way_are_refused(http: httpx.Client) -> None:
    """The digits network can't be divided along `tensor`, and no other axis is left to choose."""
    document = {
        **JOB,
        "resources": {"num_workers": 4},
        "parallel": {"data": 2, "tensor": "auto"},
    }
    for path in ("/v1/jobs", "/v1/plan"):
        answer = http.post(path, json=document)
        assert (answer.status_code, answer.json()["code"]) == (422, "not_plannable"), answer.text
        assert answer.json()["pointer"] == "/parallel"
        assert "no sizes of tensor" in answer.json()["detail"]
