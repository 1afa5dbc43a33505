"""Commands for saved views."""

from __future__ import annotations

from typing import Annotated

import typer

from dray.cli.base import AsJson, app, connect

group = typer.Typer(
    name="views", help="Show and delete saved views, which `dray ls --save NAME` creates."
)
app.add_typer(group)

ViewName = Annotated[str, typer.Argument(metavar="VIEW", help="NAME, or OWNER/NAME.")]


@group.command("ls")
def list_views(
    owner: Annotated[
        str | None, typer.Option(help="Only views of this owner; @me means you.")
    ] = None,
    project: Annotated[str | None, typer.Option(help="Only views for this project.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the saved views of all users."""
    from dray.cli.display.tables import listing

    with connect() as client:
        found = list(client.saved_views(owner=owner, project=project))
    listing(
        found,
        as_json,
        ("NAME", "OWNER", "PROJECT", "QUERY"),
        lambda view: (view.name, view.owner, view.project, _query(view.query)),
        flexible=("QUERY",),
        optional=("PROJECT",),
    )


def _query(query: dict[str, object]) -> str:
    def text(value: object) -> str:
        return ",".join(map(str, value)) if isinstance(value, list) else str(value)

    return " ".join(f"{name}={text(value)}" for name, value in query.items())


@group.command("show")
def show_view(view: ViewName, as_json: AsJson = False) -> None:
    """Show a saved view: its filter, order, columns and groups."""
    from dray.cli.display.output import write_json, write_text

    owner, _, name = view.rpartition("/")
    with connect() as client:
        found = client.saved_view(name, owner=owner or None)
    if as_json:
        write_json(found)
        return
    about = {"view": f"{found.owner}/{found.name}", "for project": found.project or "-"}
    for field, value in {**about, **found.query}.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        write_text(f"{field:<14} {shown}", indent=" " * 15)


@group.command("rm")
def delete_view(view: ViewName) -> None:
    """Delete one of your saved views; admins can also delete other users' views."""
    from dray.cli.display.output import warn

    owner, _, name = view.rpartition("/")
    with connect() as client:
        client.delete_view(name, owner=owner or None)
    warn(f"deleted the view {view}")
