"""The SDK and the command line offer all query parameters of the API."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dray import Client
from dray.cli.commands import (
    accounting,
    costs,
    decisions,
    listing,
    metrics,
    reports,
    reservations,
    shares,
    usage,
)
from dray.filters import JobFilter

OPENAPI = Path(__file__).parents[1] / "api" / "openapi.json"

METHODS: dict[str, Callable[..., Any]] = {
    "get_job": Client.get,
    "list_jobs": Client.jobs,
    "list_job_groups": Client.groups,
    "export_jobs": Client.save_table,
    "get_experiment": Client.experiment,
    "get_importance": Client.importance,
    "get_sweep_importance": Client.sweep_importance,
    "list_views": Client.saved_views,
    "get_view": Client.saved_view,
    "list_reports": Client.reports,
    "export_report": Client.export_report,
    "report_costs": Client.costs,
    "list_accounting": Client.accounting,
    "report_shares": Client.shares,
    "report_usage": Client.usage,
    "list_idle_gpus": Client.idle_gpus,
    "list_decisions": Client.decisions,
    "list_reservations": Client.reservations,
    "get_array": Client.wait_array,
    "get_sweep": Client.sweep,
    "compare_jobs": Client.compare,
    "diff_jobs": Client.diff,
    "get_metrics": Client.metrics,
    "get_system_metrics": Client.system_metrics,
    "get_logs": Client.logs,
    "get_log_text": Client.logs,
    "get_samples": Client.samples,
    "get_media_records": Client.media_records,
    "get_events": Client.events,
    "get_drill": Client.drill,
    "get_round": Client.join,
}
NAMES = {
    ("diff_jobs", "jobs"): "old",
    ("get_job", "state"): "known_state",
    ("get_array", "state"): "states",
    ("get_array", "wait_s"): "timeout_s",
    ("get_drill", "wait_s"): "wait",
    ("export_jobs", "format"): "file_format",
}
"""Parameters that have other names in the SDK."""
PAGES = {"limit", "cursor"}
"""The SDK fetches all pages itself."""
NOT_IN_THE_SDK = {
    ("list_jobs", "id_prefix"): "Client.resolve",
    ("list_job_groups", "id_prefix"): "Client.resolve",
    ("list_job_groups", "collapse_arrays"): "it is refused",
    ("export_jobs", "id_prefix"): "Client.resolve",
    ("export_jobs", "collapse_arrays"): "it is refused",
    ("get_experiment", "brief"): "of the web page, which shows no ranges",
    ("get_importance", "id_prefix"): "Client.resolve",
    ("get_importance", "collapse_arrays"): "it is refused",
    ("get_sweep", "wait_s"): "Client.wait_array",
    ("get_logs", "wait_s"): "follow",
    ("get_events", "wait_s"): "Client.follow",
    ("get_round", "wait_s"): "Client.join",
}
"""The method or parameter that is used instead."""

COMMANDS: dict[str, Callable[..., Any]] = {
    "list_jobs": listing.list_jobs,
    "report_costs": costs.costs,
    "list_accounting": accounting.accounting,
    "report_shares": shares.shares,
    "report_usage": usage.usage,
    "list_decisions": decisions.show_decisions,
    "list_reservations": reservations.list_reservations,
    "get_metrics": metrics.metrics,
    "get_logs": reports.logs,
}
OPTIONS = {
    ("list_jobs", "created_after"): "since",
    ("list_jobs", "created_before"): "until",
    ("list_jobs", "collapse_arrays"): "each",
    ("list_accounting", "per"): "per_job",
    ("get_metrics", "keys"): "key",
}
NOT_IN_THE_COMMANDS = {
    ("list_jobs", "id_prefix"): "`dray get` and others take the beginning of an id",
    ("list_jobs", "array_index"): "`dray get ARRAY/INDEX`",
    ("list_jobs", "name_glob"): "--name, where it holds a * or ?",
    ("list_accounting", "array_index"): "`--array` lists all jobs of an array",
    ("list_accounting", "name_glob"): "--name, where it holds a * or ?",
    ("get_metrics", "in_order"): "--follow leaves none out",
    ("get_metrics", "times"): "--follow has them",
    ("get_logs", "wait_s"): "--follow",
}


def questions() -> dict[str, list[str]]:
    """Return the query parameters of each GET, by operation, if it has any except for `PAGES`."""
    found = {}
    for path in json.loads(OPENAPI.read_text())["paths"].values():
        one = path.get("get", {})
        names = [each["name"] for each in one.get("parameters", ()) if each["in"] == "query"]
        if set(names) - PAGES:
            found[one["operationId"]] = names
    return found


def parameters(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


def test_the_sdk_takes_all_query_parameters() -> None:
    asked = questions()
    assert asked.keys() == METHODS.keys()
    missing = {
        (operation, name)
        for operation, names in asked.items()
        for name in names
        if NAMES.get((operation, name), name) not in parameters(METHODS[operation])
        if name not in PAGES
    }
    assert missing == NOT_IN_THE_SDK.keys()


def test_the_commands_take_them_too() -> None:
    asked = questions()
    missing = {
        (operation, name)
        for operation, command in COMMANDS.items()
        for name in asked[operation]
        if OPTIONS.get((operation, name), name) not in parameters(command)
        if name not in PAGES
    }
    assert missing == NOT_IN_THE_COMMANDS.keys()


def test_actions_on_many_jobs_take_all_filters() -> None:
    left_out = {"id_prefix", "collapse_arrays"}  # `Client.resolve`; it is refused
    taken = inspect.signature(Client.bulk).parameters
    assert set(JobFilter.model_fields) - left_out <= set(taken)
