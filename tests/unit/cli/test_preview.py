"""`dray preview`: the examples of a job as its model will see them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from pyarrow import parquet

import dray
from dray.errors import SpecError
from tests.unit.api.serving import serving
from tests.unit.cli.running import Cli
from tests.unit.recipes import tiny_models as tiny
from tests.unit.recipes.test_fine_tuning import build

NUM = 20


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("preview")
    tiny.make_base(home / "base", max_position_embeddings=1024)
    return home


def sharegpt(num: int) -> list[dict[str, Any]]:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return [
        {"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in messages]}
        for messages in (one["messages"] for one in tiny.conversations(num))
    ]


def alpaca(num: int) -> list[dict[str, Any]]:
    return [
        {"instruction": one["prompt"], "output": one["completion"]} for one in tiny.completions(num)
    ]


SHAPES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "messages": ("sft", tiny.conversations(NUM)),
    "completion": ("sft", tiny.completions(NUM)),
    "text": ("sft", tiny.texts(NUM)),
    "sharegpt": ("sft", sharegpt(NUM)),
    "alpaca": ("sft", alpaca(NUM)),
    "pairs": ("dpo", tiny.text_pairs(NUM)),
    "pairs of messages": ("reward", tiny.pairs(NUM)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_preview_is_what_the_job_will_report(cli: Cli, home: Path, shape: str) -> None:
    """Compare with the log and the artifact of the job itself."""
    method, records = SHAPES[shape]
    records = [*records, records[0], records[1]]  # some are equal
    examples = tiny.write_lines(home / f"{shape}.jsonl", records)
    document = tiny.document(home / "base", examples, method={"name": method, "max_length": 24})
    file = home / f"{shape}.yaml"
    file.write_text(yaml.safe_dump(document))
    work = build(document, home)
    assert cli("preview", str(file)).splitlines() == [*work.about]
    assert cli.json("preview", str(file)) == work.files["examples.json"]
    assert dray.preview(document) == (work.files["examples.json"], [*work.about])
    named = ("--set", f"method={{name: {method}, max_length: 24}}", "--base", str(home / "base"))
    rest = ("--set", "data.validation_fraction=0.2")
    assert cli("preview", str(examples), *named, *rest).splitlines() == [*work.about]


def test_the_lines_name_form_numbers_cuts_and_duplicates(cli: Cli, home: Path) -> None:
    train = [*tiny.completions(9), {"prompt": "the", "completion": " cat" * 80}]
    held = [train[0], train[3], {"prompt": "a", "completion": " red tree"}]
    document = tiny.document(
        home / "base",
        tiny.write_lines(home / "train.jsonl", train),
        data={"validation": tiny.write_lines(home / "held.jsonl", held).as_uri()},
    )
    file = home / "held.yaml"
    file.write_text(yaml.safe_dump(document))
    lines = cli("preview", str(file)).splitlines()
    assert lines[0].startswith("10 training examples with ")
    assert lines[0].endswith("; 3 validation examples")
    assert "train.jsonl has examples of the form completion, recognised by" in lines[1]
    assert "1 examples were cut to method.max_length tokens" in lines
    assert "2 validation examples are equal to a training example" in lines
    assert f"<s>{train[0]['prompt']}«{train[0]['completion']}</s>»" in lines[-3]


def test_tables_are_shown(cli: Cli, home: Path) -> None:
    table = pa.Table.from_pylist(tiny.completions(8))
    parquet.write_table(table, home / "table.parquet")
    lines = cli("preview", str(home / "table.parquet"), "--base", str(home / "base")).splitlines()
    assert "form completion" in lines[1]


def test_broken_examples_are_named_with_their_line(cli: Cli, home: Path) -> None:
    base = ("--base", str(home / "base"))
    lines: list[Any] = [json.dumps(one) for one in tiny.texts(30)]
    lines[16] = '{"text": '
    file = tiny.write_lines(home / "broken.jsonl", lines)
    cli("preview", str(file), *base, exits=2)
    assert f"{file.as_uri()}, line 17: is not JSON" in cli.err
    lines[16] = json.dumps({"text": "the cat", "prompt": "a", "completion": "b"})
    tiny.write_lines(file, lines)
    cli("preview", str(file), *base, exits=2)
    assert "line 17: could have the form completion or text" in cli.err
    (home / "empty.jsonl").write_text("")
    cli("preview", str(home / "empty.jsonl"), *base, exits=2)
    assert "empty.jsonl: is an empty file" in cli.err
    cli("preview", str(home / "missing ü.jsonl"), *base, exits=2)
    assert "does not exist" in cli.err or "no such" in cli.err.lower()
    pairs = tiny.write_lines(home / "other.jsonl", tiny.text_pairs(4))
    cli("preview", str(pairs), *base, exits=2)
    assert "line 1: is a preference pair" in cli.err


def test_no_weights_are_read_but_missing_ones_are_named(
    cli: Cli, home: Path, tmp_path: Path
) -> None:
    base = tiny.make_base(tmp_path / "base", max_position_embeddings=1024)
    examples = tiny.write_lines(home / "some.jsonl", tiny.texts(10))
    (base / "model.safetensors").write_bytes(b"not weights")
    lines = cli("preview", str(examples), "--base", str(base)).splitlines()
    assert lines[0].startswith("8 training examples with ")
    (base / "model.safetensors").unlink()
    cli("preview", str(examples), "--base", str(base), exits=2)
    assert "has no weights" in cli.err


@pytest.mark.parametrize(
    ("fields", "pointer", "message"),
    [
        ({"model": {"base": "job://job-0a"}}, "/model/base", "only a preview with a client"),
        ({"model": {"base": "model://digits@3"}}, "/model/base", "only a preview with a client"),
        ({"model": {"base": "llama"}}, "/model/base", "dray model bases llama"),
        (
            {"data": {"source": "upload://file-00000000000000000000000000"}},
            "/data",
            "files on the server",
        ),
        (
            {"data": {"source": "s3://bucket/a.jsonl", "credentials": "mine"}},
            "/data/credentials",
            "names the credentials 'mine', which only the cluster's nodes have",
        ),
        (
            {"model": {"base": "https://host/llama", "credentials": "mine"}},
            "/model/credentials",
            "names the credentials 'mine'",
        ),
        (
            {"recipe": "language_model", "model": None, "data": {"source": "file:///text.txt"}},
            "/recipe",
            "only jobs of the recipe fine_tuning",
        ),
    ],
)
def test_what_only_a_job_can_read_is_refused(
    home: Path, fields: dict[str, Any], pointer: str, message: str
) -> None:
    given = {
        "recipe": "fine_tuning",
        "model": {"base": (home / "base").as_uri()},
        "data": {"source": "file:///examples.jsonl"},
        **fields,
    }
    document = {name: value for name, value in given.items() if value is not None}
    with pytest.raises(SpecError) as refused:
        dray.preview(document)
    assert refused.value.pointer == pointer
    assert message in str(refused.value)


def test_a_base_is_required_and_names_are_looked_up_in_the_catalogue(cli: Cli, home: Path) -> None:
    examples = tiny.write_lines(home / "named.jsonl", tiny.texts(10))
    cli("preview", str(examples), exits=2)
    assert "--base" in cli.err
    other = 'data: {source: "file:///text.txt"}\nrecipe: language_model\n'
    (home / "other.yaml").write_text(other)
    cli("preview", str(home / "other.yaml"), exits=2)
    assert "only jobs of the recipe fine_tuning" in cli.err
    cli("preview", str(examples), "--base", "unknown-model", exits=3)
    assert "unknown-model" in cli.err


def test_links_keep_their_name_and_strange_paths_are_named(
    cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files in the cache of Hugging Face's hub are links to files without a suffix."""
    base = ("--base", str(home / "base"))
    parquet.write_table(pa.Table.from_pylist(tiny.completions(8)), home / "a1b2c3")
    (home / "linked.parquet").symlink_to(home / "a1b2c3")
    assert "linked.parquet has examples of the form" in cli(
        "preview", str(home / "linked.parquet"), *base
    )
    monkeypatch.chdir(home / "base")
    assert "linked.parquet has" in cli("preview", "../linked.parquet", "--base", ".")
    (home / "loop.jsonl").symlink_to(home / "loop.jsonl")
    cli("preview", str(home / "loop.jsonl"), *base, exits=2)
    assert "loop.jsonl" in cli.err
    cli("preview", str(home / "linked.parquet"), "--base", "/missing/llama", exits=2)
    assert "file:///missing/llama: this file or folder does not exist" in cli.err
    os.mkfifo(home / "pipe.jsonl")
    cli("preview", str(home / "pipe.jsonl"), *base, exits=2)
    assert "is neither a file nor a folder" in cli.err
    (home / "tables").mkdir()
    (home / "tables" / "a.parquet").symlink_to(home / "a1b2c3")
    cli("preview", str(home / "tables"), *base, exits=2)
    assert "is a folder without .jsonl" in cli.err
    assert "completion" in cli(
        "preview", str(home / "tables"), *base, "--set", "data.format=parquet"
    )


def test_half_of_a_character_is_named(cli: Cli, home: Path) -> None:
    halved = tiny.write_lines(home / "halved.jsonl", ['{"text": "the \\ud83d cat"}'])
    cli("preview", str(halved), "--base", str(home / "base"), exits=2)
    assert "halved.jsonl, line 1: can't be converted to tokens" in cli.err
    assert "surrogates not allowed" in cli.err


def test_a_base_can_be_named_unless_the_catalogue_replaces_its_template(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = (home / "base").as_uri()
    models = [
        {"name": "plain", "base": base},
        {"name": "templated", "base": base, "chat_template": tiny.MARKED},
    ]
    file = tmp_path / "models.yaml"
    file.write_text(json.dumps({"models": models}))
    examples = str(tiny.write_lines(home / "chats.jsonl", tiny.conversations(10)))
    with serving(tmp_path / "server", models_file=file) as server:
        named = Cli(server.url, capsys)
        lines = named("preview", examples, "--base", "plain").splitlines()
        assert lines == dray.preview(document_of(base, examples)).lines
        named("preview", examples, "--base", "templated", exits=2)
        assert "chat template the catalogue replaces" in named.err


def document_of(base: str, examples: str) -> dict[str, Any]:
    data = {"source": Path(examples).as_uri()}
    return {"recipe": "fine_tuning", "model": {"base": base}, "data": data}
