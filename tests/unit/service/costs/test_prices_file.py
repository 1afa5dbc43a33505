"""The price file: error messages for invalid contents, and changes while the service is running."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from service.costs.prices_file import BadPricesFile, PricesFile
from service.domain.costs.prices import PriceRule, Prices

GOOD = """
currency: EUR
prices:
  - {resource: GPU, per_hour: 0.9, labels: {ray.io/market-type: spot}}
  - {resource: GPU, per_hour: 2.5}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "prices.yaml"


def refusal(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(BadPricesFile) as told:
        PricesFile.load(path)
    return str(told.value)


def entry(**fields: Any) -> str:
    rule = {"resource": "GPU", "per_hour": 1.0, **fields}
    return json.dumps({"currency": "EUR", "prices": [rule]})


def test_yaml_and_json_are_read(path: Path) -> None:
    path.write_text(GOOD)
    spot = PriceRule("GPU", 0.9, {"ray.io/market-type": "spot"})
    assert PricesFile.load(path) == Prices("EUR", (spot, PriceRule("GPU", 2.5, {})))
    path.write_text('{"currency": "core hours", "prices": []}')
    assert PricesFile.load(path) == Prices("core hours", ())


@pytest.mark.parametrize("price", ["-1", ".nan", ".inf", "-.inf", "1.0e300", "1" + "0" * 300])
def test_prices_that_are_none_are_refused(path: Path, price: str) -> None:
    told = refusal(path, f"currency: EUR\nprices: [{{resource: GPU, per_hour: {price}}}]")
    assert told.startswith(f"DRAY_PRICES_FILE {path}: prices/0/per_hour must be ")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "must contain `currency`, such as EUR"),
        ("[1]", "must contain `currency`, such as EUR"),
        ("a: [", "line 1, column 5"),
        ("a: 1\na: 2", "the key 'a' appears twice"),
        (b"\xff", "is not UTF-8 text"),
        ("prices: []", "the field 'currency' is missing"),
        ("currency: EUR", "the field 'prices' is missing"),
        ("{currency: '', prices: []}", "currency must have at least 1 character"),
        ("{currency: ' ', prices: []}", "currency must not be blank"),
        ('{"currency": "E\\u202eR", "prices": []}', "currency must not contain the invisible"),
        ("{currency: EUR, price: []}", "the field 'prices' is missing; also wrong: /price"),
        (entry(resource="TPU"), "prices/0/resource must be 'slot', 'CPU', 'GPU' or 'memory'"),
        (entry(per_hour="1"), "prices/0/per_hour must be a number"),
        (entry(per_hour=True), "prices/0/per_hour must be a number"),
        (entry(label={}), "prices/0/label there is no field 'label'"),
        (entry(labels={"zone": 1}), "prices/0/labels/zone must be a valid string"),
        (entry(labels={"": "x"}), "prices/0/labels/ must have at least 1 character"),
        (entry(labels={"a": "b\0"}), "must not contain NUL"),
        (
            f"currency: EUR\nprices: [{{resource: GPU, per_hour: 1{'0' * 5000}}}]",
            "more than 4,300 digits",
        ),
        ("currency: EUR\nprices: " + "[" * 200 + "]" * 200, "deeper than 32 levels"),
        ("#" * ((1 << 20) + 1), "is larger than 1048576 bytes"),
    ],
)
def test_an_error_in_the_file_is_reported_with_its_pointer(
    path: Path, content: str | bytes, told: str
) -> None:
    said = refusal(path, content)
    assert said.startswith(f"DRAY_PRICES_FILE {path}")
    assert told in said


def test_a_rule_that_never_holds_is_refused(path: Path) -> None:
    said = refusal(
        path,
        GOOD.replace("  - {resource: GPU, per_hour: 2.5}\n", "").replace(
            "prices:\n", "prices:\n  - {resource: GPU, per_hour: 2.5}\n"
        ),
    )
    assert "prices/1 never applies" in said
    assert "prices/0 matches all nodes" in said


def test_a_file_that_is_not_there_is_refused(path: Path) -> None:
    with pytest.raises(BadPricesFile, match="can't be read"):
        PricesFile(path)


def test_a_change_holds_at_once_and_a_bad_one_changes_nothing(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text(entry())
    file = PricesFile(path)

    def price() -> float:
        prices = file.current()
        assert prices is not None
        return prices.rules[0].per_hour

    path.write_text(entry(per_hour=2.0))
    assert (price(), file.problem) == (2.0, None)
    with caplog.at_level(logging.ERROR):
        path.write_text(entry(per_hour=-1))
        assert [price(), price()] == [2.0, 2.0]
        path.unlink()
        assert price() == 2.0
    assert len(caplog.records) == 2, "each problem is logged once"
    assert file.problem is not None
    assert "can't be read" in file.problem
    path.write_text(entry(per_hour=3.0))
    assert (price(), file.problem) == (3.0, None)


def test_without_a_file_nothing_is_priced() -> None:
    assert PricesFile(None).current() is None
