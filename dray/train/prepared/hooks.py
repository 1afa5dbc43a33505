"""Hooks for the calls of a prepared script: a gradient that came, and a step of an optimizer."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from dray.train.prepared.anchor import parameters_of


def hook_gradients(
    parameters: Iterable[Tensor], hooked: set[int], came: Callable[[Tensor], None]
) -> None:
    """Have `came` called when a backward pass has given one of the parameters a gradient. hooked:
    the ids of parameters that have a hook; the others are added."""
    for parameter in parameters:
        if id(parameter) in hooked or not (parameter.is_floating_point() or parameter.is_complex()):
            continue
        hooked.add(id(parameter))
        # A parameter that is frozen now may be thawed later.
        is_trained = parameter.requires_grad
        parameter.requires_grad_(True)
        parameter.register_post_accumulate_grad_hook(came)  # type: ignore[no-untyped-call]
        parameter.requires_grad_(is_trained)


def hook_steps(
    optimizer: Optimizer, will_step: Callable[[], bool], stepped: Callable[[], None]
) -> None:
    """Have both called around each step. will_step: whether to take the step."""
    step = optimizer.step

    def counted_step(_: Any, *args: Any, **kwargs: Any) -> Any:
        if not will_step():
            return None
        result = step(*args, **kwargs)
        stepped()
        return result

    # As torch's schedulers mark a step that they have wrapped.
    for name in ("_wrapped_by_lr_sched", "_with_counter"):
        if hasattr(step, name):
            setattr(counted_step, name, True)
    optimizer.step = types.MethodType(counted_step, optimizer)  # type: ignore[method-assign]


def refuse_stranger(
    optimizer: Optimizer, known: Sequence[Optimizer], is_known: Callable[[Tensor], bool]
) -> None:
    """Raises ValueError for a step that the other ranks, or a process that takes this one's place,
    would not take alike."""
    are_known = [is_known(parameter) for parameter in parameters_of([optimizer])]
    name = type(optimizer).__name__
    if any(optimizer is one for one in known):
        if not all(are_known):
            raise ValueError(
                f"an optimizer ({name}) steps parameters that were made after prepare(), as by "
                "add_param_group() with a new layer: their gradients are not averaged over the "
                "ranks. Make all layers before prepare(), and freeze later ones"
            )
    elif any(are_known):
        raise ValueError(
            f"an optimizer ({name}) that prepare() was not given steps parameters of a prepared "
            "model, and a process that takes another's place could not go on with its state: give "
            "prepare() all optimizers, as in prepare([model], [optimizer, other], loader)"
        )
