"""Roles of a script's ranks, and the frameworks by whose rules the ranks find each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field, StrictBool, StringConstraints

from dray.spec.fields import Document, Int, PlainText, wrong
from dray.spec.resources import RoleRanks, RoleResources

Framework = Literal["torch", "tensorflow", "jax", "mxnet", "deepspeed", "mpi", "none"]
RoleName = Annotated[str, StringConstraints(max_length=32, pattern=r"^[a-z][a-z0-9_]*$")]

SERVING: Final = ("ps", "server", "scheduler")
"""Roles whose processes serve those of the others, and by themselves never end."""
TENSORFLOW_ROLES: Final = ("chief", "worker", "ps", "evaluator")
MXNET_ROLES: Final = ("scheduler", "server", "worker")


class Role(Document):
    """Some of the ranks of a script, with a command of their own."""

    num_workers: Annotated[Int, Field(ge=1)] = 1
    """Ranks of this role."""
    entrypoint: Annotated[PlainText, StringConstraints(min_length=1, max_length=4096)] | None = None
    """Python file that these ranks run; unset, the script's own program."""
    args: Annotated[list[PlainText], Field(max_length=1024)] | None = None
    """Command line arguments of these ranks; unset, the script's own."""
    serves: StrictBool | None = None
    """Whether the ranks serve the others and need not end: the job is over once the ranks of all
    other roles have ended. Unset, so do `ps`, `server` and `scheduler`, and beside a `chief` every
    role but `evaluator`."""
    resources: RoleResources | None = None
    """Resources of each rank of the role, which has no GPU then; unset, the job's `resources`."""
    restart: Literal["job", "rank"] | None = None
    """The part that starts again when a process of the role is killed: the whole job, from its
    checkpoint; or that rank alone, at the same addresses, while the others go on. Unset, it is the
    rank of TensorFlow's `evaluator`, and of its `worker` beside a `chief`; else the job."""


Roles = Mapping[str, Role]


def role_of(roles: Roles, rank: int) -> tuple[str, int]:
    """(the role of a rank, its number among those of the role); ranks are numbered role by role, in
    the order of the document. IndexError if there is no such rank."""
    first = 0
    for name, role in roles.items():
        if rank < first + role.num_workers:
            return name, rank - first
        first += role.num_workers
    raise IndexError(f"there is no rank {rank} among {first}")


def first_rank(roles: Roles, name: str) -> int:
    """The rank of the first process of a role."""
    names = list(roles)
    return sum(roles[before].num_workers for before in names[: names.index(name)])


def ranks_of(roles: Roles, name: str) -> range:
    """The ranks of a role."""
    first = first_rank(roles, name)
    return range(first, first + roles[name].num_workers)


def with_resources(roles: Roles) -> list[RoleRanks]:
    """The ranks of roles that have resources of their own."""
    return [
        RoleRanks(name, ranks_of(roles, name), role.resources)
        for name, role in roles.items()
        if role.resources is not None
    ]


def serving_ranks(roles: Roles) -> frozenset[int]:
    """Ranks whose end the job does not wait for."""
    return frozenset(r for name in roles if serves(roles, name) for r in ranks_of(roles, name))


def serves(roles: Roles, name: str) -> bool:
    """Whether the processes of a role need not end."""
    chosen = roles[name].serves
    if chosen is not None:
        return chosen
    return name in SERVING or ("chief" in roles and name not in ("chief", "evaluator"))


def lone_ranks(framework: Framework, roles: Roles) -> frozenset[int]:
    """Ranks that are started again alone when their process is killed."""
    names = [name for name in roles if _restarts_alone(framework, roles, name)]
    return frozenset(rank for name in names for rank in ranks_of(roles, name))


def _restarts_alone(framework: Framework, roles: Roles, name: str) -> bool:
    chosen = roles[name].restart
    if chosen is not None:
        return chosen == "rank"
    # The coordinator in the chief has other workers do the steps of one that is lost, and takes it
    # back when a server listens at its address again.
    is_coordinated = name == "worker" and "chief" in roles
    return framework == "tensorflow" and (is_coordinated or name == "evaluator")


def check(framework: Framework, roles: Roles) -> None:
    """ValueError, with the field, for roles that the framework does not have."""
    if roles and all(role.resources for role in roles.values()):
        raise wrong(
            "/script/roles",
            "all have resources of their own, so that nobody has the job's: leave them out of one "
            "role, and give what it needs as the job's resources",
        )
    if roles and all(serves(roles, name) for name in roles):
        raise wrong(
            "/script/roles",
            "all serve, so the job would never end: give one role `serves: false`, or add a worker",
        )
    if framework == "tensorflow":
        _refuse_others(roles, TENSORFLOW_ROLES, framework)
        if "chief" in roles and roles["chief"].num_workers > 1:
            raise wrong("/script/roles/chief/num_workers", "must be 1: TensorFlow has one chief")
    if framework == "mxnet":
        _refuse_others(roles, MXNET_ROLES, framework)
        missing = [name for name in MXNET_ROLES if name not in roles]
        if missing:
            raise wrong(
                "/script/roles",
                f"lacks {' and '.join(missing)}: MXNet's key-value store needs one scheduler, and "
                "servers and workers",
            )
        if roles["scheduler"].num_workers > 1:
            raise wrong("/script/roles/scheduler/num_workers", "must be 1: MXNet has one scheduler")


def _refuse_others(roles: Roles, known: tuple[str, ...], framework: Framework) -> None:
    for name in roles:
        if name not in known:
            raise wrong(
                f"/script/roles/{name}",
                f"is no role of {framework}, which has {', '.join(known)}",
            )


def with_num_workers(document: Any) -> Any:
    """A job document with `resources.num_workers` filled in, where roles say it and it is unset."""
    if not isinstance(document, Mapping):
        return document
    script, resources = document.get("script"), document.get("resources", {})
    found = script.get("roles") if isinstance(script, Mapping) else None
    if not isinstance(found, Mapping) or not found or not isinstance(resources, Mapping):
        return document
    counts = [
        role.get("num_workers", 1) if isinstance(role, Mapping) else 0 for role in found.values()
    ]
    if "num_workers" in resources or not all(type(count) is int and count > 0 for count in counts):
        return document  # or the field's own check refuses it
    return {**document, "resources": {**resources, "num_workers": sum(counts)}}


def check_num_workers(roles: Roles, num_workers: int) -> None:
    """ValueError if the ranks of all roles are not those of the job."""
    total = sum(role.num_workers for role in roles.values())
    if roles and total != num_workers:
        raise wrong(
            "/resources/num_workers",
            f"is {num_workers}, and the roles of the script have {total} workers together: leave "
            "it out",
        )
