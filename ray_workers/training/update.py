"""From a gradient to new weights: unscale, clip, step, average."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dray import spec
from ray_workers.training.optimizers import build_optimizer, set_lr
from ray_workers.training.replica import Replica
from ray_workers.training.sharding import optimizer_parts


class Update:
    """The optimizer, with the loss scale of fp16 and the average of the weights where asked for."""

    def __init__(
        self,
        model: nn.Module,
        replica: Replica,
        options: spec.Train,
        device: torch.device,
        *,
        has_momentum: bool = True,
    ) -> None:
        """`has_momentum`: sgd's is not somebody else's."""
        self._model = model
        self._replica = replica
        self._max_norm = options.max_grad_norm
        chosen = options.optimizer
        if not has_momentum:
            chosen = chosen.model_copy(update={"momentum": 0.0})
        self._optimizer = build_optimizer(model, chosen)
        self._scaler: torch.amp.GradScaler | None = None
        self._one = torch.ones((), device=device)
        if options.precision == "fp16":
            self._scaler = torch.amp.GradScaler(device.type)
        self._average: AveragedModel | None = None
        if options.ema is not None:
            average = get_ema_multi_avg_fn(options.ema.decay)  # type: ignore[no-untyped-call]
            self._average = AveragedModel(model, multi_avg_fn=average)

    @property
    def weights(self) -> nn.Module:
        """The model as it is to be judged and kept: its average, if there is one."""
        return self._model if self._average is None else self._average.module

    def loss_scale(self) -> Tensor | None:
        """What the loss must be multiplied by before the backward pass."""
        return None if self._scaler is None else self._scaler.scale(self._one)

    def step(self, lr: float) -> Tensor:
        """One optimizer step; the gradient's norm before it was clipped. In fp16 a gradient that
        overflowed changes no weight, and lowers the scale."""
        set_lr(self._optimizer, lr)
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)
        norm = self._replica.grad_norm()
        if self._max_norm is not None:
            clip_grads_with_norm_(self._model.parameters(), self._max_norm, norm)
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        if self._average is not None:
            self._average.update_parameters(self._model)
        self._replica.forget_gradients()
        return norm

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"optimizer": self._optimizer.state_dict()}
        if self._scaler is not None:
            state["scaler"] = self._scaler.state_dict()
        if self._average is not None:
            state["average"] = self._average.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._optimizer.load_state_dict(optimizer_parts(self._optimizer, state["optimizer"]))
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])
        if self._average is not None:
            self._average.load_state_dict(state["average"])

    def start_average(self) -> None:
        """Begin the average at the weights as they are now."""
        if self._average is not None:
            self._average.module.load_state_dict(self._model.state_dict())
