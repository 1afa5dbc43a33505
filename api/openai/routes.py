"""/openai/v1: files, fine-tuning jobs and models for OpenAI's client.

Set the client's `base_url` to the server's address with `/openai/v1`, and `api_key` to your token.
OpenAI documents this API, so dray's OpenAPI description omits it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from api.context import Actor, Caller, TheContext, TheFaults, TheJobs, TheQueries, use_cases
from api.http.body import check_as, fingerprint, read_as, read_bytes
from api.http.downloads import StoredFile, download
from api.http.idempotency import KeyHeader, check_key, named
from api.openai import multipart, translation
from api.openai.requests import TuningRequest, UploadForm
from api.problems import Refused
from api.routes.jobs import TheChanges
from dray.filters import MAX_POINTS
from dray.input import validation
from dray.input.names import unfit
from dray.requests import JobChangeRequest
from dray.views import JobState
from service.config.models_file import CatalogueModel
from service.domain.errors import (
    DomainError,
    InvalidDocument,
    JobNotRunning,
    JobNotWaiting,
    ModelNotFound,
    NotFound,
)
from service.jobs.service import Jobs
from service.jobs.tuning_requests import TuningJob, TuningRequests
from service.storage.data_files import key_of
from service.telemetry.series_filters import MetricsFilter

API = "/openai/v1"
JOBS = f"{API}/fine_tuning/jobs"
MAX_MODELS = 1000
JOBS_AT_ONCE = 200
"""Number of jobs that are read at a time to find the ones with some metadata."""
FORM_BYTES = 1 << 16
"""Maximum bytes of a form in addition to its file."""
CLIENT_TIMEOUT_S = 600.0
"""Default timeout of OpenAI's client."""
CLIENT_PAUSE_S = 180.0
"""Time that the client may take to send a request, and to pause after a failed one."""

router = APIRouter(include_in_schema=False)
TheTuning = Annotated[
    TuningRequests, use_cases(lambda runtime: TuningRequests(runtime.database, runtime.jobs))
]
Limit = Annotated[int, Query(ge=1, le=100)]
FileLimit = Annotated[int, Query(ge=1, le=10_000)]
After = Annotated[str | None, Query(max_length=128)]


def _answer(body: dict[str, Any]) -> Response:
    return JSONResponse(body, headers={"Cache-Control": "no-store"})


def _page(items: Sequence[dict[str, Any]], limit: int) -> Response:
    """Return a page, given up to `limit + 1` items."""
    return _answer(translation.page(items[:limit], has_more=len(items) > limit))


# Files


@router.post(f"{API}/files")
async def upload_file(
    request: Request, context: TheContext, jobs: TheJobs, caller: Caller
) -> Response:
    limit_bytes = context.runtime.settings.file_limit_bytes
    async with context.files.acquire(caller):
        body, _kind = await read_bytes(request, limit_bytes + FORM_BYTES, [multipart.MULTIPART])
        form = await asyncio.to_thread(multipart.parse, body, request.headers["content-type"])
        del body
        if len(form.file) > limit_bytes:
            raise Refused("body_too_large", f"the file is larger than {limit_bytes} bytes")
        asked = check_as(UploadForm, _form_fields(form.fields))
        if asked.purpose != translation.PURPOSE:
            raise Refused(
                "invalid_document",
                f"the purpose is {asked.purpose!r}, but only {translation.PURPOSE!r} is supported",
                "/purpose",
            )
        name = form.file_name.rpartition("/")[2][-255:]
        if unfit(name) is not None:
            raise Refused("invalid_document", "the file's name has unprintable characters", "/file")
        expiry = asked.expires_after
        lasts = None if expiry is None else timedelta(seconds=expiry.seconds)
        row = await jobs.files.upload(caller, name, form.file, lasts=lasts)
    return _answer(translation.file(row))


def _form_fields(fields: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a form as a document. `a[b]` is the field `b` of `a`."""
    document: dict[str, Any] = {}
    for name, value in fields.items():
        outer, bracket, inner = name.partition("[")
        if bracket and inner.endswith("]") and isinstance(document.setdefault(outer, {}), dict):
            document[outer][inner[:-1]] = value
        else:
            document[name] = value
    return document


@router.get(f"{API}/files")
async def list_files(
    jobs: TheJobs,
    caller: Caller,
    purpose: str = translation.PURPOSE,
    after: After = None,
    limit: FileLimit = 10_000,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    if purpose != translation.PURPOSE:
        return _page([], limit)
    rows = await jobs.files.page(caller, after, limit + 1, is_ascending=order == "asc")
    return _page([translation.file(row) for row in rows], limit)


@router.get(f"{API}/files/{{file_id}}")
async def get_file(jobs: TheJobs, caller: Caller, file_id: str) -> Response:
    return _answer(translation.file(await jobs.files.get(caller, file_id)))


@router.get(f"{API}/files/{{file_id}}/content")
async def get_content(
    request: Request, context: TheContext, jobs: TheJobs, caller: Caller, file_id: str
) -> Response:
    row = await jobs.files.get(caller, file_id)
    file = StoredFile(key_of(row.id), row.size_bytes, row.sha256, row.name)
    return download(request, context.runtime.storage, file)


@router.delete(f"{API}/files/{{file_id}}")
async def delete_file(jobs: TheJobs, caller: Caller, file_id: str) -> Response:
    await jobs.files.delete(caller, file_id)
    return _answer({"id": file_id, "object": "file", "deleted": True})


# Fine-tuning jobs


@router.post(JOBS)
async def create_job(
    request: Request,
    context: TheContext,
    jobs: TheJobs,
    tuning: TheTuning,
    caller: Caller,
    actor: Actor,
    idempotency_key: KeyHeader = None,
) -> Response:
    key = check_key(idempotency_key)
    limit_bytes = context.runtime.settings.max_body_bytes
    asked, body = await read_as(TuningRequest, request, limit_bytes)
    sent = fingerprint(body)
    idempotency = named(key, sent) or await tuning.key(
        caller, sent, repeats_within=_repeats_within(request)
    )
    # When a request is repeated, its file or its model may have been deleted.
    if (earlier := await tuning.earlier(caller, idempotency)) is not None:
        return _answer(translation.tuning_job(earlier))
    model = _model(jobs, asked.model)
    training = await jobs.files.get(caller, asked.training_file, pointer="/training_file")
    if asked.validation_file is not None:
        await jobs.files.get(caller, asked.validation_file, pointer="/validation_file")
    found = translation.job_of(asked, model, training, validates=asked.validation_file is not None)
    try:
        spec = validation.check(found.document)
        made = await tuning.create(spec, found.request, found.notes, caller, actor, idempotency)
    except validation.Fault as fault:
        pointer = fault.pointer or ""
        detail = fault.detail
        if pointer not in found.params:
            detail = f"the operator's defaults of the model don't fit: {pointer} {detail}"
        raise InvalidDocument(
            detail, pointer=found.params.get(pointer, "/model"), hint=fault.hint
        ) from None
    except DomainError as error:
        error.pointer = found.params.get(error.pointer or "", error.pointer)
        raise
    return _answer(translation.tuning_job(made))


def _repeats_within(request: Request) -> timedelta | None:
    """Return the maximum time since the previous try of this request; None if this is the first
    try. OpenAI's client sends no Idempotency-Key, but it counts the tries."""
    if not re.fullmatch("0*[1-9][0-9]*", request.headers.get("x-stainless-retry-count", "")):
        return None
    given = request.headers.get("x-stainless-read-timeout", "")
    timeout_s = float(given) if re.fullmatch(r"[0-9]{1,9}(\.[0-9]*)?", given) else 0.0
    return timedelta(seconds=max(timeout_s, CLIENT_TIMEOUT_S) + CLIENT_PAUSE_S)


def _model(jobs: Jobs, name: str) -> CatalogueModel:
    catalogue = jobs.models.current() or {}
    model = catalogue.get(name)
    if model is None:
        hint = f"models are {', '.join(list(catalogue)[:10])}" if catalogue else None
        raise ModelNotFound(f"the model {name!r} does not exist", pointer="/model", hint=hint)
    return model


@router.get(JOBS)
async def list_jobs(
    request: Request, tuning: TheTuning, caller: Caller, after: After = None, limit: Limit = 20
) -> Response:
    wanted = {
        name.removeprefix("metadata[").removesuffix("]"): value
        for name, value in request.query_params.items()
        if name.startswith("metadata[")
    }
    found: list[TuningJob] = []
    at_once = max(limit + 1, JOBS_AT_ONCE) if wanted else limit + 1
    while len(found) <= limit:
        some = await tuning.page(caller, after, at_once)
        found += [one for one in some if wanted.items() <= one.request["metadata"].items()]
        if len(some) < at_once:
            break
        after = some[-1].job.id
    return _page([translation.tuning_job(one) for one in found], limit)


@router.get(f"{JOBS}/{{job_id}}")
async def get_job(tuning: TheTuning, _: Caller, job_id: str) -> Response:
    return _answer(translation.tuning_job(await tuning.get(job_id)))


@router.get(f"{JOBS}/{{job_id}}/events")
async def list_events(
    queries: TheQueries,
    tuning: TheTuning,
    _: Caller,
    job_id: str,
    after: After = None,
    limit: Limit = 20,
) -> Response:
    await tuning.get(job_id)
    newest, _over = await queries.newest_event(job_id)
    before = newest + 1
    if after is not None:
        number = translation.event_number(job_id, after)
        if number is None:
            raise Refused("invalid_parameter", f"{after!r} is not an event of this job", "/after")
        before = min(number, before)
    first = max(0, before - 1 - (limit + 1))
    events = await queries.events(job_id, after_seq=first, limit=max(1, before - 1 - first))
    items = [translation.event(job_id, one) for one in reversed(events.items) if one.seq < before]
    return _page(items, limit)


@router.get(f"{JOBS}/{{job_id}}/checkpoints")
async def list_checkpoints(
    queries: TheQueries,
    tuning: TheTuning,
    _: Caller,
    job_id: str,
    after: After = None,
    limit: Limit = 10,
) -> Response:
    found = await tuning.get(job_id)
    checkpoints = (await queries.checkpoints(job_id)).items
    if after is not None:
        numbers = translation.checkpoint_numbers(job_id, after)
        if numbers is None:
            raise Refused(
                "invalid_parameter", f"{after!r} is not a checkpoint of this job", "/after"
            )
        checkpoints = [one for one in checkpoints if (one.attempt, one.step) < numbers]
    query = MetricsFilter(keys=["train/loss,val/loss"], max_points=MAX_POINTS)
    losses = (await queries.metrics(job_id, query)).series if checkpoints else {}
    items = [translation.checkpoint(found, one, losses) for one in checkpoints[: limit + 1]]
    return _page(items, limit)


@router.post(f"{JOBS}/{{job_id}}/cancel")
async def cancel_job(jobs: TheJobs, tuning: TheTuning, actor: Actor, job_id: str) -> Response:
    await tuning.get(job_id)
    await jobs.cancel(job_id, actor=actor)
    return _answer(translation.tuning_job(await tuning.get(job_id)))


@router.post(f"{JOBS}/{{job_id}}/pause")
async def pause_job(
    tuning: TheTuning, changes: TheChanges, faults: TheFaults, actor: Actor, job_id: str
) -> Response:
    """Hold a waiting job, or make a running job save its state and then hold it."""
    found = await tuning.get(job_id)
    hold = JobChangeRequest(held=True)
    try:
        if found.job.state is JobState.QUEUED:
            await changes.change(job_id, hold, actor=actor)
        else:
            await faults.preempt(job_id, held=True, actor=actor)
    except JobNotWaiting:  # it has started meanwhile
        await faults.preempt(job_id, held=True, actor=actor)
    except JobNotRunning:  # it waits again
        await changes.change(job_id, hold, actor=actor)
    return _answer(translation.tuning_job(await tuning.get(job_id)))


@router.post(f"{JOBS}/{{job_id}}/resume")
async def resume_job(tuning: TheTuning, changes: TheChanges, actor: Actor, job_id: str) -> Response:
    await tuning.get(job_id)
    await changes.change(job_id, JobChangeRequest(held=False), actor=actor)
    return _answer(translation.tuning_job(await tuning.get(job_id)))


# Models


@router.get(f"{API}/models")
async def list_models(jobs: TheJobs, tuning: TheTuning, caller: Caller) -> Response:
    """List the catalogue, and the models that the caller has fine-tuned through this API."""
    bases = [translation.base_model(name) for name in jobs.models.current() or {}]
    tuned = map(translation.tuned_model, await tuning.succeeded(caller, MAX_MODELS))
    return _answer({"object": "list", "data": [*bases, *tuned]})


@router.get(f"{API}/models/{{name:path}}")
async def get_model(jobs: TheJobs, tuning: TheTuning, _: Caller, name: str) -> Response:
    job_id = translation.job_of_model(name)
    if job_id is None:
        return _answer(translation.base_model(_model(jobs, name).name))
    unknown = ModelNotFound(f"the model {name!r} does not exist", pointer="/model")
    try:
        found = await tuning.get(job_id)
    except NotFound:
        raise unknown from None
    if found.job.state is not JobState.SUCCEEDED or translation.model_name(found) != name:
        raise unknown
    return _answer(translation.tuned_model(found))
