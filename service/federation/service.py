"""Use cases of federated jobs whose clients are outside of the cluster.

A client has a token, which is stored as its hash and is good for the rounds of one job. Its
updates go to the job's storage by way of the service, and the rank that aggregates finds them
there, so that neither knows of the other.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row
from sqlalchemy.orm import Session

from dray import views
from dray.requests import UpdateRequest
from dray.secure_aggregation.messages import MaskingPhase
from dray.views import JobState, RoundPhase
from ray_workers.shared import round_files
from ray_workers.shared.round_files import SentUpdate
from service.db.models import FederatedClientRow, JobRow
from service.db.repositories import federation as repository
from service.db.session import Database, touch
from service.db.types import storable
from service.domain.errors import (
    BadUpdate,
    ClientNotFound,
    JobFinished,
    JoinTokenUnknown,
    NotFederated,
    RoundOver,
    TooManyClients,
    UpdateRefused,
)
from service.jobs.service import found
from service.storage.quota import refuse_if_full
from service.storage.storage import Storage

JOIN_TOKEN = "dray-join-"
"""How the tokens of clients begin, by which other routes know and refuse them."""


@dataclass(frozen=True)
class RoundFile:
    """A file of a round that clients may read."""

    key: str
    size_bytes: int
    sha256: str


def token_digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


class Federation:
    """`token` is always the digest of a client's token; JoinTokenUnknown if it is none of the
    job's."""

    def __init__(self, database: Database, storage: Storage) -> None:
        self._database = database
        self._storage = storage

    # For the owner of a job.

    async def invite(self, job_id: str, count: int, *, by: str) -> views.InvitationPage:
        """Tokens for `count` more clients. TooManyClients if the document has not so many."""
        tokens = [f"{JOIN_TOKEN}{secrets.token_urlsafe(32)}" for _ in range(count)]

        def work(session: Session) -> views.InvitationPage:
            touch(session)
            job = _federated(session, job_id)
            if JobState(job.state).is_terminal:
                raise JobFinished(f"job {job_id} is {job.state}: it has no more rounds")
            taken = {one.number for one in repository.clients(session, job_id)}
            most = job.spec["federated"]["clients"]
            free = [number for number in range(most) if number not in taken][:count]
            if len(free) < count:
                raise TooManyClients(
                    f"federated.clients is {most}, and {len(taken)} of them are invited",
                    hint=f"`dray federate revoke {job_id} CLIENT` makes room for another one",
                )
            now = self._database.time(session)
            rows = [
                FederatedClientRow(
                    token_sha256=token_digest(token),
                    job_id=job_id,
                    number=number,
                    invited_by=by,
                    created_at=now,
                    num_sent=0,
                )
                for number, token in zip(free, tokens, strict=True)
            ]
            repository.add_clients(session, rows)
            items = [
                views.Invitation(client=number, token=token)
                for number, token in zip(free, tokens, strict=True)
            ]
            return views.InvitationPage(items=items)

        return await self._database.write(work)

    async def clients(self, job_id: str) -> views.FederatedClientPage:
        def work(session: Session) -> views.FederatedClientPage:
            _federated(session, job_id, lock=False)
            rows = repository.clients(session, job_id)
            items = [
                views.FederatedClient(
                    client=row.number,
                    invited_by=row.invited_by,
                    created_at=row.created_at,
                    joined_at=row.joined_at,
                    sent_at=row.sent_at,
                    num_sent=row.num_sent,
                )
                for row in rows
            ]
            newest = repository.newest_round(session, job_id)
            if newest is None:
                return views.FederatedClientPage(items=items)
            return views.FederatedClientPage(
                items=items,
                round=newest.number,
                is_open=newest.is_open,
                closes_at=newest.closes_at,
                quorum=newest.quorum,
                num_sent=sum(row.sent_round in _names_of_sent(newest.name) for row in rows),
            )

        return await self._database.read(work)

    async def revoke(self, job_id: str, number: int) -> None:
        """Let the client's token be good for nothing from now on."""

        def work(session: Session) -> None:
            touch(session)
            _federated(session, job_id)
            if not repository.remove_client(session, job_id, number):
                raise ClientNotFound(
                    f"job {job_id} has no client {number}",
                    hint=f"`dray federate clients {job_id}` shows those that are invited",
                )

        await self._database.write(work)

    # For a client.

    async def look(self, job_id: str, token: str) -> views.FederatedRound:
        """The newest round, as the client is to see it."""
        at = await self._standing(job_id, token)
        if at.joined_at is None:

            def joined(session: Session) -> None:
                touch(session)
                repository.note_joined(session, token, self._database.time(session))

            await self._database.write(joined)
        state = JobState(at.state)
        view = views.FederatedRound(phase=_phase(at, state), client=at.client, job_state=state)
        if at.name is None:
            return view
        return view.model_copy(
            update={
                "number": at.number,
                "name": at.name,
                "closes_at": at.closes_at,
                "quorum": at.quorum,
                "num_elements": at.num_elements,
                "awaits": at.awaits,
                "update_bytes": at.update_bytes,
                "part_bytes": round_files.PART_BYTES,
                "model_sha256": at.model_sha256,
                "model_size_bytes": at.model_size_bytes,
                "form_sha256": at.form_sha256,
                "form_size_bytes": at.form_size_bytes,
            }
        )

    async def model(self, job_id: str, token: str, name: str) -> RoundFile:
        """The weights that clients begin the round with. RoundOver if it is not the open one."""
        at = await self._open_round(job_id, token, name)
        key = f"{round_files.rounds_prefix(job_id)}/{name}/{round_files.MODEL}"
        return RoundFile(key, at.model_size_bytes, at.model_sha256)

    async def form(self, job_id: str, token: str) -> RoundFile:
        """The facts that clients know of the model and the training. RoundOver if no round was
        opened."""
        at = await self._standing(job_id, token)
        if at.name is None:
            raise RoundOver("no round was opened yet", hint="ask for the round, and wait for it")
        key = f"{round_files.rounds_prefix(job_id)}/{round_files.FORM}"
        return RoundFile(key, at.form_size_bytes, at.form_sha256)

    async def size_of_part(self, job_id: str, token: str, name: str, part: int) -> int:
        """The size of a part of the client's update, if that is wanted now. BadUpdate if an update
        has not so many parts; UpdateRefused if the client is not to send one."""
        at = await self._open_round(job_id, token, name)
        _refuse_unwanted(at)
        await self._database.read(refuse_if_full)
        most = round_files.num_parts(at.update_bytes)
        if at.awaits not in _SENT_IN_PARTS or part >= most:
            raise BadUpdate(f"an update of this model has {most} parts, and {part} is none of them")
        return round_files.part_size(at.update_bytes, part)

    async def put_part(self, job_id: str, token: str, name: str, part: int, content: bytes) -> None:
        """Keep a part, in place of what the client has sent as the same part before."""
        at = await self._open_round(job_id, token, name)
        _refuse_unwanted(at)
        wanted = round_files.part_size(at.update_bytes, part)
        if len(content) != wanted:
            raise BadUpdate(
                f"part {part} has {len(content)} bytes and not {wanted}: an update of this model "
                f"has {at.update_bytes}",
                hint="send its numbers in little-endian order and without a header, in parts of "
                f"{round_files.PART_BYTES} bytes",
            )
        key = f"{round_files.rounds_prefix(job_id)}/{name}/{round_files.part_path(at.client, part)}"
        await asyncio.to_thread(self._storage.write_bytes, key, content)

    async def send(
        self, job_id: str, token: str, name: str, said: UpdateRequest
    ) -> tuple[views.UpdateReceipt, bool]:
        """Hand the parts that were sent to the rank that aggregates; and whether that is news.

        Harmless to repeat, and of no effect with another update: the first one of a client in a
        round is the one that counts. BadUpdate if a part is missing.
        """
        at = await self._open_round(job_id, token, name, round_files.UPDATE)
        sent = SentUpdate(client=at.client, **said.model_dump())
        path = round_files.update_path(at.client)
        is_new = await self._hand_over(job_id, token, at, path, sent.to_json(), said.sha256)
        return views.UpdateReceipt(round=at.number, client=at.client), is_new

    async def message(self, job_id: str, token: str, name: str, phase: str) -> bytes:
        """The message to which the client answers in a phase of secure aggregation; empty in the
        first."""
        at = await self._open_round(job_id, token, name, phase)
        _refuse_unwanted(at)
        path = round_files.message_path(phase, at.client)
        key = f"{round_files.rounds_prefix(job_id)}/{name}/{path}"
        try:
            return await asyncio.to_thread(self._storage.read_bytes, key)
        except FileNotFoundError:
            return b""

    async def answer(
        self, job_id: str, token: str, name: str, phase: str, content: bytes
    ) -> tuple[views.UpdateReceipt, bool]:
        """Hand the client's answer in a phase of secure aggregation to the rank that aggregates. As
        `send`. In masked_input the answer is the SHA-256 of the parts."""
        at = await self._open_round(job_id, token, name, phase)
        path = round_files.answer_path(phase, at.client)
        sha256 = hashlib.sha256(content).hexdigest()
        is_new = await self._hand_over(job_id, token, at, path, content, sha256)
        return views.UpdateReceipt(round=at.number, client=at.client), is_new

    async def _hand_over(
        self, job_id: str, token: str, at: Row[Any], path: str, content: bytes, sha256: str
    ) -> bool:
        """Write the file by which the rank knows of what the client has sent, and note so first:
        the file can be written again, and nothing else can be sent. Whether it is news."""
        _refuse_unwanted(at, but=sha256)
        folder = f"{round_files.rounds_prefix(job_id)}/{at.name}"
        if at.awaits in _SENT_IN_PARTS:
            await asyncio.to_thread(self._check_parts, folder, at)

        def note(session: Session) -> bool:
            touch(session)
            now = self._database.time(session)
            is_update = at.awaits in _SENT_IN_PARTS
            return repository.note_sent(
                session, token, _sent_name(at), sha256, now, is_update=is_update
            )

        is_new = await self._database.write(note)
        if not is_new:  # another request came in between, or this one came before
            now = await self._open_round(job_id, token, at.name, at.awaits)
            _refuse_unwanted(now, but=sha256)
        await asyncio.to_thread(self._storage.write_bytes, f"{folder}/{path}", content)
        return is_new

    def _check_parts(self, folder: str, at: Row[Any]) -> None:
        for part in range(round_files.num_parts(at.update_bytes)):
            path = round_files.part_path(at.client, part)
            try:
                size = self._storage.size_bytes(f"{folder}/{path}")
            except FileNotFoundError:
                raise BadUpdate(
                    f"part {part} of the update is missing", hint="send it, and then the update"
                ) from None
            assert size == round_files.part_size(at.update_bytes, part)

    async def _standing(self, job_id: str, token: str) -> Row[Any]:
        def work(session: Session) -> Row[Any] | None:
            return repository.standing(session, job_id, token) if storable(job_id) else None

        at = await self._database.look_up(work)
        if at is None:
            raise join_token_unknown()
        return at

    async def _open_round(
        self, job_id: str, token: str, name: str, awaits: str | None = None
    ) -> Row[Any]:
        """awaits: what the round must await of its clients."""
        at = await self._standing(job_id, token)
        if _is_open(at) and at.name == name and awaits not in (None, at.awaits):
            raise RoundOver(
                f"the round {name[:64]!r} awaits {at.awaits}, not {awaits[:32]!r}",
                hint="ask for the round again",
            )
        if not _is_open(at) or at.name != name:
            now_open = f"; the open one is {at.name}" if _is_open(at) else ""
            raise RoundOver(
                f"the round {name[:64]!r} is over{now_open}", hint="ask for the round again"
            )
        return at


def join_token_unknown() -> JoinTokenUnknown:
    return JoinTokenUnknown(
        "the token is not one of this job's clients",
        hint="the job's owner makes one by `dray federate invite JOB`; it is sent as "
        "`Authorization: Bearer TOKEN`",
    )


def _federated(session: Session, job_id: str, *, lock: bool = True) -> JobRow:
    """NotFederated unless the job has clients outside of the cluster."""
    job = found(session, job_id, lock=lock)
    if (job.spec.get("federated") or {}).get("http") is None:
        raise NotFederated(
            f"job {job_id} has no clients outside of the cluster",
            hint="`federated: {http: {}}` in its document gives it some",
        )
    return job


def _is_open(at: Row[Any]) -> bool:
    is_of_now = at.name is not None and at.attempt == at.job_attempt
    return bool(is_of_now and at.is_open and JobState(at.state) in _PLAYING)


def _sent_name(at: Row[Any]) -> str:
    """By which it is known what a client has sent: an update, or the answer of a phase."""
    return at.name if at.awaits == round_files.UPDATE else f"{at.name}/{at.awaits}"


def _names_of_sent(name: str) -> set[str]:
    """Those that say of a client that its update in the round is there."""
    phases = (MaskingPhase.MASKED_INPUT, MaskingPhase.CONSISTENCY_CHECK, MaskingPhase.UNMASK)
    return {name, *(f"{name}/{phase}" for phase in phases)}


_SENT_IN_PARTS = (round_files.UPDATE, MaskingPhase.MASKED_INPUT)
_PLAYING = frozenset({JobState.STARTING, JobState.RUNNING, JobState.RECOVERING})


def _phase(at: Row[Any], state: JobState) -> RoundPhase:
    if state.is_terminal:
        return RoundPhase.OVER
    is_wanted = _is_open(at) and _is_asked(at) and at.sent_round != _sent_name(at)
    return RoundPhase.OPEN if is_wanted else RoundPhase.WAITING


def _is_asked(at: Row[Any]) -> bool:
    return at.clients is None or at.client in at.clients


def _refuse_unwanted(at: Row[Any], but: str | None = None) -> None:
    """UpdateRefused if the client is not asked for an update, or has sent one. but: the SHA-256 of
    an update that may be sent again."""
    if not _is_asked(at):
        raise UpdateRefused(f"client {at.client} is not asked for an update in round {at.number}")
    if at.sent_round == _sent_name(at) and at.sent_sha256 != but:
        raise UpdateRefused(f"client {at.client} has sent its {at.awaits} in round {at.number}")
