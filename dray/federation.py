"""Training as a client of a federated job. torch is imported only when it is needed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

_NEEDED = frozenset(
    {"fsspec", "numpy", "PIL", "safetensors", "tokenizers", "torch", "torchmetrics"}
)


class ClientTrainer(Protocol):
    """Trains on the client's data. Implemented in `ray_workers.training.clients.outside_client`."""

    def train(self, number: int) -> Any:
        """Train the round's model in the folder, and return the update."""

    def answer(
        self, session: str, number: int, num_elements: int, awaits: str, message: bytes
    ) -> Any:
        """Return the response in a phase of secure aggregation."""


def trainer_of(folder: Path, data: str | os.PathLike[str]) -> Callable[[int], ClientTrainer]:
    """Return a function that takes the number of a client and creates the client's trainer. The
    function must not be called until `folder` contains the job's form.

    Raises ValueError immediately if the data does not exist, because the job might not begin for
    hours. The returned function raises ImportError if the packages of `dray[client]` are missing,
    and ValueError if the data does not fit the job.
    """
    if not Path(data).exists():
        raise ValueError(f"{data}: no such file or folder")

    def make(client: int) -> ClientTrainer:
        try:
            from ray_workers.training.clients.outside_client import DataError, OutsideClient
        except ModuleNotFoundError as error:
            if error.name not in _NEEDED:
                raise
            raise ImportError(
                f"a federated client needs the package {error.name}: pip install 'dray[client]'",
                name=error.name,
            ) from error
        try:
            return OutsideClient(folder, Path(data), client)
        except DataError as error:
            raise ValueError(str(error)) from error

    return make
