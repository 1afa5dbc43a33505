from __future__ import annotations

import json
from typing import Any

import pytest

from api.http.body import check, fingerprint, parse
from api.problems import Refused
from dray.input.validation import MAX_DEPTH


def refusal(document: dict[str, Any]) -> Refused:
    with pytest.raises(Refused) as caught:
        check(document)
    return caught.value


def job(**fields: Any) -> dict[str, Any]:
    return {"recipe": "image_classification", **fields}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b"[]", "not an object"),
        (b"\xff", "not UTF-8"),
        (b'{"a": 1, "a": 2}', "'a' appears twice"),
        (b'{"a": {"b": 1, "b": 1}}', "'b' appears twice"),
        (b'{"a": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "nested deeper"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested deeper"),
        (b'{"a": ' + b"9" * 5000 + b"}", "more than 4,300 digits"),
    ],
)
def test_what_is_not_one_clear_json_object_is_refused(body: bytes, said: str) -> None:
    with pytest.raises(Refused) as caught:
        parse(body)
    assert caught.value.code == "malformed_request"
    assert said in caught.value.detail


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        (b'{"a": "\\u0000"}', "/a"),
        (b'{"a": ["x", {"b/c": "\\ud800"}]}', "/a/1/b~1c"),
        (b'{"a": {"\\udfff": 1}}', "/a"),
        (b'{"\\u0000": 1}', ""),
    ],
)
def test_text_that_no_database_holds_is_refused_with_its_pointer(body: bytes, pointer: str) -> None:
    with pytest.raises(Refused) as caught:
        parse(body)
    assert (caught.value.code, caught.value.pointer) == ("invalid_document", pointer)
    assert "NUL or an unpaired surrogate" in caught.value.detail


def test_text_of_all_languages_passes() -> None:
    assert parse('{"name": "Größe 🚚"}'.encode()) == {"name": "Größe 🚚"}
    assert parse(b'{"name": "\\ud83d\\ude9a"}') == {"name": "🚚"}


def test_depth_up_to_the_limit_passes() -> None:
    deep = b'{"a": ' + b"[" * (MAX_DEPTH - 2) + b"]" * (MAX_DEPTH - 2) + b"}"
    assert set(parse(deep)) == {"a"}


def test_an_unknown_field_is_named_with_what_was_probably_meant() -> None:
    refused = refusal(job(train={"epocs": 3}))
    assert (refused.code, refused.pointer) == ("invalid_document", "/train/epocs")
    assert refused.hint == "did you mean 'epochs'?"


def test_an_unknown_field_of_an_optional_part_is_compared_with_that_part() -> None:
    refused = refusal({"script": {"entrypoint": "a.py", "argz": []}})
    assert (refused.pointer, refused.hint) == ("/script/argz", "did you mean 'args'?")


def test_an_unknown_field_without_a_similar_name_gets_the_list_of_fields() -> None:
    refused = refusal(job(train={"schedule": {"zzz": 3}}))
    assert refused.hint is not None
    assert "warmup_steps" in refused.hint


@pytest.mark.parametrize(
    ("given", "hint"), [(400, "write it in quotes"), (True, "write it in quotes"), (["a"], None)]
)
def test_a_number_instead_of_a_text_needs_quotes(given: Any, hint: str | None) -> None:
    refused = refusal({"script": {"entrypoint": "a.py", "args": ["--steps", given]}})
    assert (refused.pointer, refused.hint) == ("/script/args/1", hint)


def test_a_misspelt_choice_is_told_the_nearest() -> None:
    refused = refusal(job(train={"optimizer": {"name": "adamv"}}))
    assert refused.pointer == "/train/optimizer/name"
    assert refused.hint == "did you mean 'adamw'?"


def test_the_pointer_of_a_choice_of_types_names_the_field_alone() -> None:
    refused = refusal(job(parallel={"data": "x"}))
    assert refused.pointer == "/parallel/data"
    assert " or " in refused.detail


def test_the_pointer_escapes_what_json_pointers_reserve() -> None:
    assert refusal(job(labels={"~a/ b": "x"})).pointer == "/labels/~0a~1 b"


def test_the_pointer_reaches_into_lists() -> None:
    refused = refusal({"script": {"entrypoint": "a.py", "args": ["x", 3]}})
    assert refused.pointer == "/script/args/1"


def test_a_missing_field_is_pointed_at_where_it_should_be() -> None:
    refused = refusal({"script": {}})
    assert refused.pointer == "/script/entrypoint"
    assert "missing" in refused.detail


def test_a_rule_between_fields_points_at_the_part_they_share() -> None:
    assert refusal({"name": "neither"}).pointer == ""
    nesterov = job(train={"optimizer": {"nesterov": True}})
    assert refusal(nesterov).pointer == "/train/optimizer"


def test_the_other_fields_at_fault_are_named_too() -> None:
    refused = refusal(job(priority=101, train={"epochs": 0}))
    assert {refused.pointer, refused.detail.partition("also wrong: ")[2]} == {
        "/priority",
        "/train/epochs",
    }


def test_a_fingerprint_does_not_depend_on_the_order_of_fields() -> None:
    one = parse(b'{"a": 1, "b": {"c": 1.5, "d": "x"}}')
    other = parse(b'{"b": {"d": "x", "c": 1.5}, "a": 1}')
    assert fingerprint(one) == fingerprint(other)
    assert fingerprint(one) != fingerprint({**one, "a": 2})
    assert fingerprint(one) == fingerprint(json.loads(json.dumps(one)))


def test_thousands_of_faults_are_told_in_one_short_sentence() -> None:
    many = {f"k{n}" * 50: 1 for n in range(20_000)}
    refused = refusal(job(labels={"a": 1}, train=many, **many))
    assert refused.code == "invalid_document"
    assert refused.detail.endswith(" and more")
    assert len(refused.detail) < 1000
