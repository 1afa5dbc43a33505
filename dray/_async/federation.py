"""Federated jobs: manage clients outside the cluster, and participate as a client."""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

from dray import errors, views
from dray._async.downloads import DownloadCalls
from dray._http.downloads import RemoteFile
from dray._http.transport import LONG_POLL_S, Call, params, segment
from dray.federation import ClientTrainer, trainer_of

BINARY = {"Content-Type": "application/octet-stream"}
UPDATE = "update"
"""Value of `awaits` in a round without secure aggregation."""
FORM, MODEL = "config.json", "model.safetensors"
"""File names that the trainer expects."""

GIVEN_UP_S = 10.0
"""Polling interval, in seconds, for the rest of a round in which the client's training diverged."""
FULL_S = 60.0
"""Seconds to wait before sending files again after the server's storage was full."""


class FederationCalls(DownloadCalls):
    async def invite_clients(self, job_id: str, clients: int = 1) -> list[views.Invitation]:
        """Invite clients outside the cluster to a federated job. Only this call returns the tokens
        of the invited clients. Raises TooManyClients if the job would then have more clients than
        its document allows."""
        call = Call.with_json("POST", _clients(job_id), {"clients": clients})
        page = await self._read(views.InvitationPage, call)
        return page.items

    async def federated_clients(self, job_id: str) -> views.FederatedClientPage:
        """Return the invited clients of a job, and its latest round."""
        return await self._read(views.FederatedClientPage, Call("GET", _clients(job_id)))

    async def revoke_client(self, job_id: str, client: int) -> None:
        """Revoke a client's token. Raises ClientNotFound if the job has no such client."""
        await self._send(Call("DELETE", f"{_clients(job_id)}/{client}"))

    async def join(
        self,
        job_id: str,
        data: str | PathLike[str],
        *,
        on_round: Callable[[str], None] | None = None,
    ) -> views.JobState:
        """Participate in a federated job as a client outside the cluster, using a client's token,
        until the job ends. Returns the final state of the job.

        data: a table with the columns of the job's data or, for images, a folder with a subfolder
        for each class. The data is never sent, only model updates, numbers of samples and mean
        losses. on_round: called with a message about each round. A client that was stopped can call
        this method again at any time. Raises ImportError if the packages of `dray[client]` are
        missing, ValueError if the data does not fit the job, and Unauthorized after the token has
        been revoked.
        """
        with tempfile.TemporaryDirectory(prefix="dray-client-") as folder:
            make_trainer = trainer_of(Path(folder), data)
            log = on_round or (lambda _sentence: None)
            return await self._take_part(job_id, Path(folder), make_trainer, log)

    async def _take_part(
        self,
        job_id: str,
        folder: Path,
        make_trainer: Callable[[int], ClientTrainer],
        log: Callable[[str], None],
    ) -> views.JobState:
        """Participate in the rounds of a job until it ends. Returns the final state of the job.

        If the server or this client is interrupted, the client continues by requesting the latest
        round again.
        """
        trainer: ClientTrainer | None = None
        given_up: tuple[str | None, str | None] | None = None
        while True:
            asked = self._clock()
            query = params(wait_s=LONG_POLL_S)
            call = Call("GET", f"{_base(job_id)}/round", query, wait_s=LONG_POLL_S)
            view = await self._read(views.FederatedRound, call, patient=True)
            if view.phase is views.RoundPhase.OVER:
                return view.job_state
            if view.phase is views.RoundPhase.WAITING:
                await self._pause_if_hurried(asked, LONG_POLL_S, changed=False)
                continue
            if (view.name, view.awaits) == given_up:
                await asyncio.sleep(GIVEN_UP_S)
                continue
            try:
                await self._fetch_round(job_id, view, folder)
                if trainer is None:
                    trainer = await asyncio.to_thread(make_trainer, view.client)
                if not await self._do_round(job_id, view, trainer, log):
                    given_up = (view.name, view.awaits)
            except (errors.RoundOver, errors.UpdateRefused) as error:
                log(f"round {view.number}: no update was sent: {error.problem.detail}")
            except errors.QuotaExceeded as error:
                log(
                    f"round {view.number}: the server currently accepts no files: "
                    f"{error.problem.detail}"
                )
                await asyncio.sleep(FULL_S)
            except errors.IntegrityError:
                # The round ended during the download, so the weights have changed.
                await asyncio.sleep(1.0)

    async def _do_round(
        self,
        job_id: str,
        view: views.FederatedRound,
        trainer: ClientTrainer,
        log: Callable[[str], None],
    ) -> bool:
        """Train, or respond in a phase of secure aggregation. Returns whether a response was
        sent."""
        if view.awaits != UPDATE:
            answer = await self._answer(job_id, view, trainer)
            if answer.note is not None:
                log(f"round {view.number}: client {view.client} {answer.note}")
            return answer.content is not None
        log(f"round {view.number}: client {view.client} trains")
        update = await asyncio.to_thread(trainer.train, view.number or 0)
        if not math.isfinite(update.loss):
            log(
                f"round {view.number}: no update was sent, because the training diverged on this "
                "client's data"
            )
            return False
        await self._send_update(job_id, view, update)
        log(f"round {view.number}: update sent, mean training loss {update.loss:.4g}")
        return True

    async def _fetch_round(self, job_id: str, view: views.FederatedRound, folder: Path) -> None:
        """Download the round's model, and the form that describes the job's data and training, into
        the folder. The form is the same in every round."""
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
        await self._fetch_all(files, folder, None)

    async def _answer(self, job_id: str, view: views.FederatedRound, trainer: ClientTrainer) -> Any:
        """Respond in a phase of secure aggregation. Returns the response, whose content is None if
        nothing was sent."""
        name, phase = view.name or "", view.awaits or ""
        base = f"{_base(job_id)}/rounds/{segment(name)}"
        call = Call("GET", f"{base}/messages/{segment(phase)}")
        message = await self._send(call, patient=True)
        facts = (name, view.number or 0, view.num_elements or 0, phase)
        answer = await asyncio.to_thread(trainer.answer, *facts, message.content)
        if answer.path is not None:
            await self._send_parts(base, answer.path, view.part_bytes or 1)
        if answer.content is not None:
            call = Call("PUT", f"{base}/answers/{segment(phase)}", (), BINARY, answer.content)
            await self._send(call, patient=True)
        return answer

    async def _send_update(self, job_id: str, view: views.FederatedRound, update: Any) -> None:
        """Send the parts of an update, then the update."""
        base = f"{_base(job_id)}/rounds/{segment(view.name or '')}"
        await self._send_parts(base, update.path, view.part_bytes or 1)
        body = {key: value for key, value in update._asdict().items() if key != "path"}
        await self._send(Call.with_json("POST", f"{base}/update", body), patient=True)

    async def _send_parts(self, base: str, path: Path, part_bytes: int) -> None:
        for part in range(-(-path.stat().st_size // part_bytes)):
            content = await asyncio.to_thread(_part_of, path, part, part_bytes)
            call = Call("PUT", f"{base}/parts/{part}", (), BINARY, content)
            await self._send(call, patient=True)


def _part_of(path: Path, part: int, part_bytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(part * part_bytes)
        return file.read(part_bytes)


def _clients(job_id: str) -> str:
    return f"/v1/jobs/{segment(job_id)}/clients"


def _base(job_id: str) -> str:
    return f"/v1/federated/{segment(job_id)}"
