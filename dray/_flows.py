"""What each method of the clients does, as flows over `dray._transport`: no I/O here."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel

from dray import errors, views
from dray._transport import (
    Call,
    Connection,
    Flow,
    Item,
    Retry,
    Run,
    Sleep,
    Stream,
    exchange,
    segment,
)
from dray.documents import load_document
from dray.spec import JobSpec
from dray.views import JobState

Spec = JobSpec | Mapping[str, Any] | str | PathLike[str]

LONG_POLL_S = 30.0
RECONNECT_PATIENCE_S = 60.0
"""How long waiting and following outlive a server that is away, say for a restart."""
PIECE_BYTES = 8 << 20
"""Artifacts come in ranges of this size, so that a broken download goes on where it was."""

V = TypeVar("V", bound=BaseModel)


def _as_json(spec: Spec) -> bytes:
    """The document as the body of a submit; defaults are left to the server."""
    if isinstance(spec, JobSpec):
        document: Any = {
            "version": spec.version,
            **spec.model_dump(mode="json", exclude_unset=True),
        }
    elif isinstance(spec, Mapping):
        document = dict(spec)
    else:
        document = load_document(spec)
    try:
        return json.dumps(document, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.SpecError(f"the job can't be written as JSON: {error}") from None


def _params(**given: str | float | None) -> tuple[tuple[str, str], ...]:
    return tuple((name, f"{value}") for name, value in given.items() if value is not None)


@dataclass(frozen=True)
class Flows:
    """One flow for each method, against one server."""

    connection: Connection

    # The two below are what everything else is made of.

    def _send(self, call: Call, *, patient: bool = False) -> Flow[httpx.Response]:
        retry: Retry = self.connection.retry
        if patient:
            retry = replace(retry, patience_s=max(retry.patience_s, RECONNECT_PATIENCE_S))
        return (yield from exchange(call, retry, base_url=self.connection.url))

    def _read(self, view: type[V], call: Call, *, patient: bool = False) -> Flow[V]:
        response = yield from self._send(call, patient=patient)
        try:
            return view.model_validate_json(response.content)
        except ValueError:
            raise errors.TransportError(
                f"{self.connection.url} answered {call.path} with something that is no "
                f"{view.__name__}: is it a dray server, and no newer than this client?"
            ) from None

    def submit(self, spec: Spec, idempotency_key: str | None) -> Flow[views.Job]:
        headers = {
            "Content-Type": "application/json",
            "Idempotency-Key": idempotency_key or uuid.uuid4().hex,
        }
        content = _as_json(spec)
        return (yield from self._read(views.Job, Call("POST", "/v1/jobs", (), headers, content)))

    def get(
        self,
        job_id: str,
        wait_s: float = 0.0,
        known_state: JobState | None = None,
        *,
        patient: bool = False,
    ) -> Flow[views.Job]:
        params = _params(wait_s=wait_s or None, state=known_state)
        call = Call("GET", f"/v1/jobs/{segment(job_id)}", params, wait_s=wait_s)
        return (yield from self._read(views.Job, call, patient=patient))

    def wait(
        self, job_id: str, timeout_s: float | None, states: Iterable[JobState | str] | None
    ) -> Flow[views.Job]:
        wanted = frozenset(JobState(state) for state in states or ())
        clock = self.connection.retry.clock
        deadline = None if timeout_s is None else clock() + timeout_s
        job = yield from self.get(job_id, patient=True)
        while not (job.state in wanted or job.state.is_terminal):
            asked = clock()
            left_s = LONG_POLL_S if deadline is None else deadline - asked
            if left_s <= 0:
                raise errors.WaitTimeout(job, timeout_s or 0.0)
            wait_s = min(LONG_POLL_S, left_s)
            known = job.state
            job = yield from self.get(job_id, wait_s, known, patient=True)
            yield from self._pause_if_hurried(asked, wait_s, changed=job.state != known)
        return job

    def _pause_if_hurried(self, asked: float, wait_s: float, *, changed: bool) -> Flow[None]:
        """A server that is stopping answers long polls at once: don't spin on it."""
        took_s = self.connection.retry.clock() - asked
        pause_s = min(0.5, wait_s - took_s)
        if not changed and pause_s > 0:
            yield Sleep(pause_s)

    def jobs(
        self,
        states: Iterable[JobState | str] | None,
        queue: str | None,
        labels: Mapping[str, str] | None,
        page_size: int,
    ) -> Stream[views.Job]:
        chosen = [("state", JobState(state).value) for state in states or ()]
        chosen += [("label", f"{key}={value}") for key, value in (labels or {}).items()]
        cursor: str | None = None
        while True:
            params = (*chosen, *_params(queue=queue, limit=page_size, cursor=cursor))
            page = yield from self._read(views.JobPage, Call("GET", "/v1/jobs", params))
            for job in page.items:
                yield Item(job)
            cursor = page.next_cursor
            if cursor is None:
                return

    def cancel(self, job_id: str) -> Flow[views.Job]:
        return (
            yield from self._read(views.Job, Call("POST", f"/v1/jobs/{segment(job_id)}/cancel"))
        )

    def delete(self, job_id: str) -> Flow[None]:
        yield from self._send(Call("DELETE", f"/v1/jobs/{segment(job_id)}"))

    def metrics(
        self,
        job_id: str,
        keys: Sequence[str] | None,
        rank: int | None,
        after_step: int | None,
        max_points: int | None,
    ) -> Flow[views.Metrics]:
        params = (
            *(("keys", key) for key in keys or ()),
            *_params(rank=rank, after_step=after_step, max_points=max_points),
        )
        call = Call("GET", f"/v1/jobs/{segment(job_id)}/metrics", params)
        return (yield from self._read(views.Metrics, call))

    def logs(
        self, job_id: str, rank: int | None, attempt: int | None, follow: bool
    ) -> Stream[views.LogLine]:
        cursor: str | None = None
        clock = self.connection.retry.clock
        path = f"/v1/jobs/{segment(job_id)}/logs"
        wait_s = LONG_POLL_S if follow else 0.0
        while True:
            asked = clock()
            params = _params(rank=rank, attempt=attempt, cursor=cursor, wait_s=wait_s or None)
            call = Call("GET", path, params, wait_s=wait_s)
            page = yield from self._read(views.LogPage, call, patient=follow)
            for line in page.items:
                yield Item(line)
            cursor = page.next_cursor
            if page.complete or not (page.items or follow):
                return
            yield from self._pause_if_hurried(asked, wait_s, changed=bool(page.items))

    def events(self, job_id: str, after_seq: int) -> Stream[views.Event]:
        while True:
            page = yield from self._event_page(job_id, after_seq, 0.0, patient=False)
            for event in page.items:
                yield Item(event)
                after_seq = event.seq
            if not page.items:
                return

    def _event_page(
        self, job_id: str, after_seq: int, wait_s: float, *, patient: bool
    ) -> Flow[views.EventPage]:
        params = _params(after_seq=after_seq, wait_s=wait_s or None)
        call = Call("GET", f"/v1/jobs/{segment(job_id)}/events", params, wait_s=wait_s)
        return (yield from self._read(views.EventPage, call, patient=patient))

    def follow(self, job_id: str, after_seq: int) -> Stream[views.Event]:
        clock = self.connection.retry.clock
        over = False
        while True:
            asked = clock()
            wait_s = 0.0 if over else LONG_POLL_S
            page = yield from self._event_page(job_id, after_seq, wait_s, patient=True)
            for event in page.items:
                yield Item(event)
                after_seq = event.seq
                if event.to_state is not None and event.to_state.is_terminal:
                    return
            if page.items:
                continue
            if over:  # already before this page was asked for: there is no more
                return
            over = (yield from self.get(job_id, patient=True)).state.is_terminal
            if not over:
                yield from self._pause_if_hurried(asked, LONG_POLL_S, changed=False)

    def attempts(self, job_id: str) -> Flow[list[views.Attempt]]:
        call = Call("GET", f"/v1/jobs/{segment(job_id)}/attempts")
        return (yield from self._read(views.AttemptPage, call)).items

    def checkpoints(self, job_id: str) -> Flow[list[views.Checkpoint]]:
        call = Call("GET", f"/v1/jobs/{segment(job_id)}/checkpoints")
        return (yield from self._read(views.CheckpointPage, call)).items

    def artifacts(self, job_id: str) -> Flow[list[views.Artifact]]:
        call = Call("GET", f"/v1/jobs/{segment(job_id)}/artifacts")
        return (yield from self._read(views.ArtifactPage, call)).items

    def explain(self, job_id: str) -> Flow[views.Explanation]:
        call = Call("GET", f"/v1/jobs/{segment(job_id)}/explain")
        return (yield from self._read(views.Explanation, call))

    def cluster(self) -> Flow[views.Cluster]:
        return (yield from self._read(views.Cluster, Call("GET", "/v1/cluster")))

    def download(
        self, job_id: str, dest: str | PathLike[str], artifact: str | None
    ) -> Flow[list[Path]]:
        chosen = _choose((yield from self.artifacts(job_id)), job_id, artifact)
        root = Path(dest)
        targets = [(item, destination(root, item.path)) for item in chosen]
        for item, target in targets:
            yield from self._fetch(job_id, item, target)
        return [target for _, target in targets]

    def _fetch(self, job_id: str, artifact: views.Artifact, target: Path) -> Flow[None]:
        """Ranges into `.part` beside the target, its hash checked before it gets its name."""
        if (yield Run(partial(_matches, target, artifact))):
            return
        part = target.with_name(f".{target.name}.{artifact.sha256[:12]}.part")
        offset: int = yield Run(partial(_begin, part, artifact.size_bytes))
        path = f"/v1/jobs/{segment(job_id)}/artifacts/{segment(artifact.id)}"
        while offset < artifact.size_bytes:
            last = min(offset + PIECE_BYTES, artifact.size_bytes) - 1
            headers = {
                "Accept": "*/*",
                "Accept-Encoding": "identity",
                "Range": f"bytes={offset}-{last}",
            }
            response = yield from self._send(Call("GET", path, (), headers), patient=True)
            if response.status_code != 206:
                offset = 0  # the range was ignored and all of it came
            if not response.content:
                break
            yield Run(partial(_write_at, part, offset, response.content))
            offset += len(response.content)
        yield Run(partial(_finish, part, target, artifact))


def _choose(
    items: Iterable[views.Artifact], job_id: str, wanted: str | None
) -> list[views.Artifact]:
    """What to download: of several attempts' files with one path, the newest."""
    newest: dict[str, views.Artifact] = {}
    for item in sorted(items, key=lambda item: item.created_at):
        if item.id == wanted:
            return [item]
        newest[item.path] = item
    if wanted is None:
        return list(newest.values())
    if wanted in newest:
        return [newest[wanted]]
    raise errors.ArtifactNotFound(
        views.Problem(
            type="about:blank",
            title="Not Found",
            status=404,
            code=errors.ArtifactNotFound.code,
            detail=f"job {job_id} has no artifact {wanted!r}",
            hint=f"it has {', '.join(newest)}" if newest else "it has none yet",
        )
    )


def destination(root: Path, name: str) -> Path:
    """Where the artifact `name` goes under `root`; IntegrityError if that is elsewhere."""
    parts = PurePosixPath(name)
    target = root.joinpath(*parts.parts)
    unsafe = parts.is_absolute() or ".." in parts.parts or "\\" in name or "\0" in name
    if unsafe or not parts.parts or not target.resolve().is_relative_to(root.resolve()):
        raise errors.IntegrityError(f"the artifact path {name!r} leads out of {root}: not fetched")
    return target


def _matches(path: Path, artifact: views.Artifact) -> bool:
    if not path.is_file() or path.stat().st_size != artifact.size_bytes:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == artifact.sha256


def _begin(part: Path, size_bytes: int) -> int:
    """Make the part file; how many of its bytes an earlier download left."""
    part.parent.mkdir(parents=True, exist_ok=True)
    with part.open("ab") as file:
        if file.tell() > size_bytes:
            file.truncate(0)
        return file.seek(0, 2)


def _write_at(part: Path, offset: int, content: bytes) -> None:
    with part.open("r+b") as file:
        file.seek(offset)
        file.truncate()
        file.write(content)


def _finish(part: Path, target: Path, artifact: views.Artifact) -> None:
    if not _matches(part, artifact):
        part.unlink()
        raise errors.IntegrityError(
            f"{artifact.path} came with the wrong size or sha256 (expected {artifact.sha256}) "
            "and was thrown away; download it again"
        )
    part.replace(target)
