from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dray
from dray.documents import apply_settings, load_document, parse_yaml
from dray.errors import SpecError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1.0e-3", 0.001),
        ("2.5E+10", 2.5e10),
        (".5", 0.5),
        ("-5", -5),
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("012", "012"),
        ("0x10", "0x10"),
        ("true", True),
        ("null", None),
        ("~", None),
        ("'true'", "true"),
        ("[1, [2.0]]", [1, [2.0]]),
        ('{"a": {"b": "c"}}', {"a": {"b": "c"}}),
    ],
)
def test_scalars_mean_what_they_mean_in_json(text: str, value: Any) -> None:
    found = parse_yaml(text, source="x")
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: 2\na: 3", "job.yaml, line 3, column 1: the key 'a' appears twice"),
        ('{"a": {"b": 1, "b": 2}}', "the key 'b' appears twice"),
        ("a: [", "line 1"),
        ("a: &x [1]\nb: *x", "aliases"),
        ("1: 2", "the key 1 is not a string"),
        ("a: !!python/object/apply:os.system [x]", "line 1, column 4: the tag"),
        ("a: !!timestamp x", "the tag 'tag:yaml.org,2002:timestamp' is not allowed"),
        ("a: !!bool x", "line 1, column 4: 'x' can't be read as a value of its type"),
        ("a: !!int ''", "line 1, column 4: '' can't be read"),
        ("a: " + "9" * 5000, "line 1, column 4: a number has more than 4,300 digits"),
        (r'a: "\UFFFFFFFF"', "job.yaml is not YAML"),
        ("- a", "is not a job document"),
        ("just text", "is not a job document"),
        ("", "is not a job document"),
        ("a: 1\n---\nb: 2", "line"),
        ("[" * 5000, "line 1, column 34: the document is nested deeper than 32 levels"),
        ("- " * 5000, "job.yaml"),
    ],
)
def test_a_document_that_is_not_one_plain_mapping_is_refused(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_document(path)
    assert said in str(caught.value)


def test_a_file_that_is_missing_huge_or_binary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="can't read"):
        load_document(tmp_path / "none.yaml")
    huge, binary = tmp_path / "huge", tmp_path / "binary"
    huge.write_bytes(b"x" * (2 << 20))
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="larger than"):
        load_document(huge)
    with pytest.raises(SpecError, match="UTF-8"):
        load_document(binary)


def test_a_job_is_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("recipe: image_classification\ntrain: {optimizer: {lr: 3e-3}}\n")
    assert dray.load_spec(path).train.optimizer.lr == 0.003
    path.write_text("recipe: image_classification\ntrain: {epochs: 0}\n")
    with pytest.raises(SpecError, match=r"job\.yaml: /train/epochs: must be "):
        dray.load_spec(path)


def test_the_shipped_example_is_a_job() -> None:
    path = Path(__file__).resolve().parents[3] / "examples" / "digits.yaml"
    assert dray.load_spec(path).recipe == "image_classification"


def test_settings_reach_into_the_document_and_leave_the_original_alone() -> None:
    document = {"train": {"epochs": 1, "seed": 2}, "name": "a"}
    changed = apply_settings(
        document, ["train.epochs=3", "train.optimizer.lr=1e-2", "name=b=c", "labels={x: y}"]
    )
    assert changed == {
        "train": {"epochs": 3, "seed": 2, "optimizer": {"lr": 0.01}},
        "name": "b=c",
        "labels": {"x": "y"},
    }
    assert document == {"train": {"epochs": 1, "seed": 2}, "name": "a"}


@pytest.mark.parametrize("setting", ["epochs", "=3", "train.=3", ".x=3", "name.x=3", "a=[", "a="])
def test_a_setting_that_is_none_is_refused_or_null(setting: str) -> None:
    if setting == "a=":
        assert apply_settings({}, [setting]) == {"a": None}
        return
    with pytest.raises(SpecError, match="--set"):
        apply_settings({"name": "a"}, [setting])
