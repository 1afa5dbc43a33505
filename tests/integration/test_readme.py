"""The README tells the truth: its tour is run word for word, and what it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dray import Client
from dray.views import JobState
from service.config.settings import Settings
from tests.integration.harness import ROOT, Service
from tests.integration.tour import Block, blocks_of, run_tour

README = (ROOT / "README.md").read_text()
TOUR_TAKES_S = 270


def tour() -> list[Block]:
    """The blocks of the tour that are to be run."""
    return blocks_of(README.split("\n## A tour\n")[1].split("\n## ")[0])


@pytest.mark.ray
def test_every_command_of_the_tour_does_what_the_readme_says(
    embedded: Service, client: Client, tmp_path: Path
) -> None:
    said = run_tour(embedded, tmp_path, tour(), takes_s=TOUR_TAKES_S)
    ready, submitted, followed, mistake, sdk, predicted, watched, queued, *rest = said
    script, drilled, ended = rest

    assert '"status":"ok"' in ready
    assert '"connected": true' in ready
    assert re.search(r"submitted job-\w+", submitted)

    assert '"to_state":"SUCCEEDED"' in followed
    assert '"train/loss"' in followed
    assert '"val/accuracy"' in followed
    assert '"is_best": true' in followed
    assert '"path": "model.safetensors"' in followed
    assert '"code":"invalid_document"' in mistake
    assert '"pointer":"/train/epoch"' in mistake
    assert "did you mean 'epochs'?" in mistake

    assert "SUCCEEDED" in sdk
    assert "model/model.safetensors" in sdk
    assert (tmp_path / "model" / "model.safetensors").is_file()
    accuracy = re.search(r"has not seen: ([0-9.]+)", sdk)
    assert accuracy
    assert float(accuracy[1]) > 0.9
    assert predicted == "predicted ['0', '1', '2', '3', '4'] of [0, 1, 2, 3, 4]\n"

    assert "step 69/69" in watched
    assert "ready" in watched
    assert re.search(r"^night +0 +0 +- +2 CPU", queued, flags=re.MULTILINE)
    assert "y = 3.000 x + 2.000" in script
    assert "fitted/linear.pt" in script
    assert re.search(r"^recovered in [0-9.]+ s, 0 steps lost$", drilled, flags=re.MULTILINE)
    assert "CANCELLED" in ended
    assert "deleted" in ended
    assert all(job.state is JobState.SUCCEEDED for job in client.jobs(label={"example": "digits"}))


def test_the_tour_has_a_block_for_each_way_to_call() -> None:
    texts = [text for _, text in tour()]
    assert len(texts) == 11
    for way in ("curl ", "dray.Client(", "dray submit"):
        assert any(way in text for text in texts)


def test_every_make_target_it_names_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", README, flags=re.MULTILINE))
    assert {"demo", "test", "setup", "run", "check"} <= named
    assert named <= targets


def test_the_settings_table_is_complete_and_its_defaults_are_true() -> None:
    rows = re.findall(r"^\| `DRAY_(\w+)` \| (.+?) \|", README, flags=re.MULTILINE)
    assert {name.lower() for name, _ in rows} == set(Settings.model_fields)
    for name, default in rows:
        value = Settings.model_fields[name.lower()].default
        if default == "none":
            assert value in (None, ()), name
        elif default.startswith("`"):
            text = f"{value:g}" if isinstance(value, float) else str(value)
            assert default.strip("`") == text, name
        elif default.endswith("MiB"):
            assert int(default.split()[0]) << 20 == value, name
        else:
            assert value in ("", (), None), f"{name} has the default {value!r}"


@pytest.mark.parametrize("document", ["README.md", "docker/README.md", "docs/adr/README.md"])
def test_its_links_lead_somewhere(document: str) -> None:
    folder = (ROOT / document).parent
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / document).read_text())
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (folder / link).exists()] == []
