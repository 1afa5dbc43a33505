"""Many kinds of bad input: the answer is a clear problem, nothing is stored, and nothing is leaked.

Some cases are tested elsewhere: data sources that no user is allowed to read in
`test_data_sources.py`, more than a thousand metric names in
`tests/unit/service/telemetry/test_metrics.py`, a stream's bad `Last-Event-ID` in `test_events.py`,
an idempotency key in use in `test_jobs.py`, protection from other web pages in `test_gate.py`, and
invalid preemptions and drills in `test_bad_faults.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from ray_workers.shared.names import attempt_prefix
from tests.unit.api.matrix import GOOD, TOKEN, check, get_raw, held, post
from tests.unit.api.serving import LiveServer
from tests.unit.service.helpers import metrics


def raw(number: str, *path: str) -> bytes:
    """A document with `number`, exactly as written, at a path of fields."""
    inner = number
    for name in reversed(path):
        inner = f'{{"{name}": {inner}}}'
    return f'{{"recipe": "image_classification", {inner[1:]}'.encode()


def deep(levels: int) -> bytes:
    return (
        b'{"recipe": "image_classification", "labels": '
        + b'{"a":' * levels
        + b"1"
        + b"}" * (levels + 1)
    )


MALFORMED = {
    "truncated": b'{"recipe": ',
    "empty": b"",
    "not an object": b"[]",
    "text": b'"recipe"',
    "not UTF-8": b'{"name": "\xff"}',
    "two documents": b"{} {}",
    "trailing comma": b'{"recipe": "image_classification",}',
    "10,000 levels of objects": deep(10_000),
    "10,000 levels of lists": b"[" * 10_000 + b"]" * 10_000,
    "100 levels": deep(100),
    "duplicate keys": b'{"recipe": "image_classification", "recipe": "image_classification"}',
    "duplicate keys inside": b'{"train": {"epochs": 1, "epochs": 2}}',
    "a number of 5,000 digits": raw("9" * 5000, "train", "epochs"),
}


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_not_one_clear_json_document_is_400(
    site: LiveServer, ann: httpx.Client, name: str
) -> None:
    check(site, post(ann, MALFORMED[name]), 400, "malformed_request")


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(
    "value", ["text/plain", "text/yaml", "multipart/form-data; boundary=x", "", "application/jsonx"]
)
def test_a_wrong_content_type_is_415(site: LiveServer, ann: httpx.Client, value: str) -> None:
    response = post(ann, GOOD, **{"Content-Type": value})
    check(site, response, 415, "unsupported_media_type")


@pytest.mark.usefixtures("unchanged")
def test_a_body_over_the_limit_is_413(site: LiveServer, ann: httpx.Client) -> None:
    check(site, post(ann, {"name": "x" * (1 << 20)}), 413, "body_too_large")


INVALID: dict[str, tuple[bytes | dict[str, Any], str, str]] = {
    # description: (document, pointer, part of the detail or hint)
    "unknown field": ({**GOOD, "nam": "x"}, "/nam", "did you mean 'name'?"),
    "unknown field inside": ({**GOOD, "train": {"epocs": 1}}, "/train/epocs", "'epochs'"),
    "unknown field of the model": (
        {**GOOD, "model": {"name": "resnet", "dephts": 8}},
        "/model/dephts",
        "did you mean 'depth'?",
    ),
    "unknown field of the recipe's own model": (
        {**GOOD, "model": {"widht": 8}},
        "/model/widht",
        "did you mean 'width'?",
    ),
    "field of another model": (
        {**GOOD, "model": {"name": "cnn", "num_layers": 8}},
        "/model/num_layers",
        "this field requires name: mlp or gpt",
    ),
    "unknown model": ({**GOOD, "model": {"name": "cnm"}}, "/model/name", "did you mean 'cnn'?"),
    "unknown recipe": ({"recipe": "image_clasification"}, "/recipe", "'image_classification'"),
    "unknown field of 10,000 characters": ({**GOOD, "x" * 10_000: 1}, "/" + "x" * 10_000, "xxx..."),
    "NaN": (raw("NaN", "train", "optimizer", "lr"), "/train/optimizer/lr", "finite"),
    "Infinity": (raw("-Infinity", "train", "max_grad_norm"), "/train/max_grad_norm", "finite"),
    "NaN for a whole number": (raw("NaN", "train", "epochs"), "/train/epochs", "integer"),
    "1e999": (raw("1e999", "train", "optimizer", "lr"), "/train/optimizer/lr", "finite"),
    "1e999 epochs": (raw("1e999", "train", "epochs"), "/train/epochs", "integer"),
    "10^18 epochs": (raw(str(10**18), "train", "epochs"), "/train/epochs", "less than or equal"),
    "a learning rate of 400 digits": (
        raw("9" * 400, "train", "optimizer", "lr"),
        "/train/optimizer/lr",
        "finite",
    ),
    "NUL": ({**GOOD, "name": "a\0b"}, "/name", "NUL"),
    "NUL in a label": ({**GOOD, "labels": {"a": "\0"}}, "/labels/a", "NUL"),
    "NUL in a key": ({**GOOD, "labels": {"\0": "a"}}, "/labels", "NUL"),
    "a lone surrogate": (raw(r'"\ud800"', "name"), "/name", "surrogate"),
    "a lone surrogate in a key": (raw(r'{"\udfff": "a"}', "labels"), "/labels", "surrogate"),
    "a control character": ({**GOOD, "name": "a\x1b[31m"}, "/name", "U+001B"),
    "a line break": ({**GOOD, "name": "a\nb"}, "/name", "U+000A"),
    "a C1 control character": ({**GOOD, "name": "a\x9b31m"}, "/name", "U+009B"),
    "a turned direction": ({**GOOD, "name": "a\u202eb"}, "/name", "U+202E"),
    "a space without width": ({**GOOD, "name": "a\u200bb"}, "/name", "U+200B"),
    "an isolated direction": ({**GOOD, "labels": {"a": "\u2066"}}, "/labels/a", "U+2066"),
    "a line separator": ({**GOOD, "labels": {"a": "\u2028"}}, "/labels/a", "U+2028"),
    "a name of 10,000 characters": ({**GOOD, "name": "x" * 10_000}, "/name", "at most 128"),
    "an empty name": ({**GOOD, "name": ""}, "/name", "at least 1"),
    "a queue that leads out": ({**GOOD, "queue": "../../etc"}, "/queue", "match"),
    "a label key that leads out": ({**GOOD, "labels": {"../x": "a"}}, "/labels/..~1x", "match"),
    "GPUs of a role with resources of its own": (
        {
            "script": {
                "entrypoint": "a.py",
                "roles": {"worker": {}, "ps": {"resources": {"gpus_per_worker": 1}}},
            }
        },
        "/script/roles/ps/resources",
        "use the job's resources",
    ),
    "cores of a role by the job's name": (
        {
            "script": {
                "entrypoint": "a.py",
                "roles": {"worker": {}, "ps": {"resources": {"cpus_per_worker": 1}}},
            }
        },
        "/script/roles/ps/resources",
        "has no field cpus_per_worker: use cpus",
    ),
    "both recipe and script": ({**GOOD, "script": {"entrypoint": "a.py"}}, "", "exactly one"),
    "null": ({**GOOD, "train": None}, "/train", ""),
    "a list for an object": ({**GOOD, "train": []}, "/train", "object"),
}
INVALID |= {
    "after something that is no id": ({**GOOD, "after": ["digits"]}, "/after/0", "match"),
    "after a number": ({**GOOD, "after": [7]}, "/after/0", ""),
    "after one id": ({**GOOD, "after": "job-1"}, "/after", "list"),
    "after an unknown condition": (
        {**GOOD, "after": [{"job": "job-1", "on": "start"}]},
        "/after/0/on",
        "'success', 'end' or 'failure'",
    ),
    "after nothing": ({**GOOD, "after": [{"on": "end"}]}, "/after/0/job", "is missing"),
    "after one job twice": ({**GOOD, "after": ["job-1", "job-1"]}, "/after", "lists job-1 twice"),
    "after 65 jobs": ({**GOOD, "after": [f"job-{n}" for n in range(65)]}, "/after", "at most 64"),
    "an array without a size": ({**GOOD, "array": {}}, "/array/size", "is missing"),
    "an array with an index": ({**GOOD, "array": {"size": 2, "index": 0}}, "/array/index", ""),
    "an array that never runs": (
        {**GOOD, "array": {"size": 2, "max_running": 0}},
        "/array/max_running",
        "greater than or equal to 1",
    ),
}
for value in ("0", "-1", "1.5", "true", '"1"', "null"):
    INVALID[f"an array of {value}"] = (raw(value, "array", "size"), "/array/size", "")
for value in ("0", "-1", "1.5", "true", '"1"', "null", "4097"):
    INVALID[f"min_workers {value}"] = (
        raw(value, "elastic", "min_workers"),
        "/elastic" if value == "null" else "/elastic/min_workers",
        "",
    )
INVALID |= {
    "more min_workers than workers": (
        {**GOOD, "elastic": {"min_workers": 2}},
        "/elastic/min_workers",
        "must be at most resources.num_workers, which is 1",
    ),
    "elastic without min_workers": ({**GOOD, "elastic": {}}, "/elastic", "must set min_workers"),
    "an exact elastic script": (
        {"script": {"entrypoint": "a.py"}, "elastic": {"min_workers": 1, "exact": True}},
        "/elastic/exact",
        "is only for recipes",
    ),
    "elastic on GPUs": (
        {
            "script": {"entrypoint": "a.py"},
            "elastic": {"min_workers": 1},
            "resources": {"gpus_per_worker": 1},
        },
        "/elastic",
        "requires gpus_per_worker 0: a script whose ranks have GPUs can't be resized",
    ),
    "elastic with half a replica": (
        {
            **GOOD,
            "elastic": {"min_workers": 1},
            "resources": {"num_workers": 4},
            "parallel": {"shard": 2},
        },
        "/elastic/min_workers",
        "must be a multiple of 2",
    ),
    "elastic with a fixed world": (
        {**GOOD, "elastic": {"min_workers": 1}, "parallel": {"data": 1}},
        "/parallel/data",
        "no fixed world size",
    ),
    "an elastic job with a batch for fewer than all": (
        {
            **GOOD,
            "elastic": {"min_workers": 1},
            "resources": {"num_workers": 4},
            "train": {"global_batch_size": 3},
        },
        "/train/global_batch_size",
        "4 workers",
    ),
}
for value in ("0", "-1", "1.5", "true", '"2"', "null", "4097"):
    INVALID[f"num_workers {value}"] = (
        raw(value, "resources", "num_workers"),
        "/resources/num_workers",
        "",
    )
for value in ("-1", "true", "2", "1.5", "0.001", "0.33333", "1e300", '"0.5"', "NaN"):
    INVALID[f"gpus_per_worker {value}"] = (
        raw(value, "resources", "gpus_per_worker"),
        "/resources/gpus_per_worker",
        "",
    )


INVALID["spares of a single rank"] = (
    {"recipe": "image_classification", "elastic": {"spares": 1}},
    "/elastic/spares",
    "remove elastic.spares",
)


INVALID["spares outside of elastic"] = ({**GOOD, "spares": 1}, "/spares", "/elastic/spares")
INVALID["spares of the resources"] = (
    {**GOOD, "resources": {"spares": 1}},
    "/resources/spares",
    "/elastic/spares",
)
INVALID["more copies in memory than other workers"] = (
    {
        **GOOD,
        "resources": {"num_workers": 2},
        "parallel": {"shard": 2},
        "checkpoint": {"in_memory": {"every_steps": 5, "copies": 2}},
    },
    "/checkpoint/in_memory/copies",
    "set it to 1 or less",
)


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("name", INVALID)
def test_a_document_at_fault_is_422_with_the_field(
    site: LiveServer, ann: httpx.Client, name: str
) -> None:
    document, pointer, said = INVALID[name]
    problem = check(site, post(ann, document), 422, "invalid_document")
    assert problem["pointer"] == pointer
    assert said in problem["detail"] + problem.get("hint", "")
    assert len(problem["detail"]) < 500


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(
    ("resources", "pointer"),
    [
        ({"num_workers": 5}, "/resources/num_workers"),
        ({"gpus_per_worker": 1}, "/resources/gpus_per_worker"),
        ({"cpus_per_worker": 5}, "/resources/cpus_per_worker"),
        ({"memory_bytes": 1 << 40}, "/resources/memory_bytes"),
        ({"accelerator": "H100"}, "/resources/accelerator"),
    ],
)
def test_more_than_the_cluster_can_ever_have_is_unsatisfiable(
    site: LiveServer, ann: httpx.Client, resources: dict[str, Any], pointer: str
) -> None:
    problem = check(site, post(ann, {**GOOD, "resources": resources}), 422, "unsatisfiable")
    assert problem["pointer"] == pointer
    assert problem["hint"]


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("key", ["", "x" * 10_240, "x" * 256, "a\tb", "\xe9"])
def test_an_idempotency_key_that_is_none_is_400(
    site: LiveServer, ann: httpx.Client, key: str
) -> None:
    headers = {b"Content-Type": b"application/json", b"Idempotency-Key": key.encode("latin-1")}
    response = ann.post("/v1/jobs", content=json.dumps(GOOD).encode(), headers=headers)
    check(site, response, 400, "bad_idempotency_key")


def test_an_idempotency_key_with_another_body_is_422(site: LiveServer, ann: httpx.Client) -> None:
    headers = {"Idempotency-Key": "another body"}
    assert post(ann, GOOD, **headers).status_code == 201
    before = held(site)
    check(site, post(ann, {**GOOD, "name": "x"}, **headers), 422, "idempotency_key_reused")
    assert held(site) == before


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer x", "Bearer \xe9", "Basic YW5uOng=", TOKEN]
)
def test_a_bad_or_missing_token_is_401(site: LiveServer, authorization: str | None) -> None:
    headers = [(b"Content-Type", b"application/json")]
    if authorization is not None:
        headers.append((b"Authorization", authorization.encode("latin-1")))
    for method, path in (("POST", "/v1/jobs"), ("GET", "/v1/jobs"), ("GET", "/metrics")):
        response = site.ask(method, path, headers=headers, content=b"{")
        check(site, response, 401, "unauthorized")
        assert response.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/v1/jobs/job-none", 404, "job_not_found"),
        ("/v1/jobs/..%2f..%2fetc%2fpasswd", 404, "not_found"),
        ("/v1/jobs/<script>", 404, "job_not_found"),
        ("/v1/jobs/%ff", 404, "job_not_found"),
        ("/v1/jobs/" + "x" * 5000, 404, "job_not_found"),
        ("/v1/jobs/%00", 400, "malformed_request"),
        ("/v1/jobs?cursor=tampered", 400, "bad_cursor"),
        ("/v1/jobs?cursor=", 400, "bad_cursor"),
        ("/v1/jobs?cursor=" + "A" * 5000, 400, "bad_cursor"),
        ("/v1/jobs?limit=0", 422, "invalid_parameter"),
        ("/v1/jobs?limit=1000000000", 422, "invalid_parameter"),
        ("/v1/jobs?limit=-1", 422, "invalid_parameter"),
        ("/v1/jobs?limit=1.5", 422, "invalid_parameter"),
        ("/v1/jobs?state=DONE", 422, "invalid_parameter"),
        ("/v1/jobs?created_after=yesterday", 422, "invalid_parameter"),
        ("/v1/jobs?limt=1", 422, "invalid_parameter"),
    ],
)
def test_an_id_cursor_or_parameter_that_is_none(
    site: LiveServer, ann: httpx.Client, path: str, status: int, code: str
) -> None:
    check(site, get_raw(ann, path), status, code)


@pytest.mark.parametrize("listing", ["/v1/jobs", "/v1/jobs/{job_id}/logs"])
def test_every_change_to_a_cursor_is_noticed(
    site: LiveServer, ann: httpx.Client, listing: str
) -> None:
    ids = [post(ann, GOOD, **{"Idempotency-Key": f"cursor {n}"}).json()["id"] for n in range(2)]
    path = listing.format(job_id=ids[0])
    cursor = ann.get(path, params={"limit": 1}).json()["next_cursor"]
    for index in range(len(cursor)):
        other = "A" if cursor[index] != "A" else "B"
        changed = cursor[:index] + other + cursor[index + 1 :]
        check(site, ann.get(path, params={"cursor": changed}), 400, "bad_cursor")


def test_cancelling_a_finished_job_is_409(site: LiveServer, ann: httpx.Client) -> None:
    job_id = post(ann, GOOD, **{"Idempotency-Key": "to its end"}).json()["id"]
    site.train(job_id)
    site.succeed(job_id)
    before = held(site)
    check(site, ann.post(f"/v1/jobs/{job_id}/cancel"), 409, "job_finished")
    assert held(site) == before


@pytest.mark.parametrize(
    "name",
    ["../../../etc/passwd", "<script>alert(1)</script>", "a/b", "[red]x[/red]", "%2e%2e"],
)
def test_a_name_is_only_ever_a_name(site: LiveServer, ann: httpx.Client, name: str) -> None:
    """It is stored unchanged, returned as JSON that browsers don't execute, and not used in any
    path."""
    document = {**GOOD, "name": name, "labels": {"label": name}}
    response = post(ann, document, **{"Idempotency-Key": hashlib.md5(name.encode()).hexdigest()})
    assert response.status_code == 201
    job = response.json()
    assert (job["name"], job["labels"]["label"]) == (name, name)
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-content-type-options"] == "nosniff"
    site.train(job["id"], site.artifact(job["id"], "out", b"x"))
    written = [path for path in held(site)["files"] if job["id"] in path]
    assert written
    assert not [path for path in written if "passwd" in path or "script" in path]
    found = ann.get("/v1/jobs", params={"label": f"label={name}"}).json()["items"]
    assert [item["id"] for item in found] == [job["id"]]


def test_metrics_that_json_can_not_hold_are_stored_and_served_as_strings(
    site: LiveServer, ann: httpx.Client
) -> None:
    job_id = post(ann, GOOD, **{"Idempotency-Key": "not finite"}).json()["id"]
    values = [float("nan"), float("inf"), float("-inf")]
    site.train(job_id, *(metrics(n, {"x": value}) for n, value in enumerate(values, start=1)))
    series = ann.get(f"/v1/jobs/{job_id}/metrics").json()["series"]["x"]
    assert series["values"] == ["NaN", "Infinity", "-Infinity"]
    assert ann.get(f"/v1/jobs/{job_id}").json()["summary"] == {"x": "-Infinity"}


@pytest.fixture(scope="module")
def job_with_files(site: LiveServer) -> tuple[str, str]:
    """A job with an artifact, and the id of an artifact that is a link to a file outside the
    storage."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with site.client(headers=headers) as client:
        job_id = post(client, GOOD, **{"Idempotency-Key": "files"}).json()["id"]
        secret = site.settings.home / "secret"
        secret.write_text("the secret")
        frames = [site.artifact(job_id, path, b"x") for path in ("out", "link", "dir/gone")]
        site.train(job_id, *frames)
        path = site.hands.storage.local_path(f"{attempt_prefix(job_id, 1)}/artifacts/link")
        assert path is not None
        path.unlink()
        path.symlink_to(secret)
        folder = path.parent / "dir"
        (folder / "gone").unlink()
        folder.rmdir()
        folder.write_text("a file where a folder was")
        items = client.get(f"/v1/jobs/{job_id}/artifacts").json()["items"]
    return job_id, {item["path"]: item["id"] for item in items}["link"]


@pytest.mark.parametrize(
    "tail",
    [
        *("..%2f", "..%2f..%2f..%2fsecret", "%2e%2e%2fsecret", "..%5csecret", "//", "/", "//etc"),
        *("#", "%23", "%3f", "out", "out/", ".", "..", "%2e", "<script>", "artifact-0", "x" * 5000),
    ],
)
def test_an_artifact_id_that_is_none_is_404(
    site: LiveServer, ann: httpx.Client, job_with_files: tuple[str, str], tail: str
) -> None:
    response = get_raw(ann, f"/v1/jobs/{job_with_files[0]}/artifacts/{tail}")
    assert response.json()["code"] in ("artifact_not_found", "not_found")
    check(site, response, 404, response.json()["code"])
    assert "the secret" not in response.text


def test_an_artifact_that_is_a_link_out_of_the_storage_is_404(
    site: LiveServer, ann: httpx.Client, job_with_files: tuple[str, str]
) -> None:
    job_id, link = job_with_files
    response = ann.get(f"/v1/jobs/{job_id}/artifacts/{link}")
    check(site, response, 404, "artifact_not_found")
    assert "the secret" not in response.text


def test_an_artifact_below_what_is_no_folder_any_more_is_404(
    site: LiveServer, ann: httpx.Client, job_with_files: tuple[str, str]
) -> None:
    job_id, _ = job_with_files
    items = ann.get(f"/v1/jobs/{job_id}/artifacts").json()["items"]
    gone = {item["path"]: item["id"] for item in items}["dir/gone"]
    response = ann.get(f"/v1/jobs/{job_id}/artifacts/{gone}")
    check(site, response, 404, "artifact_not_found")


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("call", [httpx.Client.delete, httpx.Client.put, httpx.Client.patch])
def test_a_method_that_a_path_does_not_take_is_405(
    site: LiveServer, ann: httpx.Client, call: Callable[..., httpx.Response]
) -> None:
    check(site, call(ann, "/v1/jobs"), 405, "method_not_allowed")
