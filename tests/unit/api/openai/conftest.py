"""A server with a catalogue of models, and OpenAI's client."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from service.cluster.port import ClusterSnapshot
from service.nodes import node_table
from tests.unit.api.serving import DEADLINE_S, LiveServer, serving
from tests.unit.recipes import tiny_models as tiny
from tests.wire import cluster_node

ANN, BOB = "anns-secret", "bobs-secret"
LINES = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "yes"}]}
    for n in range(40)
]
PAIRS = [
    {
        "input": {"messages": [{"role": "user", "content": f"{n}?"}]},
        "preferred_output": [{"role": "assistant", "content": "yes"}],
        "non_preferred_output": [{"role": "assistant", "content": "no"}],
    }
    for n in range(10)
]


def jsonl(records: list[Any]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in records)


@dataclass
class Shop:
    """A server with a catalogue and two users."""

    server: LiveServer
    models_file: Path

    def client(self, token: str = ANN) -> Any:
        import openai

        return openai.OpenAI(
            base_url=f"{self.server.url}/openai/v1",
            api_key=token,
            max_retries=0,
            timeout=DEADLINE_S,
        )

    def http(self, token: str = ANN) -> Any:
        return self.server.client(headers={"Authorization": f"Bearer {token}"})


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    home = tmp_path_factory.mktemp("openai")
    users = {"ann": ANN, "bob": BOB}
    (home / "tokens").write_text(
        "".join(f"{n}:{hashlib.sha256(t.encode()).hexdigest()}\n" for n, t in users.items())
    )
    base = tiny.make_base(home / "llama", template=None)
    models = [
        {
            "name": "llama-tiny",
            "base": base.as_uri(),
            "chat_template": tiny.MARKED,
            "defaults": {
                "priority": 40,
                "method": {"max_length": 128},
                "checkpoint": {"best": "val/perplexity"},
            },
        },
        {
            "name": "guarded",
            "base": f"{base.as_uri()}-other",
            "licence": "Community License",
            "licence_text": "Be good.",
            "must_accept": True,
        },
        {
            "name": "started",
            "base": f"{base.as_uri()}-third",
            "defaults": {"init_from": {"job": "job-0a"}},
        },
    ]
    file = home / "models.yaml"
    file.write_text(json.dumps({"models": models}))
    with serving(
        home / "home", tokens_file=home / "tokens", models_file=file, file_limit_bytes=1 << 20
    ) as server:
        node = cluster_node("node-a", {"CPU": 4.0, "memory": float(64 << 30)})
        seen = ClusterSnapshot("session-1", "ray://x", "http://dash", False, (node,))
        hands = server.hands
        hands.database.write_sync(lambda session: node_table.store(session, seen, None, hands.now))
        yield Shop(server, file)


@pytest.fixture(scope="module")
def client(shop: Shop) -> Any:
    return shop.client()


@pytest.fixture(scope="module")
def training(client: Any) -> str:
    made = client.files.create(file=("train.jsonl", jsonl(LINES)), purpose="fine-tune")
    return str(made.id)
