"""Training of one client in a round, from the server's weights to an update."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from dray import spec
from ray_workers.training.core.schedule import lr_at
from ray_workers.training.data.prefetcher import Piece
from ray_workers.training.parallel.gradients import EngineParts
from ray_workers.training.parallel.optim.optimizer_step import clip_gradients
from ray_workers.training.parallel.optim.optimizers import build_optimizer, set_lr

PROXIMAL_MU = 0.01


def client_lr(options: spec.Train, round_number: int, num_rounds: int) -> float:
    """Return the clients' learning rate in a round."""
    return lr_at(
        round_number,
        total_steps=num_rounds,
        lr=options.optimizer.lr,
        schedule=options.schedule,
    )


class Flat:
    """The parameters of a model and its floating-point buffers (running means) as one vector.

    With privacy, buffers are left out, because noise would corrupt constant buffers, such as the
    means of a table's columns.
    """

    def __init__(self, model: nn.Module, *, has_buffers: bool) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.buffers = [b for b in model.buffers() if has_buffers and b.is_floating_point()]
        self.integers = {
            name: buffer
            for name, buffer in model.named_buffers()
            if has_buffers and not buffer.is_floating_point()
        }
        """Integer buffers, such as counters, which can't be averaged."""
        self._tensors = [p.detach() for p in self.parameters] + self.buffers
        self._others = [b for b in model.buffers() if not (has_buffers and b.is_floating_point())]
        self._sizes = [tensor.numel() for tensor in self._tensors]
        self.num_elements = sum(self._sizes)

    def change_since(self, before: Flat) -> Tensor:
        """Return these tensors minus the tensors of `before`: float32 (elements,)."""
        return torch.cat(
            [t.reshape(-1) for t in torch._foreach_sub(self._tensors, before._tensors)]
        )

    def values(self) -> Tensor:
        """Return a copy of the tensors: float32 (elements,)."""
        return torch.cat([tensor.reshape(-1).float() for tensor in self._tensors])

    def integer_values(self) -> Tensor:
        """Return a copy of the integer buffers: int64 (elements of the integer buffers,)."""
        return torch.cat([each.reshape(-1).long() for each in self.integers.values()])

    @torch.no_grad()
    def write_integers(self, values: Tensor) -> None:
        sizes = [each.numel() for each in self.integers.values()]
        for buffer, part in zip(self.integers.values(), torch.split(values, sizes), strict=True):
            buffer.copy_(part.view(buffer.shape))

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        """Copy these values into the tensors."""
        parameters, buffers = self.split(flat)
        torch._foreach_copy_(self._tensors, [*parameters, *buffers])

    def copy_from(self, other: Flat) -> None:
        torch._foreach_copy_(self._tensors, other._tensors)
        for own, others in zip(self._others, other._others, strict=True):
            own.copy_(others)

    def split(self, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Split a vector into (parameters, buffers), as views with the shapes of the tensors."""
        parts = [
            part.view(tensor.shape)
            for part, tensor in zip(torch.split(flat, self._sizes), self._tensors, strict=True)
        ]
        return parts[: len(self.parameters)], parts[len(self.parameters) :]


class ClientTraining:
    """Trains one client after another, using a separate copy of the model."""

    def __init__(self, parts: EngineParts, options: spec.Train, federated: spec.Federated) -> None:
        has_buffers = federated.privacy is None
        self._server = Flat(parts.model, has_buffers=has_buffers)
        self._model = copy.deepcopy(parts.model)
        self._own = Flat(self._model, has_buffers=has_buffers)
        self._loss_sum, self._autocast = parts.loss_sum, parts.autocast
        self._max_grad_norm = options.max_grad_norm
        self._optimizer = build_optimizer(self._model, options.optimizer)
        self._mu = 0.0
        if federated.algorithm == "fedprox":
            self._mu = federated.proximal_mu or PROXIMAL_MU

    def train(
        self, batches: Iterable[Piece], lr: float, correction: Tensor | None
    ) -> tuple[Tensor, float]:
        """Take one step per batch. Returns (the update, the mean loss over the samples during
        training).

        correction: a vector that is added to each gradient, in the order of `Flat`'s parameters.
        """
        self._own.copy_from(self._server)
        self._optimizer.state.clear()  # a client begins with a fresh optimizer
        set_lr(self._optimizer, lr)
        added = None if correction is None else self._own.split(correction)[0]
        losses: list[Tensor] = []
        num_samples = 0
        for inputs, targets in batches:
            with self._autocast():
                loss = self._loss_sum(self._model(inputs), targets)
            torch.autograd.backward(loss / len(inputs))
            losses.append(loss.detach())
            num_samples += len(inputs)
            self._correct(added)
            self._optimizer.step()
            for parameter in self._own.parameters:  # faster than zero_grad for a small model
                parameter.grad = None
        update = self._own.change_since(self._server)
        return update, float(torch.stack(losses).double().sum()) / num_samples

    @property
    def integer_buffers(self) -> Tensor:
        """The integer buffers of the last client, as returned by `Flat.integer_values`."""
        return self._own.integer_values()

    @torch.no_grad()
    def _correct(self, added: Sequence[Tensor] | None) -> None:
        """Add fedprox's proximal term to the client's gradient, clip the gradient, and add
        scaffold's correction."""
        indices = [n for n, p in enumerate(self._own.parameters) if p.grad is not None]
        parameters: list[Tensor] = [self._own.parameters[index] for index in indices]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self._mu:
            begun: list[Tensor] = [self._server.parameters[index] for index in indices]
            away = torch._foreach_sub(parameters, begun)
            torch._foreach_add_(gradients, away, alpha=self._mu)
        if self._max_grad_norm is not None:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
            clip_gradients(self._model, self._max_grad_norm, norm)
        if added is not None:
            torch._foreach_add_(gradients, [added[index] for index in indices])
