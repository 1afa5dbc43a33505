"""The command that shows the examples of a fine-tuning job before the job is submitted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from dray.cli.base import AsJson, app, connect

DOCUMENTS = (".yaml", ".yml", ".json")


@app.command()
def preview(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Job document in YAML or JSON (- for stdin), or a file or folder of examples.",
        ),
    ],
    base: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="Base model: a folder, a URL, or a model of the catalogue."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Change a field: method=dpo."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the first examples of a fine-tuning job as the model sees them.

    The examples are read on this machine, and nothing is submitted. The output is the same as in
    the job's log, and with --json as in its artifact examples.json.
    """
    from dray.cli.display.output import write, write_data
    from dray.documents import apply_settings, load_document, with_fields
    from dray.example_preview import preview as show

    if str(file) == "-" or file.suffix.lower() in DOCUMENTS:
        document = load_document(file)
    else:
        document = {"recipe": "fine_tuning", "data": {"source": _url_of(file)}}
    if base is not None:
        folder = Path(base).expanduser()
        is_path = folder.is_dir() or ("/" in base and ":" not in base)
        address = _url_of(folder) if is_path else base
        document = with_fields(document, [("model.base", address)])
    document = _with_address(apply_settings(document, settings or []))
    with connect() as client:
        found = show(document, client)
    if as_json:
        write_data(found.report)
        return
    for line in found.lines:
        write(line)


def _url_of(path: Path) -> str:
    """Return the URL of a path. Links are not followed, because the target of a link can have
    another suffix, as in the cache of Hugging Face's hub."""
    return Path(os.path.normpath(path.absolute())).as_uri()


def _with_address(document: dict[str, Any]) -> dict[str, Any]:
    """Replace the name of a model of the catalogue by its address."""
    from dray.documents import with_fields
    from dray.errors import SpecError

    if document.get("recipe") != "fine_tuning":
        return document  # refused later
    model = document.get("model")
    base = model.get("base") if isinstance(model, dict) else None
    if base is None:
        raise typer.BadParameter(
            "specify the base model, whose tokenizer converts the examples: --base /path/to/model"
        )
    if not isinstance(base, str) or ":" in base or "/" in base:
        return document
    with connect() as client:
        entry = client.base_model(base)
    if entry.has_chat_template:
        raise SpecError(
            f"is {base!r}, whose chat template the catalogue replaces, so the job would see other "
            "tokens than a preview",
            pointer="/model/base",
            hint="give the model's address, and set model.chat_template to the catalogue's",
        )
    return with_fields(document, [("model.base", entry.base)])
