"""The training of a client of a federated job, on the client's own machine.

Its data stay in this process; an update and a few numbers leave it.
"""

from __future__ import annotations

import hashlib
import json
import math
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from dray import spec
from ray_workers.recipes import RECIPES
from ray_workers.recipes.private_data import PrivateData
from ray_workers.training.core.errors import DataError as DataError
from ray_workers.training.core.schedule import lr_at
from ray_workers.training.data.device_dataset import InMemorySamples
from ray_workers.training.data.sampler import derive_seed
from ray_workers.training.parallel.federated.client_batches import batches_of
from ray_workers.training.parallel.federated.client_training import ClientTraining
from ray_workers.training.parallel.strategy import AUTOCAST

FORM, MODEL, UPDATE = "config.json", "model.safetensors", "update.bin"
VALIDATED_AT_ONCE = 1024


class LocalUpdate(NamedTuple):
    """An update that is ready to be sent. The first fields are those of the API's request."""

    sha256: str
    num_samples: int
    num_steps: int
    loss: float
    num_val_samples: int
    val_loss: float | None
    path: Path
    """A file with its numbers."""


class OutsideClient:
    """One client. Its folder has the job's form, and in each round the round's model."""

    def __init__(self, folder: Path, data: Path, client: int) -> None:
        """The folder has the form and a model already. DataError if the data do not fit them."""
        self._folder = folder
        self._client = client
        document = spec.JobSpec.model_validate(json.loads((folder / FORM).read_text())["spec"])
        assert document.recipe is not None
        assert document.federated is not None
        self._train, self._federated = document.train, document.federated
        recipe = RECIPES[document.recipe]
        loaded = recipe.load(folder)
        assert recipe.private_data is not None, "the job's document was checked"
        self._data: PrivateData = recipe.private_data(loaded, document, data)
        self._samples = InMemorySamples(self._data.inputs, self._data.targets)
        self._model = loaded.model
        dtype = AUTOCAST.get(self._train.precision)
        autocast = partial(torch.autocast, "cpu", dtype=dtype) if dtype else nullcontext
        self._training = ClientTraining(
            self._model, self._data.loss_sum, autocast, self._train, self._federated
        )
        self._split(document.data.validation_fraction)

    def _split(self, fraction: float) -> None:
        """Into samples to train with and for validation, the same in every round."""
        num_samples = len(self._data.targets)
        seed = derive_seed("client split", self._train.seed, self._client)
        order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed))
        num_val = min(round(fraction * num_samples), num_samples - 1)
        self._validation, self._own = order[:num_val].sort().values, order[num_val:].sort().values

    @property
    def num_samples(self) -> int:
        return len(self._own)

    def train(self, number: int) -> LocalUpdate:
        """The update of a round, whose model is in the folder."""
        self._model.load_state_dict(load_file(self._folder / MODEL))
        val_loss = self._validate()
        self._model.train()
        options, federated = self._train, self._federated
        steps = federated.local_epochs * -(-len(self._own) // federated.batch_size)
        lr = lr_at(
            number,
            total_steps=federated.rounds,
            lr=options.optimizer.lr,
            schedule=options.schedule,
        )
        torch.manual_seed(derive_seed("client step", options.seed, number, self._client))
        seed = derive_seed("client", options.seed, number, self._client)
        batches = batches_of(self._samples, self._own, steps, federated.batch_size, seed)
        update, loss = self._training.train(batches, lr, None)
        path, sha256 = self._write(update)
        return LocalUpdate(
            sha256, len(self._own), steps, loss, len(self._validation), val_loss, path
        )

    @torch.no_grad()
    def _validate(self) -> float | None:
        """The mean loss of the round's model; None without samples, or if it is not finite."""
        self._model.eval()
        total = 0.0
        for numbers in torch.split(self._validation, VALIDATED_AT_ONCE):
            inputs, targets = self._samples.take(numbers)
            if len(numbers):
                total += float(self._data.validation_loss_sum(self._model(inputs), targets))
        mean = total / max(1, len(self._validation))
        return mean if len(self._validation) and math.isfinite(mean) else None

    def _write(self, update: Tensor) -> tuple[Path, str]:
        content = update.detach().to(torch.float32).cpu().contiguous().numpy().astype("<f4").data
        path = self._folder / UPDATE
        path.write_bytes(content)
        return path, hashlib.sha256(content).hexdigest()
