"""The media of jobs, over HTTP, in Python and on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import dray
from tests.unit.api.serving import LiveServer
from tests.unit.cli.running import Cli
from tests.unit.media import files
from tests.unit.service.ingest.test_media import reported

EVIL = b"<script>alert(1)</script>"


@pytest.fixture
def job_id(server: LiveServer) -> str:
    job_id = server.submit()
    frames = [
        reported(4, "image", "val/sample", files.picture()),
        reported(8, "image", "val/sample", files.picture("JPEG")),
        reported(8, "histogram", "weights", [1, 2, 3]),
        reported(8, "text", "../evil", "a\x1b[31m", rank=1),
    ]
    server.train(job_id, *frames)
    return job_id


def test_series_are_listed_and_records_are_json_lines(cli: Cli, job_id: str) -> None:
    assert [line.split() for line in cli("media", job_id).splitlines()[1:]] == [
        ["histogram", "weights", "0", "1", "8", "8"],
        ["image", "val/sample", "0", "2", "4", "8"],
        ["text", "../evil", "1", "1", "8", "8"],
    ]
    lines = [json.loads(line) for line in cli("media", job_id, "--json").splitlines()]
    assert [(one["value"]["kind"], one["step"]) for one in lines] == [
        ("histogram", 8),
        ("image", 4),
        ("image", 8),
        ("text", 8),
    ]
    chosen = cli("media", job_id, "--json", "--kind", "image", "--step", "8").splitlines()
    assert len(chosen) == 1
    assert cli("media", job_id, "--key", "other") == ""
    assert "has reported no such media" in cli.err


def test_a_download_has_each_value_as_a_file(cli: Cli, job_id: str, tmp_path: Path) -> None:
    dest = tmp_path / "out"
    paths = cli("media", job_id, "--download", str(dest)).splitlines()
    found = {path.relative_to(dest).as_posix() for path in dest.rglob("*") if path.is_file()}
    assert found == {
        "histogram/weights/step-8.json",
        "image/val%2Fsample/step-4.png",
        "image/val%2Fsample/step-8.jpg",
        "text/%2E%2E%2Fevil/step-8-rank-1.txt",
    }
    assert sorted(paths) == sorted(str(dest / name) for name in found)
    assert (dest / "image/val%2Fsample/step-4.png").read_bytes() == files.picture()
    histogram = json.loads((dest / "histogram/weights/step-8.json").read_text())
    assert sum(histogram["counts"]) == 3


def test_names_of_files_differ_for_different_keys(server: LiveServer, tmp_path: Path) -> None:
    keys = ["a", "A/b", "a%2Fb", "a/b", ".", "..", "é" * 128, "é" * 127 + "e", " "]
    job_id = server.submit()
    server.train(job_id, *(reported(1, key=key, given=key) for key in keys))
    with dray.Client(server.url) as client:
        paths = client.download_media(job_id, tmp_path)
    assert len(set(paths)) == len(keys)
    assert {path.read_text() for path in paths} == set(keys)
    assert all(path.resolve().is_relative_to(tmp_path.resolve()) for path in paths)


def test_the_sdk_fetches_every_page_and_evenly_spaced_records(server: LiveServer) -> None:
    job_id = server.submit()
    server.train(job_id, *(reported(step) for step in range(1, 131)))
    with dray.Client(server.url) as client:
        assert [one.step for one in client.media_records(job_id)] == [*range(1, 131)]
        spread = client.media_records(job_id, "text", "a", max_records=3)
        assert [one.step for one in spread] == [1, 65, 130]
        (series,) = client.media(job_id).items
        assert series.steps == [*range(1, 131)]
        with pytest.raises(dray.errors.InvalidParameter, match="requires kind and key"):
            list(client.media_records(job_id, max_records=3))


def test_a_file_is_served_so_that_no_browser_runs_it(server: LiveServer, job_id: str) -> None:
    with dray.Client(server.url) as client:
        (record,) = client.media_records(job_id, "image", step=4)
    assert isinstance(record.value, dray.views.Image)
    path = f"/v1/jobs/{job_id}/media/files/{record.value.file.sha256}"
    response = server.ask("GET", path)
    assert response.content == files.picture()
    assert response.headers["content-type"] == "image/png"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["content-disposition"].startswith("attachment")
    assert response.headers["content-security-policy"] == "sandbox; default-src 'none'"
    part = server.ask("GET", path, headers={"Range": "bytes=1-3"})
    assert (part.status_code, part.content) == (206, b"PNG")
    other = server.submit()
    for missing in (path.replace(job_id, other), path[:-1], path + "/x"):
        assert server.ask("GET", missing).status_code == 404


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("kind=point_cloud", 422),
        ("step=-1", 422),
        ("rank=99999999999", 422),
        ("max_records=1&kind=text&key=a", 422),
        ("max_records=5", 422),
        ("max_records=5&kind=text&key=a&step=1", 422),
        (f"key={'k' * 129}", 422),
        ("cursor=x", 400),
        ("other=1", 422),
    ],
)
def test_bad_queries_are_refused(server: LiveServer, job_id: str, query: str, status: int) -> None:
    response = server.ask("GET", f"/v1/jobs/{job_id}/media/records?{query}")
    assert response.status_code == status, response.text
