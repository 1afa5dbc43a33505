"""Browsers that stay signed in: what their cookie permits, when a session ends, and what pages of
other origins can do with it."""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from sqlalchemy import func, select

from api.app import ROUTERS
from api.routes.reports import events
from api.security import local_callers
from dray import home_token
from service.config import logging_setup
from service.config import tokens_file as written
from service.db.models import JobRow
from tests.unit.api.routes.reports.test_checkpoints import saved
from tests.unit.api.serving import LiveServer, serving
from tests.unit.service.helpers import log

JOB = {"recipe": "image_classification"}
EVIL = "https://evil.example.org"
KEY = "X-Dray-Write-Key"
ATTRIBUTES = "Max-Age=2592000; HttpOnly; SameSite=Strict"


def line(name: str, token: str, role: str = "") -> str:
    return f"{name}:{hashlib.sha256(token.encode()).hexdigest()}{role}\n"


@dataclass(frozen=True)
class Browser:
    """A browser that stays signed in."""

    name: str
    secret: str
    key: str

    @property
    def reads(self) -> dict[str, str]:
        return {"Cookie": f"{self.name}={self.secret}"}

    @property
    def writes(self) -> dict[str, str]:
        return {**self.reads, KEY: self.key}


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def sign_in(server: LiveServer, token: str, **headers: str) -> Browser:
    answer = server.ask("POST", "/session", headers=bearer(token) | headers)
    assert answer.status_code == 201, answer.text
    name, _, secret = answer.headers["set-cookie"].partition(";")[0].partition("=")
    return Browser(name, secret, answer.json()["write_key"])


def status(server: LiveServer, headers: dict[str, str], path: str = "/v1/jobs") -> int:
    return server.ask("GET", path, headers=headers).status_code


@dataclass
class Guarded:
    server: LiveServer
    tokens: Path
    job_id: str
    artifact_id: str


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A server with tokens, and a job with a file, a checkpoint and a log."""
    folder = tmp_path_factory.mktemp("signed-in")
    tokens = folder / "tokens"
    tokens.write_text(line("ann", "a", ":admin") + line("bob", "b"))
    with serving(folder / "home", tokens_file=tokens) as server:
        job_id = server.ask("POST", "/v1/jobs", json=JOB, headers=bearer("a")).json()["id"]
        server.train(
            job_id,
            server.artifact(job_id, "out.bin", b"0123456789"),
            saved(server, job_id, 10),
            *(log(n, f"line {n}") for n in range(3)),
        )
        path = f"/v1/jobs/{job_id}/artifacts"
        found = server.ask("GET", path, headers=bearer("a")).json()["items"][0]
        yield Guarded(server, tokens, job_id, found["id"])


@pytest.fixture
def server(site: Guarded) -> LiveServer:
    return site.server


@pytest.fixture
def tokens(site: Guarded) -> Iterator[Path]:
    """The tokens file, which is restored after the test."""
    before = site.tokens.read_text()
    yield site.tokens
    site.tokens.write_text(before)


def test_the_cookie_is_of_this_host_and_folder_alone(server: LiveServer) -> None:
    for headers, more in (
        ({}, ""),
        ({"Origin": server.url, "Sec-Fetch-Site": "same-origin"}, ""),
        ({"Origin": "https://dray.example.org", "Sec-Fetch-Site": "same-origin"}, "; Secure"),
    ):
        answer = server.ask("POST", "/session", headers=bearer("a") | headers)
        assert re.fullmatch(
            rf"dray-\w{{12}}=[\w-]{{43}}; {ATTRIBUTES}{more}", (answer.headers["set-cookie"])
        )
        assert answer.headers["cache-control"] == "no-store"
        assert answer.json()["user"] == "ann"


@pytest.mark.parametrize("headers", [{}, bearer("wrong"), {"Authorization": "Basic YTph"}])
def test_a_browser_is_signed_in_by_a_token_alone(
    server: LiveServer, headers: dict[str, str]
) -> None:
    browser = sign_in(server, "a")
    for more in ({}, browser.reads, browser.writes):
        answer = server.ask("POST", "/session", headers=headers | more)
        assert answer.status_code == 401
        assert "set-cookie" not in answer.headers


def test_a_foreign_page_signs_nobody_in(server: LiveServer) -> None:
    for headers in ({"Origin": EVIL}, {"Sec-Fetch-Site": "same-site", "Origin": server.url}):
        answer = server.ask("POST", "/session", headers=bearer("a") | headers)
        assert answer.status_code == 403
        assert "set-cookie" not in answer.headers


def is_allowed(method: str, token: str, cookie: str, key: str, site: str, origin: str) -> bool:
    """The rule: a header with a token decides alone; a cookie reads, with its key it writes, and
    neither works on a foreign page."""
    own_page = site in ("same-origin", "none") if site else origin in ("", "own")
    if token:
        return token == "known"
    return "ann" in cookie.split() and own_page and (method in ("GET", "HEAD") or key == "own")


def test_who_may_do_what_is_the_rule_of_the_oracle(site: Guarded) -> None:
    server = site.server
    browser, other = sign_in(server, "a"), sign_in(server, "b")
    gone = sign_in(server, "a")
    server.ask("DELETE", "/session", headers=gone.writes)
    secrets = {"ann": browser.secret, "gone": gone.secret, "made-up": "x" * 43, "short": "x"}
    paths = {
        "GET": f"/v1/jobs/{site.job_id}",
        "HEAD": f"/v1/jobs/{site.job_id}/artifacts/{site.artifact_id}",
        "POST": "/v1/jobs",
        "PUT": "/v1/views/of-the-oracle",
        "PATCH": f"/v1/jobs/{site.job_id}/annotations",
        "DELETE": "/v1/views/of-the-oracle",
    }
    bodies: dict[str, Any] = {"POST": JOB, "PUT": {"query": {}}, "PATCH": {"tags": {"add": ["x"]}}}
    authorization = {"known": "Bearer a", "unknown": "Bearer x", "basic": "Basic YTph"}
    keys = {"own": browser.key, "other's": other.key, "wrong": "x", "cookie": browser.secret}
    origins = {"own": server.url, "evil": EVIL, "port": "http://127.0.0.1:1", "null": "null"}
    product = list(
        itertools.product(
            paths,
            ("", *authorization),
            ("", "ann", "gone", "made-up", "short", "gone ann", "ann made-up short"),
            ("", *keys),
            ("", "same-origin", "none", "same-site", "cross-site"),
            ("", *origins),
        )
    )
    drawn = random.Random(9).sample(product, 500)
    num_jobs, allowed = num_rows(server), 0
    with server.client() as client:
        for case in drawn:
            method, token, cookies, key, from_site, origin = case
            sent = {
                "Authorization": authorization.get(token),
                "Cookie": "; ".join(f"{browser.name}={secrets[one]}" for one in cookies.split()),
                KEY: keys.get(key),
                "Sec-Fetch-Site": from_site,
                "Origin": origins.get(origin),
            }
            headers = {name: value for name, value in sent.items() if value}
            body = bodies.get(method)
            answer = client.request(method, paths[method], headers=headers, json=body)
            expected = is_allowed(*case)
            assert (answer.status_code != 401) is expected, (case, answer.text)
            assert answer.status_code < 500
            allowed += expected
            num_jobs += expected and method == "POST"
            assert num_rows(server) == num_jobs, case
            if "ann" in cookies and expected and not token:
                assert "Cookie" in answer.headers["vary"]
                assert answer.headers["cache-control"].split(",")[0] in ("no-store", "private")
    assert 50 < allowed < 450


def num_rows(server: LiveServer) -> int:
    count = select(func.count()).select_from(JobRow)
    return server.hands.database.read_sync(lambda s: s.scalar(count)) or 0


def test_the_users_of_several_cookies_are_not_mixed_up(server: LiveServer) -> None:
    ann, bob = sign_in(server, "a"), sign_in(server, "b")
    both = {"Cookie": f"{ann.reads['Cookie']}; {bob.reads['Cookie']}"}
    answer = server.ask("GET", "/v1/jobs", headers=both)
    assert (answer.status_code, answer.json()["detail"]) == (
        401,
        "the browser sent sign-in cookies of several users",
    )
    again = sign_in(server, "a")
    twice = {"Cookie": f"{ann.reads['Cookie']}; {again.reads['Cookie']}", KEY: ann.key}
    assert server.ask("POST", "/v1/jobs", headers=twice, json=JOB).json()["owner"] == "ann"
    others = "; ".join(f"dray-{n:012x}={'y' * 43}" for n in range(300))
    assert status(server, {"Cookie": f"{others}; {ann.reads['Cookie']}"}) == 200
    tossed = "; ".join(f"{ann.name}={n:043d}" for n in range(300))
    assert status(server, {"Cookie": f"{tossed}; {ann.reads['Cookie']}"}) == 200
    answer = server.ask("GET", "/v1/jobs", headers={"Cookie": f"a={'x' * 70_000}"})
    assert (answer.status_code, answer.json()["code"]) == (431, "headers_too_large")


def test_a_token_that_is_removed_or_replaced_ends_the_session_at_once(
    server: LiveServer, tokens: Path
) -> None:
    browser, before = sign_in(server, "a"), tokens.read_text()
    for after in (line("bob", "b"), line("ann", "another")):
        tokens.write_text(after)
        assert status(server, browser.reads) == 401
        tokens.write_text(before)
        assert status(server, browser.reads) == 200


def test_a_role_is_that_of_the_tokens_file(server: LiveServer, tokens: Path) -> None:
    browser = sign_in(server, "a")
    path = "/v1/queues/night"
    assert server.ask("PUT", path, headers=browser.writes, json={}).status_code == 200
    tokens.write_text(line("ann", "a"))
    assert server.ask("PUT", path, headers=browser.writes, json={}).status_code == 403


def test_who_signs_out_ends_the_session_for_every_copy_of_the_cookie(server: LiveServer) -> None:
    browser, other = sign_in(server, "a"), sign_in(server, "a")
    assert server.ask("DELETE", "/session", headers=browser.reads).status_code == 401
    answer = server.ask("DELETE", "/session", headers=browser.writes)
    assert answer.status_code == 204
    assert answer.headers["set-cookie"].startswith(f"{browser.name}=; Max-Age=0; ")
    assert status(server, browser.reads) == 401
    detail = server.ask("GET", "/v1/jobs", headers=browser.reads).json()["detail"]
    assert detail == "this browser is no longer signed in"
    assert status(server, other.reads) == 200
    everywhere = "/session?everywhere=true"
    assert server.ask("DELETE", everywhere, headers=bearer("b")).status_code == 204
    assert status(server, other.reads) == 200
    assert server.ask("DELETE", everywhere, headers=bearer("a")).status_code == 204
    assert status(server, other.reads) == 401


def test_another_sign_in_replaces_the_session_of_the_browser(server: LiveServer) -> None:
    browser = sign_in(server, "a")
    later = sign_in(server, "b", **browser.reads)
    assert status(server, browser.reads) == 401
    assert status(server, later.reads) == 200


def test_a_stream_and_a_long_poll_end_with_the_session(
    site: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "KEEP_ALIVE_S", 0.05)
    browser = sign_in(site.server, "a")
    headers = {**browser.reads, "Accept": "text/event-stream"}
    path = f"/v1/jobs/{site.job_id}/events"
    with site.server.client(headers=headers) as client, client.stream("GET", path) as stream:
        lines = stream.iter_lines()
        assert stream.status_code == 200
        next(lines)
        site.server.ask("DELETE", "/session", headers=browser.writes)
        for _ in lines:
            pass
    assert site.server.context.runtime.signals._subscribers == {}


def test_files_are_downloaded_by_plain_links(site: Guarded) -> None:
    browser, job = sign_in(site.server, "a"), f"/v1/jobs/{site.job_id}"
    link = {**browser.reads, "Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "navigate"}
    for path, content in (
        (f"{job}/artifacts/{site.artifact_id}", b"0123456789"),
        (f"{job}/checkpoints/10/files/state.pt", None),
        (f"{job}/logs/text", b"[1:0] line 0\n[1:0] line 1\n[1:0] line 2\n"),
        (f"{job}/logs/text?rank=0", b"line 0\nline 1\nline 2\n"),
        (f"{job}/logs/text?rank=1", b""),
    ):
        answer = site.server.ask("GET", path, headers=link)
        assert answer.status_code == 200
        assert answer.headers["content-disposition"].startswith("attachment; ")
        assert content is None or answer.content == content
        assert site.server.ask("GET", path).status_code == 401
    rest = site.server.ask(
        "GET", f"{job}/artifacts/{site.artifact_id}", headers={**link, "Range": "bytes=5-"}
    )
    assert (rest.status_code, rest.content) == (206, b"56789")


@pytest.mark.parametrize("path", ["/v1/jobs/<b>", "/v1/jobs", "/metrics"])
def test_a_link_from_elsewhere_leads_to_a_page_with_the_same_link(
    server: LiveServer, path: str
) -> None:
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    answer = server.ask("GET", path, headers=link)
    assert answer.status_code == 401
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    same, root = re.findall('href="([^"]*)"', answer.text)
    assert httpx.URL(f"{server.url}{path}").join(same or path).path == httpx.URL(path).path
    assert httpx.URL(f"{server.url}{path}").join(root) == f"{server.url}/"
    assert "<b>" not in answer.text
    assert "cookie" not in answer.headers.get("vary", "").lower()


def test_a_preflight_doesnt_allow_the_key(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(line("ann", "a"))
    page = "https://page.example.org"
    with serving(tmp_path / "home", tokens_file=tokens, allowed_origins=(page,)) as server:
        asked = {
            "Origin": page,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": KEY.lower(),
        }
        preflight = server.ask("OPTIONS", "/v1/jobs", headers=asked)
        assert preflight.status_code == 400
        allowed = preflight.headers["access-control-allow-headers"].lower()
        assert KEY.lower() not in allowed
        browser = sign_in(server, "a")
        read = server.ask("GET", "/v1/jobs", headers={**browser.reads, "Origin": page})
        assert read.status_code == 401
        assert "access-control-allow-credentials" not in read.headers


def test_no_get_changes_anything(site: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cookie permits every GET, so none may write."""
    browser, server = sign_in(site.server, "a"), site.server
    status(server, browser.reads)  # the id of the deployment is created once
    database, wrote = server.context.runtime.database, []
    write, write_sync = database.write, database.write_sync

    def noticing(real: Any) -> Any:
        def noted(work: Any) -> Any:
            if logging_setup.request_id.get():
                wrote.append(path)
            return real(work)

        return noted

    monkeypatch.setattr(database, "write", noticing(write))
    monkeypatch.setattr(database, "write_sync", noticing(write_sync))
    path = "/v1/jobs"
    server.ask("POST", path, headers=bearer("a"), json=JOB)
    assert wrote == [path], "writes are noticed"
    wrote.clear()
    values = {"job_id": site.job_id, "artifact_id": site.artifact_id, "step": "10"}
    routes = [
        route
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute) and route.methods and "GET" in route.methods
    ]
    assert len(routes) > 60
    for route in routes:
        path = re.sub(r"{(\w+)(:path)?}", lambda m: values.get(m[1], "x"), route.path)
        answer = server.ask("GET", path, headers=browser.reads)
        assert answer.status_code < 500 or path == "/readyz", (path, answer.text)
    assert wrote == ["/v1/downloads/x"], "which takes a secret instead of a cookie"


def test_the_names_of_two_servers_cookies_differ(server: LiveServer, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(line("ann", "a"))
    with serving(tmp_path / "home", tokens_file=tokens) as other:
        here, there = sign_in(server, "a"), sign_in(other, "a")
        assert here.name != there.name
        both = {"Cookie": f"{there.reads['Cookie']}; {here.reads['Cookie']}"}
        assert [status(one, both) for one in (server, other)] == [200, 200]
        assert status(other, here.reads) == 401


def test_the_token_of_the_home_signs_in_a_browser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path / "home") as server:
        token = written.ensure(server.settings.home)
        assert server.ask("POST", "/session", headers=bearer("x")).status_code == 401
        monkeypatch.setattr(local_callers, "is_of_own_user", lambda request: False)
        browser = sign_in(server, token)
        assert status(server, browser.reads) == 200
        made = server.ask("POST", "/v1/jobs", headers=browser.writes, json=JOB)
        assert made.json()["owner"] == "default"
        home_token.path_in(server.settings.home).unlink()
        assert status(server, browser.reads) == 401
        written.ensure(server.settings.home)
        assert status(server, browser.reads) == 401


def test_a_server_that_asks_for_no_token_signs_nobody_in(tmp_path: Path) -> None:
    with serving(tmp_path / "home", open_to_local_users=True) as server:
        for headers in ({}, bearer("x")):
            assert server.ask("POST", "/session", headers=headers).status_code == 401


@pytest.mark.parametrize(
    ("before", "character", "after"),
    [
        ("a", "\u200b", ""),
        ("", "\ufeff", "a"),
        ("tok", "\u00a0", "en"),
        ("tok", "\u00ad", "en"),
        ("schlüssel", "\u2060", "x"),
        ("a", "\u3164", ""),
    ],
)
def test_a_token_with_an_invisible_character_is_refused_with_this_reason(
    server: LiveServer, tokens: Path, before: str, character: str, after: str
) -> None:
    token = f"{before}{character}{after}"
    tokens.write_text(line("ann", "a") + line("eve", token))
    headers = {"Authorization": f"Bearer {token}".encode()}
    for method, path in (("GET", "/v1/jobs"), ("POST", "/session")):
        answer = server.ask(method, path, headers=headers)
        assert answer.status_code == 401
        detail = answer.json()["detail"]
        assert f"(U+{ord(character):04X} " in detail
        assert detail.endswith(f" at position {len(before) + 1}")
        assert "copy the token again" in answer.json()["hint"]


def test_a_token_may_have_any_visible_characters(server: LiveServer, tokens: Path) -> None:
    tokens.write_text(line("ann", "a") + line("eve", "Schlüssel 鍵 🔑"))
    headers = {"Authorization": "Bearer Schlüssel 鍵 🔑".encode()}
    answer = server.ask("POST", "/v1/jobs", headers=headers, json=JOB)
    assert answer.json()["owner"] == "eve"
