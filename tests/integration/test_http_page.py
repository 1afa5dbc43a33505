"""Every block in docs/guides/http.md works, in its order."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dray import Client
from tests.integration.harness import ROOT, Service
from tests.integration.tour import blocks_of, run_tour

PAGE = (ROOT / "docs" / "guides" / "http.md").read_text()
TOUR_TAKES_S = 270


@pytest.mark.ray
def test_every_block_does_what_the_page_says(
    embedded: Service, client: Client, tmp_path: Path
) -> None:
    said = run_tour(embedded, tmp_path, blocks_of(PAGE), takes_s=TOUR_TAKES_S)
    begun, keyed, wrong, polled, followed, brought, again, *rest = said
    listed, read, saved, linked, ended, watched, pages = rest

    assert begun == '{"status":"ok"}dray\n'
    job_id = re.findall(r"one job: (job-\w+)", keyed)[0]
    assert keyed.endswith("idempotency_key_reused\n")

    assert '"pointer":"/model/dephts"' in wrong
    assert "did you mean 'depth'?" in wrong
    assert '"code":"unsatisfiable","pointer":"/resources/cpus_per_worker"' in wrong
    assert wrong.splitlines()[-2].endswith("}my-7")
    assert "limit" in wrong.splitlines()[-1]

    assert polled.strip() in ("STARTING", "RUNNING", "SUCCEEDED")
    part, path, printed = brought.splitlines()
    assert len(part) == 64
    assert (path, printed) == ("hello.py", 'print("brought along")')

    streams = followed.split("event: reset\n")
    assert len(streams) == 2
    for stream in streams:
        ids = [int(number) for number in re.findall(r"^id: (\d+)$", stream, flags=re.MULTILINE)]
        assert [number for number in ids if number] == list(range(1, max(ids) + 1))
        assert '"to_state":"SUCCEEDED"' in stream
    assert again == "304\n"
    assert json.loads((tmp_path / "job.json").read_text())["id"] == job_id
    assert listed.splitlines() == ["QUEUED", job_id, job_id, "bad_cursor"]

    metrics, _ = json.JSONDecoder().raw_decode(read)
    assert set(metrics["series"]) == {"train/loss", "val/accuracy"}
    for series in metrics["series"].values():
        assert series["steps"][-1] == metrics["next_step"]
        assert len(series["steps"]) <= 5
    state, why, started, count, cpus = read.splitlines()[-5:]
    assert (state, why, cpus) == ("ended", "every rank exited with code 0", "4.0")
    assert re.fullmatch(r"\['job-\w+'\]", started)
    assert int(count) >= 0
    assert "the same" in saved
    assert (tmp_path / "whole").stat().st_size > 100
    assert (tmp_path / "rank-0.log").stat().st_size > 0
    assert linked == "the same\ndownload_link_not_found\n", "it works once"
    assert ended.splitlines()[0] == "job_live"
    assert ended.splitlines()[-2:] == ["204", "job_finished"]
    assert '"to_state":"CANCELLED"' in (tmp_path / "ended").read_text()
    assert watched.startswith("ok\ndray_jobs")
    code, hint = pages.splitlines()
    assert code == "forbidden"
    assert "DRAY_ALLOWED_ORIGINS" in hint
    assert client.get(job_id).state == "SUCCEEDED"
