"""Requests and objects of OpenAI's protocol: random requests against the models of the package
`openai`, and forms that another program has written."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from api.openai import multipart, translation
from api.openai.errors import error_body, response
from api.openai.requests import TuningRequest
from api.problems import Refused
from dray import views
from dray.input.validation import check
from dray.views import JobState
from service.config.models_file import CatalogueModel
from service.db.models import DataFileRow
from service.jobs.tuning_requests import TuningJob

pytest.importorskip(
    "openai", reason="the extra 'dev' is not installed: openai, whose models check the objects"
)

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
FILE_A, FILE_B = f"file-{'a' * 26}", f"file-{'b' * 26}"
JOB_ID = f"job-{'0' * 26}"
TEXTS = ("a", "für dich", "x" * 64, "run 7", "日本")


def auto(draw: random.Random, *numbers: Any) -> Any:
    return draw.choice(["auto", None, *numbers])


def request(draw: random.Random) -> dict[str, Any]:
    """Return a request as users of OpenAI's client write it."""
    numbers: dict[str, Any] = {
        "n_epochs": auto(draw, 1, 3, 50),
        "batch_size": auto(draw, 2, 8, 256),
        "learning_rate_multiplier": auto(draw, 0.02, 1, 2.5),
    }
    numbers = {k: v for k, v in numbers.items() if draw.random() < 0.7}
    body: dict[str, Any] = {"model": "llama", "training_file": FILE_A}
    if draw.random() < 0.5:
        body["hyperparameters"] = numbers
    elif draw.random() < 0.8:
        body["method"] = {"type": "supervised", "supervised": {"hyperparameters": numbers}}
    optional = {
        "validation_file": draw.choice([FILE_B, None]),
        "suffix": draw.choice([*TEXTS, None]),
        "seed": draw.choice([0, 42, 2**31, None]),
        "metadata": draw.choice([{}, None, {"k": "v", "ü": ""}]),
        "integrations": draw.choice([[], None, [{"type": "wandb", "wandb": {"project": "p"}}]]),
    }
    return body | {k: v for k, v in optional.items() if draw.random() < 0.6}


def model(draw: random.Random) -> CatalogueModel:
    defaults: dict[str, Any] = draw.choice(
        [
            {},
            {"train": {"epochs": 5, "optimizer": {"lr": 1e-3, "weight_decay": 0.1}}},
            {"model": {"adapter": "none"}, "method": {"max_length": 64}},
            {"data": {"validation_fraction": 0.3}, "resources": {"num_workers": 2}},
        ]
    )
    return CatalogueModel(name="llama", base="file:///m", defaults=defaults)


def rows(num_lines: int) -> DataFileRow:
    return DataFileRow(id=FILE_A, num_lines=num_lines, name="n", size_bytes=9, created_at=NOW)


def job(draw: random.Random, spec: dict[str, Any]) -> views.Job:
    state = draw.choice(list(JobState))
    times = {"finished_at": NOW + timedelta(hours=1)} if state.is_terminal else {}
    progress = {"step": 3, "latest_end_at": NOW} if draw.random() < 0.5 else None
    return views.Job.model_validate(
        {
            "id": JOB_ID,
            "name": "n",
            "owner": draw.choice(["ann", "b:c/d", "ü"]),
            "project": "default",
            "labels": {},
            "state": state,
            "reason": {"code": "c", "message": "m"},
            "queue": "default",
            "priority": 50,
            "spec": spec,
            "attempt": 1,
            "world_size": 1,
            "summary": {},
            "progress": progress,
            "first_step_at": draw.choice([None, NOW]),
            "created_at": NOW,
            "links": dict.fromkeys(("self", "metrics", "logs", "events", "artifacts"), ""),
            **times,
        }
    )


@pytest.mark.parametrize("seed", range(300))
def test_requests_become_jobs_and_jobs_become_objects(seed: int) -> None:
    from openai.types.fine_tuning import FineTuningJob

    draw = random.Random(seed)
    body, entry, num_lines = request(draw), model(draw), draw.choice([2, 10, 1000])
    asked = TuningRequest.model_validate(body)
    validates = asked.validation_file is not None
    found = translation.job_of(asked, entry, rows(num_lines), validates=validates)
    spec = check(found.document)  # every request is a valid job

    numbers = (body.get("method") or {}).get("supervised", body).get("hyperparameters") or {}
    given = {k: v for k, v in numbers.items() if v not in (None, "auto")}
    made = entry.defaults.get("train", {})
    full = entry.defaults.get("model") == {"adapter": "none"}
    epochs = given.get("n_epochs", made.get("epochs", 3))
    rate = made.get("optimizer", {}).get("lr", 2e-5 if full else 2e-4)
    assert spec.train.epochs == epochs
    assert spec.train.optimizer.lr == rate * given.get("learning_rate_multiplier", 1)
    assert spec.train.optimizer.weight_decay == made.get("optimizer", {}).get("weight_decay", 0.0)
    workers = 2 if "resources" in entry.defaults else 1  # each must have an example of a batch
    assert spec.train.global_batch_size == given.get(
        "batch_size", {2: workers, 10: 2, 1000: 16}[num_lines]
    )
    assert spec.train.seed == (body.get("seed") or 0)
    assert (spec.model.adapter is None) == full  # type: ignore[union-attr]
    held_out = spec.data.validation_fraction
    if not validates:
        assert 1 <= round(held_out * num_lines) < num_lines
    assert spec.data.source.count("file-") == 1 + validates

    answer = translation.tuning_job(TuningJob(job(draw, {}), found.request))
    status = answer["status"]
    if status == "paused":  # a status of the API that the package's type lacks
        answer = {**answer, "status": "queued"}
    parsed = FineTuningJob.model_validate(answer, strict=True)
    assert (parsed.hyperparameters.n_epochs, parsed.seed) == (epochs, body.get("seed") or 0)
    assert (parsed.fine_tuned_model is None) == (status != "succeeded")
    assert (parsed.error is None) == (status != "failed")
    assert (parsed.metadata or {}) == (body.get("metadata") or {})
    if parsed.fine_tuned_model is not None:
        assert translation.job_of_model(parsed.fine_tuned_model) == JOB_ID


def test_other_objects_are_those_of_the_package() -> None:
    from openai.types import FileObject, Model
    from openai.types.fine_tuning import FineTuningJobEvent
    from openai.types.fine_tuning.jobs import FineTuningJobCheckpoint

    draw = random.Random(0)
    asked = TuningRequest(model="llama", training_file=FILE_A)
    request_ = translation.job_of(asked, model(draw), rows(10), validates=False).request
    found = TuningJob(job(draw, {}), request_)
    event = views.Event(seq=7, time=NOW, type="state", attempt=1, code="c", message="m")
    for state, level in ((JobState.FAILED, "error"), (JobState.RECOVERING, "warn")):
        one = event.model_copy(update={"to_state": state, "from_state": JobState.RUNNING})
        parsed = FineTuningJobEvent.model_validate(translation.event(JOB_ID, one), strict=True)
        assert parsed.level == level
        assert translation.event_number(JOB_ID, parsed.id) == 7
    assert translation.event_number("job-other", parsed.id) is None
    saved = views.Checkpoint(
        attempt=1,
        step=4,
        size_bytes=1,
        sha256="a",
        created_at=NOW,
        is_latest=True,
        is_best=False,
        url="u",
    )
    losses = {
        "train/loss": views.Series(steps=[2, 4], values=[1.0, 0.5]),
        "val/loss": views.Series(steps=[4], values=["NaN"]),
    }
    answer = translation.checkpoint(found, saved, losses)
    checkpoint = FineTuningJobCheckpoint.model_validate(answer)
    assert (checkpoint.metrics.step, checkpoint.metrics.train_loss) == (4, 0.5)
    assert checkpoint.metrics.full_valid_loss is None
    FileObject.model_validate(translation.file(rows(3)), strict=True)
    Model.model_validate(translation.base_model("llama"), strict=True)


@pytest.mark.parametrize("method", ["supervised", "dpo"])
def test_preferences_become_the_method_dpo(method: str) -> None:
    body = {
        "model": "llama",
        "training_file": FILE_A,
        "method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.3, "n_epochs": 1}}},
    }
    of_sft = {"samples": {"prompts": ["Hi"], "max_tokens": 8}, "data": {"examples": "messages"}}
    defaults: Any = {"method": {"max_length": 64, "loss": "all"}, **of_sft}
    entry = CatalogueModel(name="llama", base="file:///m", defaults=defaults)
    if method == "supervised":
        body["method"] = {"type": "supervised", "supervised": {}}
    found = translation.job_of(TuningRequest.model_validate(body), entry, rows(9), validates=False)
    expected = {"name": "dpo", "beta": 0.3, "max_length": 64}
    if method == "supervised":
        expected = {"name": "sft", "max_length": 64, "loss": "all"}  # type: ignore[dict-item]
    assert found.document["method"] == expected
    spec = check(found.document)
    assert (spec.data.examples is None) == (method == "dpo")
    assert spec.samples is not None


@pytest.mark.parametrize("seed", range(100))
def test_defaults_apply_to_the_methods_that_have_them(seed: int) -> None:
    """Compared with the names of the metrics, in random defaults."""
    draw = random.Random(seed)
    of_sft = {"val/loss", "val/perplexity", "val/accuracy"}
    rewards = {f"val/rewards/{one}" for one in ("chosen", "rejected", "margins", "accuracies")}
    metrics = sorted({*of_sft, *rewards, "val/margin", "val/f1", "loss"})
    best, stopping = draw.choice([None, *metrics]), draw.choice([None, *metrics])
    defaults: dict[str, Any] = {"train": {"optimizer": {"weight_decay": 0.25}}}
    if best:
        defaults["checkpoint"] = {"best": best, "keep": 5}
    if stopping:
        defaults["train"]["early_stopping"] = {"metric": stopping, "patience": 2}
    if draw.random() < 0.5:
        defaults["samples"] = {"prompts": ["Hi"], "max_tokens": 8}
    unknown = {best, stopping} - {None} - of_sft - rewards
    if unknown:
        with pytest.raises(ValueError, match="is not a metric of the methods sft and dpo"):
            CatalogueModel(name="llama", base="file:///m", defaults=defaults)
        return
    entry = CatalogueModel(name="llama", base="file:///m", defaults=defaults)
    for method, names in (("supervised", of_sft), ("dpo", rewards | {"val/loss"})):
        asked = TuningRequest.model_validate(
            {"model": "llama", "training_file": FILE_A, "method": {"type": method}}
        )
        spec = check(translation.job_of(asked, entry, rows(9), validates=False).document)
        assert spec.checkpoint.best == (best if best in names else None)
        found = spec.train.early_stopping and spec.train.early_stopping.metric
        assert found == (stopping if stopping in names else None)
        assert (spec.samples is not None) == ("samples" in defaults)
        assert spec.train.optimizer.weight_decay == 0.25
        assert spec.checkpoint.keep == (5 if best else 3)


@pytest.mark.parametrize("seed", range(200))
def test_forms_of_another_program_are_read(seed: int) -> None:
    draw = random.Random(seed)
    pieces = [b"\r\n", b"--", b"\n", b"a", "ü".encode(), b"\0", b'"', b"boundary", b""]
    content = b"".join(draw.choices(pieces, k=draw.randint(0, 30)))
    name = draw.choice(["a.jsonl", "über uns.jsonl", 'qu"ote.jsonl', "a;b.jsonl"])
    boundary = draw.choice(["boundary", "b", "x" * 60, "a-b--c"])
    request_ = httpx.Request(
        "POST",
        "http://x",
        data={"purpose": "fine-tune"},
        files={"file": (name, content)},
        headers={"content-type": f"multipart/form-data; boundary={boundary}"},
    )
    body = request_.read()
    assume = b"--" + boundary.encode() not in content
    if not assume:
        return
    form = multipart.parse(body, request_.headers["content-type"])
    assert form.file == content
    assert form.fields == {"purpose": "fine-tune"}
    assert form.file_name.replace("%22", '"') == name
    cut = body[: draw.randrange(len(body) - len(boundary) - 8)]
    with pytest.raises(Refused):
        multipart.parse(cut, request_.headers["content-type"])


@pytest.mark.parametrize("content_type", ["multipart/form-data", "multipart/form-data; boundary="])
def test_a_form_without_a_boundary_is_refused(content_type: str) -> None:
    with pytest.raises(Refused, match="no boundary"):
        multipart.parse(b"--b\r\n", content_type)


@pytest.mark.parametrize("charset", ["idna", "punycode", "undefined", "\0"])
def test_a_name_that_can_not_be_decoded_is_refused(charset: str) -> None:
    name = f"filename*={charset}''%ff"
    body = f'--b\r\nContent-Disposition: form-data; name="file"; {name}\r\n\r\n{{}}\r\n--b--'
    with pytest.raises(Refused, match="can't be decoded"):
        multipart.parse(body.encode(), "multipart/form-data; boundary=b")


def test_the_numbers_of_a_checkpoint_are_in_its_id() -> None:
    assert translation.checkpoint_numbers(JOB_ID, f"ftckpt-{JOB_ID}-2-40") == (2, 40)
    for other in (
        "",
        JOB_ID,
        f"ftckpt-{JOB_ID}-2",
        "ftckpt-job-other-2-40",
        f"ftckpt-{JOB_ID}-2--1",
    ):
        assert translation.checkpoint_numbers(JOB_ID, other) is None


def test_a_full_storage_is_not_asked_again() -> None:
    for status, header in ((507, "false"), (503, None)):
        problem = views.Problem(type="t", title="t", status=status, detail="d", code="c")
        answer = response(problem, {"Retry-After": "1"})
        assert answer.headers.get("x-should-retry") == header
        assert answer.headers["retry-after"] == "1"


def test_errors_have_the_four_fields() -> None:
    problem = views.Problem(
        type="t", title="t", status=422, detail="d", code="c", pointer="/a/0/b~1c", hint="h"
    )
    assert error_body(problem) == {
        "error": {
            "message": "d; h",
            "type": "invalid_request_error",
            "param": "a.0.b/c",
            "code": "c",
        }
    }
