"""The grammar of search expressions, and the errors for invalid ones."""

from __future__ import annotations

import contextlib
import time
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.domain.errors import InvalidSearch
from service.domain.tracking.search import MAX_CHARS, MAX_CONDITIONS, MAX_DEPTH, parse_search
from service.domain.tracking.search_tree import (
    AllOf,
    AnyOf,
    Compared,
    DocumentField,
    Exists,
    HasTag,
    IsOneOf,
    JobColumn,
    LabelField,
    MetricField,
    Negated,
    Of,
    Order,
    SearchNode,
)

ACCURACY = MetricField("val/accuracy")
LR = DocumentField("/train/optimizer/lr")


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("val/accuracy > 0.9", Compared(ACCURACY, Order.MORE, 0.9)),
        (
            "val/accuracy > 0.9 and train.optimizer.lr < 1e-2",
            AllOf([Compared(ACCURACY, Order.MORE, 0.9), Compared(LR, Order.LESS, 0.01)]),
        ),
        (
            "exists(train.ema) or not 'x' in tags and state = 'failed'",
            AnyOf(
                [
                    Exists(DocumentField("/train/ema")),
                    AllOf([Negated(HasTag("x")), IsOneOf(JobColumn("state"), ["FAILED"])]),
                ]
            ),
        ),
        ("NOT ( priority>=5 )", Negated(Compared(JobColumn("priority"), Order.AT_LEAST, 5.0))),
        (
            'queue != "a"',
            AllOf([Exists(JobColumn("queue")), Negated(IsOneOf(JobColumn("queue"), ["a"]))]),
        ),
        (
            "model.name not in ('cnn', \"mlp\")",
            AllOf(
                [
                    Exists(DocumentField("/model/name")),
                    Negated(IsOneOf(DocumentField("/model/name"), ["cnn", "mlp"])),
                ]
            ),
        ),
        ("train.compile == TRUE", IsOneOf(DocumentField("/train/compile"), [True])),
        ("experiment = 'a'", IsOneOf(LabelField("experiment"), ["a"])),
        ("labels.my/team in ('a')", IsOneOf(LabelField("my/team"), ["a"])),
        ('labels["0"] = "a"', IsOneOf(LabelField("0"), ["a"])),
        ("metrics.loss<=-.5", Compared(MetricField("loss"), Order.AT_MOST, -0.5)),
        ("min(metrics['a \\'b']) = 1", IsOneOf(MetricField("a 'b", Of.MIN), [1.0])),
        ("max(val/top-5) > 1", Compared(MetricField("val/top-5", Of.MAX), Order.MORE, 1.0)),
        ("script.args[0] = '--x'", IsOneOf(DocumentField("/script/args/0"), ["--x"])),
        (
            "environment.variables['A/B~'] = 'c'",
            IsOneOf(DocumentField("/environment/variables/A~1B~0"), ["c"]),
        ),
        (
            "created_at > '2026-01-31'",
            Compared(JobColumn("created_at"), Order.MORE, datetime(2026, 1, 31, tzinfo=UTC)),
        ),
        ("name = 'ünïcödé ☃ \\\\'", IsOneOf(JobColumn("name"), ["ünïcödé ☃ \\"])),
    ],
)
def test_an_expression_is_read(text: str, tree: SearchNode) -> None:
    assert parse_search(text) == tree


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "column 1: expected a field, such as state, val/loss or train.optimizer.lr, found "),
        ("val/loss", 'column 9: expected a comparison (= != < <= > >=) or "in", found the end'),
        ("val/loss <", "column 11: expected a number, found the end"),
        ("val/loss < 'a'", "column 12: strings can be compared with =, != and"),
        ("val/loss = 'a'", "column 12: expected a number: metrics are numbers, found 'a'"),
        ("(val/loss < 1", 'column 14: expected ")", found the end'),
        ("val/loss < 1)", 'column 13: expected "and", "or" or the end, found )'),
        ("val/loss < 1 val/loss", 'column 14: expected "and", "or" or the end'),
        ("val/loss < 1 and", "column 17: expected a field"),
        ("loss < 1", "column 1: there is no field loss"),
        ("sate = 'RUNNING'", "column 1: there is no field sate; did you mean state?"),
        ("tags = 'a'", "column 1: there is no field tags"),
        ("state = 'RUNING'", "column 9: there is no such state; the states are QUEUED, STARTING"),
        ("state = RUNNING", 'column 9: expected a quoted state, such as "RUNNING", found RUN'),
        ("state > 'RUNNING'", "column 7: strings can be compared with =, != and"),
        ("name = 'a", "column 8: the string that begins here has no closing '"),
        ("val/loss < nan", "column 12: expected a number, found nan"),
        ("val/loss < 1e999", "column 12: the number is too large"),
        ("val/loss < 1.2.3", "column 12: expected a number, such as 0.1"),
        ("val/loss < 1 ; drop", "column 14: ';' is not valid here"),
        ("val/loss < 1 ☃", "column 14: '\\u2603' is not valid here"),
        ("val/loss\0 < 1", "column 9: '\\x00' is not valid here"),
        ("name = 'a\0'", "column 8: the string contains an invalid character"),
        ("name = '\ud800'", "column 8: the string contains an invalid character"),
        ("created_at > 'soon'", "column 14: this is not a time"),
        ("'a' = name", 'column 5: expected "in tags", found ='),
        ("min(state) = 1", "column 5: min can only be used with metrics"),
        ("labels = 'a'", "column 1: expected a name after labels"),
        ("train..lr = 1", "column 1: train..lr has an empty part"),
        ("script.args[x] = 1", "column 13: expected a nonnegative integer, or a quoted name"),
        ("queue in ()", "column 11: expected a quoted string, found )"),
        ("metrics.a" + "a" * 512 + " = 1", "column 1: the name has more than 512 characters"),
        (
            "a" * (MAX_CHARS + 1),
            "the expression has 4,001 characters, but at most 4,000 are allowed",
        ),
        ("x" * 100_000, "the expression has 100,000 characters, but at most 4,000 are allowed"),
        ("(" * 1000, f'column {MAX_DEPTH + 1}: more than 32 "(" and "not" are nested'),
        ("not " * 900, "column 129: more than 32"),
        (
            " or ".join(["val/a = 1"] * (MAX_CONDITIONS + 1)),
            "column 417: the expression has more than 32 conditions",
        ),
        ("queue in (" + "'a'," * 200 + "'a')", "column 410: the list has more than 100 values"),
    ],
)
def test_an_error_says_where_and_what_was_expected(text: str, said: str) -> None:
    with pytest.raises(InvalidSearch) as caught:
        parse_search(text)
    assert caught.value.message.startswith(said), caught.value.message
    assert caught.value.pointer == "/where"


def test_a_word_for_a_text_and_a_bare_metric_are_answered_with_the_way_to_write_them() -> None:
    for text, hint in (
        ("state = RUNNING", 'write "RUNNING" for a string'),
        ("loss < 1", 'a metric without "/" must be written as metrics.loss'),
    ):
        with pytest.raises(InvalidSearch) as caught:
            parse_search(text)
        assert caught.value.hint == hint


PIECES = st.sampled_from(
    ["(", ")", "not ", "and ", "or ", "in ", "val/a ", "train.lr ", "= ", "<", "1", "'a'", "exists"]
)


@given(st.one_of(st.text(max_size=200), st.lists(PIECES, max_size=200).map("".join)))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(InvalidSearch):
        parse_search(text)


def test_text_that_invites_backtracking_is_refused_in_time() -> None:
    hostile: list[Any] = ["'" + "\\" * 3998, "a/" * 1999, "1" * 4000, "[" * 4000, '"' * 3999]
    began = time.thread_time()
    for text in hostile:
        with pytest.raises(InvalidSearch):
            parse_search(text)
    assert time.thread_time() - began < 2
