"""Responses in the JSON form of MLflow's protocol buffers (mlflow/protos/service.proto)."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from api.problems import STATUS as HTTP_STATUS
from api.problems import Refused
from dray import views
from dray.input.validation import plainly
from service.domain.errors import DomainError
from service.domain.tracking.mlflow_search import BadSearch
from service.tracking.mlflow.queries import HistoryPage, MlflowExperiment, experiment_id
from service.tracking.mlflow.runs import STATUS, experiment_of, milliseconds, params_of, tags_of

_BY_STATUS = {
    400: "INVALID_PARAMETER_VALUE",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "RESOURCE_DOES_NOT_EXIST",
    429: "REQUEST_LIMIT_EXCEEDED",
    503: "TEMPORARILY_UNAVAILABLE",
}


class MlflowRoute(APIRoute):
    """A route whose errors have MLflow's format, the only format that MLflow's client
    understands."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handler(request)
            except BadSearch as error:
                return mlflow_error(400, "INVALID_PARAMETER_VALUE", str(error))
            except RequestValidationError as error:
                first = error.errors()[0]
                name = str((*first["loc"], "?")[1])
                message = f"the parameter {name!r} {plainly(str(first['msg']))}"
                return mlflow_error(400, "INVALID_PARAMETER_VALUE", message)
            except Refused as error:
                status = _status(error.code)
                message = "; ".join(filter(None, (error.detail, error.hint)))
                return mlflow_error(status, _code(status), message, error.headers)
            except DomainError as error:
                status = _status(error.code)
                return mlflow_error(status, _code(status), error.message)

        return answer


def _status(code: str) -> int:
    """Return the HTTP status of a problem. MLflow uses 400 instead of 422 for invalid values."""
    return 400 if HTTP_STATUS[code] == 422 else HTTP_STATUS[code]


def _code(status: int) -> str:
    return _BY_STATUS.get(status, "INVALID_PARAMETER_VALUE" if status < 500 else "INTERNAL_ERROR")


def mlflow_error(
    status: int, code: str, message: str, headers: Mapping[str, str] | None = None
) -> Response:
    body = {"error_code": code, "message": message}
    again = {"Retry-After": "1"} if status in (429, 503) else {}
    return JSONResponse(body, status, {"Cache-Control": "no-store", **again, **(headers or {})})


def experiment(found: MlflowExperiment) -> dict[str, Any]:
    return {
        "experiment_id": found.id,
        "name": found.name,
        "artifact_location": "mlflow-artifacts:/",
        "lifecycle_stage": "active",
        "tags": [],
    }


def run(
    job: views.Job, notes: str | None, last: Mapping[str, views.Series] | None = None
) -> dict[str, Any]:
    """Return a job as a run.

    notes: None for a job without notes. last: a series for each metric; its last point is returned.
    Without `last`, the values come from the job's summary, and the response gives the job's newest
    step as the step of every value."""
    info = {
        "run_id": job.id,
        "run_uuid": job.id,
        "run_name": job.name,
        "experiment_id": experiment_id(experiment_of(job.labels)),
        "user_id": job.owner,
        "status": STATUS[job.state],
        "start_time": milliseconds(job.created_at),
        "artifact_uri": f"mlflow-artifacts:/{job.id}",
        "lifecycle_stage": "active",
    }
    if job.finished_at is not None:
        info["end_time"] = milliseconds(job.finished_at)
    data = {
        "metrics": _metrics(job, last),
        "params": [{"key": key, "value": value} for key, value in params_of(job.spec).items()],
        "tags": [{"key": key, "value": value} for key, value in tags_of(job, notes).items()],
    }
    return {"info": info, "data": data, "inputs": {}}


def _metrics(job: views.Job, last: Mapping[str, views.Series] | None) -> list[dict[str, Any]]:
    if last is None:
        step = job.progress.step if job.progress else 0
        at = milliseconds(job.finished_at or job.first_step_at or job.created_at)
        return [metric(key, value, step, at) for key, value in job.summary.items()]
    return [
        metric(
            key,
            series.values[-1],
            series.steps[-1],
            int(1000 * series.times[-1]) if series.times else milliseconds(job.created_at),
        )
        for key, series in last.items()
    ]


def metric(key: str, value: views.MetricValue, step: int, time_ms: int) -> dict[str, Any]:
    return {"key": key, "value": value, "timestamp": time_ms, "step": step}


def history(key: str, page: HistoryPage) -> dict[str, Any]:
    points = zip(page.values, page.steps, page.times_ms, strict=True)
    return with_token({"metrics": [metric(key, *point) for point in points]}, page.next_token)


def with_token(answer: dict[str, Any], token: str | None) -> dict[str, Any]:
    return answer if token is None else {**answer, "next_page_token": token}


def files(artifacts: Sequence[views.Artifact], folder: str) -> list[dict[str, Any]]:
    """Return the files and folders that are directly in an artifact folder. The root folder is
    `""`."""
    found: dict[str, dict[str, Any]] = {}
    prefix = f"{folder}/" if folder else ""
    for artifact in artifacts:
        if artifact.path.startswith(prefix):
            name, _, below = artifact.path.removeprefix(prefix).partition("/")
            entry = {"path": posixpath.join(folder, name), "is_dir": bool(below)}
            found[name] = entry if below else {**entry, "file_size": artifact.size_bytes}
    return [found[name] for name in sorted(found)]
