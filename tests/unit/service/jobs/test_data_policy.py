"""Checks, at submission, of the data that a job is allowed to read."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from dray.spec import JobSpec
from ray_workers.shared.node_needs import DataPolicy, ResultFile
from service.config import node_policies
from service.config.settings import Settings
from service.domain.errors import DataSourceForbidden
from service.jobs import data_policy


def job(source: str, tokenizer: str | None = None) -> JobSpec:
    document: dict[str, Any] = {"recipe": "language_model", "data": {"source": source}}
    document["data"]["format"] = "text"
    if tokenizer is not None:
        document["model"] = {"name": "gpt", "tokenizer": tokenizer}
    return JobSpec.model_validate(document)


async def test_each_source_of_examples_is_checked() -> None:
    secret = "http://169.254.169.254/a.jsonl"
    fine = "file:///a.jsonl"
    for data, pointer in (
        ({"sources": [{"source": fine}, {"source": secret}]}, "/data/sources/1/source"),
        ({"sources": [{"source": secret}]}, "/data/sources/0/source"),
        ({"source": fine, "validation": secret}, "/data/validation"),
    ):
        document = {"recipe": "fine_tuning", "model": {"base": "file:///b"}, "data": data}
        with pytest.raises(DataSourceForbidden) as raised:
            await data_policy.refuse_forbidden(JobSpec.model_validate(document), DataPolicy.open())
        assert raised.value.pointer == pointer


def answer_with(address: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Resolve all names to this address; return the list of resolved names."""
    asked = []

    def look_up(host: str, *_: Any) -> Any:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return asked


@pytest.mark.parametrize(
    "source",
    [
        "http://169.254.169.254/latest/meta-data",
        "http://2852039166/latest",
        "https://metadata.google.internal/computeMetadata",
        "http://localhost:8420/v1/jobs",
        "http://[::ffff:10.0.0.1]/x",
        "http://192.168.0.1./x",
    ],
)
async def test_what_lies_within_is_refused_by_its_url(source: str) -> None:
    with pytest.raises(DataSourceForbidden) as raised:
        await data_policy.refuse_forbidden(job(source), DataPolicy.open())
    assert raised.value.pointer == "/data/source"
    assert "DRAY_DATA_PRIVATE_HOSTS" in (raised.value.hint or "")
    with pytest.raises(DataSourceForbidden) as raised:
        await data_policy.refuse_forbidden(job("file:///t.txt", source), DataPolicy.open())
    assert raised.value.pointer == "/model/tokenizer"


@pytest.mark.parametrize(
    ("host", "address", "is_refused"),
    [
        ("git.example.org", "93.184.215.14", True),
        ("93.184.215.14", "93.184.215.14", True),
        ("git.example.org", "10.0.0.7", False),
        ("10.0.0.7", "10.0.0.7", False),
        ("named.example.org", "93.184.215.14", False),
    ],
)
async def test_a_repository_without_encryption_is_a_private_one(
    host: str, address: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(address, monkeypatch)
    policy = replace(DataPolicy.open(), private_hosts=("10.0.0.0/8", "named.example.org"))
    code = {"git": f"http://{host}/me/net.git", "commit": "a" * 40}
    spec = JobSpec.model_validate({"script": {"entrypoint": "train.py", "code": code}})
    if not is_refused:
        await data_policy.refuse_forbidden(spec, policy)
        return
    with pytest.raises(DataSourceForbidden, match="only over https://") as raised:
        await data_policy.refuse_forbidden(spec, policy)
    assert raised.value.pointer == "/script/code/git"


@pytest.mark.parametrize(
    ("field", "code"),
    [
        ("git", {"git": "https://169.254.169.254/a", "commit": "a" * 40}),
        ("url", {"url": "http://localhost/a.tar", "sha256": "a" * 64}),
    ],
)
async def test_code_is_not_fetched_from_within_either(field: str, code: dict[str, str]) -> None:
    spec = JobSpec.model_validate({"script": {"entrypoint": "train.py", "code": code}})
    with pytest.raises(DataSourceForbidden) as raised:
        await data_policy.refuse_forbidden(spec, DataPolicy.open())
    assert raised.value.pointer == f"/script/code/{field}"


def with_packages(environment: dict[str, Any]) -> JobSpec:
    return JobSpec.model_validate(
        {"script": {"entrypoint": "train.py"}, "environment": environment}
    )


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("https://169.254.169.254/x", "link-local"),
        ("HTTPS://localhost/x", "the machine itself"),
        ("http://93.184.215.14/x", "only over https://"),
        ("git+http://93.184.215.14/x", "only over https://"),
    ],
)
async def test_packages_come_from_public_hosts_and_encrypted(address: str, words: str) -> None:
    for field, environment in {
        "requirements": {"requirements": f"torch\na @ {address}\n"},
        "python_packages/0": {"python_packages": [f"a @ {address}"]},
        "index/url": {"index": {"url": address}},
    }.items():
        if field == "index/url" and not address.startswith("http"):
            continue  # rejected by the document itself
        with pytest.raises(DataSourceForbidden, match=words) as raised:
            await data_policy.refuse_forbidden(with_packages(environment), DataPolicy.open())
        assert raised.value.pointer == f"/environment/{field}"
    many = with_packages({"requirements": "".join(f"a @ https://8.8.8.{n}/\n" for n in range(30))})
    with pytest.raises(DataSourceForbidden, match="more than 20 hosts"):
        await data_policy.refuse_forbidden(many, DataPolicy.open())
    named = replace(DataPolicy.open(), private_hosts=("10.0.0.0/8", "index.lan"))
    for allowed in ("http://10.1.2.3/simple", "http://index.lan/simple", "https://8.8.8.8/simple"):
        spec = with_packages({"index": {"url": allowed}})
        await data_policy.refuse_forbidden(spec, named)


async def test_a_name_is_judged_by_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer_with("10.1.2.3", monkeypatch)
    with pytest.raises(DataSourceForbidden, match=r"10\.1\.2\.3 is a private address"):
        await data_policy.refuse_forbidden(job("https://data.example.org/t"), DataPolicy.open())
    for allowed in ("data.example.org", "10.0.0.0/8"):
        policy = replace(DataPolicy.open(), private_hosts=(allowed,))
        await data_policy.refuse_forbidden(job("https://data.example.org/t"), policy)
    answer_with("93.184.215.14", monkeypatch)
    await data_policy.refuse_forbidden(job("https://data.example.org/t"), DataPolicy.open())
    assert set(asked) == {"data.example.org"}


async def test_a_name_that_nobody_answers_for_is_left_to_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(*_: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    await data_policy.refuse_forbidden(job("https://data.example.org/t"), DataPolicy.open())

    answered = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: answered.wait(30) and [])
    monkeypatch.setattr(data_policy, "LOOKUP_TIMEOUT_S", 0.05)
    await data_policy.refuse_forbidden(job("https://data.example.org/t"), DataPolicy.open())
    answered.set()


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "/data", "/data/setsx/a", "/data/sets/%2e%2e/a", "/"]
)
async def test_files_outside_the_folders_are_refused(path: str) -> None:
    policy = replace(DataPolicy.open(), file_roots=("/data/sets", "/more"))
    with pytest.raises(DataSourceForbidden, match="is outside the folders") as raised:
        await data_policy.refuse_forbidden(job(f"file://{path}"), policy)
    assert raised.value.hint == "jobs may read these folders: /data/sets, /more"


async def test_files_within_the_folders_are_not() -> None:
    policy = replace(DataPolicy.open(), file_roots=("/data/sets/", "/more"))
    for path in ("/data/sets/a", "/data/sets", "/more/./b"):
        await data_policy.refuse_forbidden(job(f"file://{path}"), policy)


async def test_with_tokens_no_file_is_read_unless_folders_are_named(tmp_path: Path) -> None:
    closed = node_policies.data_policy(Settings(home=tmp_path, tokens_file=tmp_path / "tokens"))
    with pytest.raises(DataSourceForbidden, match="does not allow jobs to read files on the nodes"):
        await data_policy.refuse_forbidden(job("file:///data/a"), closed)
    opened = Settings(home=tmp_path, tokens_file=tmp_path / "tokens", data_roots=("/data",))
    await data_policy.refuse_forbidden(job("file:///data/a"), node_policies.data_policy(opened))
    anybody = node_policies.data_policy(Settings(home=tmp_path))
    await data_policy.refuse_forbidden(job("file:///data/a"), anybody)


async def test_the_settings_become_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "ROOTS": "/a, /b/../c",
        "PRIVATE_HOSTS": "data.internal, 10.0.0.0/8",
        "CACHE_DIR": "/cache",
        "CACHE_LIMIT_BYTES": str(1 << 30),
        "CREDENTIALS_DIR": "/keys",
    }.items():
        monkeypatch.setenv(f"DRAY_DATA_{name}", value)
    monkeypatch.setenv("DRAY_S3_ENDPOINT_URL", "https://minio.internal:9000")
    result = (ResultFile("config.json", "s3://b/c", 9, "a" * 64),)
    policy = node_policies.data_policy(Settings(home=tmp_path), result=result)
    plain = vars(DataPolicy.open())
    same = {name for name, value in vars(policy).items() if value == plain[name]}
    assert same == {"licensed"}, "the models of the catalogue are no setting"
    assert policy == DataPolicy(
        cache_dir="/cache",
        cache_limit_bytes=1 << 30,
        private_hosts=("data.internal", "10.0.0.0/8"),
        file_roots=("/a", "/b/../c"),
        credentials_dir="/keys",
        s3_endpoint_url="https://minio.internal:9000",
        result=result,
        uploads_url=f"{(tmp_path / 'storage').as_uri()}/uploads",
        licensed=(),
    )
    monkeypatch.setenv("DRAY_DATA_PRIVATE_HOSTS", "10.0.0.0/99")
    with pytest.raises(ValidationError, match="is not a host name, address or network"):
        Settings(home=tmp_path)
