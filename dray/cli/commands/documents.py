"""Commands that help with writing a job document."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from dray.cli.base import app, server_url
from dray.cli.completion import document_kinds
from dray.code.local import is_folder


@app.command()
def init(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            help="A recipe (such as image_classification), `script`, or the path of a script.",
            autocompletion=document_kinds,
        ),
    ] = "image_classification",
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="File to write; - for stdout.")
    ] = Path("job.yaml"),
    schema: Annotated[
        str | None,
        typer.Option(metavar="URL", help="JSON Schema for editors (default: the server's)."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write a job document template with a comment for each field."""
    from dray.cli.display.output import write, write_text
    from dray.spec.authoring.starting import KINDS, starting_document

    script = kind if kind.endswith(".py") else None
    if script is None and kind not in KINDS:
        raise typer.BadParameter(f"{kind!r} is not one of {', '.join(KINDS)}", param_hint="KIND")
    url = schema or f"{server_url()}/v1/schema"
    if script is None:
        text = starting_document(kind, schema=url)
    else:
        text = _of_script(Path(script), output, url)
    if str(output) == "-":
        for line in text.splitlines():
            write(line)
        return
    try:
        with output.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise typer.BadParameter(
            f"{output} already exists; --force overwrites it", param_hint="--output"
        ) from None
    write_text(f"wrote {output}; submit it with: dray submit {output}")


def _of_script(script: Path, output: Path, schema: str) -> str:
    """Return a document for a script. The folder to upload is the current folder, or the script's
    own folder if the script is outside the current folder. Paths are relative to the document."""
    from dray.errors import SpecError
    from dray.spec.authoring.starting import starting_document

    if not script.is_file():
        raise SpecError(f"there is no file {script}")
    script, folder = script.resolve(), Path.cwd()
    if not script.is_relative_to(folder):
        folder = script.parent
    base = Path() if str(output) == "-" else output.parent
    code = os.path.relpath(folder, base.resolve())
    return starting_document(
        "script",
        schema=schema,
        name=script.stem,
        entrypoint=script.relative_to(folder).as_posix(),
        code=code if is_folder(code) else f"./{code}",
    )


@app.command()
def schema() -> None:
    """Print the JSON Schema of a job document, for editors.

    Editors with YAML support use the schema if the document begins with `# yaml-language-server:
    $schema=URL`, like the documents that `dray init` writes.
    """
    from dray.cli.display.output import write_data
    from dray.spec.authoring.describing import job_schema

    write_data(job_schema())
