"""What the job document's classes generate: the page, the schema, and starting documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
from manual import job_document

from dray.documents import check, load_document, parse_yaml
from dray.errors import SpecError
from dray.spec.authoring.describing import Part, job_schema, parts
from dray.spec.authoring.starting import KINDS, starting_document
from dray.spec.authoring.synonyms import MEANT
from dray.spec.program.recipes import OPTIONAL, RECIPES

ROOT = Path(__file__).resolve().parents[3]
EDITOR = jsonschema.Draft202012Validator(job_schema())
EXAMPLES = [
    path
    for path in sorted((ROOT / "examples").rglob("*.yaml"))
    if {"recipe", "script"} & load_document(path).keys()
]
JOB = {"recipe": "image_classification"}


def names(part: Part) -> set[str]:
    return {field.name for field in part.fields}


def refusal(document: dict[str, Any]) -> SpecError | None:
    try:
        check(document, source=None)
    except SpecError as error:
        return error
    return None


def test_every_field_is_explained_and_says_what_it_takes() -> None:
    found = [(part, field) for part in parts() for field in part.fields]
    assert len(found) > 100
    for part, field in found:
        assert field.sentence, f"{part.path}.{field.name} has no docstring"
        assert field.takes


def test_the_parts_have_their_ranges_and_defaults() -> None:
    of = {(part.path, part.variant): part for part in parts()}
    assert of["train", None].field("epochs").takes == "integer, 1 to 10^6"
    assert of["train.optimizer", None].field("lr").takes == "number, above 0, at most 1,000"
    assert of["train.optimizer", None].field("betas").default == "`[0.9, 0.999]`"
    assert of["model", "resnet"].field("depth").default == "`20`"
    assert "`2h`" in of["", None].field("max_runtime_s").takes


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("path", "value"),
    [
        *(("data.target", "x"), ("data.features", ["x"]), ("data.categorical", ["x"])),
        *(("data.image_size", [256, 256]), ("data.classes", ["a", "b"])),
        *(
            ("data.delimiter", ";"),
            ("data.examples", "text"),
            ("data.validation", "file:///a.jsonl"),
        ),
        ("train.label_smoothing", 0.1),
    ],
)
def test_the_page_says_for_which_recipes_a_field_is(recipe: str, path: str, value: Any) -> None:
    part, _, field = path.partition(".")
    endings = {"images": "zip", "npz": "npz", "csv": "csv", "parquet": "parquet", "text": "txt"}
    endings["jsonl"] = "jsonl"
    taken = []
    for form in RECIPES[recipe].formats:
        data: dict[str, Any] = {"source": f"file:///data.{endings[form]}"}
        if form in ("csv", "parquet") and not RECIPES[recipe].reads_examples:
            data["target"] = "x"
        document: dict[str, Any] = {"recipe": recipe, "data": data}
        if recipe == "fine_tuning":
            document["model"] = {"base": "file:///model"}
        document[part] = {**document.get(part, {}), field: value}
        error = refusal(document)
        assert error is None or error.pointer == f"/{part}/{field}"
        taken.append(error is None)
    assert any(taken) == job_document.takes(recipe, path)


def test_options_of_a_format_are_fields() -> None:
    (data,) = [part for part in parts() if part.path == "data"]
    assert set(OPTIONAL) <= names(data)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_editor_takes_what_the_server_takes(path: Path) -> None:
    EDITOR.validate(load_document(path))


@pytest.mark.parametrize(
    "more",
    [
        *({"parallel": "auto"}, {"parallel": {"shard": "auto"}}, {"model": {"width": 64}}),
        *({"max_runtime_s": "2h"}, {"max_runtime_s": 60}, {"resources": {"memory_bytes": "8GiB"}}),
        *({"init_from": {"job": "job-a", "step": "best"}}, {"labels": {"team": "vision"}}),
        *({"elastic": None}, {"checkpoint": {"every_steps": "auto"}}),
    ],
)
def test_short_forms_are_taken_by_both(more: dict[str, Any]) -> None:
    check({**JOB, **more}, source=None)
    EDITOR.validate({**JOB, **more})


@pytest.mark.parametrize(
    "document",
    [
        *({}, {"recipe": "none"}, {**JOB, "epochs": 3}, {**JOB, "train": {"epochs": 0}}),
        *({**JOB, "train": {"optimizer": {"lr": 0}}}, {**JOB, "max_runtime_s": "2x"}),
        *({**JOB, "model": {"widht": 3}}, {**JOB, "resources": {"num_workers": "2"}}),
    ],
)
def test_an_editor_marks_what_the_server_refuses(document: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        check(document, source=None)
    assert not EDITOR.is_valid(document)


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(job_schema())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("everything", [False, True])
def test_a_document_to_begin_with_is_a_job(kind: str, everything: bool) -> None:
    text = starting_document(kind, schema="http://x/v1/schema", everything=everything)
    assert text.startswith("# yaml-language-server: $schema=http://x/v1/schema\n")
    assert max(map(len, text.splitlines())) <= 100
    document = parse_yaml(text, source=kind)
    check(document, source=None)
    EDITOR.validate(document)
    assert ("max_runtime_s" in document) == everything


def test_what_other_programs_call_a_field_leads_to_one() -> None:
    fields: dict[str, set[str]] = {}
    for part in parts():
        fields.setdefault(part.path, set()).update(names(part))
    for name, pointer in MEANT.items():
        path, _, field = pointer.removeprefix("/").replace("/", ".").rpartition(".")
        assert field in fields[path], pointer
        assert name not in fields[path], name
