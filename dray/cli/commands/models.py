"""The command that lists the base models for fine-tuning."""

from __future__ import annotations

from typing import Annotated

import typer

from dray.cli.base import AsJson, app, connect


@app.command()
def models(
    name: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Show this model and its licence.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the base models for fine-tuning in the server's catalogue."""
    from dray.cli.display.output import write, write_json
    from dray.cli.display.tables import listing

    with connect() as client:
        if name is None:
            found = client.models()
        else:
            model = client.model(name)
    if name is None:
        listing(
            found,
            as_json,
            ("NAME", "LICENCE", "MUST ACCEPT", "BASE"),
            lambda m: (m.name, m.licence, "yes" if m.must_accept else None, m.base),
            optional=("MUST ACCEPT",),
        )
        return
    if as_json:
        write_json(model)
        return
    must = "must be accepted with model.accept_licence" if model.must_accept else "for information"
    rows = {
        "base": model.base,
        "licence": model.licence and f"{model.licence} ({must})",
        "sha256": model.sha256,
        "chat template": "of the catalogue" if model.has_chat_template else "of the tokenizer",
    }
    for title, value in rows.items():
        if value is not None:
            write(f"{title}: {value}")
    if model.licence_text is not None:
        write(f"\n{model.licence_text}")
