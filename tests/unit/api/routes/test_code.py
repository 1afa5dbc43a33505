"""Code uploads over HTTP."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path
from typing import Any

import httpx
import pytest

import dray
from dray.errors import CodeNotFound, CodeUnfit
from tests.unit.api.matrix import check
from tests.unit.api.serving import LiveServer, serving

PROGRAM = b"print('hello')\n"


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def described(**files: bytes) -> dict[str, Any]:
    return {
        "files": [
            {"path": name.replace("_", "."), "size_bytes": len(data), "parts": [sha(data)]}
            for name, data in files.items()
        ]
    }


def tar(**members: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return packed.getvalue()


def sparse(size: int) -> bytes:
    """Return a member of this size whose bytes are not contained in the archive."""
    member = bytearray(tarfile.TarInfo(sha(b"x")).tobuf(tarfile.GNU_FORMAT))
    member[156:157] = tarfile.GNUTYPE_SPARSE
    member[386:410] = b"%011o " % 0 * 2
    member[483:495] = b"%011o " % size
    member[148:156] = b"%06o\0 " % sum(bytes(member[:148]) + b" " * 8 + bytes(member[156:]))
    return bytes(member)


def named(name: bytes) -> bytes:
    return tar(**{name.decode(errors="surrogateescape"): b"x"})


LONG_NAME = tarfile.TarInfo("x" * 101).tobuf(tarfile.GNU_FORMAT)[:1024]


def send_parts(client: httpx.Client, content: bytes, kind: str = "application/x-tar") -> Any:
    return client.post("/v1/code/parts", content=content, headers={"Content-Type": kind})


def test_code_is_sent_by_its_parts_and_read_back_by_its_job(http: httpx.Client) -> None:
    document = described(train_py=PROGRAM, other_py=b"x = 1")
    first = http.post("/v1/code", json=document).json()
    assert (first["is_complete"], len(first["missing"])) == (False, 2)
    assert send_parts(http, tar(**{sha(PROGRAM): PROGRAM})).status_code == 204
    assert send_parts(http, b"x = 1", "application/octet-stream").status_code == 204
    code = http.post("/v1/code", json=document).json()
    assert (code["is_complete"], code["missing"], code["num_files"]) == (True, [], 2)
    job = {"script": {"code": code["id"], "entrypoint": "train.py"}}
    submitted = http.post("/v1/jobs", json=job).json()
    files = http.get(f"/v1/jobs/{submitted['id']}/code").json()
    assert [file["path"] for file in files["items"]] == ["other.py", "train.py"]
    archive = http.get(f"/v1/jobs/{submitted['id']}/code/archive").content
    with tarfile.open(fileobj=io.BytesIO(archive)) as unpacked:
        read = {m.name: unpacked.extractfile(m).read() for m in unpacked}  # type: ignore[union-attr]
    assert read == {"other.py": b"x = 1", "train.py": PROGRAM}


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(
    ("path", "kind", "body", "status", "code"),
    [
        ("/v1/code", "application/json", b"{}", 422, "invalid_document"),
        ("/v1/code", "application/json", b'{"files": []}', 422, "invalid_document"),
        ("/v1/code", "text/plain", b"{}", 415, "unsupported_media_type"),
        ("/v1/code/parts", "application/json", b"{}", 415, "unsupported_media_type"),
        ("/v1/code/parts", "application/x-tar", b"no archive", 422, "bad_upload"),
        ("/v1/code/parts", "application/x-tar", tar(**{sha(b"x"): b"y"}), 422, "bad_upload"),
        ("/v1/code/parts", "application/x-tar", tar(**{"../x": b"y"}), 422, "bad_upload"),
        ("/v1/code/parts", "application/x-tar", sparse(4 << 20), 422, "bad_upload"),
        ("/v1/code/parts", "application/x-tar", named(b"\xff"), 422, "bad_upload"),
        ("/v1/code/parts", "application/x-tar", LONG_NAME * 10_000, 422, "bad_upload"),
        ("/v1/code/parts", "application/octet-stream", b"", 422, "bad_upload"),
        ("/v1/code/parts", "application/octet-stream", bytes((4 << 20) + 1), 422, "bad_upload"),
        ("/v1/code/parts", "application/x-tar", bytes((16 << 20) + 1), 413, "body_too_large"),
    ],
)
def test_a_bad_upload_is_refused_and_stores_nothing(
    site: LiveServer,
    ann: httpx.Client,
    path: str,
    kind: str,
    body: bytes,
    status: int,
    code: str,
) -> None:
    check(site, ann.post(path, content=body, headers={"Content-Type": kind}), status, code)


def test_a_sparse_part_and_a_long_name_are_refused_in_few_words(http: httpx.Client) -> None:
    # This member has the correct hash, but is 4 MiB of zeros in a request of 512 bytes.
    zeros = bytearray(sparse(4 << 20))
    zeros[:64] = sha(bytes(4 << 20)).encode()
    zeros[148:156] = b"%06o\0 " % sum(bytes(zeros[:148]) + b" " * 8 + bytes(zeros[156:]))
    refused = send_parts(http, bytes(zeros))
    assert (refused.status_code, "not a regular file" in refused.text) == (422, True)
    refused = send_parts(http, tar(**{"x" * 100_000: b"x"}))
    assert (refused.status_code, len(refused.content) < 1000) == (422, True)


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("path", ["../a", "/a", "a//b", "a\\b", "a\u202eb", "a\nb"])
def test_a_path_that_leads_out_is_refused(site: LiveServer, ann: httpx.Client, path: str) -> None:
    document = {"files": [{"path": path, "size_bytes": 0, "parts": []}]}
    problem = check(site, ann.post("/v1/code", json=document), 422, "bad_upload")
    assert problem["pointer"] == "/files/0/path"


def test_a_folder_goes_there_and_back_by_the_sdk(server: LiveServer, tmp_path: Path) -> None:
    program = b"print('by the SDK')"  # not uploaded before
    folder = tmp_path / "job"
    for name, data in {"train.py": program, "pkg/a.bin": bytes(9 << 20), "pkg/empty": b""}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / "run.sh").write_text("true")
    (folder / "run.sh").chmod(0o700)
    seen: list[tuple[int, int]] = []
    with dray.Client(server.url) as client:
        code = client.upload_code(folder, on_progress=lambda *at: seen.append(at))
        assert code.is_complete
        # The file contains the same 4 MiB part of zeros twice. It is sent only once.
        assert seen[-1] == (len(program) + (4 << 20) + (1 << 20) + 4,) * 2
        seen.clear()
        assert client.upload_code(folder) == code
        (folder / "train.py").write_bytes(program * 2)
        assert client.upload_code(folder, on_progress=lambda *at: seen.append(at)).id != code.id
        assert seen == [(len(program) * 2,) * 2]
        script = {"code": code.id, "entrypoint": "train.py"}
        job = client.submit({"script": script})
        assert len(client.job_code(job.id)) == 4
        paths = client.download_code(job.id, tmp_path / "back")
        assert {path.relative_to(tmp_path / "back").as_posix() for path in paths} == {
            *("train.py", "pkg/a.bin", "pkg/empty", "run.sh")
        }
        assert (tmp_path / "back" / "train.py").read_bytes() == program
        assert (tmp_path / "back" / "run.sh").stat().st_mode & 0o100
        with pytest.raises(CodeNotFound, match="was submitted without code"):
            client.job_code(server.submit())
        with pytest.raises(CodeUnfit, match=r"no file 'none\.py'"):
            client.submit({"script": {**script, "entrypoint": "none.py"}})
        with pytest.raises(CodeUnfit, match="no code"):
            client.submit({"script": {**script, "code": "code-" + "0" * 32}})


def test_two_callers_do_not_share_code(tmp_path: Path) -> None:
    tokens = {"ann": "anns", "bob": "bobs"}
    lines = [f"{name}:{sha(token.encode())}" for name, token in tokens.items()]
    (tmp_path / "tokens").write_text("\n".join(lines))
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "train.py").write_bytes(PROGRAM)
    with (
        serving(tmp_path / "home", tokens_file=tmp_path / "tokens") as server,
        dray.Client(server.url, "anns") as ann,
        dray.Client(server.url, "bobs") as bob,
    ):
        code = ann.upload_code(tmp_path / "job")
        script = {"code": code.id, "entrypoint": "train.py"}
        assert ann.submit({"script": script})
        with pytest.raises(CodeUnfit):
            bob.submit({"script": script})
        sent: list[int] = []
        assert bob.upload_code(tmp_path / "job", on_progress=lambda n, _: sent.append(n))
        assert sent == [len(PROGRAM)]
        assert bob.submit({"script": script})
