"""Job documents in YAML: read as `dray submit` reads them; errors name the line."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import pytest
import yaml

from dray.documents import position_of
from tests.unit.api.serving import LiveServer
from tests.unit.service.helpers import spec

TYPE = {"Content-Type": "application/yaml"}
DOCUMENT = spec(name="in-yaml").model_dump(mode="json", exclude_defaults=True)


def sent(http: httpx.Client, text: str, path: str = "/v1/jobs", **headers: str) -> httpx.Response:
    return http.post(path, content=text.encode(), headers={**TYPE, **headers})


def test_a_document_in_yaml_is_the_same_job(http: httpx.Client, server: LiveServer) -> None:
    key = {"Idempotency-Key": "yaml-or-json"}
    first = sent(http, yaml.safe_dump(DOCUMENT), **key)
    assert first.status_code == 201
    assert first.json()["name"] == "in-yaml"
    again = http.post("/v1/jobs", json=DOCUMENT, headers=key)
    assert again.json()["id"] == first.json()["id"]
    dry = sent(http, json.dumps(DOCUMENT), "/v1/jobs?dry_run=true")
    assert dry.status_code == 200
    assert sent(http, yaml.safe_dump(DOCUMENT), "/v1/plan").status_code in (200, 422)


BAD = {
    "a: [1": ("malformed_request", "line 1"),
    "name: x\nname: y": ("malformed_request", "'name' appears twice (line 2, column 1)"),
    "a: &x [1]\nb: *x": ("malformed_request", "aliases"),
    "- 1": ("malformed_request", "not a mapping"),
    "": ("malformed_request", "not a mapping"),
    "1: x": ("malformed_request", "not a string"),
    "a: !!python/object:os.system x": ("malformed_request", "is not allowed (line 1, column 4)"),
    "name: !!bool x": ("malformed_request", "can't be read as a value of its type"),
    r'name: "\UFFFFFFFF"': ("malformed_request", "not YAML"),
    "a: " + "[" * 2000: ("malformed_request", ""),
    "n: " + "9" * 5000: ("malformed_request", ""),
    "name: x\nresources:\n  num_workers: -1": ("invalid_document", "(line 3, column 3)"),
    "#" * (300 << 10): ("body_too_large", "262144"),
}


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_a_bad_document_is_refused_and_stores_nothing(http: httpx.Client, text: str) -> None:
    before = http.get("/v1/jobs").json()["items"]
    answer = sent(http, text)
    code, part = BAD[text]
    assert answer.status_code in (400, 413, 422), answer.text
    assert answer.json()["code"] == code
    assert part in answer.json()["detail"]
    assert http.get("/v1/jobs").json()["items"] == before


def drawn(rng: random.Random, depth: int) -> Any:
    kind = rng.choice(["map", "list", "text"]) if depth else "text"
    if kind == "map":
        return {f"k{n}": drawn(rng, depth - 1) for n in range(rng.randint(1, 3))}
    if kind == "list":
        return [drawn(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    return f"v{rng.randrange(10**9)}"


def leaves(value: Any, pointer: str = "") -> dict[str, str]:
    """Return the text of each leaf, keyed by pointer."""
    if isinstance(value, str):
        return {pointer: value}
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    found: dict[str, str] = {}
    for key, one in pairs:
        found |= leaves(one, f"{pointer}/{key}")
    return found


@pytest.mark.parametrize("seed", range(20))
def test_the_line_of_each_value_is_found(seed: int) -> None:
    document = {"top": drawn(random.Random(seed), 4)}
    text = yaml.safe_dump(document)
    for pointer, leaf in leaves(document).items():
        (line,) = [n for n, one in enumerate(text.split("\n"), 1) if one.endswith(leaf)]
        at = position_of(text, pointer)
        assert at is not None
        assert at[0] == line, (pointer, text)
