"""Commands that show the cluster's nodes, test them, and release withheld nodes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from dray.cli.base import AsJson, app, connect
from dray.cli.commands.reservations import whose

if TYPE_CHECKING:
    from dray.views import AutoscalingState, NodeCheck, NodeSlots, StorageState

_KINDS = ("CPU", "GPU")
DOUBTFUL = timedelta(minutes=10)
"""Time to wait for a requested node before warning that the autoscaler may be missing."""

MAX_WAIT_S = 3600.0

group = typer.Typer(
    name="cluster",
    help="Show the nodes, the jobs that run on them, and the reservations that are active or begin "
    "within a week. Test and release nodes.",
    invoke_without_command=True,
)
app.add_typer(group)


@group.callback()
def cluster(context: typer.Context, as_json: AsJson = False) -> None:
    if context.invoked_subcommand is not None:
        return
    from dray.cli.display.output import write_json, write_text
    from dray.cli.display.tables import table

    with connect() as client:
        answer = client.cluster()
    if as_json:
        write_json(answer)
        return
    write_text("connected" if answer.connected else f"not connected: {answer.reason}")
    if answer.ray_dashboard:
        write_text(f"dashboard: {answer.ray_dashboard}")
    storage = _storage(answer.storage)
    if storage:
        write_text(f"storage: {storage}")
    if answer.autoscaling is not None:
        write_text(f"autoscaler: {_autoscaling(answer.autoscaling, datetime.now(UTC))}")
    rows = (
        (
            node.hostname,
            _health(node),
            *(f"{node.held.get(kind, 0):g}/{node.resources.get(kind, 0):g}" for kind in _KINDS),
            ", ".join(node.jobs) or None,
            ", ".join(one.name for one in node.reservations) or None,
        )
        for node in answer.nodes
    )
    table(
        ("NODE", "STATE", *(f"{kind} HELD" for kind in _KINDS), "JOBS", "RESERVATIONS"),
        rows,
        flexible=("STATE", "RESERVATIONS"),
        optional=("RESERVATIONS",),
    )
    reserved = {one.name: one for node in answer.nodes for one in node.reservations}
    if reserved:
        write_text("")
        table(
            ("RESERVATION", "BEGINS", "ENDS", "FOR"),
            (
                (one.name, one.begins_at, one.ends_at, whose(one))
                for one in sorted(reserved.values(), key=lambda one: (one.begins_at, one.name))
            ),
            flexible=("FOR",),
        )
    for node in answer.nodes:
        for kept in node.quarantined:
            slots, are = ("1 slot", "is") if kept.slots == 1 else (f"{kept.slots} slots", "are")
            write_text(
                f"{node.hostname}: {slots} of {kept.job_id} {are} in quarantine: {kept.reason}"
            )
        for fault in node.withheld:
            at = f"{fault.since:%Y-%m-%d %H:%M:%S} UTC"
            write_text(f"{node.hostname}: no new work since {at}: {fault.reason}")
        for line in _check_lines(node.check):
            write_text(line)


@group.command("release")
def release(
    node: Annotated[str, typer.Argument(metavar="NODE", help="The node's host name.")],
    as_json: AsJson = False,
) -> None:
    """Allow a node to get new work again after its GPUs were repaired or checked. Only for
    admins."""
    from dray.cli.display.output import write_json, write_text

    with connect() as client:
        answer = client.release_node(node)
    if as_json:
        write_json(answer)
        return
    for fault in answer.released:
        write_text(f"{answer.hostname}: released: {fault.reason}")


@group.command("check")
def check(
    node: Annotated[
        str | None,
        typer.Argument(metavar="[NODE]", help="The node's host name; all nodes by default."),
    ] = None,
    wait_s: Annotated[
        float, typer.Option("--wait", help="Maximum number of seconds to wait for the results.")
    ] = 120.0,
    as_json: AsJson = False,
) -> None:
    """Test the GPUs of nodes that no job uses. Only for admins."""
    from dray.cli.display.output import write_json, write_text

    if not 0 <= wait_s <= MAX_WAIT_S:
        raise typer.BadParameter(f"must be from 0 to {MAX_WAIT_S:g}", param_hint="--wait")
    with connect() as client:
        found = client.check_nodes(node, wait_s=wait_s)
    if as_json:
        write_json(found)
    else:
        for one in found:
            for line in _check_lines(one, with_values=True):
                write_text(line)
    if any(one.outcome == "failed" for one in found if one.state == "done"):
        raise typer.Exit(1)


def _check_lines(check: NodeCheck | None, *, with_values: bool = False) -> list[str]:
    """Describe a self-test and the GPUs that it found to be slow."""
    if check is None:
        return []
    state = {"waiting": "the self-test waits", "running": "the self-test is running"}
    lines = (
        [f"{check.hostname}: {state[check.state]}: {check.why}"] if check.state != "done" else []
    )
    if check.ended_at is not None and check.state == "done":
        lines.append(f"{check.hostname}: {check.message} ({check.ended_at:%Y-%m-%d %H:%M:%S} UTC)")
    for device in check.devices:
        name = f"{check.hostname}: " + (f"GPU {device.index}" if device.gpu else "processors")
        if with_values and device.values and check.state == "done":
            values = ", ".join(f"{key} {value:.3g}" for key, value in device.values.items())
            lines.append(f"{name}: {values}")
        for slow in device.slow:
            twins = f"{slow.num_twins} other {device.model}"
            lines.append(
                f"{name} is {slow.factor:.1f} times slower than the median of {twins}, measured by "
                f"{slow.measure}"
            )
    return lines


def _autoscaling(state: AutoscalingState, now: datetime) -> str:
    """Describe the request to Ray's autoscaler, with a warning if no node was added in time."""
    if state.asked_at is None:
        return f"no nodes requested; the maximum is {state.max_nodes}"
    nodes = "1 more node" if state.num_nodes == 1 else f"{state.num_nodes} more nodes"
    request = f"{nodes} requested from Ray since {state.asked_at:%Y-%m-%d %H:%M:%S} UTC"
    if now - state.asked_at < DOUBTFUL:
        return request
    return f"{request}; check whether an autoscaler is running (`ray status`)"


def _storage(state: StorageState) -> str | None:
    """Return the problem with the storage, if any. If there is no problem, return how much space is
    used or free; None if there is no limit."""
    from dray.cli.display.output import size

    if state.problem:
        return state.problem
    if state.quota_bytes is not None and state.used_bytes is not None:
        return f"{size(state.used_bytes)} of {size(state.quota_bytes)} used"
    if state.min_free_bytes is not None and state.free_bytes is not None:
        return f"{size(state.free_bytes)} free; {size(state.min_free_bytes)} must stay free"
    return None


def _health(node: NodeSlots) -> str:
    if not node.alive:
        return "lost"
    if not node.accepted:
        return f"refused: {node.reason}"
    return f"ready, but {node.reason}" if node.reason else "ready"
