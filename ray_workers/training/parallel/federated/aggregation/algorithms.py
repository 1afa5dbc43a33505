"""The algorithms of federated learning: FedAvg, and how other algorithms differ from it.

FedProx's proximal term is part of the clients' steps, for which `ClientTraining` reads the
document.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from dray.spec import Federated
from dray.spec.federated.parts import ServerOptimizer
from ray_workers.shared.memory_limit import memory_here
from ray_workers.training.core.errors import RoundsError
from ray_workers.training.parallel.federated.client_training import Flat
from ray_workers.training.parallel.federated.rounds import Participant


class Algorithm:
    """FedAvg (McMahan et al. 2017, arXiv:1602.05629), with two hooks for other algorithms:
    `configure` is called before a client trains, and `aggregate` once the updates of a round have
    been received.

    Every rank has an instance, because a rank can simulate any client.
    """

    needs_each = False
    """Whether a round needs the individual updates, not only their mean."""

    def __init__(self, options: Federated, flat: Flat, device: torch.device) -> None:
        self._options = options

    def configure(self, client: int) -> Tensor | None:
        """Return the vector to add to the gradients of a client in the next round; None if there is
        none."""
        return None

    def aggregate(self, sent: Sequence[Participant], updates: Tensor | None, lr: float) -> Any:
        """Return the changes to the algorithm's state in a round that counts; None if there are no
        changes. The changes are passed to `commit`. `updates` has the shape (participants,
        elements) if `needs_each` is set, and is None otherwise."""
        return None

    def commit(self, findings: Any) -> None:
        """Apply the result of `aggregate`. Called after the server's step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the algorithm's part of a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the algorithm's part of a checkpoint."""

    def optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Build the server's optimizer."""
        server = self._options.server
        return torch.optim.SGD(groups, lr=server.lr, momentum=server.momentum)

    @property
    def buffer_rate(self) -> float:
        """The factor for changes to running means. With a factor above 1, a running variance could
        become negative."""
        return min(1.0, self._options.server.lr)


class Adaptive(Algorithm):
    """FedAdam and FedYogi (Reddi et al. 2021, arXiv:2003.00295, algorithm 2)."""

    buffer_rate = 1.0
    """An adaptive optimizer doesn't simply multiply the update by its learning rate."""

    def optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        is_yogi = self._options.algorithm == "fedyogi"
        return AdaptiveServerOptimizer(groups, self._options.server, yogi=is_yogi)


class ControlChange(NamedTuple):
    """The changes to the control variates in a round."""

    of_clients: Mapping[int, Tensor]
    of_server: Tensor
    """The change to add to the server's control variate."""


class Scaffold(Algorithm):
    """SCAFFOLD (Karimireddy et al. 2020, arXiv:1910.06378, algorithm 1 with option II): estimates
    how much each client's gradient differs from the mean gradient. The clients' estimates are kept
    in host memory.
    """

    needs_each = True

    def __init__(self, options: Federated, flat: Flat, device: torch.device) -> None:
        super().__init__(options, flat, device)
        _check_memory(options.clients, flat.num_elements)
        self._num_parameters = sum(parameter.numel() for parameter in flat.parameters)
        self._server = torch.zeros(flat.num_elements, device=device)
        self._clients = torch.zeros(options.clients, flat.num_elements)

    def configure(self, client: int) -> Tensor:
        return self._server - self._clients[client].to(self._server)

    def aggregate(
        self, sent: Sequence[Participant], updates: Tensor | None, lr: float
    ) -> ControlChange:
        assert updates is not None
        # If the learning rate is 0 or subnormal, the gradient can't be computed from the update.
        if lr < torch.finfo(torch.float32).tiny:
            return ControlChange({}, torch.zeros_like(self._server))
        of_clients: dict[int, Tensor] = {}
        total = torch.zeros_like(self._server, dtype=torch.float64)
        for one, update in zip(sent, updates, strict=True):
            own = self._clients[one.client].to(self._server)
            new = own - self._server - update / (one.num_steps * lr)
            # The division overflows if the learning rate is close to 0.
            if not torch.isfinite(new).all():
                continue
            new[self._num_parameters :] = 0.0  # buffers have no gradient to correct
            total += new.double() - own.double()
            of_clients[one.client] = new.to(self._clients)
        return ControlChange(of_clients, (total / len(self._clients)).float())

    def commit(self, findings: ControlChange) -> None:
        for client, control in findings.of_clients.items():
            self._clients[client] = control
        self._server += findings.of_server

    def state_dict(self) -> dict[str, Any]:
        return {"controls": {"server": self._server, "clients": self._clients}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._server.copy_(state["controls"]["server"])
        self._clients.copy_(state["controls"]["clients"])


ALGORITHMS: Mapping[str, type[Algorithm]] = {
    "fedavg": Algorithm,
    "fedprox": Algorithm,
    "fedadam": Adaptive,
    "fedyogi": Adaptive,
    "scaffold": Scaffold,
}


class AdaptiveServerOptimizer(Optimizer):
    """FedAdam and FedYogi. Unlike Adam, these optimizers have no bias correction, and their
    variances start at the square of `tau`."""

    def __init__(self, groups: Any, options: ServerOptimizer, *, yogi: bool) -> None:
        super().__init__(groups, {"lr": options.lr, "betas": options.betas, "tau": options.tau})
        self._yogi = yogi

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)

    def _step(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        (beta_1, beta_2), tau = group["betas"], group["tau"]
        state = self.state[parameter]
        if not state:
            state["mean"] = torch.zeros_like(parameter)
            state["variance"] = torch.full_like(parameter, tau**2)
        mean, variance = state["mean"], state["variance"]
        mean.mul_(beta_1).add_(gradient, alpha=1 - beta_1)
        square = gradient.square()
        if self._yogi:
            sign = torch.sign(variance - square)
            variance.sub_(square.mul_(sign), alpha=1 - beta_2)
        else:
            variance.mul_(beta_2).add_(square, alpha=1 - beta_2)
        parameter.addcdiv_(mean, variance.sqrt().add_(tau), value=-group["lr"])


def _check_memory(num_clients: int, num_elements: int) -> None:
    """Raise RoundsError if the vectors of all clients don't fit into the node's memory. Without
    this check, the rank would be killed once enough vectors were nonzero."""
    needed, available = 4 * num_clients * num_elements, memory_here()
    if needed > available:
        raise RoundsError(
            f"scaffold keeps a vector of {num_elements:,} numbers for each of {num_clients:,} "
            f"clients, which requires {needed / 1e9:.1f} GB on each rank, but a node has "
            f"{available / 1e9:.1f} GB: reduce federated.clients, use a smaller model, or choose "
            "another federated.algorithm"
        )
