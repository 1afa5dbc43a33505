"""Use cases for a federated job's client outside the cluster.

The service writes the client's updates to the job's storage, where the aggregating rank reads them.
The client and the rank never communicate directly.
"""

from __future__ import annotations

import hashlib
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
from service.db.repositories import federation as repository
from service.db.session import Database, touch
from service.db.types import storable
from service.domain.errors import BadUpdate, JoinTokenUnknown, RoundOver, UpdateRefused
from service.federation.tokens import digest_of
from service.ingest.open_rounds import sent_name
from service.storage.quota import refuse_if_full
from service.storage.storage import Storage, in_storage_thread

PLAYING = frozenset({JobState.STARTING, JobState.RUNNING, JobState.RECOVERING})
SENT_IN_PARTS = (round_files.UPDATE, MaskingPhase.MASKED_INPUT)


@dataclass(frozen=True)
class RoundFile:
    """A round's file that clients can read."""

    key: str
    size_bytes: int
    sha256: str


class ClientRounds:
    """The rounds of a job, as one client can access them with its token.

    Each method raises JoinTokenUnknown if the job has no client with this token. Methods that take
    the `name` of a round raise RoundOver if this round is not open.
    """

    def __init__(self, database: Database, storage: Storage, job_id: str, token: str) -> None:
        self._database = database
        self._storage = storage
        self._job_id = job_id
        self.digest = digest_of(token)
        """The token's hash, which is stored in the database."""
        self._prefix = round_files.rounds_prefix(job_id)

    async def look(self) -> views.FederatedRound:
        """Return the newest round, as the client sees it."""
        at = await self._standing()
        if at.joined_at is None:

            def joined(session: Session) -> None:
                touch(session)
                repository.note_joined(session, self.digest, self._database.time(session))

            await self._database.write(joined)
        state = JobState(at.state)
        known = {
            field: value
            for field, value in at._mapping.items()
            if field in views.FederatedRound.model_fields
        }
        return views.FederatedRound(
            phase=_phase(at, state),
            job_state=state,
            part_bytes=None if at.name is None else round_files.PART_BYTES,
            **known,
        )

    async def model(self, name: str) -> RoundFile:
        """Return the file with the weights from which clients start the round."""
        at = await self._open_round(name)
        key = f"{self._prefix}/{name}/{round_files.MODEL}"
        return RoundFile(key, at.model_size_bytes, at.model_sha256)

    async def form(self) -> RoundFile:
        """Return the file that describes the model and the training. Raises RoundOver if no round
        has been opened yet."""
        at = await self._standing()
        if at.name is None:
            raise RoundOver("no round has been opened yet", hint="poll the round until it is open")
        key = f"{self._prefix}/{round_files.FORM}"
        return RoundFile(key, at.form_size_bytes, at.form_sha256)

    async def size_of_part(self, name: str, part: int) -> int:
        """Return the size of a part of the client's update. Raises BadUpdate if the update has no
        part with this number, or if no update is expected in this phase. Raises UpdateRefused."""
        at = await self._open_round(name)
        _refuse_unwanted(at)
        await self._database.read(refuse_if_full)
        most = round_files.num_parts(at.update_bytes)
        if at.awaits not in SENT_IN_PARTS or part >= most:
            raise BadUpdate(
                f"an update of this model has {most} parts, numbered from 0: there "
                f"is no part {part}"
            )
        return round_files.part_size(at.update_bytes, part)

    async def put_part(self, name: str, part: int, content: bytes) -> None:
        """Store a part, replacing it if the client has already sent it."""
        at = await self._open_round(name)
        _refuse_unwanted(at)
        wanted = round_files.part_size(at.update_bytes, part)
        if len(content) != wanted:
            raise BadUpdate(
                f"part {part} has {len(content)} bytes instead of {wanted}: an update of this "
                f"model has {at.update_bytes} bytes",
                hint=(
                    "send the values of the update in little-endian order without a header, in "
                    f"parts of {round_files.PART_BYTES} bytes"
                ),
            )
        key = f"{self._prefix}/{name}/{round_files.part_path(at.client, part)}"
        await in_storage_thread(self._storage.write_bytes, key, content)

    async def send(self, name: str, update: UpdateRequest) -> tuple[views.UpdateReceipt, bool]:
        """Pass an update to the aggregating rank after all its parts have been sent.

        Return (receipt, is_new). The call can be repeated, since only a client's first update
        in a round counts. Raises BadUpdate if a part is missing.
        """
        at = await self._open_round(name, round_files.UPDATE)
        sent = SentUpdate(client=at.client, **update.model_dump())
        path = round_files.update_path(at.client)
        return await self._hand_over(at, path, sent.to_json(), update.sha256)

    async def message(self, name: str, phase: str) -> bytes:
        """Return the message for the client in a phase of secure aggregation; empty in the first
        phase."""
        at = await self._open_round(name, phase)
        _refuse_unwanted(at)
        key = f"{self._prefix}/{name}/{round_files.message_path(phase, at.client)}"
        try:
            return await in_storage_thread(self._storage.read_bytes, key)
        except FileNotFoundError:
            return b""

    async def answer(
        self, name: str, phase: str, content: bytes
    ) -> tuple[views.UpdateReceipt, bool]:
        """Like `send`, but pass a client's response in a phase of secure aggregation to the rank.

        In the phase `masked_input`, the response is the SHA-256 of the parts.
        """
        at = await self._open_round(name, phase)
        path = round_files.answer_path(phase, at.client)
        return await self._hand_over(at, path, content, hashlib.sha256(content).hexdigest())

    async def _hand_over(
        self, at: Row[Any], path: str, content: bytes, sha256: str
    ) -> tuple[views.UpdateReceipt, bool]:
        """Record what the client has sent, then write the file that the rank reads.

        Because of this order, a retry can write the same file again, but the client can't send
        different content.
        """
        _refuse_unwanted(at, but=sha256)
        folder, is_update = f"{self._prefix}/{at.name}", at.awaits in SENT_IN_PARTS
        if is_update:
            await in_storage_thread(self._check_parts, folder, at)

        def note(session: Session) -> bool:
            touch(session)
            now = self._database.time(session)
            sent = self.digest, _sent_name(at), sha256, now
            return repository.note_sent(session, *sent, is_update=is_update)

        is_new = await self._database.write(note)
        if not is_new:  # another request was faster, or this request is repeated
            now = await self._open_round(at.name, at.awaits)
            _refuse_unwanted(now, but=sha256)
        await in_storage_thread(self._storage.write_bytes, f"{folder}/{path}", content)
        return views.UpdateReceipt(round=at.number, client=at.client), is_new

    def _check_parts(self, folder: str, at: Row[Any]) -> None:
        for part in range(round_files.num_parts(at.update_bytes)):
            path = round_files.part_path(at.client, part)
            try:
                size = self._storage.size_bytes(f"{folder}/{path}")
            except FileNotFoundError:
                raise BadUpdate(
                    f"part {part} of the update is missing",
                    hint="send this part, then send the update again",
                ) from None
            assert size == round_files.part_size(at.update_bytes, part)

    async def _standing(self) -> Row[Any]:
        def work(session: Session) -> Row[Any] | None:
            if not storable(self._job_id):
                return None
            return repository.standing(session, self._job_id, self.digest)

        at = await self._database.look_up(work)
        if at is None:
            raise JoinTokenUnknown(
                "the token does not belong to a client of this job",
                hint="the job's owner creates tokens with `dray federate invite JOB`; send one as "
                "`Authorization: Bearer TOKEN`",
            )
        return at

    async def _open_round(self, name: str, awaits: str | None = None) -> Row[Any]:
        """Return the round if it is open and, if `awaits` is given, waiting for this data."""
        at = await self._standing()
        if not _is_open(at) or at.name != name:
            now_open = f"; round {at.name} is open" if _is_open(at) else ""
            raise RoundOver(
                f"round {name[:64]!r} is over{now_open}", hint="request the round again"
            )
        if awaits not in (None, at.awaits):
            raise RoundOver(
                f"round {name[:64]!r} is waiting for {at.awaits}, not {awaits[:32]!r}",
                hint="request the round again",
            )
        return at


def names_of_sent(name: str) -> set[str]:
    """Return the values of `sent_round` that indicate that the client's update for the round has
    arrived."""
    phases = (MaskingPhase.MASKED_INPUT, MaskingPhase.CONSISTENCY_CHECK, MaskingPhase.UNMASK)
    return {name, *(f"{name}/{phase}" for phase in phases)}


def _sent_name(at: Row[Any]) -> str:
    return sent_name(at.name, at.awaits)


def _phase(at: Row[Any], state: JobState) -> RoundPhase:
    if state.is_terminal:
        return RoundPhase.OVER
    is_wanted = _is_open(at) and _is_asked(at) and at.sent_round != _sent_name(at)
    return RoundPhase.OPEN if is_wanted else RoundPhase.WAITING


def _is_open(at: Row[Any]) -> bool:
    is_of_now = at.name is not None and at.attempt == at.job_attempt
    return bool(is_of_now and at.is_open and JobState(at.state) in PLAYING)


def _is_asked(at: Row[Any]) -> bool:
    return at.clients is None or at.client in at.clients


def _refuse_unwanted(at: Row[Any], but: str | None = None) -> None:
    """Raise UpdateRefused if the client is not selected, or if it has already sent an update with a
    SHA-256 other than `but`."""
    if not _is_asked(at):
        raise UpdateRefused(f"client {at.client} is not selected in round {at.number}")
    if at.sent_round == _sent_name(at) and at.sent_sha256 != but:
        raise UpdateRefused(
            f"client {at.client} has already sent its {at.awaits} in round {at.number}"
        )
