"""Downloads are complete, verified, resumed, and never written outside their folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from dray import AsyncClient, Client, errors
from dray._http.downloads import destination
from dray._http.transport import Retry
from tests.unit.api.routes.reports.test_checkpoints import saved
from tests.unit.api.serving import LiveServer

BEGAN = "2026-01-01T00:00:00Z"
MODEL = bytes(range(256)) * 100
PATIENT = Retry(first_delay_s=0.01, max_delay_s=0.05)


@pytest.fixture
def trained(server: LiveServer) -> str:
    job_id = server.submit()
    frames = [
        server.artifact(job_id, name, content)
        for name, content in (
            ("model.bin", MODEL),
            ("more/empty", b""),
            ("more/config.json", b"{}"),
        )
    ]
    server.train(job_id, *frames)
    server.succeed(job_id)
    return job_id


def test_a_download_writes_every_file_to_its_path(
    client: Client, trained: str, tmp_path: Path
) -> None:
    paths = client.download(trained, tmp_path / "out")
    found = {path.relative_to(tmp_path / "out").as_posix(): path.read_bytes() for path in paths}
    assert found == {"model.bin": MODEL, "more/empty": b"", "more/config.json": b"{}"}
    assert sorted(p for p in (tmp_path / "out").rglob("*") if p.is_file()) == sorted(paths)


def test_one_artifact_is_downloaded_by_path_or_id(
    client: Client, trained: str, tmp_path: Path
) -> None:
    assert client.download(trained, tmp_path, "model.bin") == [tmp_path / "model.bin"]
    artifact = next(a for a in client.artifacts(trained) if a.path == "more/config.json")
    assert client.download(trained, tmp_path, artifact.id) == [tmp_path / "more" / "config.json"]
    with pytest.raises(errors.ArtifactNotFound, match=r"model\.bin"):
        client.download(trained, tmp_path, "none")


def test_a_broken_download_goes_on_where_it_stopped(
    server: LiveServer, trained: str, tmp_path: Path
) -> None:
    digest = hashlib.sha256(MODEL).hexdigest()
    (tmp_path / f".model.bin.{digest[:16]}.part").write_bytes(MODEL[:1000])
    asked: list[str] = []
    real = httpx.HTTPTransport()

    class Noting(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            asked.append(request.headers.get("range", ""))
            return real.handle_request(request)

    with Client(server.url, transport=Noting()) as client:
        assert client.download(trained, tmp_path, "model.bin")[0].read_bytes() == MODEL
        assert asked[-1] == "bytes=1000-"
        asked.clear()
        client.download(trained, tmp_path, "model.bin")
    assert [value for value in asked if value] == []  # the file already exists
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.bin"]


def test_a_download_that_is_damaged_is_thrown_away(
    client: Client, trained: str, tmp_path: Path
) -> None:
    digest = hashlib.sha256(MODEL).hexdigest()
    (tmp_path / f".model.bin.{digest[:16]}.part").write_bytes(b"damaged" * 100)
    with pytest.raises(errors.IntegrityError, match="SHA-256"):
        client.download(trained, tmp_path, "model.bin")
    assert list(tmp_path.iterdir()) == []
    assert client.download(trained, tmp_path, "model.bin")[0].read_bytes() == MODEL


@pytest.mark.parametrize(
    "name", ["../x", "a/../../x", "/etc/passwd", "..", "", ".", "a\\..\\x", "a/\0b", "link/x"]
)
def test_no_artifact_leaves_the_destination(tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    with pytest.raises(errors.IntegrityError, match="is outside"):
        destination(root, name)


def test_a_server_that_lists_a_path_outside_gets_nothing_fetched(tmp_path: Path) -> None:
    asked: list[str] = []
    items = [
        {"id": name, "path": path, "size_bytes": 1, "sha256": "0" * 64, "created_at": BEGAN}
        for name, path in (("a", "fine"), ("b", "../../evil"))
    ]

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(200, json={"items": items})

    with (
        Client("http://localhost", transport=httpx.MockTransport(answer)) as client,
        pytest.raises(errors.IntegrityError, match="is outside"),
    ):
        client.download("job", tmp_path / "out")
    assert asked == ["/v1/jobs/job/artifacts"]
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_ignores_ranges_is_downloaded_from(tmp_path: Path) -> None:
    artifact = {
        "id": "a",
        "path": "f",
        "size_bytes": len(MODEL),
        "sha256": hashlib.sha256(MODEL).hexdigest(),
        "created_at": "2026-01-01T00:00:00Z",
    }

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/artifacts"):
            return httpx.Response(200, json={"items": [artifact]})
        return httpx.Response(200, content=MODEL)

    (tmp_path / f".f.{artifact['sha256'][:16]}.part").write_bytes(MODEL[:10])  # type: ignore[index]
    with Client("http://localhost", transport=httpx.MockTransport(answer)) as client:
        assert client.download("job", tmp_path)[0].read_bytes() == MODEL


class Breaking(httpx.BaseTransport):
    """The network, in which each file is interrupted after `limit` bytes. Records the ranges."""

    def __init__(self, limit: int) -> None:
        self._real = httpx.HTTPTransport()
        self._limit = limit
        self.ranges: list[str | None] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = self._real.handle_request(request)
        if request.headers["accept"] != "*/*":
            return response
        self.ranges.append(request.headers.get("range"))
        body = response.read()
        return httpx.Response(
            response.status_code, headers=response.headers, stream=Broken(body, self._limit)
        )


class Broken(httpx.SyncByteStream):
    def __init__(self, body: bytes, limit: int) -> None:
        self._body, self._limit = body, limit

    def __iter__(self) -> Iterator[bytes]:
        yield self._body[: self._limit]
        if len(self._body) > self._limit:
            raise httpx.RemoteProtocolError("peer closed connection without sending all")


def test_a_connection_that_breaks_again_and_again_is_resumed_where_it_broke(
    server: LiveServer, trained: str, tmp_path: Path
) -> None:
    breaking, seen = Breaking(limit=10_000), []
    with Client(server.url, transport=breaking, retry=PATIENT) as client:
        paths = client.download(
            trained, tmp_path, "model.bin", on_progress=lambda *now: seen.append(now)
        )
    assert paths[0].read_bytes() == MODEL
    assert breaking.ranges == [None, "bytes=10000-", "bytes=20000-"]
    sizes = [(10_000, 25_600), (20_000, 25_600), (25_600, 25_600)]
    assert seen == [("model.bin", here, whole) for here, whole in sizes]


def test_an_interrupted_download_leaves_its_part_for_the_next(
    server: LiveServer, trained: str, tmp_path: Path
) -> None:
    def interrupt(_path: str, _here: int, _whole: int) -> None:
        raise KeyboardInterrupt

    breaking = Breaking(limit=10_000)
    with Client(server.url, transport=breaking) as client:
        with pytest.raises(KeyboardInterrupt):
            client.download(trained, tmp_path, "model.bin", on_progress=interrupt)
        assert not (tmp_path / "model.bin").exists()
        client.download(trained, tmp_path, "model.bin")
    assert breaking.ranges[1] == "bytes=10000-"
    assert [path.name for path in tmp_path.iterdir()] == ["model.bin"]


def test_a_link_at_the_path_of_the_part_is_not_written_through(
    client: Client, trained: str, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"")
    digest = hashlib.sha256(MODEL).hexdigest()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / f".model.bin.{digest[:16]}.part").symlink_to(victim)
    client.download(trained, tmp_path / "out", "model.bin")
    assert victim.read_bytes() == b""


def test_a_checkpoint_is_downloaded_whole(
    client: Client, server: LiveServer, tmp_path: Path
) -> None:
    job_id = server.submit()
    server.train(job_id, saved(server, job_id, 10))
    listed = client.checkpoint_files(job_id, 10)
    assert [file.path for file in listed] == ["state.pt", "manifest.json"]
    paths = client.download_checkpoint(job_id, 10, tmp_path / "ten")
    assert paths == [tmp_path / "ten" / "state.pt", tmp_path / "ten" / "manifest.json"]
    for file, path in zip(listed, paths, strict=True):
        assert hashlib.sha256(path.read_bytes()).hexdigest() == file.sha256
    with pytest.raises(errors.CheckpointNotFound):
        client.download_checkpoint(job_id, 11, tmp_path / "eleven")
    assert not (tmp_path / "eleven").exists()


async def test_the_asynchronous_client_downloads_too(
    server: LiveServer, trained: str, tmp_path: Path
) -> None:
    seen: list[str] = []
    async with AsyncClient(server.url) as client:
        paths = await client.download(
            trained, tmp_path, on_progress=lambda *now: seen.append(now[0])
        )
        job_id = server.submit()
        server.train(job_id, saved(server, job_id, 10))
        assert len(await client.download_checkpoint(job_id, 10, tmp_path / "ten")) == 2
    assert {path.name for path in paths} == {"model.bin", "empty", "config.json"}
    assert "model.bin" in seen
