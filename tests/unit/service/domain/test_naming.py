"""Names of trials: short, distinct, and of the parameters that differ."""

from __future__ import annotations

import random
from typing import Any

import pytest

from service.domain.sweeps.naming import MAX_VARIANT, variant, varied
from tests.marks import FRESH_SEEDS

RANGE = {"choices": None, "min": 0.0, "max": 1.0}
SEEDS = range(200) if not FRESH_SEEDS else random.Random().sample(range(10**9), 200)


def several(*names: str) -> dict[str, dict[str, Any]]:
    return {name: {"choices": [1, 2]} for name in names}


def test_a_name_is_as_short_as_the_others_allow() -> None:
    assert varied(several("train.optimizer.lr", "model.width")) == {
        "train.optimizer.lr": "lr",
        "model.width": "width",
    }
    assert varied(several("a.b.lr", "c.b.lr", "lr", "d.lr", "rlr")) == {
        "a.b.lr": "a.b.lr",
        "c.b.lr": "c.b.lr",
        "lr": "lr",
        "d.lr": "d.lr",
        "rlr": "rlr",
    }


def test_a_parameter_with_one_value_is_left_out() -> None:
    given = {"train.seed": {"choices": [3]}, "lr": {"choices": [0.1, 0.2]}, "width": RANGE}
    assert list(varied(given)) == ["lr", "width"]


@pytest.mark.parametrize("seed", SEEDS)
def test_short_names_are_distinct_ends_and_no_shorter_end_would_do(seed: int) -> None:
    chance = random.Random(seed)
    names = {
        ".".join(chance.choice(("a", "b", "lr", "x-y")) for _ in range(chance.randint(1, 4)))
        for _ in range(chance.randint(1, 12))
    }
    found = varied(several(*sorted(names)))
    assert found.keys() == names
    parts = {name: name.split(".") for name in names}
    for name, short in found.items():
        size = len(short.split("."))
        assert parts[name][-size:] == short.split(".")
        shorter = parts[name][-size + 1 :] if size > 1 else None
        owners = [other for other in names if parts[other][-size:] == short.split(".")]
        assert owners == [name] or short == name
        if shorter:
            assert sum(parts[other][1 - size :] == shorter for other in names) > 1
    assert len(set(found.values())) == len(names)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0031622776, "0.003162"),
        (1e-7, "1e-07"),
        (65536, "65536"),
        (2**53, "9007199254740992"),
        (True, "true"),
        (None, "null"),
        ("adamw", "adamw"),
        ([64, 32], "[64, 32]"),
        ("é" * 40, "é" * 31 + "…"),
    ],
)
def test_values_are_written_short(value: Any, text: str) -> None:
    assert variant(3, {"p": value, "q": 1}, {"p": "p"}) == f"#3 p {text}"


def test_a_job_without_values_has_its_index() -> None:
    assert variant(7, None, {"lr": "lr"}) == "#7"
    assert variant(7, {}, {"lr": "lr"}) == "#7"
    assert variant(7, None, {}) == "#7"


def test_a_variant_is_bounded() -> None:
    names = {f"p{number}": f"p{number}" for number in range(32)}
    found = variant(123456, dict.fromkeys(names, "v" * 500), names)
    assert len(found) == MAX_VARIANT
    assert found.startswith("#123456 p0 vvv")
