"""Outputs around a job: its queue, its webhook, Prometheus, and MLflow's runs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import select

from ray_workers.shared.net_policy import AllowedHosts
from service.db.models import WebhookDeliveryRow
from service.db.repositories.catalog import mlflow_exports
from service.tracking.mlflow.parts import JobPart, next_part
from service.webhooks import posting
from tests.generated.names.doors import Doors
from tests.generated.names.drawing import Case
from tests.generated.names.exits import bits, name_of
from tests.generated.names.sites import RECEIVER


def queue_is_counted(doors: Doors) -> None:
    """Prometheus shows the queue of a waiting job under its name."""
    answer = doors.site.admin.http.get("/metrics")
    counts = {
        sample.labels["queue"]: sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if sample.name == "dray_queue_jobs" and sample.labels["state"] == "QUEUED"
    }
    assert counts.get(doors.case.queue, 0) >= 1, counts


def queue_is_shown(doors: Doors) -> None:
    name, caller = doors.case.queue, doors.caller
    assert caller.get(f"/v1/queues/{name}")["name"] == name
    assert name in [queue["name"] for queue in caller.get("/v1/queues")["items"]]
    assert name in [queue.name for queue in caller.sdk.queues()]
    for words in (("queue", "ls"), ("queue", "show", "--", name)):
        code, out, err = caller.command(*words)
        assert code == 0, err
        assert name in out
    code, out, err = caller.command("queue", "show", "--json", "--", name)
    assert code == 0, err
    assert json.loads(out)["name"] == name


def owner_is_noted(doors: Doors, job_id: str) -> None:
    """The first event of a job names who submitted it; `@me` matches only the owner's own jobs."""
    events = doors.caller.get(f"/v1/jobs/{job_id}/events")["items"]
    assert events[0]["actor"] == doors.case.owner or doors.case.user is None
    if doors.case.user is not None:
        others = doors.site.admin.get("/v1/jobs", owner="@me", limit=500)["items"]
        assert job_id not in [job["id"] for job in others]


def hook_is_asked(doors: Doors, job_id: str) -> None:
    """The webhook is shown with its URL, is notified of the job, and called at that address."""
    hook, hook_id = doors.case.hook, doors.hook_id
    if hook is None or hook_id is None:
        return
    url, caller = hook["url"], doors.caller
    shown = caller.get(f"/v1/webhooks/{hook_id}")
    assert (shown["url"], shown["owner"]) == (url, doors.case.owner)
    assert url in [one.url for one in caller.sdk.webhooks()]
    for words in (("webhook", "ls", "--json"), ("webhook", "ls")):
        code, out, err = caller.command(*words)
        assert code == 0, err
        assert url in ([one["url"] for one in json.loads(out)] if "--json" in words else out)
    query = select(WebhookDeliveryRow.job_id).where(WebhookDeliveryRow.webhook_id == hook_id)
    told = doors.server.hands.database.read_sync(lambda s: s.scalars(query).all())
    assert job_id in told, "its filters are the job's own labels and queue"
    targets = doors.sites.receiver.targets
    targets.clear()
    hosts = AllowedHosts([RECEIVER])
    answer = asyncio.run(posting.post(shown["url"], b"{}", {}, hosts))
    assert answer.error is None, answer
    path = hook["path"] if hook["path"].startswith("/") else f"/{hook['path']}"
    assert targets == [path], "the address is asked for as it was given"


def exported(doors: Doors, job_id: str) -> JobPart:
    """Return what is written to MLflow about a finished job."""

    def work(session: Any) -> JobPart | None:
        mlflow_exports.add(session, mlflow_exports.new_jobs(session, 1000))
        return next_part(session, job_id)

    part = doors.server.hands.database.write_sync(work)
    assert part is not None
    return part


def run_is_written(doors: Doors, job_id: str) -> None:
    """MLflow accepts every name, no two names become one, and no value is lost."""
    case, part = doors.case, exported(doors, job_id)
    assert (part.run.name, part.run.experiment) == (name_of(case), experiment_of(case))
    keys = list(dict.fromkeys(key for key, *_ in part.metrics))
    found = {
        key: [(step, bits(value)) for one, value, _, step in part.metrics if one == key]
        for key in keys
    }
    given = [[(n, bits(v)) for n, v in enumerate(vs, 1)] for vs in case.metrics.values()]
    assert sorted(found.values()) == sorted(given), "no two metrics become one"
    for key in case.metrics.keys() & set(keys):
        assert found[key] == [(n, bits(v)) for n, v in enumerate(case.metrics[key], 1)]
    parameters = case.document["script"].get("parameters", {})
    of_script = [v for k, v in part.run.params.items() if "script.parameters." in k]
    texts = [v if isinstance(v, str) else json.dumps(v) for v in parameters.values()]
    assert sorted(of_script) == sorted(text[:6000] for text in texts)
    for key, value in case.document.get("labels", {}).items():
        assert value in part.tags.values(), key
    assert (part.tags["mlflow.user"], part.tags["dray.queue"]) == (case.owner, case.queue)
    assert len({one.path for one in part.artifacts}) == len(case.files)
    for name in (*keys, *part.run.params, *part.tags):
        assert is_of_mlflow(name), name


def experiment_of(case: Case) -> str:
    return case.document.get("labels", {}).get("experiment") or "Default"


def is_of_mlflow(name: str) -> bool:
    """Follow MLflow's documentation: letters, digits, `_`, `-`, `.`, spaces, colons and `/`, at
    most 250 characters, and no path that leads elsewhere."""
    parts = name.split("/")
    return (
        0 < len(name) <= 250
        and all(c.isalnum() or c in "_-. :/" for c in name)
        and not any(part in ("", ".", "..") for part in parts)
    )
