"""The part of a job document that defines the user's own training program."""

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
"""The supervisor checks every 5 s, so the shortest measurable time is two intervals."""


def _measurable(limit_s: int) -> int:
    if limit_s < LEAST_HANG_LIMIT_S:
        raise ValueError(
            f"must be at least {LEAST_HANG_LIMIT_S} s, since dray checks scripts every 5 s; "
            "choose a value above the longest time between two reports"
        )
    return limit_s


class Script(Document):
    """A training program that is started once per worker, as with torchrun."""

    entrypoint: Annotated[PlainText, StringConstraints(min_length=1, max_length=4096)] | None = None
    """Path of a Python file in `code`, or on the workers' machines if `code` is unset."""
    module: (
        Annotated[
            str, StringConstraints(max_length=1024, pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")
        ]
        | None
    ) = None
    """Module to run instead of `entrypoint`, as with `python -m`."""
    args: Annotated[list[PlainText], Field(max_length=1024)] = []
    """Command-line arguments, passed unchanged (without a shell)."""
    parameters: Annotated[
        dict[Annotated[_Text, StringConstraints(min_length=1)], Parameter],
        Field(max_length=MAX_PARAMETERS),
    ] = {}
    """Parameters, keyed by name, for comparing jobs, in addition to the parameters in `args`. These
    parameters are not passed to the program. `submit_function` stores the function's arguments
    here."""
    code: Code | None = None
    """Id of uploaded code, as returned by `POST /v1/code`, or the address from which nodes fetch
    the code. In a document file, the value can also be a folder such as `.`, which the client
    uploads when the job is submitted. If unset, the program must exist on the workers' machines."""
    framework: Framework = "torch"
    """Framework that determines how the ranks find each other. With `none`, the ranks form no
    group."""
    roles: Annotated[dict[RoleName, Role], Field(max_length=16)] = {}
    """Roles of the ranks, such as `ps` and `worker`, which can have different commands. Ranks are
    numbered role by role. If unset, all ranks run the same command. `resources.num_workers` is the
    total number of ranks of all roles, and can be omitted."""
    hang_limit_s: Annotated[Seconds, AfterValidator(_measurable)] | None = None
    """Number of seconds (at least 10), or a time such as `30m`. A script that reports is restarted
    when it has reported nothing for this long. A script that never reports is restarted when it has
    done nothing for this long. If unset, a script is restarted when it shows two signs of a hang
    for 15 minutes."""

    guesses: StrictBool = True
    """Whether to guess metrics from the output of rank 0, such as `loss=0.12`, if the script
    reports no metrics and `metrics` lists none. The names of guessed metrics start with
    `guessed/`."""

    @property
    def command(self) -> str:
        """The program to run, as it would be written on a command line."""
        return self.entrypoint or f"-m {self.module}"

    @property
    def serving_ranks(self) -> frozenset[int]:
        """Ranks that the job does not wait for when it ends."""
        return roles_of.serving_ranks(self.roles)

    @property
    def standalone_ranks(self) -> frozenset[int]:
        """Ranks that are restarted without the rest of the job when their process is killed."""
        return roles_of.standalone_ranks(self.framework, self.roles)

    def for_rank(self, rank: int) -> Script:
        """Return the script with the program and arguments of this rank."""
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
            raise wrong("/script/entrypoint", "is missing: specify a file, or a module instead")
        if self.entrypoint is not None and self.module is not None:
            raise wrong(
                "/script/module", "can't be combined with entrypoint: specify only one of them"
            )
        return self
