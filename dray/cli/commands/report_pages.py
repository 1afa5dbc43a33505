"""Commands for reports: pages of Markdown with charts and tables of runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dray import errors
from dray.cli.base import AsJson, app, connect
from dray.cli.choosing import Yes, confirm

group = typer.Typer(
    name="report", help="Write, show and export pages of Markdown with charts and tables of runs."
)
app.add_typer(group)

ReportId = Annotated[str, typer.Argument(metavar="REPORT", help="The report's id.")]
TextFile = Annotated[str, typer.Argument(metavar="FILE", help="The text; - for standard input.")]


@group.command("create")
def create_report(
    title: Annotated[str, typer.Argument(metavar="TITLE")],
    file: TextFile,
    project: Annotated[str | None, typer.Option(help="The project of the report.")] = None,
    as_json: AsJson = False,
) -> None:
    """Store a report, and print its id.

    The text is Markdown. Blocks of code in the languages `chart` and `table` become charts and
    tables of runs.
    """
    from dray.cli.display.output import write, write_json

    with connect() as client:
        report = client.create_report(title, _text(file), project=project)
    write_json(report) if as_json else write(report.id)


@group.command("ls")
def list_reports(
    owner: Annotated[
        str | None, typer.Option(help="Only reports of this owner; @me means you.")
    ] = None,
    project: Annotated[str | None, typer.Option(help="Only reports for this project.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the reports of all users, newest first."""
    from dray.cli.display.tables import listing

    with connect() as client:
        found = list(client.reports(owner=owner, project=project))
    listing(
        found,
        as_json,
        ("ID", "TITLE", "OWNER", "PROJECT", "VERSION", "CHANGED"),
        lambda one: (one.id, one.title, one.owner, one.project, one.version, one.updated_at),
        flexible=("TITLE",),
        optional=("PROJECT",),
    )


@group.command("show")
def show_report(report: ReportId, as_json: AsJson = False) -> None:
    """Print the text of a report, in Markdown. With --json, print its other fields, too."""
    from dray.cli.display.output import write, write_json

    with connect() as client:
        found = client.report(report)
    if as_json:
        write_json(found)
        return
    for line in found.text.splitlines():
        write(line)


@group.command("edit")
def edit_report(
    report: ReportId,
    file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Take the text from FILE; - for stdin.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="Replace the title.")] = None,
    project: Annotated[
        str | None, typer.Option(help='Replace the project; "" removes the project.')
    ] = None,
    version: Annotated[
        int | None,
        typer.Option(
            min=1, help="Refuse the change if the report now has a version other than this."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Change a report. Without options, open its text in $VISUAL or $EDITOR.

    If another user changes the report while your editor is open, your text is not stored, but is
    saved in a file.
    """
    from dray.cli.display.output import warn, write_json

    with connect() as client:
        before = client.report(report)
        draft = _edited(before.text) if (file, title, project) == (None,) * 3 else None
        text = None if file is None and draft is None else _text(file or str(draft))
        if draft is not None and text == before.text:
            draft.unlink()
            warn("nothing was changed")
            return
        try:
            found = client.change_report(
                report,
                version=before.version if version is None else version,
                title=title,
                text=text,
                project=project,
            )
        except errors.DrayError:
            if draft is not None:
                warn(f"your text is in {draft}")
            raise
    if draft is not None:
        draft.unlink()
    write_json(found) if as_json else warn(f"stored version {found.version} of {found.id}")


@group.command("rm")
def delete_report(report: ReportId, yes: Yes = False) -> None:
    """Delete one of your reports; admins can also delete other users' reports.

    Asks for confirmation.
    """
    from dray.cli.display.output import warn

    with connect() as client:
        found = client.report(report)
        confirm(f"Delete the report {found.title!r} of {found.owner}?", yes=yes)
        client.delete_report(report)
    warn(f"deleted the report {report}")


@group.command("export")
def export_report(
    report: ReportId,
    html: Annotated[
        Path, typer.Option("--html", metavar="FILE", help="Write this file; - for stdout.")
    ],
    values: Annotated[
        bool, typer.Option("--values", help="Add a table with the values of each chart.")
    ] = False,
) -> None:
    """Write a report as one HTML file that needs no script and no other file."""
    from dray.cli.display.output import warn

    with connect() as client:
        text = client.export_report(report, values=values)
    if str(html) == "-":
        typer.echo(text, nl=False)
        return
    try:
        html.write_text(text, encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(
            f"can't write {html}: {error.strerror}", param_hint="--html"
        ) from None
    warn(f"wrote {html}")


def _text(file: str) -> str:
    if file == "-":
        return sys.stdin.read()
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(
            f"can't read {file}: {error.strerror}", param_hint="FILE"
        ) from None
    except UnicodeDecodeError:
        raise typer.BadParameter(f"{file} is not UTF-8 text", param_hint="FILE") from None


def _edited(text: str) -> Path:
    """Let the user edit a text, and return the file with the result."""
    import os
    import shlex
    import subprocess
    import tempfile

    command = os.environ.get("VISUAL") or os.environ.get("EDITOR")
    if not command:
        raise typer.BadParameter(
            "set EDITOR to the command of your editor, or use --file", param_hint="--file"
        )
    with tempfile.NamedTemporaryFile(
        "w", prefix="dray-report-", suffix=".md", delete=False, encoding="utf-8"
    ) as file:
        file.write(text)
    try:
        done = subprocess.run([*shlex.split(command), file.name], check=False)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"can't run {command!r}: {error}", param_hint="EDITOR") from None
    if done.returncode:
        raise typer.BadParameter(
            f"{command!r} ended with exit code {done.returncode}; your text is in {file.name}",
            param_hint="EDITOR",
        )
    return Path(file.name)
