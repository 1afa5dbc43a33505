"""MLflow's filters and orderings are either supported or rejected with a reason."""

from __future__ import annotations

import pytest

from service.domain.tracking.mlflow_search import (
    BadSearch,
    Condition,
    Entity,
    Ordering,
    parse_filter,
    parse_name_filter,
    parse_order,
)

METRIC, PARAM, TAG, ATTRIBUTE = Entity.METRIC, Entity.PARAM, Entity.TAG, Entity.ATTRIBUTE


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", []),
        ("metrics.loss<1e-3", [Condition(METRIC, "loss", "<", 1e-3)]),
        ("metric.`val/loss` >= -.5", [Condition(METRIC, "val/loss", ">=", -0.5)]),
        ("params.a.b = 'it''s'", [Condition(PARAM, "a.b", "=", "it's")]),
        ('tags."a b" ilike "%x"', [Condition(TAG, "a b", "ILIKE", "%x")]),
        ("status IN ('A', 'B')", [Condition(ATTRIBUTE, "status", "IN", ("A", "B"))]),
        ("run_id NOT IN ('A')", [Condition(ATTRIBUTE, "run_id", "NOT IN", ("A",))]),
        ("attributes.start_time > 5", [Condition(ATTRIBUTE, "start_time", ">", 5.0)]),
        (
            "attribute.status != 'FAILED' and Metrics.x = 1",
            [Condition(ATTRIBUTE, "status", "!=", "FAILED"), Condition(METRIC, "x", "=", 1.0)],
        ),
    ],
)
def test_filters(text: str, found: list[Condition]) -> None:
    assert parse_filter(text) == found


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("metrics.loss", "operator is missing"),
        (f"tags.a ILIKE '{'x' * 256}'", "a pattern for ILIKE must not have more than 255"),
        ("metrics.loss <", "value is missing"),
        ("metrics.loss < 'a'", "with a number"),
        ("metrics.loss LIKE '1'", "not with 'LIKE'"),
        ("params.a = 1", "a quoted string"),
        ("params.a < '1'", "not with '<'"),
        ("params.a = 'x' or params.b = 'y'", "OR is not supported"),
        ("a.b = 'x'", "is not a key"),
        ("colour = 'x'", "no attribute 'colour'"),
        ("params.a IN 'x'", "in parentheses"),
        ("params.a IN (1)", "quoted strings"),
        ("params.a = 'x", "is not valid syntax"),
        ("'; DROP TABLE jobs", "is not valid syntax"),
        ("= 1", "is not a key"),
        (" and ".join(["metrics.a = 1"] * 101), "more than 100"),
        ("x" * 10_001, "longer than"),
    ],
)
def test_filters_that_are_refused(text: str, why: str) -> None:
    with pytest.raises(BadSearch, match=why):
        parse_filter(text)


def test_orderings() -> None:
    assert parse_order(["metrics.`val/loss` DESC", "attributes.start_time", "end_time asc"]) == [
        Ordering(METRIC, "val/loss", True),
        Ordering(ATTRIBUTE, "start_time", False),
        Ordering(ATTRIBUTE, "end_time", False),
    ]
    with pytest.raises(BadSearch, match="followed by ASC or DESC"):
        parse_order(["metrics.loss sideways"])


def test_experiments_are_searched_by_name() -> None:
    assert parse_name_filter("name = 'a' AND attribute.name != 'b'") == [
        Condition(Entity.ATTRIBUTE, "run_name", "=", "a"),
        Condition(Entity.ATTRIBUTE, "run_name", "!=", "b"),
    ]
    for text in ("tags.x = 'y'", "tags.run_name = 'y'"):
        with pytest.raises(BadSearch, match="only be searched by name"):
            parse_name_filter(text)
