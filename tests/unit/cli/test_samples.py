"""The texts that models generated, over HTTP, in Python and on the command line."""

from __future__ import annotations

import json

import pytest

import dray
from tests.unit.api.serving import LiveServer
from tests.unit.cli.running import Cli
from tests.unit.service.ingest.test_text_samples import TUNING, texts


@pytest.fixture
def tuned(server: LiveServer) -> str:
    job_id = server.submit(**TUNING)
    server.train(job_id, texts(4, " sees", "hi\x1b[31m\nyou"), texts(8, " likes", "hello"))
    return job_id


def test_texts_are_shown_by_prompt_and_step(cli: Cli, tuned: str) -> None:
    assert cli("samples", tuned).splitlines() == [
        "prompt 1: the cat",
        "  step 4:  sees",
        "  step 8:  likes",
        "prompt 2: user: hello",
        "  step 4: hi you",
        "  step 8: hello",
    ]
    assert cli("samples", tuned, "--step", "8").splitlines()[1::2] == [
        "  step 8:  likes",
        "  step 8: hello",
    ]
    lines = [json.loads(line) for line in cli("samples", tuned, "--json").splitlines()]
    assert [(one["step"], one["texts"][0]) for one in lines] == [(4, " sees"), (8, " likes")]


def test_without_texts_the_reason_is_named(cli: Cli, server: LiveServer, tuned: str) -> None:
    assert cli("samples", tuned, "--step", "5") == ""
    assert "no texts of step 5 exist" in cli.err
    assert cli("samples", server.submit()) == ""
    assert "the job's document has no samples" in cli.err
    assert cli("samples", server.submit(**TUNING)) == ""
    assert "no texts were generated yet" in cli.err


def test_the_sdk_fetches_every_page(server: LiveServer) -> None:
    job_id = server.submit(**TUNING)
    server.train(job_id, *(texts(step, str(step)) for step in range(1, 130)))
    with dray.Client(server.url) as client:
        assert [one.step for one in client.samples(job_id)] == [*range(1, 130)]
        (one,) = client.samples(job_id, step=7)
        assert one.texts == ["7"]
