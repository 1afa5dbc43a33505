"""The part of a job document that names a training program of the user's own."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from dray.spec.fields import Document, PlainText, wrong

CodeId = Annotated[str, StringConstraints(pattern=r"^code-[0-9a-f]{32}$")]


class Script(Document):
    """A training program, started once for each worker, as torchrun would start it."""

    entrypoint: Annotated[PlainText, StringConstraints(min_length=1, max_length=4096)] | None = None
    """Path of a Python file: in `code`, or without it on the worker's machine."""
    module: (
        Annotated[
            str, StringConstraints(max_length=1024, pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")
        ]
        | None
    ) = None
    """A module that is run as `python -m` would run it, instead of `entrypoint`."""
    args: Annotated[list[PlainText], Field(max_length=1024)] = []
    """Command line arguments, given as they are (no shell)."""
    code: CodeId | None = None
    """The id of uploaded code, as `dray submit --code` and `POST /v1/code` give it. Unset, the
    program is on the workers' machines already."""

    @property
    def command(self) -> str:
        """The program to run, as a person would write it."""
        return self.entrypoint or f"-m {self.module}"

    @model_validator(mode="after")
    def _one_program(self) -> Self:
        if self.entrypoint is None and self.module is None:
            raise wrong("/script/entrypoint", "is missing: give a file, or a module instead")
        if self.entrypoint is not None and self.module is not None:
            raise wrong("/script/module", "is run instead of an entrypoint: give one of the two")
        return self
