"""Clients of federated jobs as flows: inviting them, and the calls of a client itself."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from dray import errors, views
from dray._http.calls import LONG_POLL_S, Calls, params
from dray._http.downloads import RemoteFile, fetch_all
from dray._http.transport import Call, Flow, Run, Sleep, segment

JSON = {"Content-Type": "application/json"}
BINARY = {"Content-Type": "application/octet-stream"}
UPDATE = "update"
"""The word for what a round awaits of its clients where there is no secure aggregation."""
FORM, MODEL = "config.json", "model.safetensors"
"""The names under which the trainer finds these files."""

GIVEN_UP_S = 10.0
"""Between two looks whether a round is over in which the client's training diverged."""
FULL_S = 60.0
"""Before files are sent again to a storage that was full."""

OnRound = Callable[[str], None]
"""Called with a sentence about what the client does."""


class ClientTrainer(Protocol):
    """Trains on the client's data: `ray_workers.training.clients.outside_client`."""

    def train(self, number: int) -> Any:
        """The update of this round, whose model is in the folder."""

    def answer(
        self, session: str, number: int, num_elements: int, awaits: str, message: bytes
    ) -> Any:
        """The answer in a phase of secure aggregation."""


MakeTrainer = Callable[[int], ClientTrainer]
"""Client's number -> its trainer, once the form and a model are in the folder."""


def invite(calls: Calls, job_id: str, clients: int) -> Flow[list[views.Invitation]]:
    content = json.dumps({"clients": clients}).encode()
    call = Call("POST", f"{_job(job_id)}/clients", (), JSON, content)
    return (yield from calls.read(views.InvitationPage, call)).items


def clients(calls: Calls, job_id: str) -> Flow[views.FederatedClientPage]:
    call = Call("GET", f"{_job(job_id)}/clients")
    return (yield from calls.read(views.FederatedClientPage, call))


def revoke(calls: Calls, job_id: str, client: int) -> Flow[None]:
    yield from calls.send(Call("DELETE", f"{_job(job_id)}/clients/{client}"))


def join(
    calls: Calls, job_id: str, folder: Path, make_trainer: MakeTrainer, tell: OnRound
) -> Flow[views.JobState]:
    """Take part in the rounds of a job until it ends; its last state.

    Whatever is lost on the way, the server or this client, is made up for by asking for the newest
    round again.
    """
    trainer: ClientTrainer | None = None
    given_up: tuple[str | None, str | None] | None = None
    while True:
        asked = calls.connection.retry.clock()
        query = params(wait_s=LONG_POLL_S)
        call = Call("GET", f"{_base(job_id)}/round", query, wait_s=LONG_POLL_S)
        view = yield from calls.read(views.FederatedRound, call, patient=True)
        if view.phase is views.RoundPhase.OVER:
            return view.job_state
        if view.phase is views.RoundPhase.WAITING:
            yield from calls.pause_if_hurried(asked, LONG_POLL_S, changed=False)
            continue
        if (view.name, view.awaits) == given_up:
            yield Sleep(GIVEN_UP_S)
            continue
        try:
            yield from _fetch(calls, job_id, view, folder)
            if trainer is None:
                trainer = yield Run(partial(make_trainer, view.client))
            assert trainer is not None
            if view.awaits != UPDATE:
                answer = yield from _answer(calls, job_id, view, trainer)
                if answer.said is not None:
                    tell(f"round {view.number}: client {view.client} {answer.said}")
                if answer.content is None:
                    given_up = (view.name, view.awaits)
                continue
            tell(f"round {view.number}: client {view.client} trains")
            update = yield Run(partial(trainer.train, view.number or 0))
            if not math.isfinite(update.loss):
                tell(f"round {view.number}: not sent: the training diverged on this client's data")
                given_up = (view.name, view.awaits)
                continue
            yield from _send(calls, job_id, view, update)
            tell(f"round {view.number}: sent, with a loss of {update.loss:.4g} on the way")
        except (errors.RoundOver, errors.UpdateRefused) as error:
            tell(f"round {view.number}: not sent: {error.problem.detail}")
        except errors.QuotaExceeded as error:
            tell(f"round {view.number}: the server takes no files now: {error.problem.detail}")
            yield Sleep(FULL_S)
        except errors.IntegrityError:
            yield Sleep(1.0)  # the round ended in the middle of a download, and has other weights


def _fetch(calls: Calls, job_id: str, view: views.FederatedRound, folder: Path) -> Flow[None]:
    """Have the form and the round's model in the folder; the form is the same in every round."""
    base = _base(job_id)
    assert view.form_sha256 is not None
    assert view.model_sha256 is not None
    files = [
        RemoteFile(f"{base}/form", FORM, view.form_size_bytes or 0, view.form_sha256),
        RemoteFile(
            f"{base}/rounds/{segment(view.name or '')}/model",
            MODEL,
            view.model_size_bytes or 0,
            view.model_sha256,
        ),
    ]
    yield from fetch_all(calls, files, folder, None)


def _answer(
    calls: Calls, job_id: str, view: views.FederatedRound, trainer: ClientTrainer
) -> Flow[Any]:
    """Answer in a phase of secure aggregation; the answer, which may be none."""
    name, phase = view.name or "", view.awaits or ""
    base = f"{_base(job_id)}/rounds/{segment(name)}"
    call = Call("GET", f"{base}/messages/{segment(phase)}")
    message = (yield from calls.send(call, patient=True)).content
    facts = (name, view.number or 0, view.num_elements or 0, phase)
    answer = yield Run(partial(trainer.answer, *facts, message))
    if answer.path is not None:
        yield from _send_parts(calls, base, answer.path, view.part_bytes or 1)
    if answer.content is not None:
        call = Call("PUT", f"{base}/answers/{segment(phase)}", (), BINARY, answer.content)
        yield from calls.send(call, patient=True)
    return answer


def _send_parts(calls: Calls, base: str, path: Path, part_bytes: int) -> Flow[None]:
    for part in range(-(-path.stat().st_size // part_bytes)):
        content: bytes = yield Run(partial(_part_of, path, part, part_bytes))
        call = Call("PUT", f"{base}/parts/{part}", (), BINARY, content)
        yield from calls.send(call, patient=True)


def _send(calls: Calls, job_id: str, view: views.FederatedRound, update: Any) -> Flow[None]:
    """Send the parts of an update, and then the update."""
    base = f"{_base(job_id)}/rounds/{segment(view.name or '')}"
    yield from _send_parts(calls, base, update.path, view.part_bytes or 1)
    said: Mapping[str, Any] = {k: v for k, v in update._asdict().items() if k != "path"}
    call = Call("POST", f"{base}/update", (), JSON, json.dumps(said, allow_nan=False).encode())
    yield from calls.send(call, patient=True)


def _part_of(path: Path, part: int, part_bytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(part * part_bytes)
        return file.read(part_bytes)


def _job(job_id: str) -> str:
    return f"/v1/jobs/{segment(job_id)}"


def _base(job_id: str) -> str:
    return f"/v1/federated/{segment(job_id)}"
