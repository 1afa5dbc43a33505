"""Mixtures of sources, validation examples, duplicates, and the report about the examples."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from ray_workers.recipes import example_sets
from ray_workers.training.core.errors import DataError
from ray_workers.training.core.workload import Workload
from tests.unit.recipes import tiny_models as tiny
from tests.unit.recipes.test_fine_tuning import build


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("sets")
    tiny.make_base(home / "base")
    return home


def workload(home: Path, data: dict[str, Any], **fields: Any) -> Workload:
    document = tiny.document(home / "base", home / "unused", **fields)
    return build({**document, "data": data}, home)


def texts_of(work: Workload, home: Path, split: str) -> Counter[str]:
    """Return the texts of a split, decoded from the rows of tokens that the model gets."""
    tokenizer = tiny.tokenizer()
    samples = getattr(work, split)
    found: Counter[str] = Counter()
    for row in samples.rows:
        inputs, _ = samples.fetch(row[None])
        found[tokenizer.decode(inputs[0, 0], skip_special_tokens=True)] += 1
    return found


def write(home: Path, name: str, records: list[Any]) -> str:
    return tiny.write_lines(home / name, records).as_uri()


def different(num: int, seed: int) -> list[dict[str, Any]]:
    """Return different texts."""
    every = {one["text"]: one for one in tiny.texts(10 * num, seed)}
    return [*every.values()][:num]


@pytest.mark.parametrize("seed", range(6))
def test_an_epoch_contains_each_example_as_often_as_the_document_says(
    home: Path, seed: int
) -> None:
    """Compare with a count of the lines in the files."""
    generator = random.Random(seed)
    sources, lines = [], {}
    for number in range(generator.randint(1, 4)):
        repeat = generator.choice([0.5, 1, 1, 2, 2.25, 3])
        lines[number] = different(generator.randint(4, 12), 100 * seed + number)
        uri = write(home, f"{seed}-{number}.jsonl", lines[number])
        sources.append({"source": uri, "repeat": repeat})
    held_out = tiny.texts(5, seed=1000 + seed)
    data = {"sources": sources, "validation": write(home, f"{seed}-held.jsonl", held_out)}
    work = workload(home, data)
    assert texts_of(work, home, "validation") == Counter(one["text"] for one in held_out)
    found = texts_of(work, home, "train")
    bounds: Counter[str] = Counter()
    most: Counter[str] = Counter()
    total = 0
    for number, records in lines.items():
        repeat = sources[number]["repeat"]
        total += int(repeat) * len(records) + round(repeat % 1 * len(records))
        for record in records:
            bounds[record["text"]] += int(repeat)
            most[record["text"]] += -int(-repeat // 1)
    assert found.total() == total == len(work.train)
    assert all(bounds[text] <= count <= most[text] for text, count in found.items())
    assert workload(home, data).train.rows.tolist() == work.train.rows.tolist()
    assert workload(home, data).fingerprint == work.fingerprint


def test_a_mixture_is_known_by_its_sources_and_repeats(home: Path, tmp_path: Path) -> None:
    """A job does not continue with another mixture, and the model card names all sources."""
    one, other = (write(home, f"{n}.jsonl", tiny.texts(9, seed=n)) for n in (31, 32))
    mixtures: list[dict[str, Any]] = [
        {"source": one},
        {"sources": [{"source": one}]},
        {"sources": [{"source": one, "repeat": 2}]},
        {"sources": [{"source": one}, {"source": other}]},
        {"sources": [{"source": one}, {"source": other, "repeat": 2}]},
        {"sources": [{"source": other}, {"source": one}]},
        {"source": one, "validation": other},
    ]
    works = [workload(home, data) for data in mixtures]
    assert len({work.fingerprint for work in works}) == len(mixtures)
    works[3].write_results(works[3].model, {}, 1, tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert f"| data | `{one}`, `{other}` |" in card
    assert "validation data" not in card
    works[6].write_results(works[6].model, {}, 1, tmp_path)
    assert (
        f"| data | `{one}` |\n| validation data | `{other}` |"
        in (tmp_path / "README.md").read_text()
    )


def test_sources_without_a_split_are_divided_together(home: Path) -> None:
    one, other = different(20, 1), different(20, 2)
    data = {
        "sources": [
            {"source": write(home, "one.jsonl", one)},
            {"source": write(home, "other.jsonl", other), "repeat": 2},
        ],
        "validation_fraction": 0.25,
    }
    work = workload(home, data)
    held_out, used = (texts_of(work, home, split) for split in ("validation", "train"))
    assert held_out.total() == 10
    assert held_out.total() + len(used) == len({r["text"] for r in (*one, *other)})
    assert not held_out.keys() & used.keys()
    for record in (*one, *other):
        expected = 0 if record["text"] in held_out else 1 + (record in other)
        assert used[record["text"]] == expected


def test_a_source_keeps_its_own_split(home: Path) -> None:
    folder = home / "divided"
    folder.mkdir()
    train, valid, other = different(6, 3), different(3, 4), different(10, 5)
    tiny.write_lines(folder / "train.jsonl", train)
    tiny.write_lines(folder / "validation.jsonl", valid)
    sources = [{"source": folder.as_uri()}, {"source": write(home, "undivided.jsonl", other)}]
    work = workload(home, {"sources": sources, "validation_fraction": 0.2})
    held_out = texts_of(work, home, "validation")
    assert {one["text"] for one in valid} <= held_out.keys()
    assert held_out.total() == 3 + 2
    assert len(work.train) == 6 + 8
    data = {"source": folder.as_uri(), "validation": write(home, "v.jsonl", valid)}
    with pytest.raises(DataError, match=r"divided: has files that are named like a split, but"):
        workload(home, data)


def test_pairs_of_several_sources_stay_pairs(home: Path) -> None:
    """Compare with a count of the lines in the files."""
    one, other, held = (tiny.text_pairs(n, seed=n) for n in (4, 5, 3))
    table = home / "pairs.parquet"
    parquet.write_table(pa.Table.from_pylist(other), table)
    sources = [
        {"source": write(home, "pairs.jsonl", one), "repeat": 2},
        {"source": table.as_uri(), "repeat": 3},
    ]
    data = {"sources": sources, "validation": write(home, "held.jsonl", [*held, other[1]])}
    work = workload(home, data, method={"name": "dpo"})
    tokenizer = tiny.tokenizer()

    def texts(split: str) -> list[tuple[str, ...]]:
        samples = getattr(work, split)
        inputs, _ = samples.fetch(samples.rows)
        sides = inputs[:, :, 0]  # padding is decoded as the end token
        every = [tokenizer.batch_decode(pair, skip_special_tokens=True) for pair in sides]
        return sorted(map(tuple, every))

    def expected(records: list[Any]) -> list[tuple[str, ...]]:
        sides = ("chosen", "rejected")
        return sorted(tuple(one["prompt"] + one[side] for side in sides) for one in records)

    assert texts("train") == expected(2 * one + 3 * other)
    assert texts("validation") == expected([*held, other[1]])
    assert len(work.train) == work.train.total_terms == 23
    report = work.files["examples.json"]
    assert report["validation_examples_equal_to_training"] == 1
    assert "1 validation pairs are equal to a training pair" in work.about
    assert [part["training"] for part in report["sources"]] == [8, 15, 0]
    shown = [(found["number"], found["side"]) for found in report["first"]]
    assert shown == [(n, side) for n in (1, 5, 2) for side in ("chosen", "rejected")]
    for found, record in zip(report["first"][::2], (one[0], other[0], one[1]), strict=True):
        whole = "".join(span["text"] for span in found["spans"] if span["counts"])
        assert whole.startswith(record["chosen"])


def test_equal_examples_in_training_and_validation_are_counted(home: Path) -> None:
    """Compare with a loop over the texts."""
    generator = random.Random(3)
    train = [{"text": tiny.sentence(generator, 2)} for _ in range(60)]
    valid = [{"text": tiny.sentence(generator, 2)} for _ in range(40)]
    sources = [write(home, "a.jsonl", train[:30]), write(home, "b.jsonl", train[30:])]
    held_out = write(home, "c.jsonl", valid)
    data = {"sources": [{"source": one} for one in sources], "validation": held_out}
    work = workload(home, data)
    known = sum(any(one["text"] == other["text"] for other in train) for one in valid)
    assert known > 0
    assert f"{known} validation examples are equal to a training example" in work.about
    assert work.files["examples.json"]["validation_examples_equal_to_training"] == known


def test_the_report_shows_the_first_examples_as_the_model_sees_them(home: Path) -> None:
    chats, texts = tiny.conversations(5, seed=7), [{"text": "the cat " * 50}, *tiny.texts(3)]
    data = {
        "sources": [
            {"source": write(home, "chats.jsonl", chats), "repeat": 3},
            {"source": write(home, "texts.jsonl", texts), "examples": "text"},
        ],
        "validation": write(home, "held.jsonl", tiny.texts(2, seed=9)),
    }
    work = workload(home, data)
    report = work.files["examples.json"]
    first, second, third = report["first"]
    assert [one["number"] for one in report["first"]] == [1, 6, 2], "from each source in turn"
    answers = [m["content"] for m in chats[0]["messages"] if m["role"] == "assistant"]
    counted = [span["text"] for span in first["spans"] if span["counts"]]
    assert counted == [f"{answer}<|end|>" for answer in answers]
    tokenizer = tiny.tokenizer()
    whole = tokenizer.apply_chat_template(chats[0]["messages"], tokenize=False)
    assert "".join(span["text"] for span in first["spans"]) == whole
    assert tokenizer.decode([one["id"] for one in first["tokens"]]) == whole
    assert (first["is_truncated"], second["is_truncated"]) == (False, True)
    assert len(second["tokens"]) == 64
    for one in (first, second, third):
        assert sum(s["tokens"] for s in one["spans"]) == len(one["tokens"])
        assert sum(s["tokens"] for s in one["spans"] if s["counts"]) == sum(
            token["counts"] for token in one["tokens"]
        )
    about = "\n".join(work.about)
    assert "has examples of the form messages, recognised by the names of its fields: an" in about
    assert "has examples of the form text: an epoch contains 4" in about
    assert "example 6: 64 tokens, cut to method.max_length, of which 63 count" in about
    assert report["training"] == len(work.train) == 19
    assert sum(part["tokens"] for part in report["sources"]) == report["tokens"]


def test_a_long_example_is_shortened_in_the_log_only(home: Path) -> None:
    source = write(home, "long.jsonl", [{"text": "the cat " * 60}, *tiny.texts(9)])
    data = {"source": source, "validation": source}
    shown, whole = example_sets.MAX_SHOWN_TOKENS, workload(home, data)
    assert len(whole.about[-3]) > 300
    try:
        example_sets.MAX_SHOWN_TOKENS = 5
        work = workload(home, data)
    finally:
        example_sets.MAX_SHOWN_TOKENS = shown
    assert work.about[-3].endswith("…» (of 64 tokens)")
    assert len(work.about[-3]) < 150
    assert work.files == whole.files


def test_a_repeat_that_leaves_nothing_is_refused(home: Path) -> None:
    sources = [{"source": write(home, "few.jsonl", tiny.texts(10)), "repeat": 0.01}]
    data = {"sources": sources, "validation": write(home, "v.jsonl", tiny.texts(1))}
    with pytest.raises(DataError, match=r"10 training examples, of which repeat 0.01 leaves none"):
        workload(home, data)


def test_an_empty_validation_file_is_refused(home: Path) -> None:
    data = {"source": write(home, "t.jsonl", tiny.texts(5))}
    for content, message in (("", "is an empty file"), ("\n\n", "contains no examples")):
        (home / "empty.jsonl").write_text(content)
        with pytest.raises(DataError, match=message):
            workload(home, {**data, "validation": (home / "empty.jsonl").as_uri()})
