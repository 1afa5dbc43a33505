"""The blocks in docs/guides/sdk.md and docs/guides/cli.md work as documented."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dray import Client, errors
from tests.integration.harness import ROOT, Service
from tests.integration.tour import blocks_of, run_tour
from tests.marks import SOAK

SDK = (ROOT / "docs" / "guides" / "sdk.md").read_text()
CLI = (ROOT / "docs" / "guides" / "cli.md").read_text()
TOUR_TAKES_S = 270


@SOAK
@pytest.mark.ray
def test_every_block_does_what_the_page_of_the_sdk_says(
    embedded: Service, client: Client, tmp_path: Path
) -> None:
    said = run_tour(embedded, tmp_path, blocks_of(SDK), takes_s=TOUR_TAKES_S)
    seen, checked, failed, listed, read, called, swept, keyed = said

    assert "1 QUEUED" in seen
    assert re.search(r"^SUCCEEDED 0\.\d+$", seen, flags=re.MULTILINE)
    assert "/model/widht | there is no field 'widht' | did you mean 'width'?" in checked
    assert "12 epochs on 2 workers" in checked
    assert "unsatisfiable /resources/num_workers" in failed
    assert "404 there is no job job-none" in failed
    assert "sdk-tour SUCCEEDED" in listed
    assert "0 jobs are alive" in listed
    assert "loss from" in read
    assert len(re.findall(r"^step \d+ accuracy 0\.\d+$", read, flags=re.MULTILINE)) == 3
    assert "best/manifest.json" in read
    assert re.search(r"model\.safetensors \d+ bytes", read)
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert "adding 3 numbers" in called
    assert called.strip().endswith("6")
    assert len(re.findall(r"^lr .*: accuracy 0\.\d+$", swept, flags=re.MULTILINE)) == 2
    assert "1 job" in keyed
    assert not list(client.jobs(label={"tour": "sdk-sweep"}))


@SOAK
@pytest.mark.ray
def test_every_block_does_what_the_page_of_the_command_line_says(
    embedded: Service, client: Client, tmp_path: Path
) -> None:
    said = run_tour(embedded, tmp_path, blocks_of(CLI), takes_s=TOUR_TAKES_S)
    began, submitted, program, found, referred, *rest = said
    metrics, script, files, ended, scripted = rest

    assert "digits.yaml" in began
    assert (tmp_path / "digits.yaml").is_file()
    assert "SUCCEEDED" in referred
    assert "describes a job: image_classification on 2 workers. Nothing was submitted." in submitted
    assert re.search(r"SUCCEEDED after .* s: ", submitted)
    assert "linear_regression.py on 2 workers. Nothing was submitted." in program
    assert "data/make_data.py" in program
    assert re.search(r"^job-\w+ SUCCEEDED: ", program, flags=re.MULTILINE)
    assert found.count("digits") >= 2
    assert "RUNNING -> SUCCEEDED" in found
    assert "val/accuracy" in metrics
    assert "train/loss  last " in metrics
    assert "(log)" in metrics
    assert "key,step,value\nval/accuracy,23,0." in metrics
    assert "y = 3.0" in script
    assert "SUCCEEDED" in script
    assert "latest" in files
    assert "checkpoint/manifest.json" in files
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert '"model/model.safetensors"' in files
    assert "ready" in ended
    assert "exit code 1" in ended
    assert ended.count("deleted") == 2
    assert "exit code 3: error: there is no job job-none" in scripted
    assert "exit code 2: error: there is no field 'epoch' (at /train/epoch)" in scripted


def test_the_errors_it_names_are_there() -> None:
    section = SDK.split("\n## Errors\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \|", section, flags=re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert names
    for name in names:
        assert issubclass(getattr(errors, name), errors.DrayError)
