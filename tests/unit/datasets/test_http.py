"""Files from web servers are fetched once, checked, and never read from forbidden addresses."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from dray.spec import Data
from ray_workers.datasets import open_table, open_text
from ray_workers.datasets.sources import http, source
from ray_workers.datasets.sources.credentials import headers_for
from ray_workers.shared import net_policy
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.errors import DataError, SourceUnavailableError
from tests.unit.datasets.web import Answer, Web, serving

CSV = b"x,y\n1,a\n2,b\n3,a\n"


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setattr(source, "FIRST_PAUSE_S", 0.001)
    with serving() as server:
        yield server


@pytest.fixture
def near(policy: DataPolicy) -> DataPolicy:
    """Allow the address of the test's own server."""
    return replace(policy, private_hosts=("127.0.0.1",))


def read(url: str, policy: DataPolicy, **options: Any) -> Any:
    data = Data(source=url, format="csv", target="y", **options)
    return open_table(data, policy, classifies=True)


def test_a_file_is_fetched_once_while_it_stays_the_same(web: Web, near: DataPolicy) -> None:
    web.answers["/t.csv"] = Answer(CSV, headers={"ETag": '"1"'})
    first = read(web.url("/t.csv"), near, size_bytes=16, sha256=hashlib.sha256(CSV).hexdigest())
    assert first.target.tolist() == [0, 1, 0]
    asked = web.count("/t.csv")
    again = read(web.url("/t.csv"), near)
    assert again.fingerprint == first.fingerprint
    assert web.count("/t.csv") == asked + 1, "only the headers are asked for"

    web.answers["/t.csv"] = Answer(CSV + b"4,b\n", headers={"ETag": '"2"'})
    assert len(read(web.url("/t.csv"), near).target) == 4
    web.answers["/copy.csv"] = Answer(CSV, headers={"ETag": '"x"'})
    assert read(web.url("/copy.csv"), near).fingerprint == first.fingerprint


def test_a_server_without_versions_is_believed_for_a_while(
    web: Web, near: DataPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.answers["/t.csv"] = Answer(CSV)
    first = read(web.url("/t.csv"), near)
    web.answers["/t.csv"] = Answer(CSV.replace(b"3", b"9"))
    assert read(web.url("/t.csv"), near).fingerprint == first.fingerprint
    monkeypatch.setattr(http, "UNVERSIONED_TRUSTED_S", -1.0)
    assert read(web.url("/t.csv"), near).numeric[-1].tolist() == [9.0]


def test_a_transfer_that_breaks_off_is_tried_again(web: Web, near: DataPolicy) -> None:
    def answer(before: int) -> Answer:
        kinds = [Answer(status=503), Answer(CSV), Answer(CSV[:5], announced=len(CSV)), Answer(CSV)]
        return kinds[min(before, 3)]

    web.answers["/t.csv"] = answer
    assert len(read(web.url("/t.csv"), near).target) == 3


def test_a_transfer_that_never_ends_well_is_given_up(web: Web, near: DataPolicy) -> None:
    web.answers["/t.csv"] = Answer(CSV[:5], announced=len(CSV), headers={"ETag": '"1"'})
    with pytest.raises(
        SourceUnavailableError,
        match=r"t\.csv: the server closed the connection too early; tried 4",
    ):
        read(web.url("/t.csv"), near)
    assert not list(Path(near.cache_dir or "", "objects").iterdir())
    web.answers["/t.csv"] = Answer(status=500)
    with pytest.raises(
        SourceUnavailableError, match="the server responded with 500; tried 4 times"
    ):
        read(web.url("/t.csv"), near)


@pytest.mark.parametrize(
    ("answer", "options", "fault"),
    [
        (Answer(status=404), {}, "the file does not exist (404)"),
        (Answer(status=401), {}, "requires credentials (401)"),
        (Answer(status=204), {}, "the server responded with 204 instead of 200"),
        (Answer(CSV), {"size_bytes": 17}, "has 16 bytes, but data.size_bytes is 17"),
        (Answer(CSV), {"sha256": "a" * 64}, f"but data.sha256 is {'a' * 64}"),
        (Answer(b""), {}, "is an empty file"),
        (Answer(status=302, headers={"Location": "/t.csv"}), {}, "redirects more than 5 times"),
        (Answer(status=302, headers={"Location": "file:///etc/passwd"}), {}, "to file://"),
        (Answer(status=302, headers={"Location": "gopher://x/"}), {}, "to gopher://"),
    ],
)
def test_errors_name_the_fault_of_a_web_source(
    answer: Answer, options: dict[str, Any], fault: str, web: Web, near: DataPolicy
) -> None:
    web.answers["/t.csv"] = answer
    with pytest.raises(DataError) as raised:
        read(web.url("/t.csv"), near, **options)
    assert fault in str(raised.value)


def test_a_source_larger_than_the_cache_is_not_fetched(web: Web, near: DataPolicy) -> None:
    web.answers["/t.csv"] = Answer(CSV * 1000)
    with pytest.raises(DataError, match="has more than 1,000 bytes, the limit of a node's"):
        read(web.url("/t.csv"), replace(near, cache_limit_bytes=1000))


def test_a_server_that_announces_no_length_is_read_to_the_limit(web: Web, near: DataPolicy) -> None:
    web.answers["/t.csv"] = Answer(CSV, announced=-1)
    assert len(read(web.url("/t.csv"), near).target) == 3
    web.answers["/long.csv"] = Answer(CSV * 1000, announced=-1)
    small = replace(near, cache_limit_bytes=1000)
    with pytest.raises(DataError, match="has more than 1,000 bytes, the limit of a node's"):
        read(web.url("/long.csv"), small)
    assert list(Path(near.cache_dir or "", "scratch").iterdir()) == []


def test_redirects_are_followed_within_what_is_allowed(web: Web, near: DataPolicy) -> None:
    web.answers["/t.csv"] = Answer(CSV)
    web.answers["/moved.csv"] = Answer(status=307, headers={"Location": "/t.csv"})
    assert len(read(web.url("/moved.csv"), near).target) == 3


def test_no_redirect_leads_off_encryption(policy: DataPolicy) -> None:
    origin = http.HttpOrigin("https://example.org/t.csv", policy, {}, None)
    assert origin._next("http://example.org/a", "https://x.org/b") == "https://x.org/b"
    assert origin._next("https://example.org/a/b", "../c") == "https://example.org/c"
    with pytest.raises(DataError, match="redirects from https:// to http://"):
        origin._next("https://example.org/a", "http://example.org/a")


@pytest.mark.parametrize(
    "target", ["http://localhost:{}/t.csv", "http://169.254.169.254/t.csv", "http://[::1]:{}/t.csv"]
)
def test_no_redirect_leads_within(target: str, web: Web, near: DataPolicy) -> None:
    web.answers["/t.csv"] = Answer(CSV)
    location = target.format(web.port)
    web.answers["/moved.csv"] = Answer(status=302, headers={"Location": location})
    with pytest.raises(
        DataError, match=r"reading from .* is not allowed: .*DRAY_DATA_PRIVATE_HOSTS"
    ):
        read(web.url("/moved.csv"), near)
    assert web.count("/t.csv") == 0


def test_a_name_that_leads_within_is_found_out_when_it_is_connected_to(
    web: Web, policy: DataPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address counts, not the name with which the job was submitted."""
    look_up = socket.getaddrinfo

    def rebound(host: Any, *rest: Any, **options: Any) -> Any:
        return look_up("127.0.0.1" if host == "data.example.org" else host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", rebound)
    web.answers["/t.csv"] = Answer(CSV)
    url = web.url("/t.csv", host="data.example.org")
    with pytest.raises(DataError, match=r"127\.0\.0\.1 is the machine itself"):
        read(url, policy)
    assert web.asked == []
    allowed = replace(policy, private_hosts=("data.example.org",))
    assert len(read(url, allowed).target) == 3


@pytest.mark.parametrize("host", ["127.0.0.1", "0x7f000001"])
def test_the_connection_itself_is_guarded(
    host: str, web: Web, policy: DataPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Literal addresses use no resolver, so this is checked at the socket alone."""
    monkeypatch.setattr(net_policy, "refused_host", lambda host, allowed: None)
    web.answers["/t.csv"] = Answer(CSV)
    with pytest.raises(DataError, match=r"127\.0\.0\.1 is the machine itself"):
        read(web.url("/t.csv", host=host), policy)
    assert web.asked == []


def test_a_proxy_of_the_environment_is_not_asked(
    web: Web, policy: DataPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", web.url("/"))
    monkeypatch.setenv("http_proxy", web.url("/"))
    with pytest.raises(DataError, match=r"reading from .* is not allowed"):
        read("http://169.254.169.254/t.csv", policy)
    assert web.asked == []


def for_loopback(web: Web) -> dict[str, Any]:
    """Headers for this server, as in a file of credentials."""
    host = urlsplit(web.url("/")).netloc
    return {"headers": {"X-Key": "s3cret"}, "hosts": [host], "plain_http": True}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"hosts": None}, "the credentials have headers but no hosts"),
        ({"hosts": "127.0.0.1"}, "the credentials have headers but no hosts"),
        ({"hosts": ["0.0.1", "example.org"]}, "not for 127.0.0.1"),
        ({"hosts": ["127.0.0.1"]}, r"not for 127.0.0.1:\d+: .* without a port means port 80"),
        ({"hosts": ["127.0.0.1:1"]}, "not for 127.0.0.1"),
        ({"plain_http": False}, "only for https://"),
    ],
)
def test_credentials_are_sent_to_no_host_that_their_file_does_not_name(
    web: Web, near: DataPolicy, tmp_path: Path, changed: dict[str, Any], reason: str
) -> None:
    web.answers["/t.csv"] = Answer(CSV)
    folder = credentials(tmp_path / "keys", for_loopback(web) | changed)
    with pytest.raises(DataError, match=reason) as caught:
        read(web.url("/t.csv"), replace(near, credentials_dir=folder), credentials="lab")
    assert "s3cret" not in str(caught.value)
    assert web.asked == []


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("https://data.example.org/t.csv", ["DATA.example.org"]),
        ("https://data.example.org:443/t.csv", ["data.example.org"]),
        ("https://data.example.org/t.csv", ["data.example.org:443"]),
        ("https://data.example.org:8443/t.csv", ["data.example.org:8443"]),
        ("https://[2001:db8::1]/t.csv", ["2001:db8::1"]),
        ("https://[2001:db8::1]:8443/t.csv", ["[2001:db8::1]:8443"]),
    ],
)
def test_a_listed_host_is_one_at_its_port(url: str, hosts: list[str]) -> None:
    options = {"headers": {"X-Key": "s3cret"}, "hosts": hosts}
    assert headers_for(url, options) == {"X-Key": "s3cret"}


def credentials(folder: Path, options: dict[str, Any], mode: int = 0o600) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "lab.json").write_text(json.dumps(options))
    (folder / "lab.json").chmod(mode)
    return str(folder)


def test_credentials_go_to_the_source_alone(
    web: Web, near: DataPolicy, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """They are neither sent to the target of a redirect nor shown in an error."""
    folder = credentials(tmp_path / "keys", for_loopback(web))
    known = replace(near, credentials_dir=folder)
    web.answers["/t.csv"] = Answer(CSV)
    read(web.url("/t.csv"), known, credentials="lab")
    assert {headers["X-Key"] for _, headers in web.asked} == {"s3cret"}

    with serving() as other:
        other.answers["/t.csv"] = Answer(CSV)
        location = {"Location": other.url("/t.csv")}
        web.answers["/moved.csv"] = Answer(status=302, headers=location)
        read(web.url("/moved.csv"), known, credentials="lab")
        assert {headers["X-Key"] for _, headers in other.asked} == {None}

    web.answers["/bad.csv"] = Answer(status=403)
    with pytest.raises(DataError) as raised:
        read(web.url("/bad.csv"), known, credentials="lab")
    assert "s3cret" not in "".join(map(str, (raised.value, raised.value.__cause__)))
    kept = b"".join(
        path.read_bytes() for path in Path(near.cache_dir or "").rglob("*") if path.is_file()
    )
    assert b"s3cret" not in kept
    assert "s3cret" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("mode", "content", "fault"),
    [
        (0o644, {}, "can be read by other users of this node"),
        (0o600, [], "must be a JSON object with only the keys key, secret"),
        (0o600, {"client_kwargs": {}}, "must be a JSON object with only the keys key, secret"),
    ],
)
def test_credentials_that_are_not_used(
    mode: int, content: Any, fault: str, near: DataPolicy, tmp_path: Path
) -> None:
    folder = credentials(tmp_path / "keys", content, mode)
    with pytest.raises(DataError) as raised:
        read("https://example.org/t.csv", replace(near, credentials_dir=folder), credentials="lab")
    assert fault in str(raised.value)


def test_credentials_that_are_not_there(near: DataPolicy, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="this cluster has no credentials folder"):
        read("https://example.org/t.csv", near, credentials="lab")
    known = replace(near, credentials_dir=str(tmp_path))
    with pytest.raises(DataError, match="its file can't be read on this node: No such file"):
        read("https://example.org/t.csv", known, credentials="lab")


def test_a_tokenizer_may_come_from_elsewhere(
    web: Web, near: DataPolicy, policy: DataPolicy, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("text")
    data = Data(source=(tmp_path / "a.txt").as_uri())
    with pytest.raises(DataError, match=r"reading from .* is not allowed"):
        open_text(data, policy, web.url("/tokenizer.json"))
    web.answers["/tokenizer.json"] = Answer(b"{}")
    with pytest.raises(DataError, match=r"tokenizer\.json: is not a readable tokenizer\.json"):
        open_text(data, near, web.url("/tokenizer.json"))
