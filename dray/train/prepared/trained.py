"""The models and optimizers of a prepared script, of which each rank has a copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dray.train.prepared.anchor import Anchor, parameters_of
from dray.train.prepared.copies import digest, tensors_in

SAMPLED = 64
"""Number of elements that a sample takes from each parameter."""


class Trained:
    """The models' parameters and the optimizers' state, of which all ranks have equal copies."""

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self.models = list(models)
        self.optimizers = list(optimizers)

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of the models and the optimizers, without duplicates."""
        of_models = (parameter for model in self.models for parameter in model.parameters())
        return list(dict.fromkeys((*of_models, *parameters_of(self.optimizers))))

    @property
    def others(self) -> list[Tensor]:
        """The optimizers' parameters that belong to no model."""
        in_models = {id(p) for model in self.models for p in model.parameters()}
        return [p for p in parameters_of(self.optimizers) if id(p) not in in_models]

    def digest(self) -> int:
        """Return a number that is the same on ranks with equal parameters and optimizer states."""
        return digest(self.replicated())

    def replicated(self) -> Iterator[Tensor]:
        """Yield the tensors of which all ranks have equal copies."""
        yield from self.parameters
        for optimizer in self.optimizers:
            state = optimizer.state_dict()
            for _, of_parameter in sorted(state["state"].items()):
                # LBFGS stores the loss of this rank's samples, but replaces it before reading it.
                shared = {key: one for key, one in of_parameter.items() if key != "prev_loss"}
                yield from tensors_in(shared)
            numbers = [
                float(value)
                for group in state["param_groups"]
                for _, value in sorted(group.items())
                if isinstance(value, int | float)
            ]
            yield torch.tensor(numbers, dtype=torch.float64)

    @torch.no_grad()
    def sample(self, number: int) -> int:
        """Return a digest of `SAMPLED` elements of each parameter. Calls with consecutive numbers
        eventually cover all elements, so a lasting difference is always found."""
        parts = []
        for parameter in self.parameters:
            flat = _flat(parameter.detach())
            first = number * SAMPLED % (flat.numel() or 1) // SAMPLED * SAMPLED
            parts.append(flat[first : first + SAMPLED].view(torch.uint8))
        return digest([torch.cat(parts)])

    def saved_models(self, anchor: Anchor) -> list[dict[str, Any]]:
        """Return the state of each model at the anchor."""
        return [
            {
                name: anchor.weight(one) if isinstance(one, Tensor) else one
                for name, one in model.state_dict(keep_vars=True).items()
            }
            for model in self.models
        ]

    def saved_optimizers(self, anchor: Anchor) -> list[dict[str, Any]]:
        """Return the state of each optimizer at the anchor."""
        saved = []
        for number, (optimizer, own_groups) in enumerate(
            zip(self.optimizers, anchor.groups, strict=True)
        ):
            kept = anchor.kept.get(number)
            state = optimizer.state_dict() if kept is None else kept.state
            groups = zip(state["param_groups"], own_groups, strict=True)
            param_groups = [{**values, "params": own["params"]} for own, values in groups]
            saved.append({**state, "param_groups": param_groups})
        return saved


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements in memory order. Dense tensors, such as transposed or channels-last
    tensors, are not copied."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).reshape(-1)
