"""Each method of the clients as a flow over `dray._http.transport`, without I/O."""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from dray import errors, views
from dray._http import arrays as arrays_of_jobs
from dray._http import code, downloads, following
from dray._http.calls import LONG_POLL_S, Calls, moment, params
from dray._http.code import OnUpload
from dray._http.downloads import OnProgress
from dray._http.transport import Call, Flow, Item, Run, Stream, segment
from dray.code.local import code_part, packed_code, with_code
from dray.views import JobState

if TYPE_CHECKING:  # most commands need neither the document's classes nor YAML
    from dray.code.packing import PackedCode
    from dray.spec import JobSpec

Spec: TypeAlias = "JobSpec | Mapping[str, Any] | str | PathLike[str]"
States: TypeAlias = JobState | str | Iterable[JobState | str]
"""One state or several."""


def _document(spec: Spec) -> tuple[Any, Path]:
    """The document as it is sent, without defaults, and the folder that its paths start from."""
    from dray.documents import folder_of, load_document
    from dray.spec import JobSpec

    if isinstance(spec, JobSpec):
        own = spec.model_dump(mode="json", exclude_unset=True)
        return {"version": spec.version, **own}, Path()
    if isinstance(spec, Mapping):
        return dict(spec), Path()
    return load_document(spec), folder_of(spec)


def _as_json(document: Any) -> bytes:
    """The document as the body of a submit."""
    try:
        return json.dumps(document, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        why = f"the job can't be written as JSON: {error}"
        raise errors.SpecError(why, pointer=_not_finite(document)) from None


def _not_finite(value: Any) -> str | None:
    """The JSON pointer of the first number in a document that JSON has no words for."""
    if isinstance(value, float) and not math.isfinite(value):
        return ""
    if isinstance(value, Mapping):
        items: Iterable[tuple[Any, Any]] = value.items()
    else:
        items = enumerate(value) if isinstance(value, list | tuple) else ()
    for key, inner in items:
        if (place := _not_finite(inner)) is not None:
            return f"/{str(key).replace('~', '~0').replace('/', '~1')}{place}"
    return None


def _states(given: States | None) -> list[JobState]:
    if given is None:
        return []
    return [JobState(state) for state in ([given] if isinstance(given, str) else given)]


_ARRAY = "array-[0-9a-z]{1,26}"
"""An array's id, or how it begins."""


def _not_found(reference: str) -> errors.JobNotFound:
    """The error that the server would answer for an id."""
    what = "there is no job of yours" if reference == "@last" else f"there is no job {reference}"
    hint = "`dray ls` shows the jobs there are"
    if re.fullmatch(_ARRAY, reference):
        hint = f"that is the id of an array; {reference}/0 is its first job"
    problem = views.Problem(
        type="about:blank",
        title="Job not found",
        status=404,
        detail=what,
        code=errors.JobNotFound.code,
        hint=hint,
    )
    return errors.JobNotFound(problem)


@dataclass(frozen=True)
class JobFilter:
    """Selects the jobs to list; None selects any."""

    state: States | None = None
    queue: str | None = None
    label: Mapping[str, str] | None = None
    owner: str | None = None
    project: str | None = None
    name: str | None = None
    name_glob: str | None = None
    text: str | None = None
    id_prefix: str | None = None
    array: str | None = None
    array_index: int | None = None
    collapse_arrays: bool = False
    created_after: datetime | None = None
    created_before: datetime | None = None
    where: str | None = None
    brief: bool = False

    def params(self) -> list[tuple[str, str]]:
        return [
            *(("state", state.value) for state in _states(self.state)),
            *(("label", f"{key}={value}") for key, value in (self.label or {}).items()),
            *params(
                queue=self.queue,
                owner=self.owner,
                project=self.project,
                name=self.name,
                name_glob=self.name_glob,
                text=self.text,
                id_prefix=self.id_prefix,
                array=self.array,
                array_index=self.array_index,
                collapse_arrays="true" if self.collapse_arrays else None,
                created_after=moment(self.created_after),
                created_before=moment(self.created_before),
                where=self.where,
                brief="true" if self.brief else None,
            ),
        ]


def _meant(reference: str, arrays: bool) -> list[JobFilter]:
    """The lists in which the job is that is meant, and with `arrays` the array."""
    if reference == "@last":
        return [JobFilter(owner="@me", collapse_arrays=arrays)]
    in_array = re.fullmatch(rf"({_ARRAY})(?:/([0-9]{{1,18}}))?", reference)
    if in_array is not None and (arrays or in_array[2]):
        index = None if in_array[2] is None else int(in_array[2])
        return [JobFilter(array=in_array[1], array_index=index, collapse_arrays=index is None)]
    name, slash, number = reference.rpartition("/")
    if slash and name and re.fullmatch(r"[0-9]{1,18}", number):
        return [JobFilter(name=name, array_index=int(number)), JobFilter(name=reference)]
    if not reference:
        raise ValueError("'' is no id")
    is_prefix = re.fullmatch(r"job-[0-9a-z]{1,25}", reference)
    by_id = [JobFilter(id_prefix=reference)] if is_prefix else []
    return [*by_id, JobFilter(name=reference, collapse_arrays=arrays)]


@dataclass(frozen=True)
class Flows(Calls):
    """One flow for each method, against one server."""

    def submit(self, spec: Spec, idempotency_key: str | None) -> Flow[views.Job]:
        document, base = _document(spec)
        if code_part(document) is not None:
            packed = yield Run(lambda: packed_code(document, base))
            uploaded = yield from self.upload_code(packed, None)
            document = with_code(document, uploaded.id)
        # One key for all tries, so that a submit whose answer was lost makes one job.
        headers = {
            "Content-Type": "application/json",
            "Idempotency-Key": uuid.uuid4().hex if idempotency_key is None else idempotency_key,
        }
        content = _as_json(document)
        return (yield from self.read(views.Job, Call("POST", "/v1/jobs", (), headers, content)))

    def dry_run(self, spec: Spec) -> Flow[views.Explanation]:
        headers = {"Content-Type": "application/json"}
        content = _as_json(with_code(_document(spec)[0], None))  # nothing is uploaded
        call = Call("POST", "/v1/jobs", params(dry_run="true"), headers, content)
        return (yield from self.read(views.Explanation, call))

    def upload_code(self, packed: PackedCode, on_progress: OnUpload | None) -> Flow[views.Code]:
        return code.upload(self, packed, on_progress)

    def job_code(self, job_id: str) -> Flow[list[views.CodeFile]]:
        return code.files_of(self, job_id)

    def download_code(self, job_id: str, dest: str | PathLike[str]) -> Flow[list[Path]]:
        return code.download(self, job_id, dest)

    def plan(self, spec: Spec, options: Mapping[str, float | None]) -> Flow[views.Plan]:
        document = json.loads(_as_json(with_code(_document(spec)[0], None)))
        given = {name: value for name, value in options.items() if value is not None}
        headers = {"Content-Type": "application/json"}
        content = json.dumps({**document, **given}).encode()
        return (yield from self.read(views.Plan, Call("POST", "/v1/plan", (), headers, content)))

    def get(self, job_id: str, wait_s: float, known_state: JobState | None) -> Flow[views.Job]:
        return following.get(self, job_id, wait_s, known_state)

    def wait(self, job_id: str, timeout_s: float | None, states: States | None) -> Flow[views.Job]:
        return following.wait_for_state(self, job_id, timeout_s, frozenset(_states(states)))

    def jobs(self, chosen: JobFilter, page_size: int) -> Stream[views.Job]:
        query = (*chosen.params(), *params(limit=page_size))
        cursor: str | None = None
        while True:
            call = Call("GET", "/v1/jobs", (*query, *params(cursor=cursor)))
            page = yield from self.read(views.JobPage, call)
            for job in page.items:
                yield Item(job)
            cursor = page.next_cursor
            if cursor is None:
                return

    def resolve(self, reference: str, *, arrays: bool = False) -> Flow[str]:
        """The id of the one job that is meant; with `arrays` also that of an array."""
        kinds = "(job|array)" if arrays else "job"
        if re.fullmatch(rf"{kinds}-[0-9a-z]{{26}}", reference):
            return reference
        found: dict[str, views.Job] = {}
        for chosen in _meant(reference, arrays):
            num = 1 if reference == "@last" else errors.MAX_CANDIDATES + 1
            call = Call("GET", "/v1/jobs", (*chosen.params(), *params(limit=num)))
            page = yield from self.read(views.JobPage, call)
            for job in page.items:
                found[(chosen.collapse_arrays and job.array_id) or job.id] = job
        if len(found) > 1:
            raise errors.AmbiguousJob(reference, list(found.values()), ids=list(found))
        for one in found:
            return one
        raise _not_found(reference)

    def array(self, array_id: str) -> Flow[views.JobArray]:
        return arrays_of_jobs.get(self, array_id)

    def wait_array(
        self, array_id: str, timeout_s: float | None, states: States | None
    ) -> Flow[views.JobArray]:
        return arrays_of_jobs.wait(self, array_id, timeout_s, frozenset(_states(states)))

    def cancel_array(self, array_id: str) -> Flow[views.JobArray]:
        return arrays_of_jobs.cancel(self, array_id)

    def delete_array(self, array_id: str) -> Flow[None]:
        return arrays_of_jobs.delete(self, array_id)

    def cancel(self, job_id: str) -> Flow[views.Job]:
        call = Call("POST", f"/v1/jobs/{segment(job_id)}/cancel")
        return (yield from self.read(views.Job, call))

    def delete(self, job_id: str) -> Flow[None]:
        yield from self.send(Call("DELETE", f"/v1/jobs/{segment(job_id)}"))

    def metrics(
        self,
        job_id: str,
        keys: Sequence[str] | None,
        rank: int | None,
        after_step: int | None,
        max_points: int | None,
        *,
        until_step: int | None,
        in_order: bool,
        times: bool,
    ) -> Flow[views.Metrics]:
        call = following.metrics_call(
            job_id,
            keys,
            rank,
            after_step,
            max_points,
            until_step=until_step,
            in_order=in_order,
            times=times,
        )
        return (yield from self.read(views.Metrics, call))

    def follow_metrics(
        self,
        job_id: str,
        keys: Sequence[str] | None,
        rank: int | None,
        after: Mapping[str, int] | None,
    ) -> Stream[views.Point]:
        return following.follow_metrics(self, job_id, keys, rank, after or {})

    def system_metrics(
        self,
        job_id: str,
        keys: Sequence[str] | None,
        rank: int | None,
        after_time: int | None,
        max_points: int | None,
    ) -> Flow[views.SystemMetrics]:
        query = (
            *(("keys", key) for key in keys or ()),
            *params(rank=rank, after_time=after_time, max_points=max_points),
        )
        call = Call("GET", f"/v1/jobs/{segment(job_id)}/metrics/system", query)
        return (yield from self.read(views.SystemMetrics, call))

    def newest_system_metrics(self, job_id: str) -> Flow[views.SystemSample]:
        call = Call("GET", f"/v1/jobs/{segment(job_id)}/metrics/system/newest")
        return (yield from self.read(views.SystemSample, call))

    def logs(
        self, job_id: str, rank: int | None, attempt: int | None, follow: bool
    ) -> Stream[views.LogLine]:
        cursor: str | None = None
        clock = self.connection.retry.clock
        path = f"/v1/jobs/{segment(job_id)}/logs"
        wait_s = LONG_POLL_S if follow else 0.0
        while True:
            asked = clock()
            query = params(rank=rank, attempt=attempt, cursor=cursor, wait_s=wait_s or None)
            call = Call("GET", path, query, wait_s=wait_s)
            page = yield from self.read(views.LogPage, call, patient=follow)
            for line in page.items:
                yield Item(line)
            cursor = page.next_cursor
            if page.complete or not (page.items or follow):
                return
            yield from self.pause_if_hurried(asked, wait_s, changed=bool(page.items))

    def events(self, job_id: str, after_seq: int) -> Stream[views.Event]:
        path = f"/v1/jobs/{segment(job_id)}/events"
        while True:
            call = Call("GET", path, params(after_seq=after_seq))
            page = yield from self.read(views.EventPage, call)
            for event in page.items:
                yield Item(event)
                after_seq = event.seq
            if not page.items:
                return

    def follow(self, job_id: str, after_seq: int) -> Stream[views.Event]:
        return following.follow_events(self, job_id, after_seq)

    def attempts(self, job_id: str) -> Flow[list[views.Attempt]]:
        call = Call("GET", f"/v1/jobs/{segment(job_id)}/attempts")
        return (yield from self.read(views.AttemptPage, call)).items

    def checkpoints(self, job_id: str) -> Flow[list[views.Checkpoint]]:
        call = Call("GET", f"/v1/jobs/{segment(job_id)}/checkpoints")
        return (yield from self.read(views.CheckpointPage, call)).items

    def checkpoint_files(self, job_id: str, step: int) -> Flow[list[views.CheckpointFile]]:
        call = Call("GET", f"/v1/jobs/{segment(job_id)}/checkpoints/{step}/files")
        return (yield from self.read(views.CheckpointFilePage, call)).items

    def artifacts(self, job_id: str) -> Flow[list[views.Artifact]]:
        call = Call("GET", f"/v1/jobs/{segment(job_id)}/artifacts")
        return (yield from self.read(views.ArtifactPage, call)).items

    def explain(self, job_id: str) -> Flow[views.Explanation]:
        call = Call("GET", f"/v1/jobs/{segment(job_id)}/explain")
        return (yield from self.read(views.Explanation, call))

    def cluster(self) -> Flow[views.Cluster]:
        return (yield from self.read(views.Cluster, Call("GET", "/v1/cluster")))

    def download(
        self,
        job_id: str,
        dest: str | PathLike[str],
        artifact: str | None,
        on_progress: OnProgress | None,
    ) -> Flow[list[Path]]:
        found = yield from self.artifacts(job_id)
        files = downloads.artifact_files(job_id, found, artifact)
        return (yield from downloads.fetch_all(self, files, dest, on_progress))

    def download_checkpoint(
        self, job_id: str, step: int, dest: str | PathLike[str], on_progress: OnProgress | None
    ) -> Flow[list[Path]]:
        found = yield from self.checkpoint_files(job_id, step)
        files = downloads.checkpoint_files(job_id, step, found)
        return (yield from downloads.fetch_all(self, files, dest, on_progress))
