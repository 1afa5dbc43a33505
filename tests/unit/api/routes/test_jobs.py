from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from ray_workers.shared.contracts import Cause
from tests.unit.api.matrix import held
from tests.unit.api.serving import LiveServer, serving, wait_until

JOB = {"recipe": "image_classification"}


def post(http: httpx.Client, body: Any = JOB, key: str | None = None) -> httpx.Response:
    return http.post("/v1/jobs", json=body, headers={"Idempotency-Key": key} if key else {})


def test_a_submitted_job_is_where_its_location_says(http: httpx.Client) -> None:
    response = post(http, {**JOB, "name": "digits", "labels": {"team": "vision"}})
    assert response.status_code == 201
    job = response.json()
    assert response.headers["location"] == job["links"]["self"] == f"/v1/jobs/{job['id']}"
    assert http.get(response.headers["location"]).json() == job
    assert (job["name"], job["labels"], job["state"]) == ("digits", {"team": "vision"}, "QUEUED")
    assert job["created_at"].endswith("Z")


@pytest.mark.parametrize(
    "content_type",
    ["text/yaml", "application/x-www-form-urlencoded", "", "application/json; charset=latin-1"],
)
def test_a_body_that_is_not_declared_as_json_is_refused(
    http: httpx.Client, content_type: str
) -> None:
    response = http.post("/v1/jobs", content=b"{}", headers={"Content-Type": content_type})
    assert (response.status_code, response.json()["code"]) == (415, "unsupported_media_type")


def test_json_with_its_charset_is_taken(http: httpx.Client) -> None:
    headers = {"Content-Type": 'Application/JSON; charset="UTF-8"'}
    body = b'{"recipe": "image_classification"}'
    assert http.post("/v1/jobs", content=body, headers=headers).status_code == 201


def test_malformed_json_is_a_400(http: httpx.Client) -> None:
    headers = {"Content-Type": "application/json"}
    response = http.post("/v1/jobs", content=b'{"recipe": ', headers=headers)
    assert (response.status_code, response.json()["code"]) == (400, "malformed_request")
    assert "line 1" in response.json()["detail"]


def test_a_document_at_fault_is_a_422_with_pointer_and_hint(http: httpx.Client) -> None:
    response = post(http, {**JOB, "train": {"epocs": 3}})
    assert response.status_code == 422
    problem = response.json()
    assert problem["code"] == "invalid_document"
    assert (problem["pointer"], problem["hint"]) == ("/train/epocs", "did you mean 'epochs'?")


def test_a_body_over_the_limit_is_refused_whether_declared_or_not(http: httpx.Client) -> None:
    big = b'{"name": "' + b"x" * (1 << 20) + b'"}'
    headers = {"Content-Type": "application/json"}
    declared = http.post("/v1/jobs", content=big, headers=headers)
    chunked = http.post(
        "/v1/jobs", content=(big[i : i + 65536] for i in range(0, len(big), 65536)), headers=headers
    )
    for response in (declared, chunked):
        assert (response.status_code, response.json()["code"]) == (413, "body_too_large")


def test_a_large_body_is_taken_and_refused_by_the_same_rules(http: httpx.Client) -> None:
    labels = {f"label-{n}": "x" * 255 for n in range(64)}
    script = {"entrypoint": "a.py", "args": ["x" * 100] * 1000}
    taken = post(http, {"script": script, "labels": labels})
    assert taken.status_code == 201
    unset: dict[str, object] = {
        "module": None,
        "parameters": {},
        "code": None,
        "framework": "torch",
        "roles": {},
        "hang_limit_s": None,
        "guesses": True,
    }
    assert taken.json()["spec"]["script"] == {**script, **unset}
    refused = post(http, {"script": {**script, "argz": 1}, "labels": labels})
    assert (refused.status_code, refused.json()["pointer"]) == (422, "/script/argz")


def test_the_same_key_and_document_make_one_job_whatever_the_order_of_fields(
    http: httpx.Client,
) -> None:
    first = post(http, {"recipe": "image_classification", "name": "a"}, "key one")
    again = post(http, {"name": "a", "recipe": "image_classification"}, "key one")
    assert first.status_code == again.status_code == 201
    assert first.json()["id"] == again.json()["id"]


def test_the_same_key_at_the_same_time_makes_one_job(http: httpx.Client) -> None:
    def submit(_: int) -> httpx.Response:
        while (response := post(http, JOB, "at once")).status_code == 409:
            assert response.json()["code"] == "idempotency_in_flight"
            assert response.headers["retry-after"] == "1"
        return response

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(submit, range(8)))
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.json()["id"] for answer in answers}) == 1


def test_a_key_whose_first_request_is_being_worked_on_is_a_409_at_once(
    http: httpx.Client, server: LiveServer
) -> None:
    """Another transaction keeps the database busy, so the first request can't complete."""
    busy, free = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        busy.set()
        assert free.wait(20)

    with ThreadPoolExecutor(2) as pool:
        holding = pool.submit(server.hands.database.write_sync, hold)
        assert busy.wait(60)
        first = pool.submit(post, http, JOB, "in flight")
        keys = server.context.runtime.jobs._keys_in_flight
        wait_until(lambda: ("default", "in flight") in keys._held, "the first request")
        second = post(http, {**JOB, "name": "other"}, "in flight")
        assert (second.status_code, second.json()["code"]) == (409, "idempotency_in_flight")
        assert second.headers["retry-after"] == "1"
        free.set()
        holding.result()
        assert first.result().status_code == 201
    assert post(http, JOB, "in flight").json()["id"] == first.result().json()["id"]


def test_a_key_used_for_another_document_is_refused(http: httpx.Client) -> None:
    post(http, JOB, "key two")
    response = post(http, {**JOB, "name": "other"}, "key two")
    assert (response.status_code, response.json()["code"]) == (422, "idempotency_key_reused")


@pytest.mark.parametrize("key", [b"", b"x" * 256, b"a\tb", "schlüssel".encode()])
def test_a_key_of_other_characters_or_length_is_refused(http: httpx.Client, key: bytes) -> None:
    response = http.post("/v1/jobs", json=JOB, headers={b"Idempotency-Key": key})
    assert (response.status_code, response.json()["code"]) == (400, "bad_idempotency_key")


def test_the_longest_key_is_taken(http: httpx.Client) -> None:
    assert post(http, JOB, "~" * 255).status_code == 201


def test_pages_hold_every_matching_job_once_newest_first(
    http: httpx.Client, server: LiveServer
) -> None:
    made = [server.submit(labels={"test": "pages", "n": str(n)}) for n in range(5)]
    found, cursor = [], None
    while True:
        params = {"label": "test=pages", "limit": "2"} | ({"cursor": cursor} if cursor else {})
        page = http.get("/v1/jobs", params=params).json()
        found += [job["id"] for job in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert found == made[::-1]


def test_filters_must_all_hold_and_states_are_alternatives(
    http: httpx.Client, server: LiveServer
) -> None:
    labels = {"test": "filters"}
    server.queue("a")
    server.queue("b")
    queued = server.submit(labels=labels, queue="a")
    cancelled = server.submit(labels=labels, queue="b")
    http.post(f"/v1/jobs/{cancelled}/cancel")

    def ids(query: str) -> set[str]:
        items = http.get(f"/v1/jobs?label=test=filters&{query}").json()["items"]
        return {job["id"] for job in items}

    assert ids("state=QUEUED") == {queued}
    assert ids("state=QUEUED&state=CANCELLED") == {queued, cancelled}
    assert ids("queue=b") == {cancelled}
    assert ids("label=more=x") == set()
    assert ids("owner=default&project=default") == {queued, cancelled}
    assert ids("owner=ann") == set()
    assert ids("owner=@me") == {queued, cancelled}
    assert ids(f"id_prefix={queued[:-1]}") - {cancelled} == {queued}
    assert ids("name=job") == {queued, cancelled}
    assert ids("name=other") == set()
    assert ids("text=JO") == {queued, cancelled}
    assert ids("text=jobs") == set()


def test_a_brief_list_has_all_but_the_documents(http: httpx.Client, server: LiveServer) -> None:
    job_id = server.submit(labels={"test": "brief"})
    (job,) = http.get("/v1/jobs?label=test=brief&brief=true").json()["items"]
    assert job == {**http.get(f"/v1/jobs/{job_id}").json(), "spec": {}}


def test_times_bound_a_list_and_the_next_page_keeps_to_them(
    http: httpx.Client, server: LiveServer
) -> None:
    made = [server.submit(labels={"test": "times"}) for _ in range(4)]
    times = [http.get(f"/v1/jobs/{job_id}").json()["created_at"] for job_id in made]
    query = {"label": "test=times", "created_after": times[1], "created_before": times[3]}
    page = http.get("/v1/jobs", params={**query, "limit": 1}).json()
    more = {"limit": 1, "cursor": page["next_cursor"]}
    rest = http.get("/v1/jobs", params={**query, **more}).json()
    assert [job["id"] for job in page["items"] + rest["items"]] == [made[2], made[1]]
    assert rest["next_cursor"] is None
    other = http.get("/v1/jobs", params={"label": "test=times", **more})
    assert (other.status_code, other.json()["code"]) == (400, "bad_cursor")


@pytest.mark.parametrize("value", ["2026-01-31", "1767225600", "2026-01-31T12:00:00", "now", "-1"])
def test_a_time_that_is_not_rfc_3339_is_refused(http: httpx.Client, value: str) -> None:
    response = http.get("/v1/jobs", params={"created_after": value})
    assert (response.status_code, response.json()["code"]) == (422, "invalid_parameter")
    assert "'created_after' must be a time like" in response.json()["detail"]


def test_no_job_has_two_values_of_one_label(http: httpx.Client, server: LiveServer) -> None:
    server.submit(labels={"twice": "2"})
    assert http.get("/v1/jobs?label=twice=1&label=twice=2").json()["items"] == []
    assert len(http.get("/v1/jobs?label=twice=2&label=twice=2").json()["items"]) == 1


def test_a_cursor_that_was_changed_is_refused(http: httpx.Client) -> None:
    response = http.get("/v1/jobs?cursor=abc")
    assert (response.status_code, response.json()["code"]) == (400, "bad_cursor")


def test_a_long_poll_answers_when_the_state_changes(http: httpx.Client, server: LiveServer) -> None:
    job_id = server.submit()
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        waiting = pool.submit(http.get, f"/v1/jobs/{job_id}?wait_s=60&state=QUEUED", timeout=70)
        wait_until(lambda: server.num_waiting(job_id), "the long poll")
        server.train(job_id)
        assert waiting.result().json()["state"] in ("STARTING", "RUNNING")
    assert time.monotonic() - began < 30, "half of what it would wait"


def test_a_long_poll_of_a_state_that_has_passed_answers_at_once(
    http: httpx.Client, server: LiveServer
) -> None:
    job_id = server.submit()
    began = time.monotonic()
    assert http.get(f"/v1/jobs/{job_id}?wait_s=60&state=RUNNING").json()["state"] == "QUEUED"
    assert time.monotonic() - began < 30, "half of what it would wait"


def test_a_long_poll_answers_the_same_state_when_its_time_is_up(
    http: httpx.Client, server: LiveServer
) -> None:
    job_id = server.submit()
    began = time.monotonic()
    assert http.get(f"/v1/jobs/{job_id}?wait_s=0.3").json()["state"] == "QUEUED"
    assert 0.3 <= time.monotonic() - began < 30


def test_who_hangs_up_is_not_waited_for(server: LiveServer) -> None:
    job_id = server.submit()
    with httpx.Client(trust_env=False) as client, pytest.raises(httpx.ReadTimeout):
        client.get(f"{server.url}/v1/jobs/{job_id}?wait_s=60", timeout=0.3)
    wait_until(lambda: not server.num_waiting(job_id), "the poll to end")


def test_a_stop_answers_those_who_wait(tmp_path_factory: pytest.TempPathFactory) -> None:
    answers: list[int] = []
    with serving(tmp_path_factory.mktemp("home")) as server:
        job_id = server.submit()
        paths = [f"{job_id}?wait_s=60", f"{job_id}/logs?wait_s=60"]
        paths.append(f"{job_id}/events?after_seq=1&wait_s=60")

        def ask(path: str) -> None:
            url = f"{server.url}/v1/jobs/{path}"
            answers.append(httpx.get(url, timeout=70, trust_env=False).status_code)

        threads = [threading.Thread(target=ask, args=(path,)) for path in paths]
        for thread in threads:
            thread.start()
        wait_until(lambda: server.num_waiting(job_id) == len(paths), "all to wait")
        began = time.monotonic()
        server.ask_to_stop()
        for thread in threads:
            thread.join(30)
        assert time.monotonic() - began < 30, "half of what they would wait"
    assert answers == [200] * len(paths)


def test_cancelling_is_202_as_often_as_it_is_asked(http: httpx.Client, server: LiveServer) -> None:
    job_id = server.submit()
    for _ in range(2):
        response = http.post(f"/v1/jobs/{job_id}/cancel")
        assert (response.status_code, response.json()["state"]) == (202, "CANCELLED")


@pytest.mark.parametrize("cause", [Cause.SUCCEEDED, Cause.BAD_DATA])
def test_a_job_that_ended_by_itself_can_not_be_cancelled(
    http: httpx.Client, server: LiveServer, cause: Cause
) -> None:
    job_id = server.submit()
    server.train(job_id)
    server.hands.end(job_id, 1, cause)
    response = http.post(f"/v1/jobs/{job_id}/cancel")
    assert (response.status_code, response.json()["code"]) == (409, "job_finished")


def test_a_finished_job_is_deleted_and_a_live_one_is_not(
    http: httpx.Client, server: LiveServer
) -> None:
    job_id = server.submit()
    response = http.delete(f"/v1/jobs/{job_id}")
    assert (response.status_code, response.json()["code"]) == (409, "job_live")
    http.post(f"/v1/jobs/{job_id}/cancel")
    assert http.delete(f"/v1/jobs/{job_id}").status_code == 204
    assert http.get(f"/v1/jobs/{job_id}").json()["code"] == "job_not_found"
    assert http.delete(f"/v1/jobs/{job_id}").status_code == 404


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "?wait_s=5")]
    + [
        ("GET", f"/{name}")
        for name in (
            *("metrics", "logs", "events", "attempts", "checkpoints", "artifacts", "explain"),
            "factors",
            *("metrics/system", "metrics/system/newest"),
            *("logs?wait_s=5", "events?wait_s=5", "artifacts/x"),
        )
    ],
)
def test_a_job_that_is_not_there_is_a_404_everywhere(
    http: httpx.Client, method: str, path: str
) -> None:
    response = http.request(method, f"/v1/jobs/job-none{path}")
    assert (response.status_code, response.json()["code"]) == (404, "job_not_found")


def test_explain_says_why_a_job_waits(http: httpx.Client, server: LiveServer) -> None:
    answer = http.get(f"/v1/jobs/{server.submit()}/explain").json()
    assert (answer["state"], answer["reason"]["code"]) == ("QUEUED", "submitted")


def test_a_dry_run_answers_as_explain_and_stores_nothing(
    http: httpx.Client, server: LiveServer
) -> None:
    before = held(server)
    response = http.post("/v1/jobs?dry_run=true", json=JOB)
    assert response.status_code == 200
    told = response.json()
    assert (told["state"], told["reason"]["code"]) == ("QUEUED", "no_forecast")
    assert "location" not in response.headers
    for document, code in (({"recipe": "cooking"}, 422), ({**JOB, "queue": "nowhere"}, 422)):
        assert http.post("/v1/jobs?dry_run=true", json=document).status_code == code
    assert http.post("/v1/jobs?dry_run=perhaps", json=JOB).json()["code"] == ("invalid_parameter")
    assert held(server) == before


def test_rounds_of_the_scheduler_are_listed_and_one_that_is_not_kept_is_a_404(
    http: httpx.Client,
) -> None:
    assert http.get("/v1/decisions").json() == {"items": [], "next_before": None}
    response = http.get("/v1/decisions/7")
    assert (response.status_code, response.json()["code"]) == (404, "decision_not_found")
    assert http.get("/v1/decisions?limit=0").json()["code"] == "invalid_parameter"
    assert http.get("/v1/decisions/0").json()["code"] == "invalid_parameter"
    assert http.get("/v1/forecasts").json()["starts"]["count"] == 0
