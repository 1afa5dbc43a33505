"""The optimizer step, which computes new weights from the gradient: unscale, clip, step,
average."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dray import spec
from dray.train.prepared.dtensor import like, local, part_of
from ray_workers.training.core import compat_torch
from ray_workers.training.core.divergence import DivergedError
from ray_workers.training.parallel.gradients import GradientEngine
from ray_workers.training.parallel.optim.optimizer_offload import OffloadedState, made_later
from ray_workers.training.parallel.optim.optimizers import build_optimizer, set_lr

LEAST_SCALE = 2.0**-20
"""The loss scale after 36 consecutive overflows. At this scale, finite gradients don't overflow."""


class OptimizerStep:
    """The optimizer, including the loss scale (with fp16) and the weight average (if enabled)."""

    def __init__(
        self,
        model: nn.Module,
        gradients: GradientEngine,
        options: spec.Train,
        device: torch.device,
        *,
        has_momentum: bool = True,
    ) -> None:
        """has_momentum: whether SGD's momentum is applied by the optimizer instead of by a
        compressor."""
        self._model = model
        self._gradients = gradients
        self._max_norm = options.max_grad_norm
        self._skips = options.on_divergence == "skip_step"
        chosen = options.optimizer
        if not has_momentum:
            chosen = chosen.model_copy(update={"momentum": 0.0})
        self._optimizer = self._build_optimizer(model, chosen)
        self._offloaded = _offloaded(self._optimizer, chosen)
        self._names: Names = {parameter: name for name, parameter in model.named_parameters()}
        self._scaler: torch.amp.GradScaler | None = None
        self._one = torch.ones((), device=device)
        if options.precision == "fp16":
            self._scaler = torch.amp.GradScaler(device.type)
        self._average: AveragedModel | None = None
        if options.ema is not None:
            average = get_ema_multi_avg_fn(options.ema.decay)  # type: ignore[no-untyped-call]
            self._average = AveragedModel(model, multi_avg_fn=average)

    def _build_optimizer(self, model: nn.Module, options: spec.Optimizer) -> torch.optim.Optimizer:
        return build_optimizer(model, options)

    @property
    def weights(self) -> nn.Module:
        """The model to evaluate and store: the averaged model, if averaging is enabled."""
        return self._model if self._average is None else self._average.module

    def loss_scale(self) -> Tensor | None:
        """Return the factor by which the loss is multiplied in the backward pass; None if the
        factor is 1."""
        return None if self._scaler is None else self._scaler.scale(self._one)

    def step(self, lr: float) -> Tensor:
        """Perform an optimizer step, and return the gradient norm before clipping.

        In fp16, if the gradient has overflowed, the weights remain unchanged and the loss scale is
        lowered. With `skip_step`, the weights also remain unchanged if the gradient is not finite;
        this check waits for the device.
        """
        if not self._gradients.has_samples:
            norm = self._gradients.grad_norm()
            self._gradients.forget_gradients()
            return norm
        set_lr(self._optimizer, lr)
        norm = self._unscaled_norm()
        if self._skips and self._scaler is None and not norm.isfinite():
            self._gradients.forget_gradients()
            return norm
        if self._max_norm is not None:
            clip_gradients(self._model, self._max_norm, norm)
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._step_in_scale(self._scaler, norm)
        if self._average is not None:
            self._average.update_parameters(self._model)
        self._gradients.forget_gradients()
        return norm

    def _unscaled_norm(self) -> Tensor:
        """Remove the loss scale from the gradient, and return its norm."""
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)
        return self._gradients.grad_norm()

    def _step_in_scale(self, scaler: torch.amp.GradScaler, norm: Tensor) -> None:
        """Perform the step unless the norm shows that the gradient has overflowed, and set the next
        scale.

        The scaler's own `step` is not used: if it skips the first step of fused SGD, the momentum
        buffer remains uninitialised (torch 2.13). This method waits for the device.
        """
        overflowed = not norm.isfinite()
        if not overflowed:
            self._optimizer.step()
        found = torch.full_like(norm, overflowed)
        compat_torch.report_overflow(scaler, self._optimizer, found)
        scaler.update()
        if overflowed and scaler.get_scale() < LEAST_SCALE:
            raise DivergedError(
                "the gradients are not finite at any loss scale: weights or intermediate values "
                "exceed the range of fp16 (65,504). Lower train.optimizer.lr, or set "
                "train.precision to bf16 or fp32"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self._optimizer_state(), **self._rest()}

    def replicated(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of a `state_dict` that is equal on ranks with the same parameters. The
        buffers of the weight average are omitted, because they follow the model's buffers, and each
        rank updates its own buffers."""
        own = (self._names[parameter] for parameter in parameters_of(self.local_optimizer))
        saved = state["optimizer"]["state"]
        alike: dict[str, Any] = {"optimizer": {name: saved[name] for name in own if name in saved}}
        if self._scaler is not None:
            alike["scaler"] = state["scaler"]
        if self._average is not None:
            names = [name for name, _ in self._average.named_parameters()]
            alike["average"] = {name: state["average"][name] for name in names}
        return alike

    @property
    def local_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer for the parameters that this rank updates."""
        return self._optimizer

    def _optimizer_state(self) -> dict[str, Any]:
        return named_state(self._optimizer, self._names)

    def _rest(self) -> dict[str, Any]:
        """Return the state, except for the state of the optimizer."""
        state: dict[str, Any] = {}
        if self._scaler is not None:
            state["scaler"] = self._scaler.state_dict()
        if self._average is not None:
            state["average"] = self._average.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._load_optimizer(state["optimizer"], _part_of_state)
        self._load_rest(state)

    def _load_rest(self, state: Mapping[str, Any]) -> None:
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])
        if self._average is not None:
            self._average.load_state_dict(state["average"])

    def load_parts(self, state: Mapping[str, Any]) -> None:
        """Load the state of a rank with the same parts. In this state, the parts are plain
        tensors."""
        self._load_optimizer(state["optimizer"], _as_part)
        self._load_rest(state)

    def _load_optimizer(self, state: Mapping[str, Any], part: Callable[[Any, Tensor], Any]) -> None:
        taken = part if self._offloaded is None else made_later(part)
        load_named_state(self._optimizer, self._names, state, taken)

    def start_average(self) -> None:
        """Initialise the average with the current weights."""
        if self._average is not None:
            self._average.module.load_state_dict(self._model.state_dict())


class ShardedOptimizerStep(OptimizerStep):
    """The optimizer step for a rank's parts. The norm covers the parts of all ranks, so a rank also
    detects an overflow in another rank's part."""

    def _unscaled_norm(self) -> Tensor:
        norm = self._gradients.grad_norm()
        if self._scaler is None:
            return norm
        factor = self._scaler.scale(self._one).reciprocal()
        parts = [local(p.grad) for p in self._model.parameters() if p.grad is not None]
        if parts:
            torch._foreach_mul_(parts, factor)
        return norm * factor


def clip_gradients(model: nn.Module, max_norm: float, norm: Tensor) -> None:
    """Like `torch.nn.utils.clip_grads_with_norm_`, but for this rank's parts of the gradients."""
    parts = [local(p.grad) for p in model.parameters() if p.grad is not None]
    if parts:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(parts, factor)


def _offloaded(optimizer: torch.optim.Optimizer, options: spec.Optimizer) -> OffloadedState | None:
    if options.state_dtype == "fp32" and not options.offload:
        return None
    storage_device = torch.device("cpu") if options.offload else None
    return OffloadedState(
        optimizer, as_bf16=options.state_dtype == "bf16", storage_device=storage_device
    )


Names = Mapping[Tensor, str]
"""Maps parameters to their names in the model."""


def named_state(optimizer: torch.optim.Optimizer, names: Names) -> dict[str, Any]:
    """Return an optimizer's state dict with parameter names instead of torch's numbers. With names,
    a rank with different parameters, or with the same parameters in a different order, can find the
    state of its parameters."""
    own = [names[parameter] for parameter in parameters_of(optimizer)]
    state = optimizer.state_dict()
    return {
        "state": {own[index]: dict(values) for index, values in state["state"].items()},
        "param_groups": [
            {**group, "params": [own[index] for index in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def is_numbered(state: Mapping[str, Any]) -> bool:
    """Whether a state identifies parameters by number, as torch and older versions of dray do."""
    return any(isinstance(one, int) for group in state["param_groups"] for one in group["params"])


def _part_of_state(value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    part = part_of(value, parameter) if value.ndim else value
    # Clone the tensor, because the optimizer keeps it, and it could be a memory-mapped file.
    return part.clone() if part is value else part


def _as_part(value: Any, parameter: Tensor) -> Any:
    """Wrap a plain tensor as this rank's part of a tensor with the parameter's shape."""
    return like(value, parameter) if isinstance(value, Tensor) and value.ndim else value


def load_named_state(
    optimizer: torch.optim.Optimizer,
    names: Names,
    saved: Mapping[str, Any],
    part: Callable[[Any, Tensor], Any] = _part_of_state,
) -> None:
    """Load the part of a state that belongs to the optimizer's parameters.

    If the state identifies parameters by number, as in older versions of dray, the numbers are
    positions. part: returns the part of a value that belongs to a parameter; by default, this
    rank's part of a complete value.
    """
    parameters = parameters_of(optimizer)
    group_of = {name: group for group in saved["param_groups"] for name in group["params"]}
    keys = [
        names[parameter] if names[parameter] in group_of else index
        for index, parameter in enumerate(parameters)
    ]
    state = {
        index: {name: part(value, parameters[index]) for name, value in saved["state"][key].items()}
        for index, key in enumerate(keys)
        if key in saved["state"]
    }
    indices = iter(range(len(keys)))
    groups = []
    for group in optimizer.param_groups:
        own = [next(indices) for _ in group["params"]]
        options = group_of[keys[own[0]]] if own else group
        how = {name: group[name] for name in ("fused", "foreach") if name in group}
        groups.append({**options, **how, "params": own})
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters in the order in which torch numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
