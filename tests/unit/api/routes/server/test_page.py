"""The page's files: vendored files are unmodified, all files are small, and none refers to other
sites."""

from __future__ import annotations

import gzip
import hashlib
import posixpath
import re
from pathlib import Path

import httpx
import pytest

from api.page import manual
from api.page.static_files import FOLDER, POLICY, load
from tests.unit.api.serving import LiveServer

MAX_BYTES = 650_000
MAX_COMPRESSED = 300_000
IMPORT = re.compile(r"""\b(?:import|export)\b[^'"`;]*?from\s+'([^']+)'|\bimport\('([^']+)'\)""")
HASH = re.compile(r"\| `([\w.-]+)` \|.*\| `([0-9a-f]{64})` \|")


def test_vendored_files_are_those_of_the_registry() -> None:
    vendor = FOLDER / "vendor"
    known = dict(HASH.findall((vendor / "README.md").read_text()))
    found = {path.name for path in vendor.iterdir() if path.suffix in (".js", ".css")}
    assert known.keys() == found
    for name, sha256 in known.items():
        assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == sha256, name
    assert {path.name for path in vendor.glob("LICENSE.*")} == {
        "LICENSE.htm",
        "LICENSE.preact",
        "LICENSE.uplot",
    }


def test_all_together_are_small() -> None:
    served = {"index.html": load().index, **load().files}
    assert sum(len(file.body) for file in served.values()) < MAX_BYTES
    assert sum(len(file.compressed) for file in served.values()) < MAX_COMPRESSED
    assert all(gzip.decompress(file.compressed) == file.body for file in served.values())


def test_modules_import_each_other_by_relative_paths() -> None:
    files = load().files
    for name, file in files.items():
        if not name.endswith(".js") or name.startswith("vendor/"):
            continue
        for names in IMPORT.findall(file.body.decode()):
            (target,) = filter(None, names)
            assert target.startswith("."), f"{name} imports {target}"
            there = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
            assert there in files, f"{name} imports {target}"


def test_what_the_index_names_is_there_and_nothing_of_it_is_inline() -> None:
    index, version = load().index.body.decode(), load().version
    named = re.findall(r'(?:href|src)="([^"]+)"', index)
    files = {f"page/{version}/{name}" for name in load().files}
    assert set(named) <= files | {"docs"}
    assert not re.search(r"<style|style=|\son\w+=|<script(?![^>]* src=)", index)
    assert "unsafe" not in POLICY


def test_a_file_is_kept_for_good_and_the_index_is_asked_for_anew(http: httpx.Client) -> None:
    index = http.get("/")
    assert index.headers["cache-control"] == "no-cache"
    assert index.headers["content-security-policy"] == POLICY
    known = {"If-None-Match": index.headers["etag"]}
    assert http.get("/", headers=known).status_code == 304
    path = f"/page/{load().version}/app.js"
    file = http.get(path)
    assert file.headers["content-type"] == "text/javascript; charset=utf-8"
    assert "immutable" in file.headers["cache-control"]
    assert file.headers["content-encoding"] == "gzip"
    assert file.content == load().files["app.js"].body
    plain = http.get(path, headers={"Accept-Encoding": "identity"})
    assert plain.content == file.content


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [
        ("gzip", "gzip"),
        ("br, GZIP;q=0.5", "gzip"),
        ("x-gzip", "gzip"),
        ("*", "gzip"),
        ("gzip;q=0", None),
        ("gzip ; q=0.000, *", None),
        ("*;q=0", None),
        ("gzipped, br", None),
        ("", None),
        ("gzip;q=nan", None),
    ],
)
def test_a_file_is_compressed_for_those_who_take_it(
    http: httpx.Client, accepted: str, encoding: str | None
) -> None:
    response = http.get("/", headers={"Accept-Encoding": accepted})
    assert response.headers.get("content-encoding") == encoding
    assert response.content == load().index.body


@pytest.mark.parametrize("path", ["/", "/page/{}/app.js"])
def test_a_head_says_what_a_get_would_and_queries_are_ignored(
    http: httpx.Client, path: str
) -> None:
    url = f"{path.format(load().version)}?utm_source=x"
    head, got = http.head(url), http.get(url)
    assert (head.status_code, head.content) == (200, b"")
    assert got.content
    differ = ("date", "x-request-id")
    assert {k: v for k, v in head.headers.items() if k not in differ} == {
        k: v for k, v in got.headers.items() if k not in differ
    }


@pytest.mark.parametrize("path", ["old/app.js", "{}/nothing.js", "{}/../app.js", "{}/index.html"])
def test_other_files_and_other_versions_are_not_there(http: httpx.Client, path: str) -> None:
    response = http.get(f"/page/{path.format(load().version)}")
    assert response.status_code == 404
    assert response.headers["content-type"] == "application/problem+json"


def test_a_link_of_another_site_leads_to_the_page_and_not_to_the_api(server: LiveServer) -> None:
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert server.ask("GET", "/", headers=headers).status_code == 200
    assert server.ask("GET", "/v1/jobs", headers=headers).status_code == 403


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder from which the manual is served. It is empty."""
    monkeypatch.setattr(manual.find, "__defaults__", (tmp_path,))
    return tmp_path


def test_a_built_manual_is_served_under_the_policy_of_the_page(
    http: httpx.Client, folder: Path
) -> None:
    (folder / "guides").mkdir()
    (folder / "index.html").write_text("the manual")
    (folder / "guides" / "page.html").write_text("a guide")
    moved = http.get("/manual")
    assert (moved.status_code, moved.headers["location"]) == (307, "manual/")
    assert http.get("/manual/").text == "the manual"
    page = http.get("/manual/guides/page.html?highlight=x")
    assert page.text == "a guide"
    assert page.headers["content-security-policy"] == POLICY
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    (folder / "index.html").write_text("built again")
    assert http.get("/manual/").text == "built again"


@pytest.mark.parametrize("path", ["nothing.html", "..%2fsecret", "%2fetc%2fpasswd", "guides"])
def test_the_manual_has_no_other_files(http: httpx.Client, folder: Path, path: str) -> None:
    (folder / "index.html").write_text("the manual")
    (folder.parent / "secret").write_text("secret")
    (folder / "guides").mkdir(exist_ok=True)
    response = http.get(f"/manual/{path}")
    assert response.status_code == 404
    assert response.json()["code"] == "not_found"


def test_where_no_manual_was_built_a_page_names_the_command(
    http: httpx.Client, folder: Path
) -> None:
    assert list(folder.iterdir()) == []
    response = http.get("/manual/")
    assert response.status_code == 404
    assert response.headers["content-security-policy"] == POLICY
    assert "<code>make docs</code>" in response.text
