"""The same examples have the same tokens in each form and in each file format."""

from __future__ import annotations

import csv
import functools
import gzip
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from dray import spec
from ray_workers.datasets.formats.examples import Examples, open_examples
from ray_workers.recipes.chat_encoding import ExampleEncoder
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.errors import DataError
from tests.unit.recipes import tiny_models as tiny

TEMPLATE = (
    "{% if tools is defined and tools %}{% for t in tools %}{{ t.function | length }}{% endfor %};"
    "{% endif %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% if 'tool_calls' in m %}{% for c in m.tool_calls %}{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}{% endfor %}"
    "{% endif %}{% if m.name is defined %}:{{ m.name }}{% endif %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
METHOD = spec.Sft(max_length=10_000)
Record = dict[str, Any]


def opened(source: Path, home: Path, *, template: str | None = TEMPLATE, **data: Any) -> Examples:
    return open_given(spec.Data(source=source.as_uri(), **data), home, template)


def open_given(data: spec.Data, home: Path, template: str | None = TEMPLATE) -> Examples:
    encoder = ExampleEncoder(tokenizer(template), METHOD, data.examples)
    policy = DataPolicy.open(str(home / "cache"))
    return open_examples(data, policy, METHOD, encoder, {"template": template})


@functools.cache
def tokenizer(template: str | None) -> Any:
    return tiny.tokenizer(template)


def tokens_of(found: Examples) -> list[tuple[list[int], list[bool]]]:
    every = [found.tokens(number) for number in range(len(found))]
    return [(found.ids[at].tolist(), found.counts[at].tolist()) for at in every]


def text(generator: random.Random) -> str:
    """Return a text with characters that CSV quotes, or that look like JSON."""
    extra = generator.choice(["", "", ' "so"', ",\nnext", " [1]", " ünïcode 猫", ' [{"a": 1}]'])
    return tiny.sentence(generator) + extra


def turns(generator: random.Random, *, has_objects: bool = False) -> list[Record]:
    """Return a conversation, some with a system message, a name, a weight, or calls of tools.
    has_objects: whether the arguments of calls are objects instead of JSON in a string."""
    found: list[Record] = []
    if generator.random() < 0.3:
        found.append({"role": "system", "content": text(generator)})
    for _ in range(generator.randint(1, 3)):
        found.append({"role": "user", "content": text(generator)})
        if generator.random() < 0.3:
            found[-1]["name"] = generator.choice(tiny.WORDS)
        if generator.random() < 0.3:
            given: Record = {generator.choice(("city", "days")): generator.choice(tiny.WORDS)}
            arguments: Any = given if has_objects else json.dumps({**given, "unit": None})
            call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
            found.append({"role": "assistant", "content": None, "tool_calls": [call]})
            found.append({"role": "tool", "content": text(generator)})
        if generator.random() < 0.3:
            found.append({"role": "assistant", "content": text(generator), "weight": 0})
            found.append({"role": "user", "content": text(generator)})
        found.append({"role": "assistant", "content": text(generator)})
    return found


def messages(generator: random.Random) -> Record:
    record: Record = {"messages": turns(generator)}
    if generator.random() < 0.4:
        record["tools"] = [{"type": "function", "function": {"name": "f"}}]
    return record


def objects(generator: random.Random) -> Record:
    """Return calls and tools as objects with different fields, which are columns in Parquet."""
    more = generator.choice([{}, {"description": "x"}, {"strict": True, "description": "y"}])
    tools = [{"type": "function", "function": {"name": "f", **more}}]
    return {"messages": turns(generator, has_objects=True), "tools": tools}


def completion(generator: random.Random) -> Record:
    return {"prompt": text(generator), "completion": text(generator)}


def prompt_messages(generator: random.Random) -> Record:
    every = [one for one in turns(generator) if one.get("weight") != 0]
    return {"prompt": every[:-1], "completion": every[-1:]}


def sharegpt(generator: random.Random) -> Record:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    every = [one for one in turns(generator) if one["role"] != "tool" and one["content"]]
    pairs = [{"from": names[one["role"]], "value": one["content"]} for one in every]
    return {"conversations": pairs}


def alpaca(generator: random.Random) -> Record:
    return {
        "instruction": text(generator),
        "input": text(generator) if generator.random() < 0.5 else "",
        "output": text(generator),
    }


def plain_text(generator: random.Random) -> Record:
    return {"text": text(generator)}


MAKERS: dict[str, Callable[[random.Random], Record]] = {
    one.__name__: one
    for one in (messages, objects, completion, prompt_messages, sharegpt, alpaca, plain_text)
}


def write_csv(path: Path, records: Sequence[Record], **options: Any) -> Path:
    names = list({name: None for record in records for name in record})
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, **options)
        writer.writerow(names)
        for record in records:
            cells = (record.get(name, "") for name in names)
            writer.writerow([c if isinstance(c, str) else json.dumps(c) for c in cells])
    return path


def write_parquet(path: Path, records: Sequence[Record]) -> Path:
    parquet.write_table(pa.Table.from_pylist(with_all_fields(records)), path, row_group_size=3)
    return path


def with_all_fields(records: Sequence[Record]) -> list[Record]:
    """Give each record each field, because pyarrow takes the columns from the first one."""
    names = {name: None for record in records for name in record}
    return [{**names, **record} for record in records]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("maker", MAKERS)
def test_each_format_has_the_same_tokens(tmp_path: Path, maker: str, seed: int) -> None:
    generator = random.Random(f"{maker}{seed}")
    records = [MAKERS[maker](generator) for _ in range(20)]
    expected = opened(tiny.write_lines(tmp_path / "d.jsonl", records), tmp_path)
    packed = tmp_path / "d.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "d.jsonl").read_bytes()))
    several = tmp_path / "several"
    several.mkdir()
    tiny.write_lines(several / "1.jsonl", records[:7])
    (several / "2.jsonl.gz").write_bytes(
        gzip.compress(tiny.write_lines(tmp_path / "rest.jsonl", records[7:]).read_bytes())
    )
    tables = tmp_path / "tables"
    tables.mkdir()
    write_csv(tables / "1.csv", records[:5])
    write_csv(tables / "2.tsv", records[5:], delimiter="\t")
    columns = tmp_path / "columns"
    columns.mkdir()
    write_parquet(columns / "1.parquet", records[:11])
    write_parquet(columns / "2.pq", records[11:])
    semicolons = write_csv(tmp_path / "semi.csv", records, delimiter=";")
    for source, options in (
        (packed, {}),
        (several, {}),
        (write_csv(tmp_path / "d.csv", records), {}),
        (semicolons, {"delimiter": ";"}),
        (tables, {"format": "csv"}),
        (write_parquet(tmp_path / "d.parquet", records), {}),
        (columns, {"format": "parquet"}),
    ):
        found = opened(source, tmp_path, **options)
        assert tokens_of(found) == tokens_of(expected), source
        assert found.form == expected.form
        assert np.array_equal(found.num_counted, expected.num_counted)


def test_sharegpt_and_alpaca_are_the_conversations_that_they_describe(tmp_path: Path) -> None:
    """Compare with the same conversations in OpenAI's form."""
    generator = random.Random(4)
    roles = {"human": "user", "gpt": "assistant", "system": "system", "observation": "tool"}
    for number, maker in enumerate((sharegpt, alpaca)):
        records = [maker(generator) for _ in range(20)]
        same = []
        for record in records:
            if maker is alpaca:
                question = "\n\n".join(filter(None, (record["instruction"], record["input"])))
                pairs = [("user", question), ("assistant", record["output"])]
            else:
                pairs = [(roles[one["from"]], one["value"]) for one in record["conversations"]]
            same.append({"messages": [{"role": r, "content": c} for r, c in pairs]})
        given = tiny.write_lines(tmp_path / f"{number}.jsonl", records)
        expected = tiny.write_lines(tmp_path / f"{number}-same.jsonl", same)
        assert tokens_of(opened(given, tmp_path)) == tokens_of(opened(expected, tmp_path))


def test_alpaca_without_a_chat_template_is_the_prompt_of_alpaca(tmp_path: Path) -> None:
    records = [
        {"instruction": "the cat", "input": "a dog", "output": "red"},
        {"instruction": "the cat", "output": "blue"},
    ]
    source = tiny.write_lines(tmp_path / "d.jsonl", records)
    found = opened(source, tmp_path, template=None)
    first, second = (tokenizer(None).decode(ids) for ids, _ in tokens_of(found))
    assert first == (
        "<s>Below is an instruction that describes a task, paired with an input that provides "
        "further context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nthe cat\n\n### Input:\na dog\n\n### Response:\nred</s>"
    )
    assert second == (
        "<s>Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n### Instruction:\nthe cat\n\n### Response:\nblue</s>"
    )
    assert found.num_counted[0] == len(tokenizer(None)("red")["input_ids"])  # <s> is </s> here


def test_a_given_form_wins_over_recognition(tmp_path: Path) -> None:
    """Like the rows of a data set that also contain the rendered text."""
    records = [{**alpaca(random.Random(n)), "text": "the cat", "id": n} for n in range(3)]
    source = tiny.write_lines(tmp_path / "d.jsonl", records)
    with pytest.raises(
        DataError, match=r"line 1: could have the form text or alpaca.*set data\.ex"
    ):
        opened(source, tmp_path)
    assert opened(source, tmp_path, examples="text").form == "text"
    found = opened(source, tmp_path, examples="alpaca")
    assert found.form == "alpaca"
    assert found.lengths[0] > len(tokenizer(TEMPLATE)("the cat")["input_ids"])
    with pytest.raises(DataError, match=r"line 1: has no `messages`, which an example of messages"):
        opened(source, tmp_path, examples="messages")


USER = {"from": "human", "value": "the cat"}
ANSWER = {"from": "gpt", "value": "a dog"}
BAD: dict[str, tuple[Record, str]] = {
    "an unknown sender": (
        {"conversations": [{**USER, "from": "bing"}, ANSWER]},
        "message 1: is from 'bing'; senders are 'human', 'user'",
    ),
    "a message without a value": (
        {"conversations": [{"from": "human"}, ANSWER]},
        "message 1: is not an object with `from` and `value`",
    ),
    "no answer of gpt": ({"conversations": [USER]}, "has no answer: no message has the role"),
    "no conversation": ({"conversations": []}, "has `conversations` that are empty"),
    "broken JSON in a string": ({"messages": "[{"}, "has `messages` as a string that is not JSON"),
    "broken tools": (
        {"conversations": [USER, ANSWER], "tools": "{"},
        "has `tools` as a string that is not JSON",
    ),
    "a number as output": ({"instruction": "x", "output": 3}, "`output` that is not a string"),
    "an instruction alone": ({"instruction": "x"}, "has no `output`, which an example of alpaca"),
    "a history": (
        {"instruction": "x", "output": "y", "history": [["a", "b"]]},
        "has a `history`: write it as `messages`",
    ),
    "two forms": (
        {"conversations": [USER, ANSWER], "messages": []},
        "could have the form messages or sharegpt",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_an_example_of_these_forms_is_refused_with_its_line(tmp_path: Path, name: str) -> None:
    record, message = BAD[name]
    with pytest.raises(DataError) as raised:
        opened(tiny.write_lines(tmp_path / "d.jsonl", ["", record]), tmp_path)
    assert "d.jsonl, line 2" in str(raised.value)
    assert message in str(raised.value)


def test_forms_that_are_mixed_are_refused_with_the_line(tmp_path: Path) -> None:
    generator = random.Random(2)
    records = [*(messages(generator) for _ in range(15)), sharegpt(generator)]
    with pytest.raises(DataError, match=r"line 16: has the form sharegpt.*list both in data\.sou"):
        opened(tiny.write_lines(tmp_path / "d.jsonl", records), tmp_path)


def test_a_broken_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text('prompt,completion\n"a\nb",c\nd\n')
    with pytest.raises(DataError, match=r"d.csv, line 4: has 1 fields, but the header has 2"):
        opened(path, tmp_path)
    path.write_text("prompt,completion\na,b\nc,\n")
    with pytest.raises(DataError, match=r"d.csv, line 3: has no answer"):
        opened(path, tmp_path)
    path.write_text("prompt,completion\n")
    with pytest.raises(DataError, match="contains no examples"):
        opened(path, tmp_path)
    path.write_bytes(b"prompt,completion\na,b\nc,\xff\xfe\n")
    with pytest.raises(DataError, match=r"is not UTF-8: the byte at offset 24"):
        opened(path, tmp_path)
    assert len(opened(path, tmp_path, encoding="latin-1")) == 2
    table = tmp_path / "d.parquet"
    write_parquet(table, [{"text": "the cat"}, {"text": "the dog"}, {"text": None}])
    with pytest.raises(DataError, match=r"d.parquet, row 3: has no fields, but it needs"):
        opened(table, tmp_path)
    table.write_bytes(table.read_bytes()[:-10])
    with pytest.raises(DataError, match="is not a Parquet file, or is incomplete"):
        opened(table, tmp_path)


def test_numbered_files_of_a_split_are_its_parts(tmp_path: Path) -> None:
    """As in the Parquet files of data sets on Hugging Face's hub."""
    folder = tmp_path / "data"
    folder.mkdir()
    parts = {
        "train-00000-of-00002.parquet": 3,
        "train-00001-of-00002.parquet": 2,
        "validation-00000-of-00001-0123456789abcdef.parquet": 4,
        "test-00000-of-00001.parquet": 1,
    }
    for number, (name, count) in enumerate(parts.items()):
        write_parquet(folder / name, [{"text": f"{number} {n}"} for n in range(count)])
    found = opened(folder, tmp_path, format="parquet")
    assert (found.num_training, len(found), found.num_left_out) == (5, 9, 1)


@pytest.mark.parametrize("indent", [None, 1])
def test_prompts_with_messages_can_be_json_in_the_cells_of_a_table(
    tmp_path: Path, indent: int | None
) -> None:
    records = [prompt_messages(random.Random(seed)) for seed in range(9)]
    expected = opened(tiny.write_lines(tmp_path / "d.jsonl", records), tmp_path)
    cells = [{n: json.dumps(one, indent=indent) for n, one in r.items()} for r in records]
    for path in (
        write_parquet(tmp_path / "d.parquet", cells),
        write_csv(tmp_path / "d.csv", cells),
    ):
        assert tokens_of(opened(path, tmp_path)) == tokens_of(expected)


def test_a_cell_with_json_stays_a_text(tmp_path: Path) -> None:
    """Only messages are JSON in a cell; an answer that is JSON is a text."""
    answer = '[{"city": "Rome"}]'
    path = write_csv(tmp_path / "d.csv", [{"prompt": "the cat", "completion": answer}])
    ((ids, _),) = tokens_of(opened(path, tmp_path))
    assert tokenizer(TEMPLATE).decode(ids) == f"<s>the cat{answer}</s>"


@pytest.mark.parametrize("column", ["prompt", "messages", "completion"])
@pytest.mark.parametrize("seed", range(4))
def test_messages_in_the_notation_of_python_are_refused(
    tmp_path: Path, column: str, seed: int
) -> None:
    """A table that pandas writes has `str()` of each cell. The refusal's advice is followed."""
    pandas = pytest.importorskip("pandas")
    generator = random.Random(seed)
    rows: list[Record] = [
        {
            "prompt": [{"role": "user", "content": text(generator)}],
            "completion": [{"role": "assistant", "content": "it's " + text(generator)}],
        }
        for _ in range(5)
    ]
    if column == "messages":
        rows = [{"messages": [*one["prompt"], *one["completion"]]} for one in rows]
    elif generator.random() < 0.5:  # the keys in the order of a file in Parquet
        rows = [{n: [dict(sorted(m.items())) for m in v] for n, v in r.items()} for r in rows]
    expected = tokens_of(opened(tiny.write_lines(tmp_path / "d.jsonl", rows), tmp_path))
    table = pandas.DataFrame(rows)
    for name in table.columns:
        if name != column:
            table[name] = table[name].map(json.dumps)
    path = tmp_path / "d.csv"
    table.to_csv(path, index=False)
    with pytest.raises(DataError, match=rf"d.csv, line 2: .*`{column}` in the notation of Python"):
        opened(path, tmp_path)
    table[column] = table[column].map(json.dumps)
    table.to_csv(path, index=False)
    assert tokens_of(opened(path, tmp_path)) == expected


@pytest.mark.parametrize("answer", ["[{'city': 'Rome'}]", "{'role': 'x'}", "[1, 2]", "{x}", "[]"])
def test_other_python_in_a_cell_stays_a_text(tmp_path: Path, answer: str) -> None:
    path = write_csv(tmp_path / "d.csv", [{"prompt": "the cat", "completion": answer}])
    ((ids, _),) = tokens_of(opened(path, tmp_path))
    assert tokenizer(TEMPLATE).decode(ids) == f"<s>the cat{answer}</s>"
