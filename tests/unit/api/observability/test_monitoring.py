"""The dashboard and the alerts in docker/monitoring only use metrics and labels that are
exported."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.api.serving import LiveServer

FOLDER = Path(__file__).parents[4] / "docker" / "monitoring"
ALERTS = FOLDER / "alerts.yaml"
_SELECTOR = re.compile(r"(dray_\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)(=~|=)"([^"]*)"')
_BY = re.compile(r"by \(([^)]*)\)")
OF_PROMETHEUS = {"instance"}
"""Labels that Prometheus adds itself."""
NOT_SEEN_YET = {("status", "5..")}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus"
)


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text())
    return found


def targets() -> Iterator[dict[str, Any]]:
    """Yield the queries of the panels."""
    for panel in dashboard()["panels"]:
        yield from panel["targets"]


def expressions() -> Iterator[str]:
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    yield from (target["expr"] for target in targets())


def labels_by(expression: str) -> set[str]:
    """Return the labels by which the expression groups."""
    return {label.strip() for labels in _BY.findall(expression) for label in labels.split(",")}


@pytest.fixture
def exported(http: httpx.Client, server: LiveServer) -> dict[str, dict[str, set[str]]]:
    """Labels and their values, by sample, in a scrape of a server with jobs in several states."""
    server.submit()
    server.trains()
    http.get("/v1/jobs")
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            labels = found[sample.name]
            for label, value in sample.labels.items():
                labels[label].add(value)
    return found


def test_all_that_dashboard_and_alerts_ask_for_is_exported(
    exported: dict[str, dict[str, set[str]]],
) -> None:
    asked = 0
    for expression in expressions():
        known = set(OF_PROMETHEUS)
        for name, matchers in _SELECTOR.findall(expression):
            asked += 1
            assert name in exported, expression
            known |= exported[name].keys()
            for label, operator, value in _MATCHER.findall(matchers):
                assert label in exported[name], expression
                values = [value] if operator == "=" else value.split("|")
                missing = set(values) - exported[name][label]
                assert {(label, each) for each in missing} <= NOT_SEEN_YET, expression
        assert labels_by(expression) <= known, expression
    assert asked > 50


def test_no_alert_and_no_panel_has_the_name_of_another() -> None:
    alerts = [rule["alert"] for rule in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]]
    panels = dashboard()["panels"]
    assert len(alerts) == len(set(alerts))
    for of in ("title", "id"):
        assert len(panels) == len({panel[of] for panel in panels})


def test_panels_lie_beside_each_other_in_the_grid_of_grafana() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        columns = range(place["x"], place["x"] + place["w"])
        rows = range(place["y"], place["y"] + place["h"])
        assert set(columns) <= set(range(24)), panel["title"]
        cells = {(column, row) for column in columns for row in rows}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_each_query_goes_to_the_source_that_the_reader_chooses_and_names_labels_it_has() -> None:
    shown = dashboard()
    (variable,) = shown["templating"]["list"]
    chosen = {"type": variable["query"], "uid": f"${{{variable['name']}}}"}
    for panel in shown["panels"]:
        assert panel["datasource"] == chosen, panel["title"]
        assert len(panel["targets"]) == len({target["refId"] for target in panel["targets"]})
    for target in targets():
        assert target["datasource"] == chosen, target["expr"]
        shown_labels = set(re.findall(r"{{\s*(\w+)\s*}}", target["legendFormat"]))
        assert shown_labels <= labels_by(target["expr"]), target["expr"]


def promtool(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["promtool", *arguments], input=text, capture_output=True, text=True, check=False
    )


@needs_promtool
def test_promtool_takes_the_rules() -> None:
    said = promtool("check", "rules", str(ALERTS))
    assert said.returncode == 0, said.stdout + said.stderr


@needs_promtool
def test_promtool_parses_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    queries = [target["expr"].replace("$__rate_interval", "5m") for target in targets()]
    rules = [{"record": f"query:{number}", "expr": one} for number, one in enumerate(queries)]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    said = promtool("check", "rules", str(path))
    assert said.returncode == 0, said.stdout + said.stderr


@needs_promtool
def test_promtool_takes_the_metrics(http: httpx.Client, server: LiveServer) -> None:
    server.trains()
    said = promtool("check", "metrics", text=http.get("/metrics").text)
    assert said.returncode == 0, said.stdout + said.stderr


@needs_promtool
def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    """Evaluated by Prometheus itself, on series that this test writes."""
    series = {
        'up{job="dray", instance="a"}': "0x300",
        "dray_cluster_seen_seconds": "5x300",
        "dray_cluster_connected": "1x300",
        'dray_queue_oldest_seconds{queue="night"}': "0+60x300",
        'dray_resources{kind="GPU", what="total"}': "8x300",
        'dray_resources{kind="GPU", what="held"}': "8x300",
        'dray_slot_seconds_total{class="useful"}': "0+10x300",
        'dray_slot_seconds_total{class="starting"}': "0+50x300",
        'dray_scheduler_round_seconds_bucket{le="0.5"}': "0+9x300",
        'dray_scheduler_round_seconds_bucket{le="10"}': "0+10x300",
        'dray_scheduler_round_seconds_bucket{le="+Inf"}': "0+10x300",
    }
    fires = {
        "DrayDown": True,
        "DrayLoopsStandStill": False,
        "DrayClusterLost": False,
        "DraySlotsIdle": False,
        "DrayGoodputLow": True,
        "DraySchedulerSlow": True,
        "DrayQueueWaitsLong": True,
    }
    expected = [
        {"expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}})', "eval_time": "5h"}
        | {"exp_samples": [{"labels": "{}", "value": 1}] if is_firing else []}
        for name, is_firing in fires.items()
    ]
    test = {
        "rule_files": [str(ALERTS)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": s, "values": v} for s, v in series.items()],
                "promql_expr_test": expected,
            }
        ],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(test))
    said = promtool("test", "rules", str(tmp_path / "test.yaml"))
    assert said.returncode == 0, said.stdout + said.stderr
