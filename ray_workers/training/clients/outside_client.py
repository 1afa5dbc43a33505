"""Trains a client of a federated job on the client's own machine.

The client's data never leave this process. Only updates and a few numbers are sent.
"""

from __future__ import annotations

import hashlib
import json
import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from dray import spec
from dray.secure_aggregation.messages import MaskingPhase, MessageRefused
from ray_workers.recipes import RECIPES
from ray_workers.recipes.private_data import PrivateData
from ray_workers.training.core.errors import DataError as DataError
from ray_workers.training.data.device_dataset import InMemorySamples
from ray_workers.training.data.sampler import derive_seed
from ray_workers.training.devices import CPU
from ray_workers.training.parallel.federated.aggregation.update_checks import (
    Verdict,
    judged,
    reason,
)
from ray_workers.training.parallel.federated.client_batches import batches_of
from ray_workers.training.parallel.federated.client_training import ClientTraining, client_lr
from ray_workers.training.parallel.federated.masking_values import loss_value, outside_settings
from ray_workers.training.parallel.gradients import EngineParts
from ray_workers.training.parallel.strategy import autocast

if TYPE_CHECKING:
    from dray.secure_aggregation.client import MaskingClient

FORM, MODEL, UPDATE = "config.json", "model.safetensors", "update.bin"
VALIDATED_AT_ONCE = 1024


class LocalUpdate(NamedTuple):
    """An update that is ready to be sent. The first six fields have the same names in the API
    request."""

    sha256: str
    num_samples: int
    num_steps: int
    loss: float
    num_val_samples: int
    val_loss: float | None
    path: Path
    """The file that contains the numbers of the update."""


class MaskedAnswer(NamedTuple):
    content: bytes | None
    """None if the client can't respond in this round; it can participate in the next round."""
    path: Path | None
    """The file that contains the masked update. The update is sent in parts before the response."""
    note: str | None
    """A message for the client's user."""


class _LostToRoundError(Exception):
    """The client can't respond in this round."""


class OutsideClient:
    """A client of a federated job. The client's folder contains the job's form and, during each
    round, the model of the round."""

    def __init__(self, folder: Path, data: Path, client: int) -> None:
        """Raises DataError if the data do not match the form and the model in the folder."""
        self._folder = folder
        self._client = client
        form = json.loads((folder / FORM).read_text())
        self._masking_version: int = form.get("masking_version", 1)  # missing in older forms
        document = spec.JobSpec.model_validate(form["spec"])
        assert document.recipe is not None
        assert document.federated is not None
        self._train, self._federated = document.train, document.federated
        recipe = RECIPES[document.recipe]
        loaded = recipe.load(folder)
        assert recipe.private_data is not None, "the job document was checked"
        self._data: PrivateData = recipe.private_data(loaded, document, data)
        self._samples = InMemorySamples(self._data.inputs, self._data.targets)
        self._model = loaded.model
        in_precision = partial(autocast, self._train.precision, CPU)
        parts = EngineParts(self._model, self._data.loss_sum, in_precision)
        self._training = ClientTraining(parts, self._train, self._federated)
        self._split(document.data.validation_fraction)
        self._masking: MaskingClient | None = None
        self._session = ""

    def _split(self, fraction: float) -> None:
        """Split the samples into training and validation samples, in the same way in every
        round."""
        num_samples = len(self._data.targets)
        seed = derive_seed("client split", self._train.seed, self._client)
        order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed))
        num_val = min(round(fraction * num_samples), num_samples - 1)
        self._validation, self._own = order[:num_val].sort().values, order[num_val:].sort().values

    def train(self, number: int) -> LocalUpdate:
        """Train the round's model, which is in the folder, and return the update."""
        update, steps, loss, val_loss = self._update(number)
        content = update.numpy().astype("<f4").data
        return LocalUpdate(
            *(self._write(content), len(self._own), steps, loss),
            *(len(self._validation), val_loss, self._folder / UPDATE),
        )

    def answer(
        self, session: str, number: int, num_elements: int, awaits: str, message: bytes
    ) -> MaskedAnswer:
        """Return the client's response in a phase of a round with secure aggregation.

        session: the name of the round. message: the server's message to this client.
        """
        try:
            return self._answer(session, number, num_elements, MaskingPhase(awaits), message)
        except (MessageRefused, _LostToRoundError) as error:
            return MaskedAnswer(None, None, f"can no longer participate in this round: {error}")

    def _answer(
        self, session: str, number: int, num_elements: int, phase: MaskingPhase, message: bytes
    ) -> MaskedAnswer:
        from dray.secure_aggregation.client import MaskingClient  # needs an optional package

        if phase is MaskingPhase.ADVERTISE_KEYS and self._session != session:
            settings = outside_settings(self._federated, session, num_elements)
            version = self._masking_version
            self._masking = MaskingClient(f"{self._client}", settings, version)
            self._session = session
        masking = self._masking
        if masking is None or (self._session, masking.phase) != (session, phase):
            raise _LostToRoundError(
                "the client's secrets for this round were lost, for example because the client "
                "restarted"
            )
        if phase is not MaskingPhase.MASKED_INPUT:
            return MaskedAnswer(masking.answer(message), None, None)
        http = self._federated.http
        assert http is not None
        values, loss = self._values_of(number)
        masking.provide(values, min(len(self._own), http.max_samples))
        sha256 = self._write(masking.answer(message))
        note = f"has masked its update; the training loss is {loss:.4g}"
        return MaskedAnswer(sha256.encode(), self._folder / UPDATE, note)

    def _values_of(self, number: int) -> tuple[Any, float]:
        """Return the numbers to mask (the update, then the loss), and the loss. Raises
        _LostToRoundError if the server would reject the unmasked update."""
        update, _steps, loss, _val_loss = self._update(number)
        most = self._federated.max_update_norm
        verdict, norm = judged(update, len(update), most)
        if verdict is not Verdict.ACCEPTED:
            raise _LostToRoundError(f"not sending the update: {reason(verdict, norm, most)}")
        return np.append(update.numpy(), loss_value(loss, most)), loss

    def _update(self, number: int) -> tuple[Tensor, int, float, float | None]:
        """Return (float32 update on the CPU, number of steps, mean training loss, validation loss
        of the round's model)."""
        self._model.load_state_dict(load_file(self._folder / MODEL))
        val_loss = self._validate()
        self._model.train()
        options, federated = self._train, self._federated
        steps = federated.steps_of(len(self._own))
        lr = client_lr(options, number, federated.rounds)
        torch.manual_seed(derive_seed("client step", options.seed, number, self._client))
        seed = options.seed, number, self._client
        batches = batches_of(self._samples, self._own, steps, federated.batch_size, *seed)
        update, loss = self._training.train(batches, lr, None)
        return update.detach().float().cpu(), steps, loss, val_loss

    @torch.no_grad()
    def _validate(self) -> float | None:
        """Return the mean loss of the round's model; None if there are no samples or the loss is
        not finite."""
        self._model.eval()
        total = 0.0
        for numbers in torch.split(self._validation, VALIDATED_AT_ONCE):
            inputs, targets = self._samples.take(numbers)
            if len(numbers):
                total += float(self._data.validation_loss_sum(self._model(inputs), targets))
        mean = total / max(1, len(self._validation))
        return mean if len(self._validation) and math.isfinite(mean) else None

    def _write(self, content: Any) -> str:
        """Write the update's file, and return its SHA-256."""
        (self._folder / UPDATE).write_bytes(content)
        return hashlib.sha256(content).hexdigest()
