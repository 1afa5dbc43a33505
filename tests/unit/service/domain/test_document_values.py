"""Documents as individual values: which values of very large documents are searched and
compared."""

from __future__ import annotations

from typing import Any

import pytest

from service.domain.tracking import document_values
from service.domain.tracking.differences import MAX_DIFFERENCES, differences
from service.domain.tracking.document_values import (
    ABSENT,
    MAX_VALUES,
    PARTS,
    SharedValues,
    StoredValue,
    of_trial,
    searchable,
)


def document(width: int, value: float = 1.0) -> dict[str, Any]:
    """Return a document whose model has a table of `width` rows with `width` lists each."""
    table = [[[value] * 4 for _ in range(width)] for _ in range(width)]
    return {"model": {"name": "imported", "args": {"table": table}}}


def test_a_field_with_very_many_values_is_searched_as_a_whole_only() -> None:
    small, large = searchable(document(8)), searchable(document(64))
    assert small["/model/args/table/7/7/3"] == StoredValue(1.0, None)
    assert large.keys() == {"/model", "/model/name", "/model/args"}
    assert large["/model/args"] == PARTS
    lists = {str(number): ["a"] * 64 for number in range(15)}
    found = searchable({"environment": {"variables": lists}})
    assert 15 * 64 < len(found) <= MAX_VALUES + 2


def trial(rate: float, layers: Any) -> dict[str, Any]:
    args = {"layers": layers, "same": [5, 6]}
    return {"train": {"lr": rate}, "model": {"args": args}, "environment": {"packages": ["a"]}}


def test_lists_in_which_the_jobs_of_a_large_array_differ_are_searched_as_wholes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    documents = {"b": trial(0.2, [1, 3]), "c": trial(0.1, None), "d": trial(0.1, [1, 2])}
    first = trial(0.1, [1, 2])
    shared = SharedValues("arr-1", first, searchable(first))
    of_few, own = shared.of_array(documents)
    assert of_few is shared
    assert own["b"] == {
        "/train/lr": StoredValue(0.2, None),
        "/model/args/layers/1": StoredValue(3.0, None),
    }
    monkeypatch.setattr(document_values, "MAX_OF_ARRAY", 3)
    of_many, own = shared.of_array(documents)
    assert own == {
        "b": {"/train/lr": StoredValue(0.2, None)},
        "c": {"/model/args/layers": ABSENT},
        "d": {},
    }
    # Shared values do not necessarily come from the first job.
    assert shared.values.keys() - of_many.values.keys() == {
        "/model/args/layers/0",
        "/model/args/layers/1",
    }
    assert of_many.values["/model/args/same/1"] == StoredValue(6.0, None)


def test_so_are_those_of_a_trial_that_gets_its_values_late(monkeypatch: pytest.MonkeyPatch) -> None:
    base, drawn = trial(0.1, [1, 2]), trial(0.2, [1, 3])
    assert of_trial(drawn, base, 2)["/model/args/layers/1"] == StoredValue(3.0, None)
    monkeypatch.setattr(document_values, "MAX_OF_ARRAY", 3)
    assert of_trial(drawn, base, 2) == {
        "/train/lr": StoredValue(0.2, None),
        "/model/args/layers/0": ABSENT,
        "/model/args/layers/1": ABSENT,
    }


def test_a_comparison_of_very_large_documents_ends_with_the_first_differences() -> None:
    found = differences([document(64), document(64, 2.0), document(64)])
    assert len(found) == MAX_DIFFERENCES
    assert found["/model/args/table/0/0/0"] == [1.0, 2.0, 1.0]


def test_differences_are_those_of_json() -> None:
    values = [{"a": {"x": 1, "y": [], "z": [1]}}, {"a": {"x": True, "z": {"k": 2}}}, {"a": 1.0}]
    assert differences(values[:2]) == {
        "/a/x": [1, True],
        "/a/z/0": [1, None],
        "/a/z/k": [None, 2],
    }
    assert differences(values[1:])["/a"] == [None, 1.0]
    assert differences([{"a": 1}, {"a": 1.0}]) == {}
    assert differences([{"a": {"~/": 1}}, {}]) == {"/a/~0~1": [1, None]}
