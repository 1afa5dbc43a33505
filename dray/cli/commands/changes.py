"""Commands that show what changed between two jobs, and from what a job was made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dray.cli.base import AsJson, JobId, app, connect
from dray.cli.choosing import read_job
from dray.cli.commands.tracking import as_path
from dray.cli.completion import job_ids

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dray.views import CodeCommit, CodeDiff, FileDiff, JobDiff, Lineage, LineageLink

NewJob = Annotated[
    str,
    typer.Argument(
        metavar="JOB", help="The job that came later.", autocompletion=job_ids, show_default=False
    ),
]
LEFT_OUT = {
    "binary": "binary",
    "large": "too large to compare",
    "limit": "not compared: the files that differ are too large together",
}


@app.command()
def diff(
    old: JobId,
    new: NewJob,
    code: Annotated[
        bool, typer.Option("--code", help="Print only the changed lines of the code, as a patch.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what changed from one job to another: document, commit, data, packages and code."""
    from dray.cli.display.output import write_json

    with connect() as client:
        found = client.diff(read_job(client, old), read_job(client, new))
    if as_json:
        write_json(found)
    elif code:
        _write_patch(found.code)
    else:
        _show(found)


def _show(found: JobDiff) -> None:
    from dray.cli.display.output import write_text
    from dray.cli.display.tables import shortest_prefixes, table

    ids = shortest_prefixes([job.id for job in found.jobs])
    rows = [
        ("name", *(job.name for job in found.jobs)),
        *((as_path(one.pointer), *map(_text, one.values)) for one in found.document),
        *_commits(found),
        *_data(found),
        *((f"package {one.name}", *one.versions) for one in found.packages.differences),
    ]
    table(("", *ids), rows, flexible=ids)
    if not all(found.packages.is_known):
        known = zip(ids, found.packages.is_known, strict=True)
        unknown = [job_id for job_id, is_known in known if not is_known]
        write_text(f"The packages of {' and '.join(unknown)} are unknown.")
    for note in found.code.notes:
        write_text(f"The code is not compared: {note}.")
    if not found.code.notes:
        what = (
            "1 file differs"
            if found.code.num_files == 1
            else f"{found.code.num_files} files differ"
        )
        write_text(f"code: {what}")
    for file in found.code.files:
        write_text(f"  {file.path}  {_about(file)}")
    if len(found.code.files) < found.code.num_files:
        write_text(f"  and {found.code.num_files - len(found.code.files)} more")


def _text(value: object) -> str | None:
    import json

    return value if value is None or isinstance(value, str) else json.dumps(value)


def _commits(found: JobDiff) -> Iterator[tuple[str | None, ...]]:
    """Yield a row with the commits if there are any, also if they are equal."""
    if not any(found.git):
        return

    def text(git: CodeCommit | None) -> str | None:
        if git is None:
            return None
        return f"{git.commit[:12]}{' with uncommitted changes' if git.dirty else ''}"

    yield ("commit", *map(text, found.git))


def _data(found: JobDiff) -> Iterator[tuple[str | None, ...]]:
    if any(found.data):
        sources = [None if one is None else ", ".join(one.sources) for one in found.data]
        hashes = [None if one is None else one.sha256 or "not given" for one in found.data]
        yield from (("data", *sources), ("data sha256", *hashes))


def _about(file: FileDiff) -> str:
    if file.num_added is None:
        counts = LEFT_OUT.get(file.left_out or "", "not compared")
    else:
        counts = f"+{file.num_added} -{file.num_removed}"
    is_mode = len(set(file.is_executable)) > 1
    return f"{file.change}, {counts}{', executable bit changed' if is_mode else ''}"


def _write_patch(code: CodeDiff) -> None:
    import sys

    from dray.cli.display.output import warn, write, write_drawn

    # A patch in a file or a pipe needs carriage returns and other control characters.
    emit = write if sys.stdout.isatty() else write_drawn
    for note in code.notes:
        warn(f"the code is not compared: {note}")
    for file in code.files:
        if file.text is None:
            warn(f"left out: {file.path} {_about(file)}")
            continue
        for line in patch_of(file):
            emit(line)
    if len(code.files) < code.num_files:
        warn(f"left out: {code.num_files - len(code.files)} more files")


def patch_of(file: FileDiff) -> Iterator[str]:
    """Yield the lines of a patch in Git's format."""
    old, new = (f"{side}/{file.path}" for side in ("a", "b"))
    yield f"diff --git {_quoted(old)} {_quoted(new)}"
    modes = ["100755" if is_executable else "100644" for is_executable in file.is_executable]
    if file.change == "added":
        yield f"new file mode {modes[0]}"
    elif file.change == "removed":
        yield f"deleted file mode {modes[0]}"
    elif modes[0] != modes[1]:
        yield from (f"old mode {modes[0]}", f"new mode {modes[1]}")
    if file.text:
        yield f"--- {'/dev/null' if file.change == 'added' else _ended(old)}"
        yield f"+++ {'/dev/null' if file.change == 'removed' else _ended(new)}"
        yield from file.text.removesuffix("\n").split("\n")


def _ended(path: str) -> str:
    """Return a path with a tab at its end if it contains a space, as Git writes it."""
    return f"{path}\t" if _quoted(path) == path and " " in path else _quoted(path)


def _quoted(path: str) -> str:
    r"""Return a path as Git writes it: in quotes, with bytes such as \303, if it contains
    characters other than printable ASCII, or a quote."""
    if path.isascii() and path.isprintable() and '"' not in path:
        return path
    escaped = "".join(
        chr(byte) if 32 <= byte < 127 and chr(byte) not in '"\\' else f"\\{byte:03o}"
        for byte in path.encode()
    )
    return f'"{escaped}"'


@app.command()
def lineage(job_id: JobId, as_json: AsJson = False) -> None:
    """Show the jobs from which a job was made, and the jobs and models that were made from it."""
    from dray.cli.display.output import write_json

    with connect() as client:
        found = client.lineage(read_job(client, job_id))
    write_json(found) if as_json else _show_lineage(found)


HOW = {"init_from": "starts from", "edited": "edited from", "registered": "registered from"}


def _show_lineage(found: Lineage) -> None:
    from dray.cli.display.output import write_text

    jobs = {job.id: job for job in found.jobs}

    def named(id_: str) -> str:
        job = jobs.get(id_)
        if job is None:
            return id_
        if job.name is None:
            return f"{id_}, deleted"
        return f"{job.name}{f' {job.variant}' if job.variant else ''} ({id_}), {job.state}"

    if found.array_id is not None:
        kind = "sweep" if found.is_sweep else "array"
        write_text(f"{named(found.job_id)}, of the {kind} {found.array_id}")
    else:
        write_text(named(found.job_id))
    for link in _ordered(found.links):
        at = "" if link.step is None else f", step {link.step}"
        write_text(f"  {named(link.child)}: {HOW[link.kind]} {named(link.parent)}{at}")
    if not found.links:
        write_text("  It was made from no other job, and nothing was made from it.")
    if not found.is_complete:
        write_text("  There are more jobs than are shown.")


def _ordered(links: Sequence[LineageLink]) -> list[LineageLink]:
    """Return the links in the order in which the children were made. Ids of jobs sort by time."""
    return sorted(links, key=lambda link: (link.kind == "registered", link.child))
