"""A program's arguments as names and values, compared with how argparse parses them."""

from __future__ import annotations

import argparse
import random

import pytest

from dray.arguments import (
    AmbiguousArguments,
    parameters,
    parameters_of,
    replaced,
    with_parameters,
)

ARGS = "data.csv --lr 0.1 --no-amp --sizes 64 32 -b 3 opt.lr=1e-3 --neg -1 --x=-3 --to a=b=c"


def test_arguments_have_the_names_and_values_of_argparse() -> None:
    assert parameters(ARGS.split()) == {
        "lr": 0.1,
        "no_amp": True,
        "sizes": "64 32",
        "b": 3,
        "opt.lr": 0.001,
        "neg": -1,
        "x": -3,
        "to": True,
        "a": "b=c",
    }
    assert parameters(["--lr", "0.1", "--lr=0.2", "--", "--epochs", "3"]) == {"lr": 0.2}
    assert parameters(["--flag", "TRUE", "--name", "a b", "--id", "1" * 20]) == {
        "flag": True,
        "name": "a b",
        "id": "1" * 20,
    }


@pytest.mark.parametrize("text", ["12e4567", "007", "-01", "12345678901234567890", "1e-999"])
def test_digits_that_a_number_would_lose_stay_text(text: str) -> None:
    assert parameters(["--commit", text]) == {"commit": text}


@pytest.mark.parametrize("text", ["0.30000000000000004", "1e-3", "1.10", "-0.50", "3.", "1e300"])
def test_numbers_are_compared_as_written(text: str) -> None:
    assert parameters(["--lr", text]) == {"lr": float(text)}
    document = {"script": {"entrypoint": "/a.py", "args": ["--lr", text]}}
    compared = with_parameters(document)["parameters"]["lr"]
    assert str(compared) == text


@pytest.mark.parametrize("seed", range(40))
def test_a_program_of_argparse_reads_the_same_values(seed: int) -> None:
    """A parser with random options, and a command line with some of them in any order."""
    draw = random.Random(seed)
    parser = argparse.ArgumentParser()
    words: list[list[str]] = []
    expected: dict[str, object] = {}
    for number in range(draw.randint(1, 8)):
        name = f"--{draw.choice(['lr', 'num-layers', 'data_dir', '3d', '_größe'])}{number}"
        kind = draw.choice(["flag", "float", "int", "text", "several"])
        value = {
            "flag": True,
            "float": round(draw.uniform(-9, 9), 3),
            "int": draw.randint(-99, 10**9),
            "text": draw.choice(["adam", "s3://bucket/a b", "x,y", "a/b.csv"]),
            "several": [draw.randint(2, 9) for _ in range(draw.randint(2, 4))],
        }[kind]
        if kind == "flag":
            parser.add_argument(name, action="store_true")
            words.append([name])
        elif kind == "several":
            parser.add_argument(name, nargs="+", type=int)
            words.append([name, *map(str, value)])  # type: ignore[call-overload]
        else:
            parser.add_argument(name, type=type(value))
            words.append(draw.choice([[name, str(value)], [f"{name}={value}"]]))
        expected[name[2:].replace("-", "_")] = value
    draw.shuffle(words)
    args = [word for some in words for word in some]
    read = vars(parser.parse_args(args))
    assert read == expected
    as_values = {
        name: " ".join(map(str, value)) if isinstance(value, list) else value
        for name, value in read.items()
    }
    assert parameters(args) == as_values
    for changed in words:  # repeating an option doesn't change what the program reads
        again = replaced(args, changed)
        assert sorted(again) == sorted(args)
        assert vars(parser.parse_args(again)) == read


def test_changed_arguments_replace_arguments_of_the_same_name() -> None:
    args = ["train.csv", "--lr", "0.1", "--sizes", "64", "32", "--amp", "--lr", "0.2"]
    assert replaced(args, ["--lr=0.01", "--wd", "3"]) == [
        *("train.csv", "--lr=0.01", "--sizes", "64", "32", "--amp", "--wd", "3")
    ]
    assert replaced(args, ["--sizes", "8", "4"]) == [
        *("train.csv", "--lr", "0.1", "--sizes", "8", "4", "--amp", "--lr", "0.2")
    ]
    assert replaced(["old.csv", "opt.lr=1"], ["new.csv", "opt.lr=2"]) == ["new.csv", "opt.lr=2"]
    assert replaced([], ["--lr", "1"]) == ["--lr", "1"]
    assert replaced(args, []) == args


def test_an_option_keeps_its_form() -> None:
    assert replaced(["--tags=old", "pos1"], ["--tags", "new"]) == ["--tags=new", "pos1"]
    assert replaced(["--tags=old", "pos1"], ["--tags=new"]) == ["--tags=new", "pos1"]
    assert replaced(["--tags=old", "--amp"], ["--tags", "a", "b"]) == ["--tags", "a", "b", "--amp"]
    assert replaced(["--lr", "1", "--", "-x"], ["--wd", "2"]) == [
        "--lr",
        "1",
        "--wd",
        "2",
        "--",
        "-x",
    ]
    assert replaced(["a", "--lr", "1"], ["--lr", "2", "--", "-x"]) == ["--lr", "2", "--", "-x"]
    assert replaced(["--lr", "0.1", "old.csv"], ["new.csv", "--lr", "2"]) == [
        "new.csv",
        "--lr",
        "2",
    ]


@pytest.mark.parametrize(
    ("args", "changes", "word"),
    [
        ("--verbose data.csv", "--verbose", "data.csv"),
        ("--lr 0.1 data.csv", "--lr 0.01", "data.csv"),
        ("--lr 0.1 data.csv", "--lr=0.01", "data.csv"),
        ("-v -v data.csv", "-v", "data.csv"),
        ("--sizes 64 32", "--sizes 8", "32"),
        ("--tags=old pos1", "--tags a b", "pos1"),
        ("--tags=old pos1", "--tags", "pos1"),
        ("--verbose data.csv", "new.csv", "data.csv"),
    ],
)
def test_a_word_that_may_be_positional_is_neither_dropped_nor_made_a_value(
    args: str, changes: str, word: str
) -> None:
    with pytest.raises(AmbiguousArguments, match=f"{word}'"):
        replaced(args.split(), changes.split())


def test_a_document_for_a_comparison_has_parameters_instead_of_arguments() -> None:
    script = {"entrypoint": "a.py", "args": ["x.csv", "--lr", "1"], "parameters": {"k": True}}
    shown = with_parameters({"name": "a", "script": script})
    assert shown == {
        "name": "a",
        "script": {"entrypoint": "a.py", "args": ["x.csv"]},
        "parameters": {"lr": 1, "k": True},
    }
    assert parameters_of({"recipe": "image_classification"}) == {}
    assert with_parameters({"recipe": "r"}) == {"recipe": "r"}
