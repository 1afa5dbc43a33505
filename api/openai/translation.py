"""Translation between OpenAI's requests and objects, and dray's documents and views."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from api.openai.requests import AUTO, Hyperparameters, TuningRequest
from api.problems import Refused
from dray import views
from dray.views import JobState
from service.config.models_file import CatalogueModel
from service.db.models import DataFileRow
from service.jobs.tuning_requests import TuningJob

ACCEPT_LICENCE: Final = "accept_licence"
"""Key of `metadata` with the name of the licence, or `true`."""
EPOCHS: Final = 3
BATCH_SIZE: Final = 16
ADAPTER_LR: Final = 2e-4
FULL_LR: Final = 2e-5
BETA: Final = 0.1
HELD_OUT: Final = 0.05
"""Fraction of the examples that is held out if there is no validation file."""
PURPOSE: Final = "fine-tune"
_NAMES: Final = {"supervised": "sft", "dpo": "dpo"}

_STATUS: Final = {
    JobState.QUEUED: "queued",
    JobState.STARTING: "validating_files",
    JobState.RUNNING: "running",
    JobState.RECOVERING: "running",
    JobState.CANCELLING: "running",
    JobState.SUCCEEDED: "succeeded",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "cancelled",
}


@dataclass(frozen=True)
class Translated:
    """A request as a job."""

    document: dict[str, Any]
    request: dict[str, Any]
    """The fields that responses repeat, with a number for each `auto`."""
    notes: list[str]
    """Events about options that are ignored or chosen."""
    params: Mapping[str, str]
    """The parameter of the request for each pointer into the document that has another name."""


def job_of(
    asked: TuningRequest, model: CatalogueModel, training: DataFileRow, *, validates: bool
) -> Translated:
    """Translate a request. validates: whether it names a validation file. Raises Refused."""
    kind, given, at = _method(asked)
    start = model.document({}, _NAMES[kind])
    train = _mapping(start.get("train"))
    fraction = _held_out(start, training, validates=validates)
    found = _numbers(given, kind, start, training.num_lines)
    optimizer = {**_mapping(train.get("optimizer")), "lr": found.pop("lr")}
    metadata = asked.metadata or {}
    accepts = metadata.get(ACCEPT_LICENCE, "")
    source = f"upload://{asked.training_file}"
    if validates:
        source = f"{source}?validation={asked.validation_file}"
    document = model.document(
        {
            "name": asked.suffix or model.name,
            "method": {"beta": found["beta"]} if kind == "dpo" else {},
            "data": {"source": source, "format": "jsonl", **fraction},
            "train": {
                "epochs": found["n_epochs"],
                "global_batch_size": found["batch_size"],
                "seed": asked.seed or 0,
                "optimizer": optimizer,
            },
        },
        _NAMES[kind],
    )
    document["model"]["accept_licence"] = accepts == "true" or accepts or False
    request = {
        "model": asked.model,
        "training_file": asked.training_file,
        "validation_file": asked.validation_file,
        "suffix": asked.suffix,
        "seed": asked.seed or 0,
        "metadata": dict(metadata),
        "method": kind,
        "hyperparameters": found,
    }
    notes = [
        f"the integration {one.type!r} is ignored: dray's own tools show the metrics"
        for one in asked.integrations or ()
    ]
    if asked.validation_file is None:
        held = f"{document['data']['validation_fraction']:.2%}"
        notes.append(f"no validation file: {held} of the examples are held out for val/ metrics")
    params = {
        "/model/base": "/model",
        "/model/accept_licence": f"/metadata/{ACCEPT_LICENCE}",
        "/data/source": "/training_file",
        "/method": "/method/type",
        "/method/name": "/method/type",
        "/method/beta": f"{at}/beta",
        "/train/epochs": f"{at}/n_epochs",
        "/train/global_batch_size": f"{at}/batch_size",
        "/train/optimizer/lr": f"{at}/learning_rate_multiplier",
        "/train/seed": "/seed",
        "/name": "/suffix",
    }
    return Translated(document, request, notes, params)


def _method(asked: TuningRequest) -> tuple[str, Hyperparameters, str]:
    """Return the kind of the method, its hyperparameters, and the pointer to them."""
    method = asked.method
    if method is None:
        return "supervised", asked.hyperparameters or Hyperparameters(), "/hyperparameters"
    if method.type == "reinforcement":
        raise Refused(
            "invalid_document",
            "the method 'reinforcement' is not supported: use supervised or dpo",
            "/method/type",
        )
    for name in ("supervised", "dpo", "reinforcement"):
        if name != method.type and getattr(method, name) is not None:
            raise Refused(
                "invalid_document",
                f"is set, but the method is {method.type!r}: leave it out",
                f"/method/{name}",
            )
    of_method = method.dpo if method.type == "dpo" else method.supervised
    at = f"/method/{method.type}/hyperparameters"
    given = of_method.hyperparameters if of_method is not None else None
    if asked.hyperparameters is not None:
        if method.type == "dpo" or given is not None:
            raise Refused(
                "invalid_document",
                f"the method has its own hyperparameters: set them only in method.{method.type}",
                "/hyperparameters",
            )
        return method.type, asked.hyperparameters, "/hyperparameters"
    return method.type, given or Hyperparameters(), at


def _held_out(
    start: Mapping[str, Any], training: DataFileRow, *, validates: bool
) -> dict[str, float]:
    """Return the fraction of the examples to hold out, so that at least one example is held out."""
    of_model = _mapping(start.get("data")).get("validation_fraction")
    if validates or of_model is not None:
        return {} if of_model is None else {"validation_fraction": of_model}
    if training.num_lines < 2:
        raise Refused(
            "invalid_document",
            "the file has one example, but at least two are needed, because one is held out for "
            "validation: add examples, or give a validation_file",
            "/training_file",
        )
    return {"validation_fraction": max(HELD_OUT, 1 / training.num_lines)}


def _numbers(
    given: Hyperparameters, kind: str, start: Mapping[str, Any], num_examples: int
) -> dict[str, Any]:
    """Return the hyperparameters with a number for each `auto`, and the learning rate `lr`."""
    train = _mapping(start.get("train"))
    adapter = _mapping(start["model"]).get("adapter")
    usual = FULL_LR if adapter in (None, "none") else ADAPTER_LR
    base_lr = _mapping(train.get("optimizer")).get("lr", usual)
    num_workers = _mapping(start.get("resources")).get("num_workers", 1)
    multiplier = _number(given.learning_rate_multiplier, 1.0)
    found = {
        "n_epochs": _number(given.n_epochs, train.get("epochs", EPOCHS)),
        "batch_size": _number(
            given.batch_size,
            train.get("global_batch_size", max(num_workers, min(BATCH_SIZE, num_examples // 4))),
        ),
        "learning_rate_multiplier": multiplier,
        "lr": base_lr * multiplier,
    }
    if kind == "dpo":
        found["beta"] = _number(given.beta, _mapping(start.get("method")).get("beta", BETA))
    elif given.beta is not None:
        raise Refused(
            "invalid_document",
            "beta is a hyperparameter of the method dpo only",
            "/method",
        )
    return found


def _number(given: Any, otherwise: Any) -> Any:
    return otherwise if given in (None, AUTO) else given


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def tuning_job(found: TuningJob) -> dict[str, Any]:
    """Return a `fine_tuning.job`."""
    job, request = found.job, found.request
    numbers = request["hyperparameters"]
    shared = {name: one for name, one in numbers.items() if name != "beta"}
    latest = job.progress.latest_end_at if job.progress is not None else None
    return {
        "id": job.id,
        "object": "fine_tuning.job",
        "created_at": _seconds(job.created_at),
        "error": _error(job),
        "fine_tuned_model": model_name(found) if job.state is JobState.SUCCEEDED else None,
        "finished_at": _seconds(job.finished_at),
        "hyperparameters": shared,
        "model": request["model"],
        "organization_id": job.owner,
        "result_files": [],
        "seed": request["seed"],
        "status": status(job),
        "trained_tokens": None,
        "training_file": request["training_file"],
        "validation_file": request["validation_file"],
        "estimated_finish": _seconds(latest),
        "integrations": [],
        "metadata": request["metadata"],
        "method": {
            "type": request["method"],
            request["method"]: {"hyperparameters": numbers},
        },
    }


def status(job: views.Job) -> str:
    """Return the status. A job that the user has paused is `paused`, and a job whose first attempt
    has not reached a step is `validating_files`."""
    if job.state is JobState.QUEUED and job.held_by is not None:
        return "paused"
    if job.state is JobState.RUNNING and job.first_step_at is None:
        return "validating_files"
    return _STATUS[job.state]


def model_name(found: TuningJob) -> str:
    """Return the name of the fine-tuned model, such as `ft:llama-8b:ann:support:job-01kr...`."""
    request = found.request
    return f"ft:{request['model']}:{found.job.owner}:{request['suffix'] or ''}:{found.job.id}"


def job_of_model(name: str) -> str | None:
    """Return the id of the job in the name of a fine-tuned model; None for other names."""
    return name.rpartition(":")[2] if name.startswith("ft:") else None


def _error(job: views.Job) -> dict[str, Any] | None:
    if job.state is not JobState.FAILED:
        return None
    return {"code": job.reason.code, "message": job.reason.message, "param": None}


def event(job_id: str, one: views.Event) -> dict[str, Any]:
    """Return a `fine_tuning.job.event`."""
    return {
        "id": f"ftevent-{job_id}-{one.seq}",
        "object": "fine_tuning.job.event",
        "created_at": _seconds(one.time),
        "level": _level(one),
        "message": one.message,
        "type": "message",
        "data": {"code": one.code, "type": one.type, "actor": one.actor, **one.data},
    }


def _level(one: views.Event) -> str:
    if one.to_state is JobState.FAILED:
        return "error"
    loses_ground = one.to_state in (JobState.RECOVERING, JobState.QUEUED) and one.from_state
    return "warn" if loses_ground or one.code == "ignored_option" else "info"


def event_number(job_id: str, event_id: str) -> int | None:
    """Return the number of a job's event, given its id; None if this is not the id of an event of
    the job."""
    number = event_id.removeprefix(f"ftevent-{job_id}-")
    return int(number) if number.isascii() and number.isdigit() and len(number) < 10 else None


def checkpoint(
    found: TuningJob, one: views.Checkpoint, losses: Mapping[str, views.Series]
) -> dict[str, Any]:
    """Return a `fine_tuning.job.checkpoint`. losses: series of `train/loss` and `val/loss`."""
    names = {"train_loss": "train/loss", "full_valid_loss": "val/loss"}
    metrics = {name: value_at(losses.get(key), one.step) for name, key in names.items()}
    return {
        "id": checkpoint_id(found.job.id, one),
        "object": "fine_tuning.job.checkpoint",
        "created_at": _seconds(one.created_at),
        "fine_tuned_model_checkpoint": f"{model_name(found)}:ckpt-step-{one.step}",
        "fine_tuning_job_id": found.job.id,
        "metrics": {"step": one.step, **{k: v for k, v in metrics.items() if v is not None}},
        "step_number": one.step,
    }


def checkpoint_id(job_id: str, one: views.Checkpoint) -> str:
    return f"ftckpt-{job_id}-{one.attempt}-{one.step}"


def checkpoint_numbers(job_id: str, checkpoint_id: str) -> tuple[int, int] | None:
    """Return (attempt, step) of a checkpoint of a job, which may have been deleted; None if the id
    is none of such a checkpoint."""
    pattern = rf"ftckpt-{re.escape(job_id)}-([0-9]{{1,18}})-([0-9]{{1,18}})"
    found = re.fullmatch(pattern, checkpoint_id)
    return None if found is None else (int(found[1]), int(found[2]))


def value_at(series: views.Series | None, step: int) -> float | None:
    """Return the finite value of a series at a step; None if there is none."""
    if series is None or step not in series.steps:
        return None
    value = series.values[series.steps.index(step)]
    return value if isinstance(value, float | int) and math.isfinite(value) else None


def file(row: DataFileRow) -> dict[str, Any]:
    """Return a `file`."""
    return {
        "id": row.id,
        "object": "file",
        "bytes": row.size_bytes,
        "created_at": _seconds(row.created_at),
        "filename": row.name,
        "purpose": PURPOSE,
        "status": "processed",
        "expires_at": _seconds(row.expires_at),
        "status_details": None,
    }


def base_model(name: str) -> dict[str, Any]:
    """Return the `model` of a base model in the catalogue. Its date is unknown."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "dray"}


def tuned_model(found: TuningJob) -> dict[str, Any]:
    """Return the `model` of a job that has succeeded."""
    return {
        "id": model_name(found),
        "object": "model",
        "created": _seconds(found.job.finished_at),
        "owned_by": found.job.owner,
    }


def page(items: Sequence[Mapping[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return a page of a list."""
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {}
    no_ends = {"first_id": None, "last_id": None}
    return {"object": "list", "data": list(items), "has_more": has_more, **(ends or no_ends)}


def _seconds(time: datetime | None) -> int | None:
    return None if time is None else int(time.timestamp())
