"""What users store about an experiment, on each database."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from pydantic import ValidationError

from dray import views
from dray.experiment_requests import MAX_LAYOUT_BYTES, MAX_PINNED, ExperimentRequest
from service.domain.errors import (
    DomainError,
    ExperimentChanged,
    ExperimentNotFound,
    NotComparable,
    NotFound,
)
from service.jobs.deletions import Deletions
from service.tracking.experiments import Experiments
from tests.seeds import drawn
from tests.unit.service.helpers import Service

NAME = "müon / \N{SNOWMAN}"


@pytest.fixture
def experiments(service: Service) -> Experiments:
    return Experiments(service.database)


async def member(service: Service, name: str = NAME) -> str:
    """Return a job of the experiment that can be deleted."""
    job_id = await service.submit(labels={"experiment": name})
    await service.jobs.cancel(job_id, actor="ann")
    return job_id


def request(**fields: Any) -> ExperimentRequest:
    return ExperimentRequest.model_validate(fields)


async def test_omitted_fields_stay_and_each_change_has_a_revision(
    service: Service, experiments: Experiments
) -> None:
    first, second = [await member(service) for _ in range(2)]
    before = await experiments.get(NAME)
    assert (before.notes, before.pinned, before.layout, before.revision) == ("", [], {}, 0)
    await experiments.change(NAME, request(notes="**why**"), actor="ann")
    layout = {"charts": [{"metrics": ["val/loss", "☃"], "log": True}], "columns": 2}
    await experiments.change(NAME, request(layout=layout, pinned=[second, first]), actor="bob")
    await experiments.change(NAME, request(baseline=first), actor="bob")
    found = await experiments.get(NAME)
    assert (found.notes, found.layout) == ("**why**", layout)
    assert list(found.layout) == ["charts", "columns"]
    assert (found.pinned, found.baseline) == ([second, first], first)
    assert (found.revision, found.updated_by) == (3, "bob")
    assert found.updated_at is not None
    assert await experiments.change(NAME, request(baseline=first), actor="eve") == found
    emptied = request(notes="", pinned=[], layout={}, baseline=None)
    found = await experiments.change(NAME, emptied, revision=3)
    assert (found.notes, found.pinned, found.layout, found.baseline) == ("", [], {}, None)


async def test_an_outdated_change_stores_nothing(
    service: Service, experiments: Experiments
) -> None:
    await member(service)
    await experiments.change(NAME, request(notes="one"), revision=0, actor="ann")
    with pytest.raises(ExperimentChanged, match="is now at revision 1, changed by ann") as refused:
        await experiments.change(NAME, request(notes="two"), revision=0, actor="bob")
    assert refused.value.hint is not None
    found = await experiments.get(NAME)
    assert (found.notes, found.revision, found.updated_by) == ("one", 1, "ann")


async def test_users_who_change_an_experiment_at_once_lose_nothing(
    service: Service, experiments: Experiments
) -> None:
    await member(service)
    retries = 0

    async def add(line: str) -> None:
        nonlocal retries
        while True:
            found = await experiments.get(NAME)
            wanted = request(
                notes=f"{found.notes}{line}\n", layout={**found.layout, line: len(found.layout)}
            )
            try:
                await experiments.change(NAME, wanted, revision=found.revision, actor=line)
                return
            except ExperimentChanged:
                retries += 1

    lines = [f"line {number}" for number in range(8)]
    await asyncio.gather(*map(add, lines))
    found = await experiments.get(NAME)
    assert sorted(found.notes.splitlines()) == sorted(found.layout) == lines
    assert found.revision == len(lines)
    assert retries > 0


async def test_only_jobs_of_the_experiment_are_pinned(
    service: Service, experiments: Experiments
) -> None:
    mine, other = await member(service), await member(service, "other")
    with pytest.raises(NotComparable) as refused:
        await experiments.change(NAME, request(pinned=[mine, other]))
    assert refused.value.pointer == "/pinned/1"
    with pytest.raises(NotComparable) as refused:
        await experiments.change(NAME, request(baseline=other))
    assert refused.value.pointer == "/baseline"
    for fields in ({"pinned": ["job-none"]}, {"baseline": "job-none"}):
        with pytest.raises(NotFound, match="job-none"):
            await experiments.change(NAME, request(**fields))
    for name in ("none", "a\0b", "\ud800", ""):
        with pytest.raises(ExperimentNotFound):
            await experiments.change(name, request(notes="x"))
    assert (await experiments.get(NAME)).revision == 0


async def test_what_is_stored_outlives_the_jobs(service: Service, experiments: Experiments) -> None:
    jobs = [await member(service) for _ in range(3)]
    await experiments.change(NAME, request(notes="kept", pinned=jobs, baseline=jobs[0]))
    deletions = Deletions(service.database, service.storage)
    assert not await deletions.delete(jobs[:1], actor="ann")
    found = await experiments.get(NAME)
    assert (found.pinned, found.baseline, found.notes) == (jobs[1:], None, "kept")
    assert not await deletions.delete(jobs[1:], actor="ann")
    with pytest.raises(ExperimentNotFound):
        await experiments.get(NAME)
    await member(service)
    found = await experiments.get(NAME)
    assert (found.notes, found.pinned) == ("kept", [])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "specify at least one of baseline, notes, pinned, layout"),
        ({"layout": []}, "dictionary"),
        ({"layout": {"a": float("nan")}}, "must not contain NaN"),
        ({"layout": {"a": "é" * (MAX_LAYOUT_BYTES // 2)}}, "65,544 bytes of JSON"),
        ({"notes": "x" * 65_537}, "65536 characters"),
        ({"notes": None}, "string"),
        ({"pinned": ["x"]}, "pattern"),
        ({"pinned": ["job-1", "job-2", "job-1"]}, "`pinned` contains a job twice"),
        ({"pinned": [f"job-{n}" for n in range(MAX_PINNED + 1)]}, "at most 20"),
        ({"versions": 1}, "Extra inputs"),
    ],
)
def test_invalid_changes_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        request(**fields)


def test_the_largest_layout_is_accepted() -> None:
    text = "é" * ((MAX_LAYOUT_BYTES - len('{"a":""}')) // 2)
    assert request(layout={"a": text}).layout == {"a": text}


@pytest.mark.parametrize("seed", drawn(4))
async def test_any_changes_leave_what_a_plain_model_has(
    service: Service, experiments: Experiments, seed: int
) -> None:
    """The model is a dictionary that is changed by the same requests, one after another."""
    random_ = random.Random(seed)
    jobs = [await member(service) for _ in range(4)]
    other = await member(service, "other")
    deletions = Deletions(service.database, service.storage)
    model: dict[str, Any] = {"notes": "", "pinned": [], "layout": {}, "baseline": None}
    revision = 0
    for _ in range(30):
        if random_.random() < 0.1 and len(jobs) > 1:
            gone = jobs.pop(random_.randrange(len(jobs)))
            assert not await deletions.delete([gone], actor="ann")
            model["pinned"] = [one for one in model["pinned"] if one != gone]
            model["baseline"] = None if model["baseline"] == gone else model["baseline"]
        some = random_.sample(jobs, random_.randint(0, len(jobs)))
        if is_foreign := random_.random() < 0.1:
            some.append(other)
        fields: dict[str, Any] = {
            "notes": random_.choice(["", "a", "b\r\nc", "\N{SNOWMAN}" * 9]),
            "pinned": some,
            "layout": random_.choice([{}, {"a": [1, None, {"b": 1e300}]}, {"": True}]),
            "baseline": random_.choice([None, random_.choice(jobs)]),
        }
        fields = dict(random_.sample(sorted(fields.items()), random_.randint(1, 4)))
        known = random_.choice([None, revision, revision + 1, max(0, revision - 1)])
        is_refused = known not in (None, revision) or ("pinned" in fields and is_foreign)
        try:
            found: views.ExperimentSummary | None
            found = await experiments.change(NAME, request(**fields), revision=known)
        except DomainError:
            assert is_refused
            found = await experiments.get(NAME)
        else:
            assert not is_refused
            model |= fields
        assert {name: getattr(found, name) for name in model} == model
        assert found.revision >= revision
        revision = found.revision
