"""Commands for reservations and maintenance windows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dray.cli.base import AsJson, app, connect, future

if TYPE_CHECKING:
    from dray.views import NodeReservation, Reservation

group = typer.Typer(name="reservation", help="Set nodes aside for users, or for maintenance.")
app.add_typer(group)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The reservation's name.")]
Begin = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Begin time, such as 'tomorrow 08:00' or now+2hours."),
]
End = Annotated[
    str | None, typer.Option(metavar="TIME", help="End time, in the same form as --begin.")
]
Duration = Annotated[
    str | None,
    typer.Option(metavar="DURATION", help="Duration of the reservation, such as 90m or 2h."),
]
User = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="User whose jobs can use the nodes.")
]
InQueue = Annotated[
    list[str] | None,
    typer.Option("--queue", metavar="NAME", help="Queue whose jobs can use the nodes."),
]
Project = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Project whose jobs can use the nodes.")
]
Node = Annotated[list[str] | None, typer.Option(metavar="NAME", help="Hostname or id of a node.")]
Label = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="Reserve all nodes with this label, or only --nodes or --gpus of them.",
    ),
]
NumNodes = Annotated[
    int | None, typer.Option("--nodes", min=1, metavar="N", help="Number of nodes, chosen by dray.")
]
NumGpus = Annotated[
    int | None, typer.Option("--gpus", min=1, metavar="N", help="Number of GPUs on whole nodes.")
]
AtBegin = Annotated[
    str | None,
    typer.Option(
        metavar="RULE",
        help="What happens to other jobs that still run at the begin time: preempt (default), wait "
        "or cancel.",
    ),
]
AtEnd = Annotated[
    str | None,
    typer.Option(
        metavar="RULE",
        help="What happens to jobs that still run at the end time: continue (default) or preempt.",
    ),
]
Comment = Annotated[str | None, typer.Option(metavar="TEXT", help="A comment for users.")]
Flex = Annotated[
    bool | None,
    typer.Option(
        "--flex/--no-flex", help="Jobs can also start before the begin time and on other nodes."
    ),
]
Unnamed = Annotated[
    bool | None,
    typer.Option(
        "--accepts-unnamed/--no-accepts-unnamed",
        help="Jobs can use the nodes without naming the reservation.",
    ),
]


@group.command("create")
def create(
    name: Name,
    begin: Begin = None,
    end: End = None,
    duration: Duration = None,
    user: User = None,
    queue: InQueue = None,
    project: Project = None,
    maintenance: Annotated[
        bool, typer.Option("--maintenance", help="No jobs run on the nodes.")
    ] = False,
    node: Node = None,
    label: Label = None,
    nodes: NumNodes = None,
    gpus: NumGpus = None,
    all_nodes: Annotated[bool, typer.Option("--all-nodes", help="All nodes.")] = False,
    accepts_unnamed: Unnamed = None,
    flex: Flex = None,
    at_begin: AtBegin = None,
    at_end: AtEnd = None,
    comment: Comment = None,
    as_json: AsJson = False,
) -> None:
    """Set nodes aside for jobs of users, queues or projects, or for maintenance; admins only.

    Examples: dray reservation create class --begin 'tomorrow 08:00' --duration 4h --user ann
    --nodes 2; dray reservation create disks --maintenance --node node7 --duration 2h
    """
    fields = _fields(
        {"begin_at": begin, "end_at": end},
        duration_s=duration,
        users=user,
        queues=queue,
        projects=project,
        maintenance=maintenance or None,
        nodes=node,
        node_labels=_labels(label),
        num_nodes=nodes,
        num_gpus=gpus,
        all_nodes=all_nodes or None,
        accepts_unnamed=accepts_unnamed,
        flex=flex,
        at_begin=at_begin,
        at_end=at_end,
        comment=comment,
    )
    with connect() as client:
        _report(client.create_reservation(name, **fields), as_json)


@group.command("change")
def change(
    name: Name,
    begin: Begin = None,
    end: End = None,
    duration: Duration = None,
    user: User = None,
    queue: InQueue = None,
    project: Project = None,
    node: Node = None,
    label: Label = None,
    nodes: NumNodes = None,
    gpus: NumGpus = None,
    accepts_unnamed: Unnamed = None,
    flex: Flex = None,
    at_begin: AtBegin = None,
    at_end: AtEnd = None,
    comment: Comment = None,
    as_json: AsJson = False,
) -> None:
    """Change a reservation; admins only.

    Lists of users, queues, projects and nodes are replaced. If you specify the nodes in a different
    way than before, the new selection replaces the earlier selection.
    """
    fields = _fields(
        {"begin_at": begin, "end_at": end},
        duration_s=duration,
        users=user,
        queues=queue,
        projects=project,
        nodes=node,
        node_labels=_labels(label),
        num_nodes=nodes,
        num_gpus=gpus,
        accepts_unnamed=accepts_unnamed,
        flex=flex,
        at_begin=at_begin,
        at_end=at_end,
        comment=comment,
    )
    ways = ("nodes", "node_labels", "num_nodes", "num_gpus", "all_nodes")
    if any(way in fields for way in ways):
        fields = {**dict.fromkeys(ways), **fields}
    with connect() as client:
        _report(client.change_reservation(name, **fields), as_json)


@group.command("ls")
def list_reservations(
    ended: Annotated[
        bool, typer.Option("--ended", help="Also list reservations that have ended.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the reservations that concern you; admins see all reservations."""
    from dray.cli.display.tables import listing

    with connect() as client:
        found = client.reservations(ended=ended)
    listing(
        found,
        as_json,
        ("NAME", "STATE", "BEGINS", "ENDS", "NODES", "FOR", "COMMENT"),
        lambda one: (
            *(one.name, one.state, one.begins_at, one.ends_at, len(one.includes)),
            *(whose(one), one.comment or None),
        ),
        flexible=("FOR", "COMMENT"),
        optional=("COMMENT",),
    )


@group.command("show")
def show(name: Name, as_json: AsJson = False) -> None:
    """Show a reservation, the nodes that it includes, and its numbers of jobs."""
    with connect() as client:
        _report(client.reservation(name), as_json)


@group.command("rm")
def remove(name: Name, as_json: AsJson = False) -> None:
    """Delete a reservation, which ends it; admins only. Jobs on its nodes continue."""
    import json

    from dray.cli.display.output import write

    with connect() as client:
        client.delete_reservation(name)
    write(json.dumps({"deleted": name}) if as_json else f"{name} deleted")


def _fields(times: dict[str, str | None], **others: Any) -> dict[str, Any]:
    """Return the given fields. `times` contains times as users write them."""
    options = {"begin_at": "--begin", "end_at": "--end"}
    moments = {field: future(text, options[field]) for field, text in times.items()}
    return {name: value for name, value in {**moments, **others}.items() if value is not None}


def _labels(labels: list[str] | None) -> dict[str, str] | None:
    found = {}
    for text in labels or ():
        key, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"write {text!r} as KEY=VALUE", param_hint="--label")
        found[key] = value
    return found or None


def _report(found: Reservation, as_json: bool) -> None:
    from dray.cli.display.output import cell, write_json, write_text

    if as_json:
        write_json(found)
        return
    there = ", ".join(node.hostname for node in found.includes) or None
    lines: list[tuple[str, object]] = [
        ("name", found.name),
        ("state", found.state),
        ("begins", found.begins_at),
        ("ends", found.ends_at),
        ("for", whose(found)),
        ("nodes", _nodes(found)),
        ("includes", there),
        ("at begin", f"other jobs: {found.at_begin}"),
        *([] if found.maintenance else [("at end", f"its jobs: {found.at_end}")]),
        *([("flex", "yes")] if found.flex else []),
        *([("unnamed", "accepts jobs that don't name it")] if found.accepts_unnamed else []),
        *([("comment", found.comment)] if found.comment else []),
        *([] if found.maintenance else [("waiting", found.num_waiting)]),
        *([] if found.maintenance else [("running", found.num_running)]),
        *(("warning", warning.message) for warning in found.warnings),
    ]
    for name, value in lines:
        write_text(f"{name:<10} {cell(value)}", indent=" " * 11)


def whose(found: Reservation | NodeReservation) -> str:
    """Return a string such as `ann, bob, queue night`."""
    if found.maintenance:
        return "maintenance"
    queues = (f"queue {name}" for name in found.queues)
    projects = (f"project {name}" for name in found.projects)
    return ", ".join([*found.users, *queues, *projects])


def _nodes(found: Reservation) -> str:
    """Return a description of the nodes, in the form in which the reservation specifies them."""
    labels = ", ".join(f"{key}={value}" for key, value in found.node_labels.items())
    of = f" with {labels}" if labels else ""
    if found.all_nodes:
        return "all nodes"
    if found.num_nodes is not None:
        return f"{found.num_nodes} node{'' if found.num_nodes == 1 else 's'}{of}"
    if found.num_gpus is not None:
        return f"{found.num_gpus} GPU{'' if found.num_gpus == 1 else 's'}{of}"
    return f"all nodes{of}" if labels else ", ".join(found.nodes)
