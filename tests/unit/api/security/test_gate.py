"""Host names and web pages that the server answers, and those that it must refuse."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from api.security.gate import Gate
from service.config.settings import Settings
from tests.unit.api.serving import LiveServer, serving

EVIL = "https://evil.example.org"
PAGE = "https://dray.example.org"


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server without tokens, but with lists of hosts and origins."""
    home = tmp_path_factory.mktemp("home")
    lists = {"allowed_hosts": ("gpu.example.org",), "allowed_origins": (PAGE,)}
    with serving(home, **lists) as server:
        yield server


def passes(gate: Gate, **headers: str) -> bool:
    return gate.check({name.replace("_", "-"): value for name, value in headers.items()}) is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.example.org",
        "evil.example.org:8420",
        "127.0.0.1.nip.io",
        "127.0.0.1@evil.example.org",
        "localhost@127.0.0.1",
        "localhost.",
        "[",
        "[::1",
        "a b",
        "a/b",
        "127.0.0.1:x",
        "api",
        "ai:8420",
    ],
)
def test_without_tokens_a_name_from_the_dns_is_refused(http: httpx.Client, host: str) -> None:
    response = http.get("/v1/jobs", headers={"Host": host})
    assert (response.status_code, response.json()["code"]) == (403, "forbidden")
    assert "DRAY_ALLOWED_HOSTS" in response.json()["hint"]


@pytest.mark.parametrize(
    "host", ["localhost:8420", "127.0.0.1:1", "[::1]:8420", "a.localhost", "LOCALHOST"]
)
def test_without_tokens_names_of_this_machine_are_answered(http: httpx.Client, host: str) -> None:
    assert http.get("/v1/jobs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": EVIL},
        {"Origin": "null"},
        {"Origin": ""},
        {"Origin": "http://localhost:3000"},
        {"Origin": EVIL, "Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": EVIL, "Content-Type": "text/plain"},
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
def test_without_tokens_a_web_page_elsewhere_can_do_nothing(
    http: httpx.Client, server: LiveServer, headers: dict[str, str], method: str
) -> None:
    job_id = server.submit()
    for path in (f"/v1/jobs/{job_id}/cancel", f"/v1/jobs/{job_id}", "/v1/jobs", "/metrics"):
        response = http.request(method, path, headers=headers)
        assert response.status_code == 403, path
        assert "access-control-allow-origin" not in response.headers
    assert http.get(f"/v1/jobs/{job_id}").json()["state"] == "QUEUED"


def test_without_tokens_the_servers_own_pages_and_programs_are_answered(
    http: httpx.Client, server: LiveServer
) -> None:
    path = f"/v1/jobs/{server.submit()}/cancel"
    own = {"Origin": server.url, "Sec-Fetch-Site": "same-origin"}
    for headers in ({}, own, {"Sec-Fetch-Site": "none"}):
        assert http.post(path, headers=headers).status_code == 202


def test_probes_are_answered_under_any_name(http: httpx.Client) -> None:
    for path in ("/healthz", "/readyz"):
        assert http.get(path, headers={"Host": "node-7.cluster.example.org"}).status_code == 200


def test_a_listed_name_is_answered_besides_those_of_this_machine(listed: LiveServer) -> None:
    for host, status in (
        ("gpu.example.org", 200),
        ("GPU.example.org:443", 200),
        ("127.0.0.1", 200),
        ("evil.gpu.example.org", 403),
    ):
        response = listed.ask("GET", "/v1/jobs", headers={"Host": host})
        assert response.status_code == status, host


def test_a_listed_page_may_use_the_api_and_read_what_it_needs(listed: LiveServer) -> None:
    asked = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,idempotency-key",
    }
    preflight = listed.ask("OPTIONS", "/v1/jobs", headers=asked)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == PAGE
    called = listed.ask("GET", "/v1/jobs", headers={"Origin": PAGE, "Sec-Fetch-Site": "cross-site"})
    assert called.status_code == 200
    assert called.headers["access-control-allow-origin"] == PAGE
    assert "ETag" in called.headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in called.headers


def test_a_page_that_is_not_listed_is_told_nothing(listed: LiveServer) -> None:
    asked = {"Origin": EVIL, "Access-Control-Request-Method": "POST"}
    for response in (
        listed.ask("OPTIONS", "/v1/jobs", headers=asked),
        listed.ask("GET", "/v1/jobs", headers={"Origin": EVIL}),
    ):
        assert response.status_code == 403
        assert "access-control-allow-origin" not in response.headers


def test_with_tokens_any_name_and_page_passes_until_there_are_lists() -> None:
    gate = Gate(has_tokens=True)
    assert passes(gate, host="dray.example.org", origin=EVIL)
    assert passes(gate, host="dray.example.org", sec_fetch_site="cross-site")
    only_hosts = Gate(has_tokens=True, hosts=["dray.example.org"])
    assert passes(only_hosts, host="dray.example.org", origin=EVIL)
    assert not passes(only_hosts, host="evil.example.org")
    only_origins = Gate(has_tokens=True, origins=[f"{PAGE}/"])
    assert passes(only_origins, host="any.example.org", origin=PAGE)
    assert not passes(only_origins, host="any.example.org", origin=EVIL)


def test_a_program_that_names_no_host_is_answered() -> None:
    assert passes(Gate(has_tokens=False))


def test_the_lists_are_set_with_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAY_ALLOWED_HOSTS", "a.example.org, b.example.org")
    monkeypatch.setenv("DRAY_ALLOWED_ORIGINS", "https://a.example.org")
    settings = Settings()
    assert settings.allowed_hosts == ("a.example.org", "b.example.org")
    assert settings.allowed_origins == ("https://a.example.org",)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HOSTS", "https://a.example.org"),
        ("HOSTS", "a.example.org:80"),
        ("HOSTS", "a,,b"),
        ("ORIGINS", "a.example.org"),
        ("ORIGINS", "null"),
        ("ORIGINS", "https://a.example.org/path"),
    ],
)
def test_a_list_that_could_never_match_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"DRAY_ALLOWED_{name}", value)
    with pytest.raises(ValueError, match="allowed_"):
        Settings()
