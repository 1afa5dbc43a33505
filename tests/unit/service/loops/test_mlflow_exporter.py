"""Jobs are written to MLflow completely and exactly once, regardless of failures."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from dray.model_requests import AliasRequest
from dray.requests import AnnotationRequest
from ray_workers.shared.contracts import Cause
from service.config.start_refusals import StartRefused
from service.db.repositories.catalog import mlflow_exports as repository
from service.loops import mlflow_exporter
from service.loops.mlflow_exporter import MlflowExporter
from service.loops.shared.fencing import LoopDatabase
from service.loops.shared.timings import LoopTimings
from service.tracking.mlflow import parts, runs
from service.tracking.mlflow.process import MLFLOW_CALLS, MlflowAway, MlflowRefused
from service.tracking.registry import Registry
from service.tracking.service import Tracking
from tests.marks import ON_SQLITE, RULES
from tests.unit.service.helpers import START, Service, metrics, resumed
from tests.unit.service.loops.world import STEPS, World, eventually
from tests.unit.service.tracking.test_registry import ANN, done, register

pytestmark = RULES


class FakeRun:
    def __init__(self, experiment: str, name: str, start_time_ms: int, params: dict[str, str]):
        self.experiment, self.name, self.params = experiment, name, params
        self.start_time_ms = start_time_ms
        self.points: Counter[tuple[Any, ...]] = Counter()
        self.tags: dict[str, str] = {}
        self.status: tuple[str, int | None] = ("RUNNING", None)
        self.uploads: list[str] = []
        self.versions: dict[tuple[str, int], tuple[str, list[str]]] = {}

    def steps(self, key: str) -> list[int]:
        return sorted(step for name, _, _, step in self.points if name == key)


class FakeMlflow:
    """Stores runs like MLflow; a call can fail before or after its work."""

    def __init__(self) -> None:
        self.runs: dict[str, FakeRun] = {}
        self.failures: Iterator[tuple[str, Exception] | None] = iter(())
        """Failures of the next calls: ("before" or "after", error)."""
        self.calls: Counter[str] = Counter()

    async def call(self, method: str, *arguments: Any, limit_s: float) -> Any:
        when, error = next(self.failures, None) or ("", None)
        if when == "before" and error:
            raise error
        self.calls[method] += 1
        answer = getattr(self, method)(*arguments)
        await asyncio.sleep(0)
        if error:
            raise error
        return answer

    async def stop(self) -> None:
        pass

    def begin(
        self, experiment: str, name: str, job_id: str, start_time_ms: int, params: dict[str, str]
    ) -> str:
        self.runs.setdefault(job_id, FakeRun(experiment, name, start_time_ms, params))
        return job_id

    def log(
        self, run_id: str, metrics: list[tuple[str, float, int, int]], tags: dict[str, str]
    ) -> None:
        run = self.runs[run_id]
        run.points.update(dict.fromkeys(metrics, 1).keys() - run.points.keys())
        run.tags |= tags

    def set_status(self, run_id: str, status: str, end_time_ms: int | None) -> None:
        self.runs[run_id].status = (status, end_time_ms)

    def describe_model(self, run_id: str, config_url: str) -> None:
        self.runs[run_id].uploads.append(f"model by {config_url.rpartition('/')[2]}")

    def register(self, run_id: str, name: str, version: int, card: str, aliases: list[str]) -> None:
        self.runs[run_id].versions[name, version] = (card, aliases)

    def upload(self, run_id: str, path: str, url: str, size_bytes: int) -> None:
        self.runs[run_id].uploads.append(path)


@pytest.fixture
def mlflow() -> FakeMlflow:
    return FakeMlflow()


@pytest.fixture
def exporter(service: Service, mlflow: FakeMlflow) -> MlflowExporter:
    return MlflowExporter(LoopDatabase(service.database), mlflow, LoopTimings())


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_exporter, "AWAY_PAUSES_S", (0.0,))
    monkeypatch.setattr(mlflow_exporter, "REFUSED_PAUSES_S", (0.0,))


async def export_all(exporter: MlflowExporter) -> None:
    while await exporter.run_once():
        pass


async def test_a_job_is_a_run_from_its_submission_to_its_end(
    service: Service, mlflow: FakeMlflow, exporter: MlflowExporter
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    code = {"git": "https://example.org/x.git", "commit": commit}
    job_id = await service.submit(
        recipe=None,
        script={"entrypoint": "train.py", "args": ["--lr", "0.1"], "code": code},
        name="digits",
        labels={"experiment": "mnist", "team": "vision"},
    )
    await export_all(exporter)
    run = mlflow.runs[job_id]
    assert (run.experiment, run.name) == ("mnist", "digits")
    assert run.start_time_ms == START.timestamp() * 1000
    assert run.params["script.entrypoint"] == "train.py"
    assert run.params["script.args"] == '["--lr", "0.1"]'
    assert run.status == ("SCHEDULED", None)
    assert run.tags["team"] == "vision"
    assert run.tags["mlflow.source.git.commit"] == commit
    service.claim(job_id)
    first = [metrics(n, {"loss": 1 / n, "x": math.inf}) for n in (1, 2)]
    service.report(job_id, 1, [*first, service.artifact(job_id, 1, "model/a.bin")])
    await export_all(exporter)
    assert run.status == ("RUNNING", None)
    assert run.steps("loss") == [1, 2]
    assert ("x", math.inf, START.timestamp() * 1000, 2) in run.points
    assert run.uploads == []
    service.end(job_id, 1, frames=[metrics(3, {"loss": 0.1})])
    await export_all(exporter)
    assert run.steps("loss") == [1, 2, 3]
    assert run.status == ("FINISHED", START.timestamp() * 1000)
    assert run.tags["dray.state"] == "SUCCEEDED"
    assert run.uploads == ["model/a.bin"]
    before = mlflow.calls.total()
    await export_all(exporter)
    assert mlflow.calls.total() == before, "a complete run is not read again"


async def test_versions_are_registered_also_after_the_job_was_exported(
    service: Service, mlflow: FakeMlflow, exporter: MlflowExporter
) -> None:
    first, second = [await done(service, 5) for _ in range(2)]
    await export_all(exporter)
    registry = Registry(service.database, service.storage)
    for job_id in (first, second):
        await register(registry, "digits", job_id, card="A card.", aliases=["best"])
    await register(registry, "digits", second, step=5)
    await export_all(exporter)
    assert mlflow.runs[first].versions == {("digits", 1): ("A card.", [])}
    assert mlflow.runs[second].versions == {("digits", 2): ("A card.", ["best"])}
    await registry.move("digits", "best", AliasRequest(version=1), ANN)
    await registry.set_card("digits", 2, "Another.", ANN)
    await export_all(exporter)
    assert mlflow.runs[first].versions == {("digits", 1): ("A card.", ["best"])}
    assert mlflow.runs[second].versions == {("digits", 2): ("Another.", [])}


async def test_a_version_that_is_registered_during_an_export_is_exported_next(
    service: Service, mlflow: FakeMlflow, exporter: MlflowExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, registry = await done(service), Registry(service.database, service.storage)
    call = mlflow.call

    async def registering(method: str, *arguments: Any, limit_s: float) -> Any:
        answer = await call(method, *arguments, limit_s=limit_s)
        if method == "set_status":
            await register(registry, "digits", job_id)
        return answer

    monkeypatch.setattr(mlflow, "call", registering)
    await export_all(exporter)
    monkeypatch.undo()
    await export_all(exporter)
    assert mlflow.runs[job_id].versions == {("digits", 1): ("", [])}


async def test_tags_and_notes_are_those_of_the_job_also_when_they_change_later(
    service: Service, mlflow: FakeMlflow, exporter: MlflowExporter
) -> None:
    tracking = Tracking(service.database)

    async def annotate(**wanted: Any) -> None:
        await tracking.annotate(job_id, AnnotationRequest.model_validate(wanted))

    def shown() -> tuple[str | None, str | None]:
        tags = mlflow.runs[job_id].tags
        return tags.get("dray.tags"), tags.get("mlflow.note.content")

    job_id = await service.running()
    await export_all(exporter)
    assert shown() == (None, None)
    await annotate(add_tags=["good", "bad"], notes="**Next:** more epochs.")
    await export_all(exporter)
    assert shown() == ("bad, good", "**Next:** more epochs.")
    service.end(job_id, 1)
    await export_all(exporter)
    await annotate(remove_tags=["bad", "good"], notes="")
    await export_all(exporter)
    assert shown() == ("", "")
    assert mlflow.runs[job_id].status[0] == "FINISHED"
    before = mlflow.calls.total()
    await export_all(exporter)
    assert mlflow.calls.total() == before


async def test_notes_that_change_while_the_run_gets_the_last_of_its_job_are_not_lost(
    service: Service, mlflow: FakeMlflow, exporter: MlflowExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracking, set_status = Tracking(service.database), mlflow.set_status
    job_id = await service.running()
    service.end(job_id, 1)

    def annotate_meanwhile(*arguments: Any) -> None:
        set_status(*arguments)
        wanted = AnnotationRequest(notes="late")
        annotating.append(asyncio.ensure_future(tracking.annotate(job_id, wanted)))

    annotating: list[asyncio.Future[Any]] = []
    call = mlflow.call

    async def call_and_wait(method: str, *arguments: Any, limit_s: float) -> Any:
        answer = await call(method, *arguments, limit_s=limit_s)
        await asyncio.gather(*annotating)
        return answer

    monkeypatch.setattr(mlflow, "set_status", annotate_meanwhile)
    monkeypatch.setattr(mlflow, "call", call_and_wait)
    await exporter.run_once()
    monkeypatch.undo()
    await export_all(exporter)
    assert mlflow.runs[job_id].tags["mlflow.note.content"] == "late"


async def test_the_model_of_a_recipe_is_described(
    service: Service, mlflow: FakeMlflow, exporter: MlflowExporter
) -> None:
    job_id = await service.running()
    service.end(job_id, 1, frames=[service.artifact(job_id, 1, "config.json")])
    await export_all(exporter)
    assert mlflow.runs[job_id].uploads == ["config.json", "model by config.json"]


async def test_a_job_that_has_nothing_new_costs_no_call(
    service: Service, mlflow: FakeMlflow, exporter: MlflowExporter
) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [metrics(1, {"loss": 1.0})])
    await export_all(exporter)
    before = mlflow.calls.total()
    await export_all(exporter)
    assert mlflow.calls.total() == before
    service.report(job_id, 1, [metrics(2, {"loss": 1.0})])
    await export_all(exporter)
    assert (mlflow.calls.total(), mlflow.runs[job_id].steps("loss")) == (before + 1, [1, 2])


async def test_jobs_that_wait_are_not_read_each_round(
    service: Service, exporter: MlflowExporter
) -> None:
    """Ten thousand complete runs would take 0.15 s of every two seconds."""
    waiting, job_id = await service.submit(), await service.submit()
    await export_all(exporter)
    database = LoopDatabase(service.database)
    assert await database.read(repository.incomplete) == []
    service.claim(job_id)
    assert [row.id for row in await database.read(repository.incomplete)] == [job_id]
    await service.jobs.cancel(waiting, actor="ann")
    assert {row.id for row in await database.read(repository.incomplete)} == {waiting, job_id}


async def test_nothing_is_lost_or_doubled_whichever_calls_fail(
    service: Service, mlflow: FakeMlflow, exporter: MlflowExporter, no_pauses: None
) -> None:
    """Calls fail before or after MLflow has done its work, in the middle of parts; the service is
    restarted after each failure."""
    job_id = await service.running()
    frames = [metrics(n, {"loss": 1.0, **({"val": 2.0} if n % 7 == 0 else {})}) for n in range(100)]
    service.report(job_id, 1, [*frames[:60], service.artifact(job_id, 1, "a.bin")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "POINTS_OF_A_PART", 30)
        kinds = ("before", "after", None, "after", None, None)
        away = MlflowAway("gone")
        mlflow.failures = iter([when and (when, away) for when in kinds * 20])
        for round_ in range(60):
            if round_ == 10:
                service.report(job_id, 1, frames[60:])
            if round_ == 20:
                service.end(job_id, 1)
            await exporter.run_once()
            exporter = MlflowExporter(LoopDatabase(service.database), mlflow, LoopTimings())
    run = mlflow.runs[job_id]
    assert run.steps("loss") == list(range(100))
    assert run.steps("val") == [n for n in range(100) if n % 7 == 0]
    assert set(run.points.values()) == {1}
    assert run.status[0] == "FINISHED"
    assert set(run.uploads) == {"a.bin"}
    row = service.database.read_sync(lambda s: repository.get(s, job_id))
    assert row is not None
    assert row.is_complete
    assert row.problem is None


async def test_points_of_steps_that_others_have_passed_are_there_in_the_end(
    service: Service, mlflow: FakeMlflow, exporter: MlflowExporter
) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [metrics(n, {"loss": 1.0}) for n in range(50)])
    await export_all(exporter)
    service.report(job_id, 1, [metrics(20, {"slow/eval": 1.0}), metrics(30, {"slow/eval": 1.0})])
    service.report(job_id, 1, [metrics(50, {"loss": 1.0})])
    await export_all(exporter)
    service.end(job_id, 1)
    await export_all(exporter)
    assert mlflow.runs[job_id].steps("slow/eval") == [20, 30]
    assert mlflow.runs[job_id].steps("loss") == list(range(51))


async def test_a_step_that_is_trained_again_is_there_once(
    service: Service, mlflow: FakeMlflow, exporter: MlflowExporter
) -> None:
    job_id = await service.running()
    service.report(job_id, 1, [resumed(0), *(metrics(n, {"loss": 1.0}) for n in range(1, 11))])
    await export_all(exporter)
    service.end(job_id, 1, Cause.NODE_LOST)
    await export_all(exporter)
    assert mlflow.runs[job_id].status == ("SCHEDULED", None)
    service.claim(job_id, 1)
    service.report(job_id, 2, [resumed(5), *(metrics(n, {"loss": 2.0}) for n in range(6, 13))])
    service.end(job_id, 2)
    await export_all(exporter)
    values = {step: value for _, value, _, step in mlflow.runs[job_id].points}
    assert values == {**dict.fromkeys(range(1, 11), 1.0), 11: 2.0, 12: 2.0}
    assert mlflow.runs[job_id].points.total() == 12


async def test_while_mlflow_is_away_few_calls_are_made_and_with_growing_pauses(
    service: Service, mlflow: FakeMlflow, exporter: MlflowExporter, no_pauses: None
) -> None:
    jobs = [await service.submit() for _ in range(2 * MLFLOW_CALLS)]
    mlflow.failures = iter([("before", MlflowAway("http://me:s@cret@host is down"))] * 100)
    asked: list[str] = []
    call = mlflow.call

    async def counting(method: str, *arguments: Any, limit_s: float) -> Any:
        asked.append(method)
        return await call(method, *arguments, limit_s=limit_s)

    mlflow.call = counting  # type: ignore[method-assign]
    pauses = []
    for _ in range(2):
        await exporter.run_once()
        pauses.append(exporter._pause_s())
    assert exporter.is_away
    assert len(asked) < 2 * 2 * MLFLOW_CALLS
    assert pauses == sorted(set(pauses))
    rows = [service.database.read_sync(lambda s, job=job: repository.get(s, job)) for job in jobs]
    assert {row.problem for row in rows if row is not None} == {None, "http://host is down"}
    mlflow.failures = iter(())
    await export_all(exporter)
    assert mlflow.runs.keys() == set(jobs)
    assert not exporter.is_away


async def test_a_job_that_mlflow_refuses_holds_up_no_other(
    service: Service, mlflow: FakeMlflow, exporter: MlflowExporter
) -> None:
    jobs = [await service.submit() for _ in range(7)]
    mlflow.failures = iter([("before", MlflowRefused("the experiment was deleted"))])
    await export_all(exporter)
    (bad,) = set(jobs) - set(mlflow.runs)
    assert not exporter.is_away
    row = service.database.read_sync(lambda s: repository.get(s, bad))
    assert row is not None
    assert (row.failures, row.problem) == (1, "the experiment was deleted")
    assert row.not_before is not None


async def test_an_artifact_that_mlflow_refuses_holds_up_neither_others_nor_the_status(
    service: Service, mlflow: FakeMlflow, exporter: MlflowExporter
) -> None:
    job_id = await service.running()
    frames = [service.artifact(job_id, 1, path) for path in ("a.bin", "config.json", "z.bin")]
    service.end(job_id, 1, frames=frames)
    refused = MlflowRefused("too large")
    for method, path in (("upload", "a.bin"), ("describe_model", None)):
        call = getattr(mlflow, method)

        def refusing(run_id: str, *what: Any, call: Any = call, path: Any = path) -> None:
            if path in (None, what[0]):
                raise refused
            call(run_id, *what)

        setattr(mlflow, method, refusing)
    await export_all(exporter)
    run = mlflow.runs[job_id]
    assert (run.status[0], run.uploads) == ("FINISHED", ["config.json", "z.bin"])
    row = service.database.read_sync(lambda s: repository.get(s, job_id))
    assert row is not None
    assert (row.is_complete, row.problem) == (False, "too large")


async def test_a_job_that_can_not_be_read_holds_up_no_other(
    service: Service,
    mlflow: FakeMlflow,
    exporter: MlflowExporter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bad, good = [await service.submit() for _ in range(2)]
    next_part = parts.next_part

    def queries(session: Any, job_id: str) -> Any:
        if job_id == bad:
            raise ValueError("a chunk is damaged")
        return next_part(session, job_id)

    monkeypatch.setattr(mlflow_exporter, "next_part", queries)
    await export_all(exporter)
    assert mlflow.runs.keys() == {good}
    row = service.database.read_sync(lambda s: repository.get(s, bad))
    assert row is not None
    assert row.problem == "a chunk is damaged"


async def test_a_job_that_is_deleted_is_forgotten(
    service: Service, mlflow: FakeMlflow, exporter: MlflowExporter
) -> None:
    job_id = await service.running()
    await export_all(exporter)
    service.end(job_id, 1)
    await service.jobs.delete(job_id, actor="ann")
    await export_all(exporter)
    assert mlflow.runs[job_id].status == ("RUNNING", None)
    assert service.database.read_sync(lambda s: repository.get(s, job_id)) is None


async def test_a_failure_of_the_database_ends_no_loop(
    service: Service,
    mlflow: FakeMlflow,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timings = LoopTimings(export_period_s=0.0)
    exporter = MlflowExporter(LoopDatabase(service.database), mlflow, timings)
    job_id = await service.submit()
    broken = iter([True])
    incomplete = repository.incomplete

    def fails_once(*asked: Any) -> Any:
        if next(broken, False):
            raise RuntimeError("no database")
        return incomplete(*asked)

    monkeypatch.setattr(repository, "incomplete", fails_once)
    running = asyncio.create_task(exporter.run())
    async with asyncio.timeout(60):
        while job_id not in mlflow.runs:
            await asyncio.sleep(0.001)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def test_a_document_is_flat_and_within_the_limits_of_mlflow() -> None:
    document = {"a": {"b": [1, {"c": None}], "d": {}}, "e": None, "f:g": "x" * 9000, "h": True}
    params = runs.params_of(document)
    odd = runs.key_of("f:g")
    assert params.keys() == {"a.b", odd, "h"}
    assert params["a.b"] == '[1, {"c": null}]'
    assert (len(params[odd]), params["h"]) == (6000, "true")


ODD_NAMES = [
    "acc@5",
    "acc#5",
    "f1 (%)",
    "a//b",
    "a/",
    "/a",
    "a/./b",
    "../a",
    ".",
    "",
    "x:y",
    300 * "k",
]


@pytest.mark.parametrize("name", [*ODD_NAMES, "train/loss", "a b-c.d_e", "ä"])
def test_mlflow_takes_the_name(name: str) -> None:
    validation = pytest.importorskip("mlflow.utils.validation")
    key = runs.key_of(name)
    validation._validate_metric_name(key)
    validation._validate_tag_name(key)
    assert len(key) <= validation.MAX_ENTITY_KEY_LENGTH
    assert (key == name) is (name not in ODD_NAMES)


def test_names_that_differ_still_do() -> None:
    names = [*ODD_NAMES, "acc_5", "acc_5-", "_a__b", 250 * "k", 301 * "k"]
    assert len({runs.key_of(name) for name in names}) == len(names)
    paths = [
        "plot#1.png",
        "plot?1.png",
        "plot_1.png",
        "a#1/plot.png",
        "100%25.txt",
        "good/x.tar.gz",
    ]
    shown = [runs.artifact_path_of(path) for path in paths]
    assert len(set(shown)) == len(paths)
    assert not any(set("#?%") & set(path) for path in shown)
    assert [path.rpartition(".")[2] for path in shown] == ["png"] * 4 + ["txt", "gz"]
    assert shown[-1] == paths[-1]


async def test_names_that_mlflow_does_not_take_are_changed(
    service: Service, mlflow: FakeMlflow, exporter: MlflowExporter
) -> None:
    job_id = await service.running(labels={"a//b": "x", "experiment": ""})
    found = [metrics(1, {"acc@5": 1.0}), service.artifact(job_id, 1, "plot#1.png")]
    service.end(job_id, 1, frames=found)
    await export_all(exporter)
    run = mlflow.runs[job_id]
    assert run.steps(runs.key_of("acc@5")) == [1]
    assert run.tags[runs.key_of("a//b")] == "x"
    assert run.uploads == [runs.artifact_path_of("plot#1.png")]
    assert run.experiment == "Default"


@ON_SQLITE
async def test_the_service_exports_a_job_that_trains(
    world: World, mlflow: FakeMlflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.runtime.MlflowProcess", lambda *_: mlflow)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    world.set_timings(export_period_s=0.01)
    runtime = await world.open(mlflow_tracking_uri="http://mlflow.lan")
    job_id = await world.submit(runtime)

    async def is_exported() -> bool:
        return job_id in mlflow.runs and mlflow.runs[job_id].status[0] == "FINISHED"

    await eventually(is_exported, "the run")
    assert mlflow.runs[job_id].steps("train/loss") == list(range(1, STEPS + 1))
    assert (await runtime.ready()).checks["mlflow"] == "ok"


@ON_SQLITE
async def test_a_service_that_lacks_the_client_says_what_to_install(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StartRefused, match=r"pip install 'dray\[mlflow\]'"):
        await world.open(mlflow_tracking_uri="http://mlflow.lan")
