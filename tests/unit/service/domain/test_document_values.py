"""Documents as single values: what is searched and compared of a very large one."""

from __future__ import annotations

from typing import Any

from service.domain.tracking.differences import MAX_DIFFERENCES, differences
from service.domain.tracking.document_values import MAX_VALUES, PARTS, StoredValue, searchable


def document(width: int, value: float = 1.0) -> dict[str, Any]:
    """One whose model has a table of `width` rows of `width` lists."""
    table = [[[value] * 4 for _ in range(width)] for _ in range(width)]
    return {"model": {"name": "imported", "args": {"table": table}}}


def test_a_field_with_very_many_values_is_searched_as_a_whole_only() -> None:
    small, large = searchable(document(8)), searchable(document(64))
    assert small["/model/args/table/7/7/3"] == StoredValue(1.0, None)
    assert large.keys() == {"/model", "/model/name", "/model/args"}
    assert large["/model/args"] == PARTS
    lists = {str(number): ["a"] * 64 for number in range(64)}
    assert 64 * 64 < len(searchable({"environment": {"variables": lists}})) < MAX_VALUES


def test_a_comparison_of_very_large_documents_ends_with_the_first_places() -> None:
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
