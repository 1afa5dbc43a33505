"""The tour in the README works word for word, and what the README names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dray import Client
from dray.views import JobState
from tests.integration.harness import ROOT, Service
from tests.integration.tour import Block, blocks_of, run_tour

README = (ROOT / "README.md").read_text()
TOUR_TAKES_S = 270


def tour() -> list[Block]:
    """Return the blocks of the tour to run."""
    return blocks_of(README.split("\n## A first job\n")[1].split("\n## ")[0])


@pytest.mark.ray
def test_every_command_of_the_tour_does_what_the_readme_says(
    embedded: Service, client: Client, tmp_path: Path
) -> None:
    said = run_tour(embedded, tmp_path, tour(), takes_s=TOUR_TAKES_S)
    followed, sdk, commands, drilled = said

    assert '"to_state":"SUCCEEDED"' in followed
    assert '"train/loss"' in followed
    assert '"val/accuracy"' in followed
    assert '"path": "model.safetensors"' in followed

    assert "SUCCEEDED" in sdk
    assert "model/model.safetensors" in sdk
    assert (tmp_path / "model" / "model.safetensors").is_file()
    accuracy = re.search(r"has not seen: ([0-9.]+)", sdk)
    assert accuracy
    assert float(accuracy[1]) > 0.9

    assert "step 69/69" in commands
    assert "y = 3.000 x + 2.000" in commands
    assert re.search(r"^recovered in [0-9.]+ s, 0 steps lost$", drilled, flags=re.MULTILINE)
    assert "CANCELLED" in drilled
    ended = [job.state for job in client.jobs(label={"example": "digits"})]
    assert sorted(ended) == [JobState.CANCELLED, JobState.SUCCEEDED, JobState.SUCCEEDED]


def test_the_tour_has_a_block_for_each_way_to_call() -> None:
    texts = [text for _, text in tour()]
    assert len(texts) == 4
    for way in ("curl ", "dray.Client(", "dray submit"):
        assert any(way in text for text in texts)


def test_every_make_target_it_names_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", README, flags=re.MULTILINE))
    assert {"demo", "run", "docs"} <= named
    assert named <= targets


@pytest.mark.parametrize("document", ["README.md", "docker/README.md", "docs/adr/README.md"])
def test_its_links_lead_somewhere(document: str) -> None:
    folder = (ROOT / document).parent
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / document).read_text())
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (folder / link).exists()] == []
