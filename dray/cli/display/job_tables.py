"""Tables of jobs with chosen columns, groups of jobs, and saved views of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from dray.cli.display.exports import column_names, write_csv
from dray.cli.display.output import age, duration, warn, write_json
from dray.cli.display.tables import listing, shortest_prefixes, table

if TYPE_CHECKING:
    from dray.client import Client
    from dray.views import Job, JobGroup

T = TypeVar("T")
_NAMED = frozenset(
    {
        *("id", "name", "owner", "project", "queue", "state", "priority", "world_size", "array"),
        *("created_at", "started_at", "finished_at", "duration", "cost", "tags", "experiment"),
    }
)
"""Columns whose headings are in capital letters, unlike the names of parameters and metrics."""


@dataclass(frozen=True)
class Shown:
    """How `dray ls` shows jobs."""

    sort: str | None
    columns: str | None
    group: str | None
    as_csv: bool
    parquet: Path | None
    as_json: bool
    brief: bool
    limit: int | None
    """Maximum number of jobs or groups; None for all."""

    @property
    def is_table(self) -> bool:
        return self.is_export or bool(self.sort or self.columns or self.group)

    @property
    def is_export(self) -> bool:
        return self.as_csv or self.parquet is not None


def with_view(
    client: Client, view: str, given: Mapping[str, Any], shown: Shown
) -> tuple[dict[str, Any], Shown]:
    """Return the filter and the options of `dray ls`. Options that are not given are taken from the
    view."""
    owner, _, name = view.rpartition("/")
    query = dict(client.saved_view(name, owner=owner or None).query)
    mine = {part: query.pop(part, None) for part in ("sort", "columns", "group")}
    shown = replace(shown, **{part: getattr(shown, part) or value for part, value in mine.items()})
    if "label" in query:
        query["label"] = dict(text.split("=", 1) for text in query["label"])
    for part in ("created_after", "created_before"):
        if part in query:
            query[part] = datetime.fromisoformat(query[part])
    query.pop("collapse_arrays", None)
    return {**query, **{part: value for part, value in given.items() if value}}, shown


def save(client: Client, name: str, given: Mapping[str, Any], shown: Shown) -> None:
    """Save the filter and the options as a view."""
    if not name or "/" in name:
        message = "must consist of a-z, 0-9, _ and -, and begin with a letter or a digit"
        raise typer.BadParameter(message, param_hint="--save")
    query = {part: value for part, value in given.items() if value}
    for part in ("sort", "columns", "group"):
        if (value := getattr(shown, part)) is not None:
            query[part] = value
    saved = client.save_view(name, view_project=given.get("project"), **query)
    warn(f"saved the view {saved.owner}/{saved.name}")


def show(client: Client, given: Mapping[str, Any], shown: Shown) -> None:
    """Write the table of jobs or groups."""
    _check(shown)
    limit = None if shown.is_export else shown.limit
    page_size = 500 if limit is None else min(limit + 1, 500)
    if shown.group is not None:
        groups = client.groups(shown.group, sort=shown.sort, page_size=page_size, **given)
        found_groups = _up_to(groups, limit)
        _show_groups(found_groups[:limit], as_json=shown.as_json)
        _warn_of_more(found_groups, limit, "groups")
        return
    columns = shown.columns
    if columns is None and shown.sort is not None:
        columns = f"name,state,{shown.sort.strip().removeprefix('-')},owner,created_at"
    assert columns is not None
    if shown.parquet is not None:
        _write_file(client, shown.parquet, columns, given, shown.sort)
        return
    jobs = client.jobs(
        **given,
        sort=shown.sort,
        columns=[columns],
        brief=shown.brief or not shown.as_json,
        page_size=page_size,
    )
    if shown.as_csv:
        write_csv(jobs, columns)
        return
    found = _up_to(jobs, limit)
    if shown.as_json:
        write_json(found[:limit])
        return
    _show_columns(found[:limit], columns)
    _warn_of_more(found, limit, "jobs")


def _write_file(
    client: Client, path: Path, columns: str, given: Mapping[str, Any], sort: str | None
) -> None:
    try:
        size = client.save_table(path, [columns], sort=sort, **given)
    except OSError as error:
        raise typer.BadParameter(f"can't write {path}: {error}", param_hint="--parquet") from None
    warn(f"wrote {size:,} bytes to {path}")


def _up_to(items: Iterator[T], limit: int | None) -> list[T]:
    """Return the items up to one more than `limit`."""
    return list(islice(items, None if limit is None else limit + 1))


def _warn_of_more(found: Sequence[object], limit: int | None, what: str) -> None:
    if limit is not None and len(found) > limit:
        warn(f"only {limit} {what} are listed; use --all to list all {what}")


def _check(shown: Shown) -> None:
    if shown.is_export:
        option = "--csv" if shown.as_csv else "--parquet"
        if shown.columns is None:
            raise typer.BadParameter("requires --columns", param_hint=option)
        if shown.group is not None:
            raise typer.BadParameter("can't be combined with --group", param_hint=option)
        if shown.as_json or (shown.as_csv and shown.parquet is not None):
            raise typer.BadParameter("--json, --csv and --parquet can't be combined")
    elif shown.group is not None and shown.columns is not None and shown.sort is None:
        raise typer.BadParameter("groups have no columns: use --sort", param_hint="--columns")


def _show_columns(jobs: Sequence[Job], columns: str) -> None:
    names = list(jobs[0].values) if jobs else column_names(columns)
    headings = ["ID", *(name.upper() if name in _NAMED else name for name in names)]
    rows = [[job.id, *(_cell(job, name) for name in names)] for job in jobs]
    if any(job.values_as_of for job in jobs):
        headings.append("AS OF")
        for row, job in zip(rows, jobs, strict=True):
            row.append(None if job.values_as_of is None else age(job.values_as_of))
    table(
        headings,
        rows,
        flexible=("NAME", "TAGS"),
        shorter={"ID": shortest_prefixes},
    )


def _cell(job: Job, name: str) -> object:
    value = job.values[name]
    if value is None:
        return None
    if name == "duration":
        return duration(value)
    if name in ("created_at", "started_at", "finished_at"):
        return age(datetime.fromisoformat(value))
    return ", ".join(value) if name == "tags" else value


def _show_groups(groups: Sequence[JobGroup], *, as_json: bool) -> None:
    listing(
        groups,
        as_json,
        (
            "GROUP",
            "NAME",
            "JOBS",
            "VALUES",
            "BEST",
            "BEST JOB",
            "MEAN",
            "STD",
            "MIN",
            "MAX",
            "AS OF",
        ),
        lambda one: (
            *(one.key, one.name, one.num_jobs, one.num_values, one.best, one.best_job),
            *(one.mean, one.std, one.min, one.max),
            None if one.as_of is None else age(one.as_of),
        ),
        flexible=("GROUP", "NAME"),
        optional=("NAME", "STD", "MIN", "MAX", "MEAN", "BEST JOB", "BEST", "VALUES", "AS OF"),
    )
