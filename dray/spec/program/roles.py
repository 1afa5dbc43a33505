"""Roles of a script's ranks, and the frameworks that determine how the ranks find each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field, StrictBool, StringConstraints

from dray.spec.fields import Document, Int, PlainText, wrong
from dray.spec.resources import RoleRanks, RoleResources

Framework = Literal["torch", "tensorflow", "jax", "mxnet", "deepspeed", "mpi", "none"]
RoleName = Annotated[str, StringConstraints(max_length=32, pattern=r"^[a-z][a-z0-9_]*$")]

SERVING: Final = ("ps", "server", "scheduler")
"""Roles whose processes serve the other roles and do not exit on their own."""
TENSORFLOW_ROLES: Final = ("chief", "worker", "ps", "evaluator")
MXNET_ROLES: Final = ("scheduler", "server", "worker")


class Role(Document):
    """A group of a script's ranks. A role can have its own command."""

    num_workers: Annotated[Int, Field(ge=1)] = 1
    """Number of ranks with this role."""
    entrypoint: Annotated[PlainText, StringConstraints(min_length=1, max_length=4096)] | None = None
    """Python file that these ranks run; if unset, the script's program."""
    args: Annotated[list[PlainText], Field(max_length=1024)] | None = None
    """Command-line arguments of these ranks; if unset, the script's arguments."""
    serves: StrictBool | None = None
    """Whether the ranks of this role serve other ranks. The job ends when all other ranks have
    ended, without waiting for the serving ranks. By default true for `ps`, `server` and `scheduler`
    and, in a script with a `chief`, for every role except `chief` and `evaluator`."""
    resources: RoleResources | None = None
    """Resources of each rank of the role; if unset, the job's `resources`. Ranks of a role with its
    own resources have no GPU."""
    restart: Literal["job", "rank"] | None = None
    """The part that is restarted when a process of the role is killed. job: the whole job, from its
    checkpoint. rank: only that rank, at the same addresses, while the other ranks continue. The
    default is `rank` for TensorFlow's `evaluator`, and for its `worker` in a script with a `chief`;
    it is `job` for all other roles."""


Roles = Mapping[str, Role]


def role_of(roles: Roles, rank: int) -> tuple[str, int]:
    """Return (role of the rank, index of the rank within the role). Ranks are numbered role by
    role, in the order of the document. Raises IndexError if the rank does not exist."""
    first = 0
    for name, role in roles.items():
        if rank < first + role.num_workers:
            return name, rank - first
        first += role.num_workers
    raise IndexError(f"rank {rank} does not exist: there are {first} ranks")


def first_rank(roles: Roles, name: str) -> int:
    """Return the lowest rank of a role."""
    names = list(roles)
    return sum(roles[before].num_workers for before in names[: names.index(name)])


def ranks_of(roles: Roles, name: str) -> range:
    """Return the ranks of a role."""
    first = first_rank(roles, name)
    return range(first, first + roles[name].num_workers)


def with_resources(roles: Roles) -> list[RoleRanks]:
    """Return the ranks of each role that has its own resources."""
    return [
        RoleRanks(name, ranks_of(roles, name), role.resources)
        for name, role in roles.items()
        if role.resources is not None
    ]


def serving_ranks(roles: Roles) -> frozenset[int]:
    """Return the ranks that the job does not wait for when it ends."""
    return frozenset(r for name in roles if serves(roles, name) for r in ranks_of(roles, name))


def serves(roles: Roles, name: str) -> bool:
    """Whether the job ends without waiting for the processes of this role."""
    chosen = roles[name].serves
    if chosen is not None:
        return chosen
    return name in SERVING or ("chief" in roles and name not in ("chief", "evaluator"))


def standalone_ranks(framework: Framework, roles: Roles) -> frozenset[int]:
    """Return the ranks that are restarted without the rest of the job when their process is
    killed."""
    names = [name for name in roles if _restarts_alone(framework, roles, name)]
    return frozenset(rank for name in names for rank in ranks_of(roles, name))


def _restarts_alone(framework: Framework, roles: Roles, name: str) -> bool:
    chosen = roles[name].restart
    if chosen is not None:
        return chosen == "rank"
    # The chief's coordinator assigns the steps of a lost worker to other workers, and uses the lost
    # worker again once a server listens at that worker's address.
    is_coordinated = name == "worker" and "chief" in roles
    return framework == "tensorflow" and (is_coordinated or name == "evaluator")


def check(framework: Framework, roles: Roles) -> None:
    """Raise ValueError with the field if the framework does not support the roles."""
    if roles and all(role.resources for role in roles.values()):
        raise wrong(
            "/script/roles",
            "all roles have their own resources, so none would use the job's resources: omit the "
            "resources of one role, and set the job's resources to what this role needs",
        )
    if roles and all(serves(roles, name) for name in roles):
        raise wrong(
            "/script/roles",
            "all roles serve other roles, so the job would never end: set `serves: false` for "
            "one role, or add a worker",
        )
    if framework == "tensorflow":
        _refuse_others(roles, TENSORFLOW_ROLES, framework)
        if "chief" in roles and roles["chief"].num_workers > 1:
            raise wrong(
                "/script/roles/chief/num_workers", "must be 1: TensorFlow allows only one chief"
            )
    if framework == "mxnet":
        _refuse_others(roles, MXNET_ROLES, framework)
        missing = [name for name in MXNET_ROLES if name not in roles]
        if missing:
            raise wrong(
                "/script/roles",
                f"lacks {' and '.join(missing)}: MXNet's key-value store requires one scheduler, "
                "servers and workers",
            )
        if roles["scheduler"].num_workers > 1:
            raise wrong(
                "/script/roles/scheduler/num_workers", "must be 1: MXNet allows only one scheduler"
            )


def _refuse_others(roles: Roles, known: tuple[str, ...], framework: Framework) -> None:
    for name in roles:
        if name not in known:
            raise wrong(
                f"/script/roles/{name}",
                f"is not a role of {framework}, which has the roles {', '.join(known)}",
            )


def with_num_workers(document: Any) -> Any:
    """Return the job document. If `resources.num_workers` is unset, it is computed from the
    roles."""
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
        return document  # invalid values are refused by the field's own check
    return {**document, "resources": {**resources, "num_workers": sum(counts)}}


def check_num_workers(roles: Roles, num_workers: int) -> None:
    """Raise ValueError unless the roles have `num_workers` ranks in total."""
    total = sum(role.num_workers for role in roles.values())
    if roles and total != num_workers:
        raise wrong(
            "/resources/num_workers",
            f"is {num_workers}, but the roles of the script have {total} workers in total: omit "
            "this field",
        )
