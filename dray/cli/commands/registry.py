"""Commands for registered models, and for the catalogue of base models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dray.cli.base import AsJson, JobId, app, connect

group = typer.Typer(name="model", help="Name and version models, and list the base models.")
app.add_typer(group)

ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="The model's name.")]
Version = Annotated[
    str, typer.Argument(metavar="MODEL@VERSION", help="A version, by its number or by an alias.")
]


def _reference(text: str) -> str:
    """Return `NAME@VERSION` as a reference. `model://` may precede it."""
    return f"model://{text.removeprefix('model://')}"


@group.command("register")
def register(
    job: JobId,
    name: ModelName,
    step: Annotated[
        str | None,
        typer.Option(help="Register this checkpoint, `latest` or `best`, instead of the result."),
    ] = None,
    alias: Annotated[
        list[str] | None, typer.Option(help="Let this alias refer to the version.")
    ] = None,
    card: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Model card, a file in Markdown.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Register the result of a job as the next version of a model.

    The job can't be deleted while the version exists.
    """
    from dray.cli.display.output import write, write_json

    text = "" if card is None else card.read_text()
    with connect() as client:
        version = client.register_model(
            name,
            client.resolve(job),
            step=int(step) if step is not None and step.isascii() and step.isdigit() else step,
            card=text,
            aliases=alias or (),
        )
    write_json(version) if as_json else write(version.reference)


@group.command("ls")
def list_models(as_json: AsJson = False) -> None:
    """List the registered models."""
    from dray.cli.display.output import age
    from dray.cli.display.tables import listing

    with connect() as client:
        found = list(client.models())
    listing(
        found,
        as_json,
        ("NAME", "OWNER", "LATEST", "VERSIONS", "ALIASES", "AGE"),
        lambda m: (
            m.name,
            m.owner,
            m.latest_version or None,
            m.num_versions,
            ", ".join(f"{alias} {version}" for alias, version in m.aliases.items()) or None,
            age(m.created_at),
        ),
        flexible=("NAME", "ALIASES"),
    )


@group.command("show")
def show(
    name: Annotated[
        str, typer.Argument(metavar="MODEL[@VERSION]", help="A model, or one of its versions.")
    ],
    moves: Annotated[
        bool, typer.Option("--moves", help="List the changes of its aliases.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the versions of a model, or show a version with its lineage, card and files."""
    from dray.cli.display.output import age
    from dray.cli.display.tables import listing

    if "@" in name:
        _show_version(name, as_json)
        return
    with connect() as client:
        if moves:
            changes = list(client.alias_moves(name))
        else:
            found = list(client.model_versions(name))
    if moves:
        listing(
            changes,
            as_json,
            ("ALIAS", "FROM", "TO", "BY", "AGE"),
            lambda m: (m.alias, m.from_version, m.to_version, m.moved_by, age(m.moved_at)),
        )
        return
    listing(
        found,
        as_json,
        ("VERSION", "ALIASES", "JOB", "STEP", "BY", "AGE"),
        lambda v: (
            v.version,
            ", ".join(v.aliases) or None,
            v.job_id,
            v.step,
            v.created_by,
            age(v.created_at),
        ),
        optional=("STEP",),
    )


def _show_version(name: str, as_json: bool) -> None:
    from dray.cli.display.output import size, write, write_json

    with connect() as client:
        version = client.model_version(_reference(name))
    if as_json:
        write_json(version)
        return
    lineage, files = version.lineage, version.files or []
    assert lineage is not None
    step = "" if version.step is None else f", checkpoint at step {version.step}"
    rows = {
        "model": version.reference,
        "aliases": ", ".join(version.aliases),
        "job": f"{version.job_id} ({lineage.job_name}, of {lineage.owner}){step}",
        "recipe": lineage.recipe,
        "base": lineage.base,
        "data": ", ".join(lineage.data),
        "data sha256": lineage.data_sha256,
        "document sha256": lineage.document_sha256,
        "started from": ", ".join(
            (one.model or one.job_id)
            + ("" if one.step is None else f" step {one.step}")
            + ("" if one.exists else " (deleted)")
            for one in lineage.parents
        ),
        "registered": f"{version.created_at:%Y-%m-%d %H:%M} UTC by {version.created_by}",
    }
    for title, value in rows.items():
        if value:
            write(f"{title}: {value}")
    for file in files:
        lost = "  MISSING from the storage" if file.missing else ""
        write(f"file: {file.path}  {size(file.size_bytes)}  {file.sha256}{lost}")
    if version.card:
        write(f"\n{version.card}")


@group.command("alias")
def set_alias(
    version: Annotated[
        str, typer.Argument(metavar="MODEL@VERSION", help="The version, by number or alias.")
    ],
    alias: Annotated[str, typer.Argument(metavar="ALIAS")],
    from_version: Annotated[
        int | None,
        typer.Option("--from", min=1, help="Move the alias only if it refers to this version."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Let an alias, such as production, refer to a version."""
    from dray.cli.display.output import write, write_json

    with connect() as client:
        found = client.model_version(_reference(version))
        model = client.set_model_alias(found.model, alias, found.version, from_version=from_version)
    write_json(model) if as_json else write(f"{model.name}@{alias} is version {found.version}")


@group.command("unalias")
def remove_alias(name: ModelName, alias: Annotated[str, typer.Argument(metavar="ALIAS")]) -> None:
    """Remove an alias."""
    with connect() as client:
        client.delete_model_alias(name, alias)


@group.command("card")
def set_card(
    version: Version,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The card, a file in Markdown.")],
) -> None:
    """Replace the card of a version."""
    text = file.read_text()
    with connect() as client:
        client.set_model_card(_reference(version), text)


@group.command("download")
def download(
    version: Version,
    dest: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder for the files.")],
) -> None:
    """Download the files of a version."""
    from dray.cli.display.output import write

    with connect() as client:
        for path in client.download_model(_reference(version), dest):
            write(str(path))


@group.command("rm")
def remove(
    name: Annotated[
        str, typer.Argument(metavar="MODEL[@VERSION]", help="A model, or one of its versions.")
    ],
) -> None:
    """Delete a version, or a model with all its versions. The jobs remain.

    The numbers of deleted versions are not used again.
    """
    with connect() as client:
        if "@" in name:
            found = client.model_version(_reference(name))
            client.delete_model_version(found.model, found.version)
        else:
            client.delete_model(name)


@group.command("bases")
def bases(
    name: Annotated[
        str | None, typer.Argument(metavar="BASE", help="Show this base model and its licence.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the base models for fine-tuning in the server's catalogue."""
    from dray.cli.display.output import write, write_json
    from dray.cli.display.tables import listing

    with connect() as client:
        if name is None:
            found = client.base_models()
        else:
            model = client.base_model(name)
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
