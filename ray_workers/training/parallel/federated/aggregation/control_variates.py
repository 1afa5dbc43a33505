"""SCAFFOLD's estimates of how far each client's gradient is from that of all (Karimireddy et al.
2020, arXiv:1910.06378, algorithm 1 with option II)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ray_workers.shared.memory_limit import memory_here
from ray_workers.training.core.errors import RoundsError
from ray_workers.training.parallel.federated.client_training import Flat
from ray_workers.training.parallel.federated.rounds import Participant


class ControlChange(NamedTuple):
    """The changes of the control variates in a round."""

    of_clients: Mapping[int, Tensor]
    of_server: Tensor
    """To be added."""


class ControlVariates:
    """Of the server and of all clients, on every rank: a rank may play any client. Those of the
    clients are in the host's memory."""

    def __init__(self, flat: Flat, num_clients: int, device: torch.device) -> None:
        _check_memory(num_clients, flat.num_elements)
        self._num_parameters = sum(parameter.numel() for parameter in flat.parameters)
        self._server = torch.zeros(flat.num_elements, device=device)
        self._clients = torch.zeros(num_clients, flat.num_elements)

    def correction(self, client: int) -> Tensor:
        """The vector that is added to the gradients of a client."""
        return self._server - self._clients[client].to(self._server)

    def change(
        self, participants: Sequence[Participant], updates: Tensor, lr: float
    ) -> ControlChange:
        """After a round in which these clients sent these updates, (participants, elements)."""
        if lr < torch.finfo(torch.float32).tiny:  # a step of 0 does not tell the gradient
            return ControlChange({}, torch.zeros_like(self._server))
        of_clients: dict[int, Tensor] = {}
        total = torch.zeros_like(self._server, dtype=torch.float64)
        for one, update in zip(participants, updates, strict=True):
            own = self._clients[one.client].to(self._server)
            new = own - self._server - update / (one.num_steps * lr)
            if not torch.isfinite(new).all():  # by a rate near 0, which magnifies the update
                continue
            new[self._num_parameters :] = 0.0  # buffers have no gradient to correct
            total += new.double() - own.double()
            of_clients[one.client] = new.to(self._clients)
        return ControlChange(of_clients, (total / len(self._clients)).float())

    def commit(self, change: ControlChange) -> None:
        for client, control in change.of_clients.items():
            self._clients[client] = control
        self._server += change.of_server

    def state_dict(self) -> dict[str, Any]:
        return {"server": self._server, "clients": self._clients}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._server.copy_(state["server"])
        self._clients.copy_(state["clients"])


def _check_memory(num_clients: int, num_elements: int) -> None:
    """RoundsError if the node can't hold those of all clients: without it the rank would be killed
    once enough of them are not 0."""
    needed, there = 4 * num_clients * num_elements, memory_here()
    if needed > there:
        raise RoundsError(
            f"scaffold keeps a vector of {num_elements:,} numbers for each of {num_clients:,} "
            f"clients, {needed / 1e9:.1f} GB on each rank, and a node has {there / 1e9:.1f} GB: "
            "take fewer federated.clients, a smaller model, or another federated.algorithm"
        )
