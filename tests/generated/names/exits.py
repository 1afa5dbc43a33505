"""The outputs at which the parts of a case appear, each compared with the input."""

from __future__ import annotations

import asyncio
import csv
import html
import io
import json
import math
import struct
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from dray.aio import AsyncClient
from dray.tensorboard.writer import FILE, write_jobs
from dray.views import WebhookFormat
from service.db.models import WebhookDeliveryRow
from service.domain.webhooks import body_of
from tests.generated.names.doors import Doors
from tests.generated.names.drawing import Case


def bits(value: Any) -> str:
    """Return a number as its 64 bits, so that -0.0 differs from 0.0; all NaNs are equal."""
    number = float(value)
    return "nan" if math.isnan(number) else struct.pack(">d", number).hex()


def points(steps: Sequence[int], values: Sequence[Any]) -> list[tuple[int, str]]:
    return [(step, bits(value)) for step, value in zip(steps, values, strict=True)]


def storable(text: str) -> str:
    """Return a log line as shown: NUL as its picture, and a lone surrogate as a question mark."""
    return "".join("␀" if c == "\0" else "?" if "\ud800" <= c <= "\udfff" else c for c in text)


class Readers:
    """Reads one job at every output of its server."""

    def __init__(self, doors: Doors, job_id: str) -> None:
        self.doors = doors
        self.site = doors.site
        self.caller = doors.caller
        self.http, self.sdk = doors.caller.http, doors.caller.sdk
        self.get = doors.caller.get
        self.case = doors.case
        self.job_id = job_id

    def check(self) -> None:
        job_id, case = self.job_id, self.case
        self.api(job_id, case)
        self.lists(job_id, case)
        self.searches(job_id, case)
        self.client(job_id, case)
        self.frames(job_id, case)
        self.commands(job_id, case)
        self.mlflow(job_id, case)
        self.mlflow_search(job_id, case)
        self.experiment(case)
        self.messages(job_id, case)
        self.tensorboard(job_id, case)

    def command(self, *words: str) -> str:
        code, out, err = self.caller.command(*words)
        assert code == 0, (words, err)
        return out

    def api(self, job_id: str, case: Case) -> None:
        of_job = f"/v1/jobs/{job_id}"
        document_is(self.get(of_job), case)
        last = {key: bits(values[-1]) for key, values in case.metrics.items()}
        summary = {k: bits(v) for k, v in self.get(of_job)["summary"].items()}
        assert summary == last, "the summary has the last value of each metric"
        annotations = self.get(f"{of_job}/annotations")
        assert annotations["tags"] == sorted(case.tags)
        assert annotations["notes"] == case.notes
        series_are(self.get(f"{of_job}/metrics")["series"], case)
        for key in case.metrics:
            assert list(self.get(f"{of_job}/metrics", keys=key)["series"]) == [key]
        logs = self.get(f"{of_job}/logs", limit=1000)["items"]
        assert [line["text"] for line in logs] == [storable(line) for line in case.lines]
        files = {one["path"]: one["id"] for one in self.get(f"{of_job}/artifacts")["items"]}
        assert files.keys() == case.files.keys()
        for path, content in case.files.items():
            answer = self.http.get(f"{of_job}/artifacts/{files[path]}")
            assert answer.content == content, path

    def lists(self, job_id: str, case: Case) -> None:
        name = case.document.get("name", "")
        found: list[dict[str, Any]] = [{"name": name}, {"text": name}] if name else []
        if name and not any(sign in name for sign in "*?"):
            found.append({"name_glob": name})
        found += [{"owner": case.owner}, {"owner": "@me"}, {"queue": case.queue}]
        found += [{"label": f"{k}={v}"} for k, v in case.document.get("labels", {}).items()]
        for params in found:
            items = self.get("/v1/jobs", **params)["items"]
            assert job_id in [job["id"] for job in items], params
        if name:
            for other in (name + "x", f"x{name}", name.swapcase()):
                items = self.get("/v1/jobs", name=other)["items"] if len(other) < 129 else []
                assert other == name or job_id not in [job["id"] for job in items], other

    def searches(self, job_id: str, case: Case) -> None:
        document = case.document
        conditions = [f"owner = {quoted(case.owner)}", f"queue = {quoted(case.queue)}"]
        conditions += [f"name = {quoted(document['name'])}"] if "name" in document else []
        for key, value in document.get("labels", {}).items():
            conditions.append(f"labels[{quoted(key)}] = {quoted(value)}")
        for key, values in case.metrics.items():
            field = f"metrics[{quoted(key)}]"
            conditions.append(f"exists({field})")
            if math.isfinite(values[-1]):
                conditions.append(f"{field} = {values[-1]!r}")
        for number, word in enumerate(document["script"].get("args", ())):
            if len(word) < 256:
                conditions.append(f"script.args[{number}] = {quoted(word)}")
        for key, value in document["script"].get("parameters", {}).items():
            if isinstance(value, str) or (not isinstance(value, bool) and abs(value) <= 2**53):
                written = quoted(value) if isinstance(value, str) else repr(value)
                if len(key.replace("~", "~0").replace("/", "~1")) < 200:
                    conditions.append(f"script.parameters[{quoted(key)}] = {written}")
        conditions += [f"{quoted(tag)} in tags" for tag in case.tags]
        for condition in conditions:
            if len(condition) < 4000:
                items = self.get("/v1/jobs", where=condition)["items"]
                assert job_id in [job["id"] for job in items], condition

    def client(self, job_id: str, case: Case) -> None:
        job = self.sdk.get(job_id)
        document_is(job.model_dump(mode="json"), case)
        assert sorted(job.tags) == sorted(case.tags)
        metrics = self.sdk.metrics(job_id).series
        series_are({k: {"steps": s.steps, "values": s.values} for k, s in metrics.items()}, case)
        lines = [line.text for line in self.sdk.logs(job_id)]
        assert lines == [storable(line) for line in case.lines]
        name = case.document.get("name", "")
        if name and not name.startswith("@"):
            same = [one.id for one in self.sdk.jobs(name=name)]
            assert job_id in same
            if same == [job_id]:
                assert self.sdk.resolve(name) == job_id
        followed: dict[str, list[tuple[int, str]]] = {}
        for point in self.sdk.follow_metrics(job_id):
            followed.setdefault(point.key, []).append((point.step, bits(point.value)))
        assert followed == expected_series(case)
        with tempfile.TemporaryDirectory() as folder:
            paths = self.sdk.download(job_id, folder) if case.files else []
            found = {str(path.relative_to(folder)): path.read_bytes() for path in map(Path, paths)}
            assert found == case.files

    def frames(self, job_id: str, case: Case) -> None:
        row = self.sdk.frame([job_id, self.site.other]).loc[job_id]
        assert (row["name"], row["owner"]) == (name_of(case), case.owner)
        assert row["experiment"] == case.document.get("labels", {}).get("experiment") or (
            row["experiment"] is None or row["experiment"] != row["experiment"]
        )
        for name, value in case.document["script"].get("parameters", {}).items():
            assert row[f"parameters.{name}"] == value, name
        series = self.sdk.series_frame([job_id])
        found: dict[str, list[tuple[int, str]]] = {}
        for key, step, value in zip(series["key"], series["step"], series["value"], strict=True):
            found.setdefault(key, []).append((step, bits(value)))
        assert found == expected_series(case)

    def commands(self, job_id: str, case: Case) -> None:
        document_is(json.loads(self.command("get", job_id, "--json")), case)
        found: dict[str, list[tuple[int, str]]] = {}
        rows = csv.reader(io.StringIO(self.command("metrics", job_id, "--csv"), newline=""))
        for key, step, value in list(rows)[1:]:
            found.setdefault(key, []).append((int(step), bits(value)))
        assert found == expected_series(case)
        lines = self.command("logs", job_id, "--json").split("\n")[:-1]
        assert [json.loads(line)["text"] for line in lines] == [storable(one) for one in case.lines]
        name = case.document.get("name", "")
        if name and not any(sign in name for sign in "*?"):
            whose = (f"--owner={case.owner}", f"--queue={case.queue}")
            listed = json.loads(self.command("ls", "--json", "--all", f"--name={name}", *whose))
            assert job_id in [job["id"] for job in listed]
        table = self.command("metrics", job_id)
        for key in case.metrics:
            assert key in table, "the table has each metric"
        for words in (("ls", "-n1"), ("get", job_id), ("logs", job_id), ("explain", job_id)):
            assert is_harmless(self.command(*words)), words

    def mlflow(self, job_id: str, case: Case) -> None:
        run = self._of_mlflow("runs/get", run_id=job_id)["run"]
        assert run["info"]["run_name"] == name_of(case)
        params = {one["key"]: one["value"] for one in run["data"]["params"]}
        tags = {one["key"]: one["value"] for one in run["data"]["tags"]}
        assert run["info"]["user_id"] == tags["mlflow.user"] == tags["dray.owner"] == case.owner
        assert tags["dray.queue"] == case.queue
        for key, value in case.document.get("labels", {}).items():
            assert tags.get(key, value) == value
            assert value in tags.values(), "a key that MLflow does not take has another name"
        if "script.args" in params:
            shown = params["script.args"]
            assert shown == json.dumps(case.document["script"]["args"])[:6000], "as MLflow cuts it"
        of_script = [key for key in params if "script.parameters." in key]
        assert len(of_script) == len(case.document["script"].get("parameters", {}))
        last = {one["key"]: bits(one["value"]) for one in run["data"]["metrics"]}
        assert last == {key: bits(values[-1]) for key, values in case.metrics.items()}
        for key, values in case.metrics.items():
            history = self._of_mlflow("metrics/get-history", run_id=job_id, metric_key=key)
            found = [(one["step"], bits(one["value"])) for one in history["metrics"]]
            assert found == [(n, bits(value)) for n, value in enumerate(values, 1)]

    def mlflow_search(self, job_id: str, case: Case) -> None:
        filters = [
            f"attributes.run_name = {of_mlflow(name_of(case))}",
            f"attributes.user_id = {of_mlflow(case.owner)}",
            f"tags.`dray.queue` = {of_mlflow(case.queue)}",
        ]
        for key, value in case.document.get("labels", {}).items():
            filters.append(f"tags.`{key}` = {of_mlflow(value)}")
        for key, values in case.metrics.items():
            if "`" not in key and not math.isnan(values[-1]):
                is_number = f"= {values[-1]!r}" if math.isfinite(values[-1]) else ""
                filters.append(f"metrics.`{key}` {is_number or ('> 0', '< 0')[values[-1] < 0]}")
        experiment = case.document.get("labels", {}).get("experiment") or "Default"
        found = self._of_mlflow("experiments/get-by-name", experiment_name=experiment)
        wanted = found["experiment"]["experiment_id"]
        for text in filters:
            body = {"experiment_ids": [wanted], "filter": text}
            answer = self.http.post("/api/2.0/mlflow/runs/search", json=body)
            assert answer.status_code == 200, (text, answer.text)
            runs = answer.json().get("runs", [])
            assert job_id in [run["info"]["run_id"] for run in runs], text

    def experiment(self, case: Case) -> None:
        name = case.document.get("labels", {}).get("experiment")
        if name:
            assert name in [one.name for one in self.sdk.experiments()]
            if name in (".", ".."):  # URL libraries remove such segments from paths
                with pytest.raises(ValueError, match="part of a URL"):
                    self.sdk.experiment(name)
                return
            assert self.sdk.experiment(name).name == name
            shown = json.loads(self.command("experiment", "show", "--json", "--", name))
            assert shown["name"] == name

    def messages(self, job_id: str, case: Case) -> None:
        """Return what a webhook is sent about the end."""
        query = select(WebhookDeliveryRow).where(
            WebhookDeliveryRow.job_id == job_id, WebhookDeliveryRow.webhook_id == self.site.hook
        )
        (row,) = self.site.server.hands.database.read_sync(lambda s: s.scalars(query).all())
        told = json.loads(body_of(row.type, row.created_at, row.data, WebhookFormat.JSON, ""))
        about = (name_of(case), case.owner, case.queue)
        assert tuple(told["data"][field] for field in ("name", "owner", "queue")) == about
        assert told["data"]["labels"] == case.document.get("labels", {})
        last = {key: bits(values[-1]) for key, values in case.metrics.items()}
        assert {key: bits(value) for key, value in told["data"]["metrics"].items()} == last
        slack = json.loads(body_of(row.type, row.created_at, row.data, WebhookFormat.SLACK, ""))
        lines = slack["text"].split("\n")
        assert html.unescape(lines[0]).startswith(f"*{name_of(case)}* SUCCEEDED")
        assert html.unescape(lines[1]) == f"{case.owner}, queue {case.queue}"
        assert "<" not in "".join(lines[:-1]), "a name is no link, and mentions nobody"

    def _of_mlflow(self, path: str, **params: Any) -> Any:
        return self.get(f"/api/2.0/mlflow/{path}", **params)

    def tensorboard(self, job_id: str, case: Case) -> None:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(self._write_events(job_id, Path(folder)))
            (path,) = Path(folder).glob(f"*/{FILE}")
            found: dict[str, list[tuple[int, str]]] = {}
            for tag, step, value in scalars(path.read_bytes()):
                found.setdefault(tag, []).append((step, value))
        single = {
            key: [(step, single_bits(value)) for step, value in enumerate(values, 1)]
            for key, values in case.metrics.items()
        }
        assert found == single, "TensorBoard's values have 32 bits"

    async def _write_events(self, job_id: str, folder: Path) -> None:
        async with AsyncClient(self.caller.url, token=self.caller.token) as client:
            await write_jobs(client, [job_id], folder)


def expected_series(case: Case) -> dict[str, list[tuple[int, str]]]:
    return {k: [(n, bits(v)) for n, v in enumerate(vs, 1)] for k, vs in case.metrics.items()}


def series_are(found: Mapping[str, Any], case: Case) -> None:
    series = {key: points(one["steps"], one["values"]) for key, one in found.items()}
    assert series == expected_series(case)


def document_is(job: Mapping[str, Any], case: Case) -> None:
    """A job is shown with all accepted parts of the document."""
    given, spec = case.document, job["spec"]
    assert job["name"] == spec["name"] == name_of(case)
    assert job["labels"] == given.get("labels", {})
    assert spec["script"]["args"] == given["script"].get("args", [])
    assert equal(spec["script"]["parameters"], given["script"].get("parameters", {}))
    variables = (spec.get("environment") or {}).get("env", {})
    assert variables == given["environment"].get("env", {})
    assert (job["owner"], job["queue"], spec["queue"]) == (case.owner, case.queue, case.queue)
    secrets = (spec.get("environment") or {}).get("secrets", [])
    assert secrets == given["environment"].get("secrets", [])
    found = {one["name"]: one["pattern"] for one in spec["metrics"]}
    assert found == {one["name"]: one["pattern"] for one in given.get("metrics", ())}


def name_of(case: Case) -> str:
    """Return the default, where the value was refused: that of the program file."""
    name: str = case.document.get("name", "a" if case.door == "program" else "job")
    return name


def equal(found: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Compare as JSON: `true` is not 1."""

    def typed(values: Mapping[str, Any]) -> dict[str, Any]:
        return {k: (isinstance(v, bool), v) for k, v in values.items()}

    return typed(found) == typed(given)


def quoted(text: str) -> str:
    """Return a string literal of a search."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def of_mlflow(text: str) -> str:
    """Return a string literal of an MLflow search."""
    doubled = text.replace("'", "''")
    return f"'{doubled}'"


def is_harmless(shown: str) -> bool:
    """Whether no character of an output moves the cursor or changes the text direction."""
    controls = {chr(n) for n in (*range(32), *range(0x7F, 0xA0))} - {"\n", "\t"}
    turning = set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u2028\u2029")
    return not set(shown) & (controls | turning)


def single_bits(value: float) -> str:
    """Return a number as TensorBoard stores it."""
    if math.isnan(value):
        return "nan"
    try:
        return struct.pack(">f", value).hex()
    except OverflowError:
        return struct.pack(">f", math.copysign(math.inf, value)).hex()


def scalars(content: bytes) -> list[tuple[str, int, str]]:
    """Return (tag, step, value) for each scalar of an event file, read by TensorBoard itself."""
    from tensorboard.compat.proto.event_pb2 import Event

    found, at = [], 0
    while at < len(content):
        (size,) = struct.unpack_from("<Q", content, at)
        event = Event.FromString(content[at + 12 : at + 12 + size])
        at += 16 + size
        for value in event.summary.value:
            if value.HasField("simple_value"):
                number = value.simple_value
            elif value.HasField("tensor") and value.tensor.float_val:
                number = value.tensor.float_val[0]
            else:
                continue
            found.append((value.tag, event.step, single_bits(number)))
    return found
