"""Phrases for messages about slots and resources."""

from __future__ import annotations

from collections.abc import Mapping

from ray_workers.shared.slices import RoleSlots
from service.config.node_types import labels_in, without_labels
from service.domain.scheduling.placement.slots import ACCELERATOR, Request

UNITS = ("bytes", "KiB", "MiB", "GiB")
"""Units of memory, each 1024 times as large as the previous one."""


def needs(request: Request) -> str:
    """Return a phrase such as `needs 2 workers of 1 CPU within one rack`."""
    at_least = "at least " if request.min_workers is not None else ""
    level = request.required_level
    within = "" if level is None else f" within one {level}"
    within += ", each silo on a node that has its data" if request.homes else ""
    own_reservation = None if request.fence is None else request.fence.own
    where = "" if own_reservation is None else f" in the reservation {own_reservation!r}"
    if not request.roles:
        number = workers(request.least)
        if request.num_spares and not at_least:
            number += f", {request.num_spares} of them spare{'s'[: request.num_spares > 1]},"
        return f"needs {at_least}{number} of {spoken_bundle(request.bundle)}{within}{where}"
    own = [f"{spoken_ranks(role)} of {spoken_bundle(role.bundle)}" for role in request.roles]
    alike = f"{workers(request.num_alike)} of {spoken_bundle(request.bundle)}"
    return f"needs {', '.join([alike, *own[:-1]])}, and {own[-1]}{where}"


def workers(number: int) -> str:
    return "1 worker" if number == 1 else f"{number} workers"


def number_of_nodes(number: int) -> str:
    return "1 node" if number == 1 else f"{number} nodes"


def spoken_ranks(role: RoleSlots) -> str:
    """Return a phrase such as `1 server`, `2 servers` or `2 ps`."""
    is_plain = role.number == 1 or role.role.endswith("s")
    return f"{role.number} {role.role}{'' if is_plain else 's'}"


def spoken_bundle(bundle: Mapping[str, float]) -> str:
    """Return a phrase for the bundle of one worker."""
    parts = [
        amount_of(name, amount)
        for name, amount in without_labels(bundle).items()
        if not name.startswith("accelerator_type:")
    ]
    kinds = [
        name.removeprefix("accelerator_type:")
        for name in bundle
        if name.startswith("accelerator_type:")
    ]
    what = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
    labels = ", ".join(f"{key}={value}" for key, value in labels_in(bundle).items())
    where = f" on nodes with {labels}" if labels else ""
    return what + (f" on {kinds[0]}" if kinds else "") + where


def amount_of(name: str, amount: float, digits: int = 3) -> str:
    """Return a phrase such as `8 GPU` or `15.5 GiB of memory`. `digits` is the minimum number of
    significant digits for memory."""
    if name != "memory":
        return f"{round(amount, 4):.15g} {name}"
    power = max((at for at in range(len(UNITS)) if amount >= 1024**at), default=0)
    value = amount / 1024**power
    return f"{value:.{max(digits, len(str(round(value))))}g} {UNITS[power]} of memory"


def distinct_amounts(name: str, one: float, other: float) -> tuple[str, str]:
    """Return phrases for both amounts, with enough digits to make them differ."""
    for digits in range(3, 16):
        words = amount_of(name, one, digits), amount_of(name, other, digits)
        if words[0] != words[1]:
            break
    return words


def spoken(name: str, amount: float) -> str:
    """Return a phrase such as `8 GPU`, `8 H100` or `8 GiB of memory`."""
    return amount_of(name.removeprefix(ACCELERATOR), amount)
