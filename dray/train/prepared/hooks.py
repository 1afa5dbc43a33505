"""Hooks in a prepared script, for computed gradients and the steps of optimizers."""

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
    """Call `came` whenever a backward pass has computed the gradient of one of the parameters.
    hooked: ids of the parameters that already have a hook; the ids of newly hooked parameters are
    added."""
    for parameter in parameters:
        if id(parameter) in hooked or not (parameter.is_floating_point() or parameter.is_complex()):
            continue
        hooked.add(id(parameter))
        # Hook frozen parameters too, because they can be unfrozen later.
        is_trained = parameter.requires_grad
        parameter.requires_grad_(True)
        parameter.register_post_accumulate_grad_hook(came)  # type: ignore[no-untyped-call]
        parameter.requires_grad_(is_trained)


def hook_steps(
    optimizer: Optimizer, will_step: Callable[[], bool], stepped: Callable[[], None]
) -> None:
    """Call these functions before and after each step. will_step: returns whether to take the
    step."""
    step = optimizer.step

    def counted_step(_: Any, *args: Any, **kwargs: Any) -> Any:
        if not will_step():
            return None
        result = step(*args, **kwargs)
        stepped()
        return result

    # Copy the attributes that torch's LR schedulers set on `optimizer.step` when they wrap it.
    for name in ("_wrapped_by_lr_sched", "_with_counter"):
        if hasattr(step, name):
            setattr(counted_step, name, True)
    optimizer.step = types.MethodType(counted_step, optimizer)  # type: ignore[method-assign]


def refuse_stranger(
    optimizer: Optimizer, known: Sequence[Optimizer], is_known: Callable[[Tensor], bool]
) -> None:
    """Raise ValueError for an optimizer whose step can't be reproduced by the other ranks or by a
    process that replaces this one."""
    are_known = [is_known(parameter) for parameter in parameters_of([optimizer])]
    name = type(optimizer).__name__
    if any(optimizer is one for one in known):
        if not all(are_known):
            raise ValueError(
                f"an optimizer ({name}) updates parameters that were created after prepare(), for "
                "example a new layer for add_param_group(): their gradients are not averaged over "
                "the ranks. Create all layers before prepare(), and freeze layers that are trained "
                "only later"
            )
    elif any(are_known):
        raise ValueError(
            f"an optimizer ({name}) updates parameters of a prepared model, but was not passed to "
            "prepare(), so a replacement process could not restore the optimizer's state: pass "
            "all optimizers to prepare(), as in prepare([model], [optimizer, other], loader)"
        )
