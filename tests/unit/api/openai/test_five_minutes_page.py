"""The page docs/guides/five-minutes.md: every command and every program on it is run, in order."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shlex
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dray.input.validation import check_as
from service.config.models_file import ModelList
from tests.unit.api.openai.conftest import ANN
from tests.unit.api.openai.test_tuned_model import train
from tests.unit.api.serving import DEADLINE_S, LiveServer, serving, wait_until
from tests.unit.cli.running import Cli
from tests.unit.recipes import tiny_models as tiny

pytest.importorskip(
    "openai", reason="the extra 'dev' is not installed: openai, whose client fine-tunes with dray"
)
pytest.importorskip("transformers", reason="the extra 'tuning' is not installed: transformers")

PAGE = Path(__file__).parents[4] / "docs" / "guides" / "five-minutes.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ADDRESS = "http://127.0.0.1:8420"
EXAMPLES = "file:///srv/data/examples.jsonl"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    (tmp_path / "tokens").write_text(f"ann:{hashlib.sha256(ANN.encode()).hexdigest()}\n")
    base = tiny.make_base(tmp_path / "llama", template=None)
    entry = {"name": "llama-1b", "base": base.as_uri(), "chat_template": tiny.MARKED}
    entry["defaults"] = {"method": {"max_length": 128}}
    models = tmp_path / "models.yaml"
    models.write_text(yaml.safe_dump({"models": [entry]}))
    with serving(
        tmp_path / "home",
        tokens_file=tmp_path / "tokens",
        models_file=models,
        data_roots=(tmp_path,),
    ) as found:
        yield found


class Reader:
    """Someone who follows the page in a folder. Jobs are trained as soon as they wait."""

    def __init__(self, server: LiveServer, cli: Cli, folder: Path, patch: Any) -> None:
        self.server, self._cli, self._folder, self._patch = server, cli, folder, patch
        self.ran: list[str] = []
        self.jobs: list[str] = []

    def bash(self, text: str) -> None:
        for line in text.splitlines():
            words = shlex.split(line, comments=True)
            if not words:
                continue
            self.ran.append(line)
            if words[0] == "export":
                name, _, value = words[1].partition("=")
                value = value.replace(ADDRESS, self.server.url).replace("$DRAY_TOKEN", ANN)
                self._patch.setenv(name, value)
            elif words[:2] == ["pip", "install"]:
                assert all(importlib.util.find_spec(one) for one in words[2:])
            elif words[:2] == ["python", "-c"]:
                exec(words[2], {})
            elif words[0] == "dray":
                self._dray([self.jobs[-1] if one == "JOB" else one for one in words[1:]])
            else:
                pytest.fail(f"the page has a command that this test does not run: {line}")

    def _dray(self, words: list[str]) -> None:
        if words[0] == "submit":
            path = self._folder / words[1]
            document = yaml.safe_load(path.read_text())
            # The tiny model of this test has 128 positions.
            document["method"] = {"max_length": 128}
            path.write_text(yaml.safe_dump(document))
            trainer = threading.Thread(target=self._train_next, daemon=True)
            trainer.start()
            self._cli(*words)
            trainer.join(DEADLINE_S)
            assert not trainer.is_alive()
        else:
            self._cli(*words)

    def _train_next(self) -> None:
        listed: list[Any] = []

        def waits() -> bool:
            http = {"headers": {"Authorization": f"Bearer {ANN}"}}
            listed[:] = self.server.ask("GET", "/v1/jobs?state=QUEUED", **http).json()["items"]
            return bool(listed)

        wait_until(waits, "a job that waits")
        train(self.server, listed[0]["id"], self._folder / "work")
        self.jobs.append(listed[0]["id"])

    def yaml(self, text: str) -> None:
        if text.startswith("models:"):
            assert check_as(ModelList, yaml.safe_load(text)).models
            return
        examples = tiny.write_lines(self._folder / "examples.jsonl", tiny.conversations(40))
        path = self._folder / text.splitlines()[0].removeprefix("# ")
        assert EXAMPLES in text
        path.write_text(text.replace(EXAMPLES, examples.as_uri()))

    def python(self, text: str) -> None:
        exec(text, {})


def test_the_page_is_followed(
    server: LiveServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "reader"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("DRAY_TOKEN", ANN)
    reader = Reader(server, Cli(server.url, capsys), folder, monkeypatch)
    blocks = BLOCK.findall(PAGE.read_text())
    for language, text in blocks:
        getattr(reader, language)(text)
    assert [language for language, _ in blocks].count("python") == 1
    assert len(reader.ran) >= 7
    http = {"headers": {"Authorization": f"Bearer {ANN}"}}
    (tuned,) = server.ask("GET", "/v1/jobs?state=QUEUED", **http).json()["items"]
    assert tuned["name"] == "support"
    assert tuned["spec"]["train"]["epochs"] == 3
    assert (folder / "model" / "model.safetensors").exists()
