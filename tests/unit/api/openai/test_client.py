"""OpenAI's own client, unmodified: files, fine-tuning jobs and models."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest

from service.db.models import DataFileRow
from service.jobs.tuning_requests import TuningRequests
from tests.unit.api.openai.conftest import BOB, LINES, PAIRS, Shop, jsonl
from tests.unit.service.helpers import metrics

openai = pytest.importorskip(
    "openai", reason="the extra 'dev' is not installed: openai, whose client fine-tunes with dray"
)


def test_files_are_uploaded_listed_read_and_deleted(shop: Shop, client: Any) -> None:
    content = jsonl(LINES[:3])
    made = client.files.create(file=("über uns.jsonl", content), purpose="fine-tune")
    assert (made.object, made.filename, made.bytes) == ("file", "über uns.jsonl", len(content))
    assert (made.purpose, made.status) == ("fine-tune", "processed")
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == content
    assert made.id in [one.id for one in client.files.list()]
    more = [client.files.create(file=b'{"text": "a"}', purpose="fine-tune").id for _ in range(3)]
    newest = [one.id for one in client.files.list(limit=2)]  # follows the pages
    assert newest[:4] == [*reversed(more), made.id]
    oldest = [one.id for one in client.files.list(order="asc", limit=3)]
    assert oldest == newest[::-1]
    assert list(client.files.list(purpose="batch")) == []
    other = shop.client(BOB)
    assert list(other.files.list()) == []
    for call in (other.files.retrieve, other.files.content, other.files.delete):
        with pytest.raises(openai.NotFoundError) as refused:
            call(made.id)
        assert refused.value.body["code"] == "file_not_found"
    deleted = client.files.delete(made.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (made.id, True, "file")
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made.id)
    for file_id in more:
        client.files.delete(file_id)


def test_a_job_is_created_paused_resumed_and_cancelled(
    shop: Shop, client: Any, training: str
) -> None:
    job = client.fine_tuning.jobs.create(
        model="llama-tiny",
        training_file=training,
        suffix="support",
        seed=7,
        method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2}}},
        metadata={"team": "a"},
        integrations=[{"type": "wandb", "wandb": {"project": "p"}}],
    )
    assert (job.object, job.status, job.model) == ("fine_tuning.job", "queued", "llama-tiny")
    assert (job.training_file, job.seed, job.organization_id) == (training, 7, "ann")
    assert (job.hyperparameters.n_epochs, job.hyperparameters.batch_size) == (2, 10)
    spec = shop.http().get(f"/v1/jobs/{job.id}").json()["spec"]
    assert spec["name"] == "support"
    assert spec["priority"] == 40
    assert spec["model"]["catalogue"] == "llama-tiny"
    assert spec["model"]["adapter"]["kind"] == "lora"
    assert spec["data"]["source"] == f"upload://{training}"
    assert spec["train"]["epochs"] == 2
    assert spec["train"]["seed"] == 7
    assert spec["train"]["global_batch_size"] == 10
    assert spec["train"]["optimizer"]["lr"] == 2e-4
    with pytest.raises(openai.BadRequestError, match=job.id):
        client.files.delete(training)
    jobs = client.fine_tuning.jobs
    assert jobs.pause(job.id).status == "paused"
    assert jobs.retrieve(job.id).status == "paused"
    assert jobs.resume(job.id).status == "queued"
    assert jobs.cancel(job.id).status == "cancelled"
    events = list(jobs.list_events(job.id, limit=2))  # follows the pages
    assert [one.id for one in events] == [
        f"ftevent-{job.id}-{n}" for n in range(len(events), 0, -1)
    ]
    (ignored,) = [one for one in events if "integration" in one.message]
    assert ignored.level == "warn"
    assert any("held out" in one.message for one in events)
    assert job.id in [one.id for one in jobs.list(limit=1)]
    assert [one.id for one in jobs.list(metadata={"team": "a"})] == [job.id]
    assert list(jobs.list(metadata={"team": "b"})) == []
    assert list(shop.client(BOB).fine_tuning.jobs.list()) == []


def test_a_job_trains_and_its_model_is_listed(shop: Shop, client: Any, training: str) -> None:
    validation = client.files.create(file=jsonl(LINES[:4]), purpose="fine-tune").id
    jobs = client.fine_tuning.jobs
    job = jobs.create(model="llama-tiny", training_file=training, validation_file=validation)
    assert job.validation_file == validation
    assert job.method.type == "supervised"
    frames = [metrics(step, {"train/loss": 1.0 / (1 + step)}) for step in range(4)]
    shop.server.train(job.id, *frames)
    assert jobs.retrieve(job.id).status in ("running", "validating_files")
    shop.server.succeed(job.id)
    done = jobs.retrieve(job.id)
    assert (done.status, done.error) == ("succeeded", None)
    assert done.fine_tuned_model == f"ft:llama-tiny:ann::{job.id}"
    assert done.finished_at is not None
    names = [one.id for one in client.models.list()]
    assert names[:3] == ["llama-tiny", "guarded", "started"]
    assert done.fine_tuned_model in names
    assert done.fine_tuned_model not in [one.id for one in shop.client(BOB).models.list()]
    for name in ("llama-tiny", done.fine_tuned_model):
        assert client.models.retrieve(name).id == name
    assert list(jobs.checkpoints.list(job.id)) == []
    deleted = f"ftckpt-{job.id}-1-2"  # the last of a page may be deleted before the next page
    assert list(jobs.checkpoints.list(job.id, after=deleted)) == []
    with pytest.raises(openai.BadRequestError, match="not a checkpoint of this job"):
        jobs.checkpoints.list(job.id, after=f"{deleted}x")
    for name in ("none", "ft:x", f"ft:llama-tiny:bob::{job.id}"):
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve(name)
    with pytest.raises(openai.BadRequestError):
        jobs.cancel(job.id)
    client.files.delete(validation)


def test_a_licence_is_accepted_in_the_metadata(shop: Shop, client: Any, training: str) -> None:
    create = client.fine_tuning.jobs.create
    for metadata in ({}, {"accept_licence": "Other"}):
        with pytest.raises(openai.BadRequestError, match="Community License") as refused:
            create(model="guarded", training_file=training, metadata=metadata)
        assert refused.value.body["code"] == "licence_not_accepted"
        assert refused.value.body["param"] == "metadata.accept_licence"
    made = create(
        model="guarded", training_file=training, metadata={"accept_licence": "Community License"}
    )
    (first, *_) = shop.http().get(f"/v1/jobs/{made.id}/events").json()["items"]
    assert first["actor"] == "ann"
    assert first["data"]["accepted"] == {"model": "guarded", "licence": "Community License"}
    client.fine_tuning.jobs.cancel(made.id)


def test_preferences_make_a_job(shop: Shop, client: Any) -> None:
    """Defaults that only the other method has do not prevent the job."""
    file = client.files.create(file=jsonl(PAIRS), purpose="fine-tune").id
    create = client.fine_tuning.jobs.create
    method = {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2}}}
    job = create(model="llama-tiny", training_file=file, method=method)
    assert job.method.dpo.hyperparameters.beta == 0.2
    other = create(model="llama-tiny", training_file=file)
    found = [shop.http().get(f"/v1/jobs/{one.id}").json()["spec"] for one in (job, other)]
    assert [one["checkpoint"]["best"] for one in found] == [None, "val/perplexity"]
    for one in (job, other):
        client.fine_tuning.jobs.cancel(one.id)


def test_defaults_that_one_method_refuses_are_the_operators(client: Any, training: str) -> None:
    create = client.fine_tuning.jobs.create
    with pytest.raises(openai.BadRequestError, match="defaults of the model don't fit: /init_from"):
        create(model="started", training_file=training, method={"type": "dpo"})


def test_errors_outside_of_routes_have_the_form_of_openai(shop: Shop, client: Any) -> None:
    unknown = openai.OpenAI(base_url=client.base_url, api_key="other", max_retries=0)
    with pytest.raises(openai.AuthenticationError) as refused:
        unknown.models.list()
    assert refused.value.body["code"] == "invalid_api_key"
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="llama-tiny", messages=[])
    assert refused.value.body["type"] == "invalid_request_error"
    http = shop.http()
    for call in (
        http.put("/openai/v1/files"),
        http.get("/openai/v1/nothing"),
        http.post("/openai/v1/files", content=b"x", headers={"content-type": "text/plain"}),
        http.post("/openai/v1/files", data={"purpose": "fine-tune"}, files={"other": b"x"}),
        http.post("/openai/v1/fine_tuning/jobs", json=[]),
        http.get("/openai/v1/fine_tuning/jobs", params={"limit": "all"}),
        http.get("/openai/v1/fine_tuning/jobs/job-none/events"),
    ):
        assert 400 <= call.status_code < 500
        assert call.headers["content-type"] == "application/json"
        assert set(call.json()["error"]) == {"message", "type", "param", "code"}
    assert http.get("/v1/nothing").headers["content-type"] == "application/problem+json"


def test_jobs_with_rare_metadata_are_found_with_few_reads(
    client: Any, training: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = client.fine_tuning.jobs
    for number in range(5):
        job = jobs.create(model="llama-tiny", training_file=training, metadata={"n": f"{number}"})
        jobs.cancel(job.id)
    pages: list[int] = []
    page = TuningRequests.page

    async def counted(self: Any, owner: str, after: str | None, limit: int) -> Any:
        pages.append(limit)
        return await page(self, owner, after, limit)

    monkeypatch.setattr(TuningRequests, "page", counted)
    assert len(list(jobs.list(limit=1, metadata={"n": "0"}))) == 1
    assert len(pages) <= 2


@pytest.mark.parametrize("by", ["name", "address"])
def test_models_of_the_catalogue_are_planned_though_jobs_may_read_no_other_folder(
    shop: Shop, by: str
) -> None:
    models = shop.http().get("/v1/base-models").json()["items"]
    base = models[0]["name" if by == "name" else "base"]
    document = {
        "recipe": "fine_tuning",
        "model": {"base": base},
        "data": {"source": "s3://bucket/examples.jsonl"},
        "resources": {"memory_bytes": 1 << 20},
        "method": {"max_length": 128},
    }
    plan = shop.http().post("/v1/plan", json=document)
    assert plan.status_code == 200, plan.text
    assert plan.json()["meshes"][0]["missing_bytes"] > 0
    refused = shop.http().post("/v1/jobs", json=document)
    assert refused.json()["code"] == "out_of_memory", refused.text
    folder = models[0]["base"].rpartition("/")[0]
    for other in (f"{folder}/llama-2", "file:///etc"):
        document["model"] = {"base": other, "catalogue": "llama-tiny"}
        unknown = shop.http().post("/v1/plan", json=document)
        assert unknown.json()["code"] == "not_plannable"


def test_files_that_do_not_fit_are_refused(shop: Shop, client: Any) -> None:
    create = client.files.create
    for content, purpose, status, message in (
        (b'{"a": 1}\n' * 16 + b"{", "fine-tune", 400, "line 17"),
        (b"", "fine-tune", 400, "no examples"),
        (b'{"a": 1}', "batch", 400, "only 'fine-tune'"),
        (b" " * (1 << 20) + b"{}", "fine-tune", 413, "larger than"),
    ):
        with pytest.raises(openai.APIStatusError, match=message) as refused:
            create(file=content, purpose=purpose)
        assert refused.value.status_code == status
    other = shop.client(BOB)
    file = other.files.create(file=jsonl(LINES), purpose="fine-tune").id
    with pytest.raises(openai.NotFoundError) as refused:
        client.fine_tuning.jobs.create(model="llama-tiny", training_file=file)
    assert refused.value.body["param"] == "training_file"


def test_files_expire(shop: Shop, client: Any) -> None:
    after: Any = {"anchor": "created_at", "seconds": 3600}
    made = client.files.create(file=jsonl(LINES[:3]), purpose="fine-tune", expires_after=after)
    assert made.expires_at == made.created_at + 3600
    assert client.files.retrieve(made.id).expires_at == made.expires_at
    hours = timedelta(hours=1)

    def expire(session: Any) -> None:
        row = session.get(DataFileRow, made.id)
        row.expires_at -= hours

    shop.server.hands.database.write_sync(expire)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made.id)
    assert made.id not in [one.id for one in client.files.list()]
    with pytest.raises(openai.NotFoundError) as refused:
        client.fine_tuning.jobs.create(model="llama-tiny", training_file=made.id)
    assert refused.value.body["param"] == "training_file"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"expires_after[seconds]": "3600"}, "expires_after.anchor", "missing"),
        ({"expires_after[anchor]": "created_at"}, "expires_after.seconds", "missing"),
        ({"expires_after[anchor]": "last_used_at"}, "expires_after.anchor", "created_at"),
        *(
            ({"expires_after[anchor]": "created_at", "expires_after[seconds]": seconds}, at, words)
            for at in ["expires_after.seconds"]
            for seconds, words in (
                ("3599", "3600"),
                ("2592001", "2592000"),
                ("1e400", "integer"),
                ("nan", "integer"),
                ("", "integer"),
            )
        ),
        ({"expires_after": "3600"}, "expires_after", "object"),
        ({"expires_after[]": "1"}, "expires_after.anchor", "missing"),
        ({"retention": "1"}, "retention", "no field"),
        ({"purpose[a]": "1"}, "purpose[a]", "no field"),
    ],
)
def test_fields_of_an_upload_are_never_ignored(
    shop: Shop, client: Any, fields: dict[str, str], param: str, message: str
) -> None:
    before = len(list(client.files.list()))
    answer = shop.http().post(
        "/openai/v1/files",
        data={"purpose": "fine-tune", **fields},
        files={"file": ("a.jsonl", jsonl(LINES[:2]))},
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error
    assert re.search(message, error["message"]), error
    assert len(list(client.files.list())) == before


@pytest.mark.parametrize(
    ("fields", "status", "param", "message"),
    [
        ({"model": "gpt-4o"}, 404, "model", "does not exist"),
        ({"training_file": "file-none"}, 404, "training_file", "no file"),
        ({"validation_file": "file-none"}, 404, "validation_file", "no file"),
        ({"hyperparameters": {"n_epochs": 0}}, 400, "hyperparameters.n_epochs", "must"),
        ({"hyperparameters": {"batch_size": "all"}}, 400, "hyperparameters.batch_size", "must"),
        ({"hyperparameters": {"beta": 0.1}}, 400, "method", "dpo"),
        ({"method": {"type": "reinforcement"}}, 400, "method.type", "not supported"),
        ({"method": {"type": "magic"}}, 400, "method.type", "must be"),
        ({"method": {"type": "supervised", "dpo": {}}}, 400, "method.dpo", "leave it out"),
        ({"suffix": "a:b"}, 400, "suffix", "colon"),
        ({"suffix": "x" * 65}, 400, "suffix", "at most 64"),
        ({"seed": -1}, 400, "seed", "must"),
        ({"seed": 2**70}, 400, "seed", "must"),
        ({"metadata": {"k": "v" * 513}}, 400, "metadata.k", "at most 512"),
        ({"extra_body": {"surprise": 1}}, 400, "surprise", "no field"),
    ],
)
def test_bad_input_is_refused_in_the_form_of_openai(
    client: Any, training: str, fields: dict[str, Any], status: int, param: str, message: str
) -> None:
    before = len(list(client.fine_tuning.jobs.list()))
    with pytest.raises(openai.APIStatusError, match=message) as refused:
        client.fine_tuning.jobs.create(
            **{"model": "llama-tiny", "training_file": training, **fields}
        )
    assert refused.value.status_code == status, refused.value.body
    assert refused.value.body["param"] == param
    assert set(refused.value.body) == {"message", "type", "param", "code"}
    assert len(list(client.fine_tuning.jobs.list())) == before
