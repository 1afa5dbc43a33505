"""The command that shows the ways to parallelize a job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dray.cli.base import AsJson, app, connect, num_bytes

if TYPE_CHECKING:
    from dray.views import Plan, PlannedMesh, SyncPlan


@app.command()
def plan(
    document: Annotated[
        Path, typer.Argument(metavar="FILE", help="Job document in YAML or JSON; - for stdin.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Change a field: train.epochs=3."),
    ] = None,
    memory: Annotated[
        int | None,
        typer.Option(metavar="BYTES", help="Memory of each worker: 8GiB.", parser=num_bytes),
    ] = None,
    flops: Annotated[
        float | None,
        typer.Option(
            metavar="PER_S", help="Floating-point operations per second of a worker.", min=0
        ),
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(metavar="BYTES_PER_S", help="Bandwidth of each worker.", min=0)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the memory use and step time of each way to parallelize a job across its workers."""
    from dray.cli.display.output import write_json
    from dray.documents import apply_settings, load_document

    spec = apply_settings(load_document(document), settings or [])
    with connect() as client:
        found = client.plan(
            spec,
            memory_bytes_per_rank=memory,
            flops_per_s=flops,
            bandwidth_bytes_per_s=bandwidth,
        )
    if as_json:
        write_json(found)
    else:
        _show(found)


def _show(found: Plan) -> None:
    from dray.cli.display.output import size, write, write_text
    from dray.cli.display.tables import table

    headings = ("MESH", "PARAMETERS", "GRADIENTS", "OPTIMIZER", "ACTIVATIONS", "TOTAL", "WHY")
    table(
        headings,
        map(_row, found.meshes),
        flexible=("WHY",),
        optional=("OPTIMIZER", "GRADIENTS", "PARAMETERS", "ACTIVATIONS"),
    )
    write("")
    has = found.memory_bytes_per_rank
    write_text(f"memory per worker: {'' if has is None else size(has) + ', '}{found.memory_source}")
    write_text(f"times: {found.calibration.source}")
    for sentence in found.assumed:
        write_text(f"assumed: {sentence}")
    if found.chosen is not None:
        write_text(f"chosen: {found.chosen}")
    else:
        write_text(f"no mesh fits; {found.change or 'no single change'} would make the job fit")
    write("")
    show_sync(found.sync)


def show_sync(found: SyncPlan) -> None:
    """Write the ways to keep the model copies in sync, and the way that `sync: auto` chooses."""
    from dray.cli.display.output import number, size, write_text
    from dray.cli.display.tables import table

    table(
        ("SYNC", "SENT PER STEP", "TIME", "STALENESS", "WHY"),
        (
            (
                one.name,
                None if one.sent_bytes is None else size(one.sent_bytes),
                None if one.step_time_s is None else f"{number(one.step_time_s * 1e3)} ms",
                one.staleness_steps,
                one.why,
            )
            for one in found.options
        ),
        flexible=("WHY",),
        optional=("SENT PER STEP", "TIME", "STALENESS"),
    )
    for sentence in found.facts:
        write_text(f"known: {sentence}")
    write_text(f"sync: auto would choose {found.chosen}")


def _row(mesh: PlannedMesh) -> tuple[str, ...]:
    from dray.cli.display.output import size

    memory = mesh.memory
    sizes = (
        memory.parameters_bytes,
        memory.gradients_bytes,
        memory.optimizer_bytes,
        memory.activations_bytes,
        memory.total_bytes,
    )
    return (mesh.name, *map(size, sizes), mesh.why)
