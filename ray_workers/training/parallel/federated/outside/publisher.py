"""Publishes a round for clients outside the cluster as files in the job's storage."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from dray import spec
from dray.secure_aggregation.messages import VERSION
from dray.train import files, storage_faults
from ray_workers.shared import round_files
from ray_workers.shared.frames import RoundReport
from ray_workers.training.core.workload import Workload
from ray_workers.training.parallel.federated.outside.sent_updates import names_below
from ray_workers.training.parallel.strategy import StrategyContext

DATA_OF_CLIENTS = (
    *("decimal", "delimiter", "encoding", "missing", "missing_columns", "validation_fraction"),
)
"""Fields of the document's `data` that also apply to the clients' files."""


class RoundPublisher:
    """Publishes the model for each round and, only once, the form that all rounds share (see
    `form_of`)."""

    def __init__(
        self, given: StrategyContext, num_elements: int, model: Callable[[], dict[str, Tensor]]
    ) -> None:
        """model: returns the tensors from which clients start a round."""
        self._document = given.spec
        self._workload: Workload = given.workload
        self._waiting = given.page.move
        self._url = given.rounds_url
        self._num_elements = num_elements
        self._model = model
        self._form: tuple[str, int] | None = None
        """(SHA-256, size in bytes) of the form; None until it is published."""

    def publish(
        self, number: int, clients: list[int] | None, quorum: int, deadline_s: float, nonce: str
    ) -> RoundReport:
        """Write the files of the round to the storage, and delete the files of older rounds.

        clients: the clients to ask; None for all. nonce: a string that makes the round's name
        unique, so that no other attempt can continue the round, or an empty string if other
        attempts may continue it.
        """
        with TemporaryDirectory(prefix="dray-round-") as scratch:
            path = Path(scratch, round_files.MODEL)
            save_file(self._model(), path)
            size_bytes, sha256 = files.measure(path)
            digest = hashlib.sha256(f"{sha256}{nonce}".encode()).hexdigest() if nonce else sha256
            name = round_files.round_name(number, digest)
            self.store(path, f"{name}/{round_files.MODEL}")
            if self._form is None:
                form = Path(scratch, round_files.FORM)
                form.write_text(json.dumps(form_of(self._document, self._workload, Path(scratch))))
                size, digest = files.measure(form)
                self.store(form, round_files.FORM)
                self._form = digest, size
        self._delete_old(number, name)
        return RoundReport(
            number=number,
            name=name,
            is_open=True,
            clients=clients,
            quorum=quorum,
            deadline_s=deadline_s,
            num_elements=self._num_elements,
            model_sha256=sha256,
            model_size_bytes=size_bytes,
            form_sha256=self._form[0],
            form_size_bytes=self._form[1],
            received=[],
            awaits=round_files.UPDATE,
            update_bytes=self._num_elements * round_files.ELEMENT_BYTES,
        )

    def store(self, path: Path, name: str) -> None:
        """Write a file to the storage, under a name below the URL of the rounds."""
        url = f"{self._url}/{name}"

        def store() -> None:
            files.store(path, url)

        storage_faults.wait_for_space(f"the round's {path.name}", store, waiting=self._waiting)

    def _delete_old(self, number: int, name: str) -> None:
        """Delete the files of all rounds except for the current round and the previous round. An
        attempt repeats the previous round if there is no newer checkpoint. All older rounds are
        checked, because requests that were in progress when a round ended may have written files
        afterwards."""
        for each in names_below(self._url):
            found = round_files.number_of(each)
            if found is not None and each != name and found != number - 1:
                files.remove_folder(f"{self._url}/{each}")


def form_of(document: spec.JobSpec, workload: Workload, folder: Path) -> dict[str, Any]:
    """Return the form: the information that a client needs in addition to the weights. The form
    describes the model's inputs and outputs in the same way as a job's result, and contains the
    parts of the document that affect training. It omits the job's environment and the path of the
    job's own data.

    folder: an empty folder for temporary files.
    """
    workload.write_results(workload.model, {}, 0, folder)
    form: dict[str, Any] = json.loads((folder / "config.json").read_text())
    whole = document.model_dump(mode="json")
    data = {name: whole["data"][name] for name in DATA_OF_CLIENTS}
    is_table = "target" in form
    data |= {"source": "file:///private", "format": "csv" if is_table else "images"}
    if is_table:
        data["target"] = form["target"]
    shown = {name: whole[name] for name in ("version", "recipe", "model", "train", "federated")}
    return form | {"spec": shown | {"data": data}, "masking_version": VERSION}
