"""Rounds whose clients are outside of the cluster: publishing a model, and waiting for updates.

Nothing of a round is in this process alone. Its model and the updates are files in the storage of
the job, by a name that depends on the weights; so the next attempt, which begins with the same
weights, finds the updates that came in, and none is counted twice.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dray import spec, train
from dray.secure_aggregation.messages import MaskingPhase
from dray.spec.federated import Http
from dray.train import files, storage_room
from dray.train.storage_room import StorageError
from ray_workers.shared import round_files
from ray_workers.shared.frames import RoundReport
from ray_workers.shared.heartbeat import HeartbeatPage
from ray_workers.shared.job_log import log
from ray_workers.shared.round_files import SentUpdate
from ray_workers.training.core.errors import LeaveRequested
from ray_workers.training.core.workload import Workload
from ray_workers.training.data.prefetcher import Feeding
from ray_workers.training.data.sampler import Batch
from ray_workers.training.parallel.federated.client_batches import RoundShare
from ray_workers.training.parallel.federated.collection_rules import Collection, Next, next_of
from ray_workers.training.parallel.federated.rounds import Participant, RoundPlan, Rounds
from ray_workers.training.parallel.federated.storage_listing import names_below
from ray_workers.training.parallel.federated.update_checks import Verdict, judged
from ray_workers.training.parallel.strategy import StrategyContext

LOOK_S = 0.2
"""Seconds between two looks at what came in; of a storage that is no folder, `REMOTE_LOOK_S`."""
REMOTE_LOOK_S = 2.0


_DATA_OF_CLIENTS = (
    *("decimal", "delimiter", "encoding", "missing", "missing_columns", "validation_fraction"),
)
"""Fields of `data` that hold for the files of clients as well."""


class DamagedUpdateError(Exception):
    """The parts of an update are not what its announcement says."""


@dataclass(frozen=True)
class CollectedShare(RoundShare):
    """A round that is over. Rank 0 has all of it."""

    sent: Mapping[int, SentUpdate]
    """By client."""
    folder: str
    """URL of the files of the round."""

    def update_of(self, client: int, num_elements: int) -> Tensor:
        """Raises DamagedUpdateError where a part has changed since the update came in."""
        return read_update(self.folder, self.sent[client], num_elements)


def read_update(folder: str, sent: SentUpdate, num_elements: int) -> Tensor:
    """float32 (elements,), on the CPU. DamagedUpdateError; StorageError."""
    num_bytes = num_elements * round_files.ELEMENT_BYTES
    content = read_parts(folder, sent.client, sent.sha256, num_bytes)
    return torch.frombuffer(content, dtype=torch.float32)


def read_parts(folder: str, client: int, sha256: str, num_bytes: int) -> bytearray:
    """The bytes that a client has sent in parts. DamagedUpdateError; StorageError."""
    content = bytearray()
    for part in range(round_files.num_parts(num_bytes)):
        url = f"{folder}/{round_files.part_path(client, part)}"
        try:
            content += read_file(url)
        except FileNotFoundError:
            raise DamagedUpdateError(f"its part {part} is missing") from None
    if len(content) != num_bytes:
        raise DamagedUpdateError("its shape is not that of the model")
    if hashlib.sha256(content).hexdigest() != sha256:
        raise DamagedUpdateError("its bytes are not those that the client announced")
    return content


def read_file(url: str) -> bytes:
    """FileNotFoundError; StorageError for any other fault."""
    try:
        return files.read(url)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StorageError(f"{url} can't be read: {error}") from error


def empty_batch(plan: RoundPlan) -> Batch:
    """A batch of a rank that has no sample: clients have them."""
    return Batch(0, torch.empty(0, dtype=torch.int64), plan.num_samples, is_empty=True)


class UpdateCollector:
    """The feed of the rank that aggregates: a round is its batch, and updates are the samples."""

    def __init__(
        self, given: StrategyContext, num_elements: int, model: Callable[[], dict[str, Tensor]]
    ) -> None:
        """model: the tensors that clients begin a round with."""
        options = given.spec.federated
        assert options is not None
        assert options.http is not None
        self._http: Http = options.http
        assert options.deadline_s is not None
        self._deadline_s = options.deadline_s
        self._options = options
        self._workload: Workload = given.workload
        self._document = given.spec
        self._page: HeartbeatPage = given.page
        self._url = given.rounds_url
        self._num_elements = num_elements
        self._model = model
        self._rounds = Rounds(options, (), given.spec.train.seed)
        self._form: tuple[str, int] | None = None
        """(SHA-256, bytes), once it is published."""
        self._failing_since: float | None = None
        """Since when the storage does not answer."""
        self._look_s = LOOK_S if files.local_path(self._url) is not None else REMOTE_LOOK_S

    def at(self, step: int) -> Feeding:
        """Publish the round, and wait until it is over. LeaveRequested if the rank is to leave."""
        opening = self._publish(step)
        folder = f"{self._url}/{opening.name}"
        taken = _Taken(folder, self._num_elements, self._options.max_update_norm)
        self._wait(opening, taken)
        share = self._share(step, opening, taken)
        return Feeding(share.plan.num_samples, [share])

    def end_batches(self, *_: object) -> None:
        """A round is one step."""

    def close(self) -> None:
        """Nothing is read ahead."""

    def _wait(self, opening: RoundReport, taken: _Taken) -> None:
        """Until the round is over; the service knows of its beginning and its end."""
        late_at = time.monotonic() + self._deadline_s

        def look() -> None:
            taken.look(self._page.move)

        self._look_for(look)
        self._report(replace(opening, received=sorted(taken.clients)))
        while True:
            state = Collection(
                *(self._asked(opening), opening.clients is None, opening.quorum),
                *(taken.accepted, taken.refused),
            )
            step = next_of(state, is_late=time.monotonic() >= late_at)
            if step is Next.END:
                break
            if step is Next.ASK_ALL:
                opening = replace(opening, clients=None, received=sorted(taken.clients))
                self._report(opening)
                continue
            self._pause()
            self._look_for(look)
        self._report(replace(opening, is_open=False, received=sorted(taken.clients)))

    def _asked(self, opening: RoundReport) -> frozenset[int]:
        clients = opening.clients
        return frozenset(range(self._options.clients) if clients is None else clients)

    def _pause(self) -> None:
        """Before the next look. LeaveRequested if the rank is to leave."""
        if self._page.is_asked_to_leave:
            raise LeaveRequested
        self._page.move()  # clients may take hours
        time.sleep(self._look_s)

    def _look_for(self, look: Callable[[], None]) -> None:
        """StorageError once the storage has not answered for `storage_room.WAIT_S` seconds: in the
        hours of a round it may fail for a moment."""
        try:
            look()
        except StorageError as error:
            if self._failing_since is None:
                self._failing_since = time.monotonic()
                log(f"the updates of the round can't be read, which is tried again: {error}")
            elif time.monotonic() - self._failing_since > storage_room.WAIT_S:
                raise
        else:
            self._failing_since = None

    def _report(self, report: RoundReport) -> None:
        train.emit(report.KIND, report.body())

    def _publish(self, number: int, nonce: str = "") -> RoundReport:
        """Have the files of the round in the storage, and those of older rounds no more. nonce: of
        a round that no other attempt may take up."""
        with TemporaryDirectory(prefix="dray-round-") as scratch:
            path = Path(scratch, round_files.MODEL)
            save_file(self._model(), path)
            size_bytes, sha256 = files.measure(path)
            digest = hashlib.sha256(f"{sha256}{nonce}".encode()).hexdigest() if nonce else sha256
            name = round_files.round_name(number, digest)
            self._store(path, f"{name}/{round_files.MODEL}")
            if self._form is None:
                form = Path(scratch, round_files.FORM)
                form.write_text(json.dumps(_form(self._document, self._workload, Path(scratch))))
                size, digest = files.measure(form)
                self._store(form, round_files.FORM)
                self._form = digest, size
        self._delete_old(number, name)
        everyone = self._options.clients_per_round == self._options.clients
        return RoundReport(
            number=number,
            name=name,
            is_open=True,
            clients=None if everyone else self._rounds.chosen(number),
            quorum=self._options.least_updates,
            deadline_s=self._deadline_s,
            num_elements=self._num_elements,
            model_sha256=sha256,
            model_size_bytes=size_bytes,
            form_sha256=self._form[0],
            form_size_bytes=self._form[1],
            received=[],
            awaits=round_files.UPDATE,
            update_bytes=self._num_elements * round_files.ELEMENT_BYTES,
        )

    def _store(self, path: Path, name: str) -> None:
        url = f"{self._url}/{name}"

        def store() -> None:
            files.store(path, url)

        storage_room.wait_for_room(f"the round's {path.name}", store, waiting=self._page.move)

    def _delete_old(self, number: int, name: str) -> None:
        """All but this round and the one before, which an attempt repeats if no checkpoint is of
        it. A request that was under way when a round ended may have left files in any."""
        for each in names_below(self._url):
            found = round_files.number_of(each)
            if found is not None and each != name and found != number - 1:
                files.remove_folder(f"{self._url}/{each}")

    def _share(self, number: int, opening: RoundReport, taken: _Taken) -> CollectedShare:
        sent = [taken.sent[client] for client in sorted(taken.accepted | taken.readable)]
        most = self._http.max_samples
        participants = [
            Participant(one.client, min(one.num_samples, most), one.num_steps, attacks=False)
            for one in sent
        ]
        plan = self._plan(number, participants, taken.clients)
        folder = f"{self._url}/{opening.name}"
        owners, by_client = [0] * len(sent), {one.client: one for one in sent}
        return CollectedShare(empty_batch(plan), [], plan, owners, None, by_client, folder)

    def _plan(self, number: int, participants: Sequence[Participant], came: Set[int]) -> RoundPlan:
        chosen = self._rounds.chosen(number)
        lost = [client for client in chosen if client not in came]
        gone = dict.fromkeys(lost, MaskingPhase.MASKED_INPUT)
        return RoundPlan(number, participants, len(chosen), 0, gone)


def _form(document: spec.JobSpec, workload: Workload, folder: Path) -> dict[str, Any]:
    """The facts that a client needs to know besides the weights: the form of the model's inputs and
    outputs, as a result has it, and the parts of the document that training goes by. The place of
    the job's own data, and its environment, are not among them.

    folder: an empty one, for a moment.
    """
    workload.write_results(workload.model, {}, 0, folder)
    form: dict[str, Any] = json.loads((folder / "config.json").read_text())
    whole = document.model_dump(mode="json")
    data = {name: whole["data"][name] for name in _DATA_OF_CLIENTS}
    is_table = "target" in form
    data |= {"source": "file:///private", "format": "csv" if is_table else "images"}
    if is_table:
        data["target"] = form["target"]
    shown = {name: whole[name] for name in ("version", "recipe", "model", "train", "federated")}
    return form | {"spec": shown | {"data": data}}


class _Taken:
    """The updates of a round that came in, each looked at once."""

    def __init__(self, folder: str, num_elements: int, max_norm: float) -> None:
        self._folder = folder
        self._num_elements = num_elements
        self._max_norm = max_norm
        self.sent: dict[int, SentUpdate] = {}
        self.accepted: set[int] = set()
        self.readable: set[int] = set()
        """Clients whose updates are refused, which can be read all the same."""
        self._damaged: set[int] = set()

    @property
    def refused(self) -> set[int]:
        return self.readable | self._damaged

    @property
    def clients(self) -> set[int]:
        return self.accepted | self.refused

    def look(self, moved: Callable[[], None]) -> None:
        """Take in what is new. The first update of a client counts, and no other."""
        for name in names_below(f"{self._folder}/{round_files.UPDATES}"):
            stem, _, suffix = name.partition(".")
            if suffix != "json" or not stem.isdecimal() or int(stem) in self.clients:
                continue
            moved()
            self._take(int(stem))

    def _take(self, client: int) -> None:
        try:
            content = read_file(f"{self._folder}/{round_files.update_path(client)}")
            sent = SentUpdate.from_json(content)
            if sent.client != client:
                raise ValueError("it is another client's")
            update = read_update(self._folder, sent, self._num_elements)
        except (DamagedUpdateError, ValueError) as error:
            log(f"the update of client {client} is refused: {error}")
            self._damaged.add(client)
            return
        self.sent[client] = sent
        verdict, _ = judged(update, self._num_elements, self._max_norm)
        (self.accepted if verdict is Verdict.ACCEPTED else self.readable).add(client)
