"""The forms of saved states of a prepared training, and how older ones are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer


def has_groups_of(optimizer: Optimizer, state: Mapping[str, Any]) -> bool:
    """Whether a state's groups of parameters are those that the optimizer has."""
    own = [len(group["params"]) for group in optimizer.param_groups]
    return own == [len(group["params"]) for group in state["param_groups"]]


def upgraded(state: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, Any]:
    """A saved state in its present form; before, it had one model, and further optimizers were
    tracked. names: of the optimizers among the tracked objects."""
    if "models" in state:
        return state
    tracked = dict(state["tracked"])
    further = [tracked.pop(name) for name in names if name in tracked]
    groups = [
        [{key: value for key, value in group.items() if key != "params"} for group in groups]
        for groups in (one["param_groups"] for one in further)
    ]
    return {
        **state,
        "models": [state["model"]],
        "optimizers": [state["optimizer"], *further],
        "others": [],
        "groups": [state["groups"], *groups],
        "tracked": tracked,
        "parts": 0,
        "copied_before_step": [],
        "unstepped": [],
        "keeps_gradients": False,
    }
