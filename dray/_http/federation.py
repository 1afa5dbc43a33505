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
FORM, MODEL = "config.json", "model.safetensors"
"""The names under which the trainer finds these files."""

GIVEN_UP_S = 10.0
"""Between two looks whether a round is over in which the client's training diverged."""
FULL_S = 60.0
"""Before files are sent again to a storage that was full."""

OnRound = Callable[[str], None]
"""Called with a sentence about what the client does."""


class Trainer(Protocol):
    """What trains on the client's data: `ray_workers.training.loop.outside_client`."""

    def train(self, number: int) -> Any:
        """The update of this round, whose model is in the folder."""


MakeTrainer = Callable[[int], Trainer]
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
    trainer: Trainer | None = None
    given_up: str | None = None
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
        if view.name == given_up:
            yield Sleep(GIVEN_UP_S)
            continue
        try:
            yield from _fetch(calls, job_id, view, folder)
            if trainer is None:
                trainer = yield Run(partial(make_trainer, view.client))
            tell(f"round {view.number}: client {view.client} trains")
            assert trainer is not None
            update = yield Run(partial(trainer.train, view.number or 0))
            if not math.isfinite(update.loss):
                tell(f"round {view.number}: not sent: the training diverged on this client's data")
                given_up = view.name
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


def _send(calls: Calls, job_id: str, view: views.FederatedRound, update: Any) -> Flow[None]:
    """Send the parts of an update, and then the update."""
    part_bytes = view.part_bytes or 1
    base = f"{_base(job_id)}/rounds/{segment(view.name or '')}"
    size = update.path.stat().st_size
    for part in range(-(-size // part_bytes)):
        content: bytes = yield Run(partial(_part_of, update.path, part, part_bytes))
        call = Call("PUT", f"{base}/parts/{part}", (), BINARY, content)
        yield from calls.send(call, patient=True)
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
