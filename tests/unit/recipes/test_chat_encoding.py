"""Which tokens of an example count, and which examples are refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from dray import spec
from ray_workers.datasets.formats.examples import Encoded, Examples, open_examples
from ray_workers.recipes.chat_encoding import ExampleEncoder
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.errors import DataError
from tests.unit.recipes import tiny_models as tiny

USER = {"role": "user", "content": "the cat"}
ANSWER = {"role": "assistant", "content": "a dog"}


@pytest.fixture(scope="module")
def tokenizers() -> dict[str | None, Any]:
    return {form: tiny.tokenizer(form) for form in (tiny.TEMPLATE, tiny.MARKED, None)}


def encode(tokenizer: Any, record: dict[str, Any], **options: Any) -> Encoded:
    return ExampleEncoder(tokenizer, spec.Sft(**options)).encode("file:///d, line 1", record)


def counted(tokenizer: Any, found: Encoded) -> list[str]:
    """Return each run of tokens that count, as text."""
    runs: list[list[int]] = [[]]
    for number, counts in zip(found.ids, found.counts, strict=True):
        if counts:
            runs[-1].append(number)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


@pytest.mark.parametrize("template", [tiny.TEMPLATE, tiny.MARKED], ids=["prefixes", "marks"])
def test_the_answers_count_and_nothing_else(tokenizers: Any, template: str) -> None:
    tokenizer = tokenizers[template]
    for record in tiny.conversations(60, seed=3):
        found = encode(tokenizer, record)
        answers = [m["content"] for m in record["messages"] if m["role"] == "assistant"]
        assert counted(tokenizer, found) == [f"{answer}<|end|>" for answer in answers]
        text = tokenizer.apply_chat_template(record["messages"], tokenize=False)
        assert tokenizer.decode(found.ids) == text
        everything = encode(tokenizer, record, loss="all")
        assert everything.ids == found.ids
        assert all(everything.counts)


def test_marks_agree_with_the_mask_of_transformers(tokenizers: Any) -> None:
    tokenizer = tokenizers[tiny.MARKED]
    for record in tiny.conversations(40, seed=8):
        expected = tokenizer.apply_chat_template(
            record["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        found = encode(tokenizer, record)
        assert found.ids == expected["input_ids"]
        assert found.counts == [bool(one) for one in expected["assistant_masks"]]


def test_a_completion_counts_with_the_end_and_a_prompt_does_not(tokenizers: Any) -> None:
    tokenizer = tokenizers[None]
    for record in tiny.completions(40):
        found = encode(tokenizer, record)
        assert tokenizer.decode(found.ids) == f"<s>{record['prompt']}{record['completion']}</s>"
        assert counted(tokenizer, found) == [f"{record['completion']}</s>"]
        assert encode(tokenizer, record, loss="all").counts == [
            False,
            *[True] * (len(found.ids) - 1),
        ]


def test_every_token_of_a_text_counts_except_the_begin(tokenizers: Any) -> None:
    found = encode(tokenizers[None], {"text": "the cat likes"})
    assert counted(tokenizers[None], found) == ["the cat likes</s>"]


def test_messages_as_prompt_and_completion_count_in_the_completion(tokenizers: Any) -> None:
    tokenizer = tokenizers[tiny.TEMPLATE]
    record = {"prompt": [USER, ANSWER, USER], "completion": [{**ANSWER, "content": "red"}]}
    assert counted(tokenizer, encode(tokenizer, record)) == ["red<|end|>"]


def test_an_answer_with_the_weight_0_does_not_count(tokenizers: Any) -> None:
    tokenizer = tokenizers[tiny.MARKED]
    messages = [USER, {**ANSWER, "weight": 0}, USER, {**ANSWER, "content": "red", "weight": 1}]
    assert counted(tokenizer, encode(tokenizer, {"messages": messages})) == ["red<|end|>"]


def test_calls_of_tools_have_their_arguments_as_objects(tokenizers: Any) -> None:
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }};"
        "{% endfor %}{{ m.content }}|{% endfor %}{{ (tools or []) | length }}"
    )
    tokenizer = tiny.tokenizer(template)
    call = {"type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sun"},
        ANSWER,
    ]
    record = {"messages": messages, "tools": [{"type": "function", "function": {"name": "f"}}]}
    found = encode(tokenizer, record, loss="all")
    assert tokenizer.decode(found.ids) == "the cat|Rome;|sun|a dog|1"


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no known key": (
        {"question": "x"},
        "has the fields 'question', but it needs the fields of one form",
    ),
    "no messages": ({"messages": []}, "empty or not a list"),
    "no answer": ({"messages": [USER]}, "has no answer: no message has the role assistant"),
    "a question at the end": (
        {"messages": [USER, ANSWER, USER]},
        "ends with a message of the role user",
    ),
    "an unknown role": (
        {"messages": [{**USER, "role": "human"}, ANSWER]},
        "message 1: has the role 'human'",
    ),
    "no role": ({"messages": ["hello", ANSWER]}, "message 1: has the role 'hello'"),
    "a late system message": (
        {"messages": [USER, {**USER, "role": "system"}, ANSWER]},
        "has a system message as message number 2",
    ),
    "a tool without a call": (
        {"messages": [USER, {**USER, "role": "tool"}, ANSWER]},
        "tool message as message number 2",
    ),
    "an empty answer": ({"messages": [USER, {**ANSWER, "content": ""}]}, "is an empty answer"),
    "content that is a number": (
        {"messages": [{**USER, "content": 3}, ANSWER]},
        "`content` that is not a string",
    ),
    "an image": (
        {"messages": [{**USER, "content": [{"type": "image"}]}, ANSWER]},
        "other than text",
    ),
    "a weight of a half": (
        {"messages": [USER, {**ANSWER, "weight": 0.5}]},
        "has the weight '0.5'",
    ),
    "weights of 0": ({"messages": [USER, {**ANSWER, "weight": 0}]}, "all have the weight 0"),
    "broken arguments": (
        {
            "messages": [
                USER,
                {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]},
            ]
        },
        "`arguments` are not JSON",
    ),
    "no completion": ({"prompt": "x"}, "`completion` that is missing"),
    "an empty completion": ({"prompt": "x", "completion": ""}, "has no answer: its `completion`"),
    "an empty text": ({"text": ""}, "`text` that is empty"),
    "half a character": ({"text": "\ud800"}, "can't be converted to tokens"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_example_is_refused_with_its_line(tokenizers: Any, name: str) -> None:
    record, message = BAD[name]
    with pytest.raises(DataError) as raised:
        encode(tokenizers[tiny.TEMPLATE], record)
    assert str(raised.value).startswith("file:///d, line 1")
    assert message in str(raised.value)


def test_messages_need_a_chat_template(tokenizers: Any) -> None:
    with pytest.raises(DataError, match=r"tokenizer of model\.base has no chat template"):
        encode(tokenizers[None], {"messages": [USER, ANSWER]})


def test_what_a_template_raises_is_reported() -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}x"
    system = {"role": "system", "content": "x"}
    with pytest.raises(DataError, match=r"line 1: is refused by the chat template: no system"):
        encode(tiny.tokenizer(template), {"messages": [system, USER, ANSWER]})


def test_a_template_that_changes_earlier_answers_is_refused() -> None:
    """Like templates that remove the reasoning from all answers but the last."""
    template = (
        "{% for m in messages %}"
        "{{ m.content if loop.last or m.role == 'user' else m.content[:1] }};{% endfor %}"
    )
    messages = [USER, ANSWER, USER, ANSWER]
    with pytest.raises(DataError, match=r"the first 2 messages differently.*generation"):
        encode(tiny.tokenizer(template), {"messages": messages})
    assert all(encode(tiny.tokenizer(template), {"messages": messages}, loss="all").counts)
    messages[1] = {**ANSWER, "weight": 0}
    tokenizer = tiny.tokenizer(template)
    found = encode(tokenizer, {"messages": messages})
    assert counted(tokenizer, found) == ["a dog;"], "only the last answer counts"


def test_the_header_of_a_first_answer_does_not_count(tokenizers: Any) -> None:
    """Without marks, its end is unknown."""
    record = {"messages": [ANSWER, USER, ANSWER]}
    found = encode(tokenizers[tiny.MARKED], record)
    assert counted(tokenizers[tiny.MARKED], found) == ["a dog<|end|>"] * 2
    with pytest.raises(DataError, match="begins with an answer"):
        encode(tokenizers[tiny.TEMPLATE], record)


def open_lines(folder: Path, records: Any, **options: Any) -> Examples:
    data = spec.Data(source=tiny.write_lines(folder / "d.jsonl", records).as_uri())
    method = spec.Sft(**options)
    encoder = ExampleEncoder(tiny.tokenizer(), method)
    policy = DataPolicy.open(str(folder / "cache"))
    return open_examples(data, policy, method, encoder, method.model_dump())


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    lines: list[Any] = [*tiny.texts(16), '{"text": "the cat', *tiny.texts(3)]
    with pytest.raises(DataError, match=r"d.jsonl, line 17: is not JSON"):
        open_lines(tmp_path, lines)
    with pytest.raises(DataError, match=r"d.jsonl, line 2: is a JSON list"):
        open_lines(tmp_path, [*tiny.texts(1), "[1]"])
    with pytest.raises(DataError, match=r"d.jsonl, line 3: is not JSON"):
        open_lines(tmp_path, ["", *tiny.texts(1), "[" * 100_000])
    with pytest.raises(DataError, match=r"line 2: has the form text, but the lines before"):
        open_lines(tmp_path, [*tiny.completions(1), *tiny.texts(1)])


def test_long_examples_are_cut_or_left_out_or_refused(tmp_path: Path) -> None:
    """Compare with a loop over the encoded examples."""
    generator = random.Random(5)
    for longest in (4, 9, 20):
        records = tiny.conversations(30, seed=generator.randrange(10**6))
        encoder = ExampleEncoder(tiny.tokenizer(), spec.Sft())
        every = [encoder.encode("", record) for record in records]
        cut = [(ids[:longest], counts[:longest]) for ids, counts in every]
        kept = [ids for ids, counts in cut if any(counts)]
        if not kept:
            with pytest.raises(DataError, match=r"increase method\.max_length"):
                open_lines(tmp_path, records, max_length=longest)
            continue
        found = open_lines(tmp_path, records, max_length=longest)
        assert [found.ids[found.tokens(n)].tolist() for n in range(len(found))] == kept
        assert found.num_counted.tolist() == [sum(c) for _, c in cut if any(c)]
        assert found.num_dropped == len(every) - len(kept)
        assert found.num_truncated == sum(
            len(ids) > longest and any(counts[:longest]) for ids, counts in every
        )
        short = [ids for ids, _ in every if len(ids) <= longest]
        if short:
            dropped = open_lines(tmp_path, records, max_length=longest, truncation="drop")
            assert [dropped.ids[dropped.tokens(n)].tolist() for n in range(len(dropped))] == short
            assert (dropped.num_truncated, dropped.num_dropped) == (0, len(every) - len(short))
        first = next(n for n, (ids, _) in enumerate(every, start=1) if len(ids) > longest)
        with pytest.raises(DataError, match=rf"line {first}: has .* more than method\.max_length"):
            open_lines(tmp_path, records, max_length=longest, truncation="error")


def test_an_error_counts_only_the_examples_of_its_part(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    tiny.write_lines(folder / "train.jsonl", [{"text": "a cat"}, {"text": "a cat " * 40}])
    (folder / "validation.jsonl").write_text("\n")
    method = spec.Sft(max_length=16, truncation="drop")
    encoder = ExampleEncoder(tiny.tokenizer(), method)
    data = spec.Data(source=folder.as_uri(), format="jsonl")
    policy = DataPolicy.open(str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"validation part of .*: contains no examples"):
        open_examples(data, policy, method, encoder, {})
    with pytest.raises(DataError, match=r"contains only examples of more than 16 tokens"):
        open_lines(tmp_path, [{"text": "a cat " * 40}], max_length=16, truncation="drop")


def test_files_named_like_a_split_divide_the_examples(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    tiny.write_lines(folder / "train.jsonl", tiny.texts(5))
    tiny.write_lines(folder / "validation.jsonl", tiny.texts(2, seed=1))
    method = spec.Sft()
    encoder = ExampleEncoder(tiny.tokenizer(), method)
    data = spec.Data(source=folder.as_uri(), format="jsonl")

    def opened() -> Examples:
        policy = DataPolicy.open(str(tmp_path / "cache"))
        return open_examples(data, policy, method, encoder, {})

    found = opened()
    assert (len(found), found.num_training) == (7, 5)
    (folder / "validation.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match=r"validation part of .*/set: contains no examples"):
        opened()


def test_two_reads_of_the_same_lines_are_the_same(tmp_path: Path) -> None:
    records = tiny.conversations(10)
    one, other = open_lines(tmp_path, records), open_lines(tmp_path, records)
    assert one.fingerprint == other.fingerprint
    changed = open_lines(tmp_path, [*records[:-1], json.loads(json.dumps(records[0]))])
    assert changed.fingerprint != one.fingerprint
    assert changed.digests[0] == changed.digests[-1] != changed.digests[1]
