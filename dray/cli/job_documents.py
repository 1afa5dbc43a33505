"""The job document that a command describes: a file, a program with its arguments, or the document
of an earlier job."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dray.cli.base import connect
from dray.cli.choosing import read_job
from dray.cli.code_upload import MODULE, is_program, packed_folder
from dray.cli.document_options import with_found_packages

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dray.client import Client
    from dray.code.packing import PackedCode
    from dray.views import Job

LAUNCHERS = ("python", "python3", "torchrun", "horovodrun", "mpirun", "srun")


def named_document(words: list[str], like: str | None = None) -> tuple[dict[str, Any], str]:
    """Return the document and its display name. `words` is the path of a job document, or a program
    and its arguments. If `like` names a job, `words` contains the arguments for running that job
    again."""
    return _document(words) if like is None else _again(like, words)


def with_code(
    document: dict[str, Any],
    source: str,
    code: Path | None,
    include: list[str],
    *,
    finds_packages: bool = True,
) -> tuple[dict[str, Any], PackedCode | None]:
    """Return the document, and its packed folder if there is one to upload. With `finds_packages`,
    the document of a program gets the packages that its folder lists."""
    packed = packed_folder(document, source, code, include)
    if packed is not None and is_program(source) and finds_packages:
        document = with_found_packages(document, packed)
    return document, packed


def _again(reference: str, args: list[str]) -> tuple[dict[str, Any], str]:
    """Return the document for running the job `reference` again, and a display name. Omits `after`,
    `array`, `sweep`, the times, the reservation, and the values that only a trial's program gets.
    `args` replace arguments of the same name."""
    from dray.arguments import AmbiguousArguments, replaced
    from dray.cli.display.output import warn
    from dray.spec.trial_values import as_text, variable

    with connect() as client:
        job = client.get(read_job(client, reference))
        values = _trial_values(client, job)
    left_out = ("array", "sweep", "after", "begin_at", "deadline", "reservation")
    document = {name: value for name, value in job.spec.items() if name not in left_out}
    document["origin"] = {**(document.get("origin") or {}), "job": job.id}
    script = document.get("script")
    if isinstance(script, dict) and (own := values.keys() & (script.get("parameters") or {})):
        named = ", ".join(f"{variable(name)}={as_text(values[name])}" for name in sorted(own))
        warn(
            f"{job.id} is a trial of a sweep that set {named}; the copy runs without "
            f"{'this variable' if len(own) == 1 else 'these variables'}"
        )
        kept = {name: value for name, value in script["parameters"].items() if name not in own}
        document["script"] = script = {**script, "parameters": kept}
    if not args:
        return document, job.id
    if not isinstance(script, dict):
        raise typer.BadParameter(
            f"{job.id} runs the recipe {document.get('recipe')}, which takes no arguments: "
            "change its fields with --set"
        )
    try:
        script = {**script, "args": replaced(script.get("args") or [], args)}
    except AmbiguousArguments as error:
        raise typer.BadParameter(str(error)) from None
    program = script.get("entrypoint") or f"-m {script.get('module')}"
    warn(f"like {job.id}: {shlex.join([program, *script['args']])}")
    return {**document, "script": script}, job.id


def _trial_values(client: Client, job: Job) -> Mapping[str, Any]:
    """Return the parameter values of a trial; an empty mapping for other jobs."""
    from dray.errors import SweepNotFound

    if job.array_id is None:
        return {}
    try:
        trials = client.trials(job.array_id, page_size=500)
        return next((one.parameters or {} for one in trials if one.index == job.array_index), {})
    except SweepNotFound:
        return {}


def with_git(
    document: dict[str, Any], git: str | None, commit: str | None, *, uploads: bool
) -> dict[str, Any]:
    """Return the document with a git commit as its code."""
    if git is None or commit is None:
        raise typer.BadParameter(
            "--git and --commit must be used together; `git rev-parse HEAD` prints a commit's hash"
        )
    if uploads:
        raise typer.BadParameter("--git uploads no files: remove --code and --include")
    script = document.get("script")
    if not isinstance(script, dict):
        raise typer.BadParameter("--git requires a script: specify a program after --")
    return {**document, "script": {**script, "code": {"git": git, "commit": commit}}}


def _document(words: list[str]) -> tuple[dict[str, Any], str]:
    """Return the document and its display name. `words` is the path of a job document, or a program
    and its arguments."""
    from dray.documents import load_document

    if not words:
        raise typer.BadParameter("specify a job document, or a program after --")
    first, *rest = words
    if first == MODULE:
        if not rest:
            raise typer.BadParameter("-m requires the name of a module")
        return {"name": rest[0], "script": {"module": rest[0], "args": rest[1:]}}, "-m " + rest[0]
    if first.endswith(".py"):
        name = Path(first).stem
        return {"name": name, "script": {"entrypoint": first, "args": rest}}, first
    if first in LAUNCHERS:
        raise typer.BadParameter(
            f"remove {first} and its options: the program must come first, as in "
            "`dray submit --workers 2 -- train.py --lr 0.1`"
        )
    if rest:
        raise typer.BadParameter(
            f"unexpected argument {rest[0]!r}: to run a program, give -- and a Python file "
            "before the program's arguments"
        )
    return load_document(first), first
