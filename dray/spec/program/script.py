"""The part of a job document that names a training program of the user's own."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AfterValidator, Field, StrictBool, StringConstraints, model_validator

from dray.arguments import MAX_CHARS, MAX_PARAMETERS
from dray.spec.fields import Document, Int, Number, PlainText, Seconds, wrong
from dray.spec.program import roles as roles_of
from dray.spec.program.code import Code
from dray.spec.program.roles import Framework, Role, RoleName

_Text = Annotated[PlainText, StringConstraints(max_length=MAX_CHARS)]
Parameter = StrictBool | Int | Number | _Text

LEAST_HANG_LIMIT_S = 10
"""Two checks of the supervisor, which are 5 s apart: it can't measure shorter times."""


def _measurable(limit_s: int) -> int:
    if limit_s < LEAST_HANG_LIMIT_S:
        raise ValueError(
            f"must be at least {LEAST_HANG_LIMIT_S} s, since dray looks at a script every 5 s; "
            "choose more than the longest time between two reports"
        )
    return limit_s


class Script(Document):
    """A training program, started once for each worker, as torchrun would start it."""

    entrypoint: Annotated[PlainText, StringConstraints(min_length=1, max_length=4096)] | None = None
    """Path of a Python file: in `code`, or without `code` on the worker's machine."""
    module: (
        Annotated[
            str, StringConstraints(max_length=1024, pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")
        ]
        | None
    ) = None
    """A module that is run as `python -m` would run it, instead of `entrypoint`."""
    args: Annotated[list[PlainText], Field(max_length=1024)] = []
    """Command line arguments, passed unchanged (no shell)."""
    parameters: Annotated[
        dict[Annotated[_Text, StringConstraints(min_length=1)], Parameter],
        Field(max_length=MAX_PARAMETERS),
    ] = {}
    """Names and values by which jobs are compared, besides the parameters in `args`; they are not
    passed to the program. `submit_function` writes the function's arguments here."""
    code: Code | None = None
    """Id of uploaded code, as returned by `POST /v1/code`; or the address that nodes fetch the code
    from. A document in a file may also name a folder such as `.`, which the client uploads when the
    job is submitted. Unset, the program must be on the workers' machines."""
    framework: Framework = "torch"
    """Framework that defines how the ranks find each other; `none`: they form no group."""
    roles: Annotated[dict[RoleName, Role], Field(max_length=16)] = {}
    """Roles of the ranks, such as `ps` and `worker`, which may have commands of their own; ranks
    are numbered role by role. Unset, all ranks run the same command. `resources.num_workers` is the
    sum of the roles' ranks, and may be left out."""
    hang_limit_s: Annotated[Seconds, AfterValidator(_measurable)] | None = None
    """Seconds after which a script that reports nothing, or that never reports and does nothing, is
    restarted; a number from 10, or a time such as `30m`. Unset, a script is restarted when it shows
    two signs of a hang for 15 minutes."""

    guesses: StrictBool = True
    """Whether metrics are guessed from the output of rank 0, such as `loss=0.12`, if the script
    reports none and `metrics` names none. The names of guessed metrics begin with `guessed/`."""

    @property
    def command(self) -> str:
        """The program to run, as a user would write it."""
        return self.entrypoint or f"-m {self.module}"

    @property
    def serving_ranks(self) -> frozenset[int]:
        """Ranks that need not end for the job to be over."""
        return roles_of.serving_ranks(self.roles)

    @property
    def lone_ranks(self) -> frozenset[int]:
        """Ranks that are restarted alone when their process is killed."""
        return roles_of.lone_ranks(self.framework, self.roles)

    def for_rank(self, rank: int) -> Script:
        """Return the script with the program and the arguments of this rank."""
        if not self.roles:
            return self
        name, _ = roles_of.role_of(self.roles, rank)
        role = self.roles[name]
        own: dict[str, object] = {}
        if role.entrypoint is not None:
            own |= {"entrypoint": role.entrypoint, "module": None}
        if role.args is not None:
            own["args"] = role.args
        return self.model_copy(update=own)

    @model_validator(mode="after")
    def _roles_of_the_framework(self) -> Self:
        roles_of.check(self.framework, self.roles)
        return self

    @model_validator(mode="after")
    def _one_program(self) -> Self:
        if self.entrypoint is None and self.module is None:
            raise wrong("/script/entrypoint", "is missing: give a file, or a module instead")
        if self.entrypoint is not None and self.module is not None:
            raise wrong("/script/module", "is run instead of an entrypoint: give one of the two")
        return self
