"""The forms of preference pairs, which give the same tokens, and pairs that are refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from dray import spec
from ray_workers.datasets.formats.examples import Encoded, Examples, open_examples
from ray_workers.recipes.chat_encoding import ExampleEncoder
from ray_workers.recipes.pair_encoding import PairEncoder
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.errors import DataError
from tests.unit.recipes import tiny_models as tiny
from tests.unit.recipes.test_example_forms import write_csv, write_parquet

USER = {"role": "user", "content": "the cat"}
GOOD = {"role": "assistant", "content": "a dog"}
BAD = {"role": "assistant", "content": "a tree"}
PAIR = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
TEXT = {"prompt": "the cat", "chosen": " a dog", "rejected": " a tree"}
METHODS: dict[str, spec.Dpo | spec.Reward] = {
    "dpo": spec.Dpo(name="dpo"),
    "reward": spec.Reward(name="reward"),
}


def encode(
    record: dict[str, Any], method: str = "dpo", template: str = tiny.TEMPLATE
) -> list[Encoded]:
    encoder = PairEncoder(tiny.tokenizer(template), METHODS[method])
    return encoder.encode("file:///d, line 7", record)


def whole(pair: dict[str, Any]) -> dict[str, Any]:
    """Return the pair as two conversations."""
    return {name: [*pair["prompt"], *pair[name]] for name in ("chosen", "rejected")}


def openai(pair: dict[str, Any]) -> dict[str, Any]:
    return {
        "input": {"messages": pair["prompt"], "tools": [], "parallel_tool_calls": True},
        "preferred_output": pair["chosen"],
        "non_preferred_output": pair["rejected"],
    }


@pytest.mark.parametrize("template", [tiny.TEMPLATE, tiny.MARKED], ids=["prefixes", "marks"])
def test_all_forms_are_the_same_and_only_the_answer_counts(template: str) -> None:
    """The tokens are the ones of transformers; earlier answers of the conversation don't count."""
    tokenizer = tiny.tokenizer(template)
    for pair in tiny.pairs(30, seed=4):
        found = encode(pair, template=template)
        assert encode(whole(pair), template=template) == found
        assert encode(openai(pair), template=template) == found
        options = {"return_dict": True, "add_generation_prompt": True}
        start = len(tokenizer.apply_chat_template(pair["prompt"], **options)["input_ids"])
        for name, side in zip(("chosen", "rejected"), found, strict=True):
            ids = tokenizer.apply_chat_template(pair["prompt"] + pair[name])["input_ids"]
            assert side.ids == ids
            assert side.counts == [number >= start for number in range(len(ids))]
        assert [side.ids for side in encode(pair, "reward", template)] == [s.ids for s in found]


def test_texts_end_with_the_end_token() -> None:
    tokenizer = tiny.tokenizer()
    for pair in tiny.text_pairs(30, seed=4):
        start = len(tokenizer(pair["prompt"])["input_ids"])
        for name, side in zip(("chosen", "rejected"), encode(pair), strict=True):
            ids = [*tokenizer(pair["prompt"] + pair[name])["input_ids"], tokenizer.eos_token_id]
            assert side.ids == ids
            assert side.counts == [number >= start for number in range(len(ids))]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({**PAIR, "rejected": [GOOD]}, "has equal answers: `chosen` and `rejected` are the same"),
        ({**TEXT, "rejected": " a dog"}, "has equal answers"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "has equal answers"),
        (
            {"chosen": [USER, GOOD], "rejected": [{**USER, "content": "hi"}, BAD]},
            "has different prompts: message 1 of `chosen` differs from message 1 of `rejected`",
        ),
        (
            {"chosen": [USER, GOOD], "rejected": [USER, BAD, USER, BAD]},
            "has different prompts: message 2",
        ),
        (
            {"chosen": [USER, GOOD], "rejected": [USER, GOOD, USER, BAD]},
            "has different prompts: message 3",
        ),
        ({"messages": [USER, GOOD]}, "set method.name to sft, or give pairs"),
        ({"text": "the cat"}, "set method.name to sft, or give pairs"),
        ({"prompt": "a", "completion": "b"}, "set method.name to sft, or give pairs"),
        ({"prompt": [USER], "chosen": [GOOD]}, "has the keys 'prompt', 'chosen'; a pair is"),
        ({"question": "a"}, "has the keys 'question'; a pair is"),
        ({**TEXT, "chosen": ""}, "has a `chosen` that is empty or of another type"),
        ({**PAIR, "rejected": {}}, "has a `rejected` that is empty or of another type"),
        ({**PAIR, "prompt": "the cat"}, "If the answers contain the prompt, leave out `prompt`"),
        ({**PAIR, "rejected": " a tree"}, "mixes strings and messages in one pair"),
        ({"chosen": "a b", "rejected": "a c"}, "has no `prompt`"),
        ({**PAIR, "rejected": None}, "has the keys 'prompt', 'chosen'; a pair is"),
        ({**openai(PAIR), "input": "[{"}, "OpenAI's format"),
        ({**PAIR, "chosen": [USER]}, "line 7, chosen: has no answer"),
        ({**PAIR, "rejected": [{**BAD, "role": "bot"}]}, "line 7, rejected, message 2"),
        ({"preferred_output": [GOOD], "non_preferred_output": [BAD]}, "OpenAI's format"),
        ({**openai(PAIR), "input": [USER]}, "OpenAI's format"),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_what_is_not_a_pair_is_refused(record: Any, message: str, method: str) -> None:
    with pytest.raises(DataError) as caught:
        encode(record, method)
    assert message in str(caught.value)
    assert "file:///d, line 7" in str(caught.value)


@pytest.mark.parametrize("record", [PAIR, TEXT, whole(PAIR), openai(PAIR)])
def test_pairs_are_refused_by_sft(record: Any) -> None:
    encoder = ExampleEncoder(tiny.tokenizer(), spec.Sft())
    with pytest.raises(DataError, match=r"line 2: is a preference pair, .* to dpo or reward"):
        encoder.encode("file:///d, line 2", record)


def open_pairs(folder: Path, records: Any, **options: Any) -> Examples:
    return opened_pairs(tiny.write_lines(folder / "d.jsonl", records), folder, **options)


def opened_pairs(source: Path, folder: Path, **options: Any) -> Examples:
    data = spec.Data(source=source.as_uri())
    method = spec.Dpo(name="dpo", **options)
    encoder = PairEncoder(tiny.tokenizer(), method)
    policy = DataPolicy.open(str(folder / "cache"))
    return open_examples(data, policy, method, encoder, method.model_dump())


def test_long_pairs_are_cut_or_left_out_together(tmp_path: Path) -> None:
    """Compare with a loop over the encoded pairs."""
    generator = random.Random(5)
    for longest in (20, 25, 35):
        records = tiny.pairs(30, seed=generator.randrange(10**6))
        every = [encode(record) for record in records]
        cut = [[(s.ids[:longest], s.counts[:longest]) for s in sides] for sides in every]
        kept = [
            [ids for ids, _ in sides]
            for sides in cut
            if all(any(counts) for _, counts in sides) and sides[0][0] != sides[1][0]
        ]
        found = open_pairs(tmp_path, records, max_length=longest)
        ids = [found.ids[found.tokens(n)].tolist() for n in range(len(found))]
        assert [ids[n : n + 2] for n in range(0, len(ids), 2)] == kept
        assert found.num_dropped == len(every) - len(kept)
        short = [
            [s.ids for s in sides] for sides in every if all(len(s.ids) <= longest for s in sides)
        ]
        found = open_pairs(tmp_path, records, max_length=longest, truncation="drop")
        ids = [found.ids[found.tokens(n)].tolist() for n in range(len(found))]
        assert [ids[n : n + 2] for n in range(0, len(ids), 2)] == short
        first = next(n for n, s in enumerate(every, 1) if max(len(o.ids) for o in s) > longest)
        with pytest.raises(DataError, match=rf"line {first}: has .* more than method\.max_length"):
            open_pairs(tmp_path, records, max_length=longest, truncation="error")


def test_only_the_answer_that_was_cut_counts_as_cut(tmp_path: Path) -> None:
    """Compare with the lengths of the encoded answers."""
    records = tiny.pairs(30, seed=6)
    lengths = [[len(side.ids) for side in encode(record)] for record in records]
    longest = min(max(one) for one in lengths) + 1
    found = open_pairs(tmp_path, records, max_length=longest)
    is_cut = [found.is_cut[n : n + 2].tolist() for n in range(0, len(found), 2)]
    assert [False, True] in is_cut
    for sides, ends in zip(is_cut, found.lengths.reshape(-1, 2).tolist(), strict=True):
        assert all(length == longest for length, cut in zip(ends, sides, strict=True) if cut)
    expected = [[one > longest for one in each] for each in lengths]
    assert all(sides in expected for sides in is_cut)


@pytest.mark.parametrize("form", ["trl", "conversations", "openai", "texts"])
def test_pairs_have_the_same_tokens_in_each_file_format(tmp_path: Path, form: str) -> None:
    make = {"conversations": whole, "openai": openai}.get(form, dict)
    records = tiny.text_pairs(12, seed=8) if form == "texts" else tiny.pairs(12, seed=8)
    records = [make(record) for record in records]
    for record in records[::3] if form in ("trl", "conversations") else ():
        record["tools"] = [{"type": "function", "function": {"name": "f"}}]
        record["rejected"][-1]["name"] = "tom"
    cells = [
        {n: one if isinstance(one, str) else json.dumps(one, indent=1) for n, one in r.items()}
        for r in records
    ]
    tables = tmp_path / "cells.parquet", tmp_path / "columns.parquet"
    for path, rows in zip(tables, (cells, records), strict=True):
        write_parquet(path, rows)
    expected = sides_of(opened_pairs(tiny.write_lines(tmp_path / "d.jsonl", records), tmp_path))
    for path in (write_csv(tmp_path / "d.csv", cells), *tables):
        assert sides_of(opened_pairs(path, tmp_path)) == expected, path


def sides_of(found: Examples) -> list[tuple[list[int], list[bool]]]:
    every = [found.tokens(number) for number in range(len(found))]
    return [(found.ids[at].tolist(), found.counts[at].tolist()) for at in every]


def test_pairs_are_equal_if_both_answers_are(tmp_path: Path) -> None:
    swapped = {**PAIR, "chosen": [BAD], "rejected": [GOOD]}
    found = open_pairs(tmp_path, [PAIR, swapped, PAIR, TEXT])
    one, same, other, opposite, again, last, *_ = found.digests.tolist()
    assert one == same == again == last != other == opposite
