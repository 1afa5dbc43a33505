"""/v1/webhooks: who can create, see and change webhooks, and where bad input is."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from service.domain.cursors import encode_cursor
from service.webhooks import service
from tests.unit.api.matrix import check, held
from tests.unit.api.serving import LiveServer, serving

URL = "https://93.184.216.34/hook"
PRIVATE = "http://127.0.0.1:9/hook"
CLIENTS: dict[LiveServer, httpx.Client] = {}
"""One client per server for all tests, because creating a client takes longer than a call."""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server on which ann is an admin, but bob and eve are not."""
    home = tmp_path_factory.mktemp("webhooks")
    hashes = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("ann", "bob", "eve")}
    lines = (f"{name}:{value}{':admin' * (name == 'ann')}\n" for name, value in hashes.items())
    (home / "tokens").write_text("".join(lines))
    settings: dict[str, Any] = {"webhook_private_hosts": ["127.0.0.1"]}
    with (
        serving(home / "home", tokens_file=home / "tokens", **settings) as server,
        server.client() as client,
    ):
        CLIENTS[server] = client
        yield server


def ask(
    server: LiveServer, name: str, method: str, path: str = "", **options: Any
) -> httpx.Response:
    headers = {"Authorization": f"Bearer {name}"}
    return CLIENTS[server].request(method, f"/v1/webhooks{path}", headers=headers, **options)


def made(server: LiveServer, name: str = "bob", **fields: Any) -> dict[str, Any]:
    response = ask(server, name, "POST", json={"url": URL, **fields})
    assert response.status_code == 201, response.text
    hook: dict[str, Any] = response.json()
    assert response.headers["location"] == f"/v1/webhooks/{hook['id']}"
    return hook


def test_a_webhook_tells_its_secret_once(guarded: LiveServer) -> None:
    hook = made(guarded, states=["FAILED"], labels={"team": "vision"})
    assert hook["secret"].startswith("whsec_")
    assert (hook["states"], hook["labels"], hook["format"]) == (
        ["FAILED"],
        {"team": "vision"},
        "json",
    )
    shown = ask(guarded, "bob", "GET", f"/{hook['id']}").json()
    assert shown == {**hook, "secret": None}
    assert shown in ask(guarded, "bob", "GET").json()["items"]
    assert made(guarded)["states"] == ["SUCCEEDED", "FAILED", "CANCELLED"]


def test_a_webhook_is_seen_and_changed_by_its_owner_and_admins_alone(guarded: LiveServer) -> None:
    hook = made(guarded)
    hook_path = f"/{hook['id']}"
    calls: list[tuple[str, str, dict[str, Any]]] = [
        ("GET", hook_path, {}),
        ("GET", f"{hook_path}/deliveries", {}),
        ("POST", f"{hook_path}/test", {}),
        ("PATCH", hook_path, {"json": {"enabled": False}}),
        ("DELETE", hook_path, {}),
    ]
    for method, path, options in calls:
        check(guarded, ask(guarded, "eve", method, path, **options), 404, "webhook_not_found")
    assert hook["id"] not in [each["id"] for each in ask(guarded, "eve", "GET").json()["items"]]
    assert hook["id"] in [each["id"] for each in ask(guarded, "ann", "GET").json()["items"]]
    for method, path, options in calls:
        assert ask(guarded, "ann", method, path, **options).is_success
    check(guarded, ask(guarded, "bob", "GET", hook_path), 404, "webhook_not_found")


def test_only_admins_are_told_of_the_jobs_of_all(guarded: LiveServer) -> None:
    refused = ask(guarded, "bob", "POST", json={"url": URL, "all_users": True})
    check(guarded, refused, 403, "forbidden")
    assert made(guarded, "ann", all_users=True)["all_users"] is True


def test_a_disabled_webhook_takes_no_test_until_it_is_enabled(guarded: LiveServer) -> None:
    hook_path = f"/{made(guarded)['id']}"
    for _ in range(2):
        changed = ask(guarded, "bob", "PATCH", hook_path, json={"enabled": False}).json()
        assert (changed["enabled"], changed["disabled_reason"]["code"]) == (
            False,
            "disabled_by_user",
        )
    check(guarded, ask(guarded, "bob", "POST", f"{hook_path}/test"), 409, "webhook_disabled")
    for name, enabled_by in (("ann", "ann"), ("bob", None)):
        enabled = ask(guarded, name, "PATCH", hook_path, json={"enabled": True}).json()
        assert (enabled["enabled"], enabled["disabled_reason"]) == (True, None)
        assert enabled["enabled_by"] == enabled_by
    test = ask(guarded, "bob", "POST", f"{hook_path}/test")
    assert (test.status_code, test.json()["type"]) == (202, "webhook.test")
    assert ask(guarded, "bob", "GET", f"{hook_path}/deliveries?limit=1").json()["items"] == [
        test.json()
    ]


def test_a_user_has_so_many_webhooks_at_most(
    guarded: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_PER_OWNER", 2)
    for _ in range(2):
        last = made(guarded, "eve")
    response = ask(guarded, "eve", "POST", json={"url": URL})
    check(guarded, response, 409, "too_many_webhooks")
    assert ask(guarded, "eve", "DELETE", f"/{last['id']}").status_code == 204
    made(guarded, "eve")


@pytest.mark.parametrize(
    ("fields", "pointer", "said"),
    [
        ({"url": None}, "/url", ""),
        ({"url": "ftp://x.org/"}, "/url", "pattern"),
        ({"url": "https:///x"}, "/url", "pattern"),
        ({"url": "https://"}, "/url", "pattern"),
        ({"url": "https://user:word@x.org/"}, "/url", "pattern"),
        ({"url": "https://x.org/#part"}, "/url", "pattern"),
        ({"url": "https://x.org\\@evil.org/"}, "/url", "pattern"),
        ({"url": "https://x.org/\r\nX-Header: 1"}, "/url", "pattern"),
        ({"url": "https://x.org/a b"}, "/url", "pattern"),
        ({"url": "https://x.org:99999/"}, "/url", "port"),
        ({"url": "https://x.org:port/"}, "/url", "port"),
        ({"url": "https://[::1/"}, "/url", "host"),
        ({"url": "https://b\u00fccher.example/"}, "/url", "ASCII"),
        ({"url": "https://x.org/" + "x" * 2000}, "/url", "2000"),
        ({"states": []}, "/states", "at least 1"),
        ({"states": ["DONE"]}, "/states/0", "QUEUED"),
        ({"states": "FAILED"}, "/states", ""),
        ({"format": "xml"}, "/format", "slack"),
        ({"queue": "No"}, "/queue", "pattern"),
        ({"labels": {"a b": "c"}}, "/labels/a b", ""),
        ({"labels": {str(n): "x" for n in range(17)}}, "/labels", "16"),
        ({"all_users": "yes"}, "/all_users", ""),
        ({"secret": "mine"}, "/secret", "no field"),
    ],
)
def test_bad_fields_are_reported_with_their_pointer(
    guarded: LiveServer, fields: dict[str, Any], pointer: str, said: str
) -> None:
    before = held(guarded)
    response = ask(guarded, "bob", "POST", json={"url": URL, **fields})
    problem = check(guarded, response, 422, "invalid_document")
    assert problem["pointer"] == pointer
    assert said in problem["detail"]
    assert held(guarded) == before


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://10.0.0.7/x", "a private address"),
        ("https://169.254.169.254/latest", "a link-local address"),
        ("https://metadata.google.internal/", "credentials"),
        ("https://localhost/", "the machine itself"),
        ("https://[::ffff:10.0.0.1]/", "a private address"),
        ("https://0x7f000002/", "the machine itself"),
        ("http://93.184.216.34/hook", "only sent over https://"),
    ],
)
def test_an_address_that_may_not_be_connected_to_is_403(
    guarded: LiveServer, url: str, said: str
) -> None:
    before = held(guarded)
    response = ask(guarded, "bob", "POST", json={"url": url})
    problem = check(guarded, response, 403, "webhook_url_forbidden")
    assert problem["pointer"] == "/url"
    assert said in problem["detail"]
    assert "DRAY_WEBHOOK_PRIVATE_HOSTS" in problem["hint"]
    assert held(guarded) == before


def test_a_host_that_the_operator_names_is_taken_without_encryption(guarded: LiveServer) -> None:
    assert made(guarded, url=PRIVATE)["url"] == PRIVATE


def test_other_mistakes_are_told(guarded: LiveServer) -> None:
    unknown = ask(guarded, "bob", "POST", json={"url": URL, "queue": "nigth"})
    assert check(guarded, unknown, 422, "unknown_queue")["pointer"] == "/queue"
    hook_path = f"/{made(guarded)['id']}"
    assert (
        check(guarded, ask(guarded, "bob", "PATCH", hook_path, json={}), 422, "invalid_document")[
            "pointer"
        ]
        == "/enabled"
    )
    check(
        guarded,
        ask(guarded, "bob", "PATCH", hook_path, content=b"{"),
        415,
        "unsupported_media_type",
    )
    for query, code, status in (
        ("limit=0", "invalid_parameter", 422),
        ("limit=501", "invalid_parameter", 422),
        ("cursor=x", "bad_cursor", 400),
        *(
            (f"cursor={encode_cursor(hook_path[1:], forged)}", "bad_cursor", 400)
            for forged in (2**70, -(2**70), True)
        ),
        ("state=x", "invalid_parameter", 422),
    ):
        check(guarded, ask(guarded, "bob", "GET", f"{hook_path}/deliveries?{query}"), status, code)
    check(guarded, ask(guarded, "bob", "GET", "/webhook-none"), 404, "webhook_not_found")
    check(guarded, ask(guarded, "bob", "GET", "/%ff"), 404, "webhook_not_found")
