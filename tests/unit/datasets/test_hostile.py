"""A source with any bytes or names is read, or refused as bad data.

An error of any other kind would be blamed on the training code, and the file would be read again.
"""

from __future__ import annotations

import errno
import json
import os
import random
import struct
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dray.spec import Data
from dray.train.storage_faults import StorageError
from ray_workers import datasets
from ray_workers.datasets.core import errors
from ray_workers.datasets.core.errors import reading
from ray_workers.datasets.formats import text
from ray_workers.datasets.sources.local import LocalOrigin
from ray_workers.shared.contracts import Cause
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.errors import DataError, SourceUnavailableError, cause_of
from tests.marks import soak_but
from tests.object_store import ObjectStore
from tests.unit.datasets import hostile
from tests.unit.datasets.hostile import IMAGES, Open, damaged, npz_with_header, picture
from tests.unit.datasets.web import Answer, serving

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")

FORMATS = hostile.formats()
SEEDS = range(1, 25)
UNTRUE_HEADERS = {
    "negative": "{'descr': '<f4', 'fortran_order': False, 'shape': (-12, 2), }",
    "far negative": "{'descr': '<f4', 'fortran_order': False, 'shape': (-12000, 2), }",
    "twice negative": "{'descr': '<f4', 'fortran_order': False, 'shape': (-12, -2), }",
    "no rows": "{'descr': '<f4', 'fortran_order': False, 'shape': (0, 9223372036854775807), }",
    "larger than the file": "{'descr': '<f4', 'fortran_order': False, 'shape': (12, 1000), }",
    "larger than memory": "{'descr': '<f4', 'fortran_order': False, 'shape': (12, 1 << 60), }",
    "overflowing": f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({2**32}, {2**32}), }}",
    "beyond 64 bits": f"{{'descr': '<f4', 'fortran_order': False, 'shape': (12, {10**30}), }}",
    "no number": "{'descr': '<f4', 'fortran_order': False, 'shape': (12, 'two'), }",
    "a truth": "{'descr': '<f4', 'fortran_order': False, 'shape': (True, True), }",
    "many dimensions": f"{{'descr': '<f4', 'fortran_order': False, 'shape': {(1,) * 99}, }}",
    "no dimension": "{'descr': '<f4', 'fortran_order': False, 'shape': (), }",
    "no type": "{'descr': '<q9', 'fortran_order': False, 'shape': (12, 2), }",
    "objects": "{'descr': '|O', 'fortran_order': False, 'shape': (12, 2), }",
    "fields": "{'descr': [('a', '<f4'), ('b', '|O')], 'fortran_order': False, 'shape': (12, 2), }",
    "endless": "{'descr': '<f4', 'fortran_order': False, 'shape': " + "(" * 4000,
    "code": "__import__('os').abort()",
    "another text": "\u00ff\u00fe",
    "nothing": "",
}


def raised_by(open_data: Open, *given: Any) -> Exception | None:
    try:
        open_data(*given)
    except Exception as error:
        return error
    return None


def outcome(open_data: Open, data: Data, policy: DataPolicy) -> str | None:
    """The sentence with which the source was refused; None if it was read."""
    error = raised_by(open_data, data, policy)
    if error is None:
        return None
    assert cause_of(error) is Cause.BAD_DATA, repr(error)
    message = str(error)
    assert message.startswith(data.source), "the source is named"
    assert message.isprintable(), "on one line, as text that every store takes"
    assert len(message) < 1000 + len(data.source)
    return message


@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_file_is_read_or_is_bad_data(
    name: str, tmp_path: Path, policy: DataPolicy
) -> None:
    form = FORMATS[name]
    path = tmp_path / form.name
    data = Data(source=path.as_uri(), **form.options)
    path.write_bytes(form.content)
    assert outcome(form.open, data, policy) is None
    refused = 0
    for seed in SEEDS:
        path.write_bytes(damaged(form.content, seed))
        refused += outcome(form.open, data, policy) is not None
    assert refused


@pytest.mark.parametrize("kind", ["bmp", "gif", "jpg", "png", "ppm", "tif", "webp"])
def test_a_damaged_image_is_read_or_is_bad_data(
    kind: str, tmp_path: Path, policy: DataPolicy
) -> None:
    for place, number in IMAGES.items():
        path = tmp_path / "set" / f"{place}.{kind}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(kind, number))
    data = Data(source=(tmp_path / "set").as_uri(), format="images")
    refused = 0
    for seed in SEEDS:
        path.write_bytes(damaged(picture(kind), seed))
        refused += outcome(datasets.open_images, data, policy) is not None
    assert refused


@pytest.mark.parametrize("header", UNTRUE_HEADERS)
@pytest.mark.parametrize("name", ["npz table", "npz images", "npz masks"])
def test_an_array_whose_header_is_not_true_is_bad_data(
    header: str, name: str, tmp_path: Path, policy: DataPolicy
) -> None:
    path = tmp_path / "t.npz"
    path.write_bytes(npz_with_header(UNTRUE_HEADERS[header]))
    message = outcome(FORMATS[name].open, Data(source=path.as_uri()), policy)
    assert message is not None
    assert "'x'" in message


def test_an_array_that_is_an_archive_itself_is_bad_data(tmp_path: Path, policy: DataPolicy) -> None:
    inner = hostile.npz(x=hostile.ROWS)
    (tmp_path / "t.npz").write_bytes(hostile.zipped({"x.npy": inner, "y.npy": inner, "z": b""}))
    data = Data(source=(tmp_path / "t.npz").as_uri())
    message = outcome(FORMATS["npz table"].open, data, policy)
    assert message is not None
    assert "array 'x': is not a readable array" in message
    message = outcome(FORMATS["npz table"].open, data.model_copy(update={"target": "z"}), policy)
    assert message is not None
    assert "there is no array 'z', only 'x', 'y'" in message


@pytest.mark.parametrize("size", [-512, -1024, 2**62])
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_member_of_a_tar_that_leads_back_is_bad_data(
    kind: bytes, size: int, tmp_path: Path, policy: DataPolicy
) -> None:
    member = tarfile.TarInfo("a/0.png")
    member.type, member.size = kind, size
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    whole = tarfile.TarInfo("b/0.png").tobuf(tarfile.GNU_FORMAT)
    (tmp_path / "t.tar").write_bytes(whole + bytes(header) + b"\0" * 1024)
    data = Data(source=(tmp_path / "t.tar").as_uri())
    assert outcome(datasets.open_images, data, policy) is not None


def test_an_extended_header_that_leads_back_is_bad_data(tmp_path: Path, policy: DataPolicy) -> None:
    member = tarfile.TarInfo("a/0.png")
    member.pax_headers = {"size": "-512"}
    content = member.tobuf(tarfile.PAX_FORMAT) + b"\0" * 1024
    (tmp_path / "t.tar").write_bytes(content)
    data = Data(source=(tmp_path / "t.tar").as_uri())
    message = outcome(datasets.open_images, data, policy)
    assert message is not None
    assert "has the negative size -512" in message


def test_names_that_are_no_text_are_shown_by_escapes(tmp_path: Path, policy: DataPolicy) -> None:
    folder = tmp_path / "set" / os.fsdecode(b"a\xff\n\xe2\x80\xae")
    folder.mkdir(parents=True)
    (folder / "0.png").write_bytes(b"no image")
    (tmp_path / "set" / "b").mkdir()
    Path(tmp_path, "set", "b", "0.png").write_bytes(picture("png"))
    data = Data(source=(tmp_path / "set").as_uri(), format="images")
    message = outcome(datasets.open_images, data, policy)
    assert message is not None
    assert r"set/a\udcff\n\u202e/0.png: is not a readable image" in message


@pytest.mark.parametrize("name", ["x" * 256, "x/" * 2200, "a%ffb", "%0a", "loop", "."])
def test_a_path_that_no_file_can_have_is_bad_data(
    name: str, tmp_path: Path, policy: DataPolicy
) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    data = Data(source="sklearn://digits").model_copy(
        update={"source": f"{tmp_path.as_uri()}/{name}", "format": "csv", "target": "y"}
    )
    assert outcome(FORMATS["csv"].open, data, policy) is not None


def test_a_nul_in_a_path_is_bad_data_also_in_a_document_of_an_older_version(
    policy: DataPolicy,
) -> None:
    data = Data(source="file:///t.csv", target="y")
    data = data.model_copy(update={"source": "file:///a%00b.csv"})
    message = outcome(FORMATS["csv"].open, data, policy)
    assert message is not None
    assert "can't be followed: embedded null byte" in message


LOCATIONS = (
    "\\t.csv", "http:\\\\127.0.0.1\\t.csv", "http://127.0.0.1\\@example.org/", "//\\/x", "http://",
    "http:///x", "http://[::1", "http://[x]/", "http://127.0.0.1:99999/", "http://127.0.0.1:x/",
    "http://" + "a" * 64 + ".example.org/", "http://\u00ad.org/", "http://xn--a.org:0/", "http://%00/",
    "http://a b/", "/a\tb", "/\x7f", "data:,x", "javascript:x", "?" * 3000, "\u00ff\u00fe",
)  # fmt: skip


@pytest.mark.parametrize("location", LOCATIONS)
def test_a_redirect_to_what_is_no_address_is_no_error_of_the_training_code(
    location: str, policy: DataPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray_workers.datasets.sources.source.FIRST_PAUSE_S", 0.001)
    policy = replace(policy, private_hosts=("127.0.0.1",))
    with serving() as web:
        web.answers["/t.csv"] = Answer(status=302, headers={"Location": location})
        data = Data(source=web.url("/t.csv"), target="y")
        error = raised_by(FORMATS["csv"].open, data, policy)
    if isinstance(error, SourceUnavailableError):  # the host may have an address some day
        assert "\\" not in location
        return
    assert isinstance(error, DataError), repr(error)
    assert str(error).startswith(f"{data.source}: ")
    assert str(error).isprintable()
    is_named = "URLs can't contain backslashes" in str(error)
    assert is_named == any(c in location for c in "\\ \t\x7f")


NAMES = (
    "a/../b.png", "./a.png", "a//b.png", "a/%00.png", "a/\u202e.png", "a/ .png", "a/\\.png",
    "a/?.png", "a/#.png", "a/*.png", ".png/.png", "A/\u00e9.PNG", "a/" + "x" * 900 + ".png",
)  # fmt: skip


@pytest.mark.parametrize("name", soak_but(NAMES, short=NAMES[::3]))
def test_an_object_of_any_name_is_read_or_is_bad_data(
    name: str, s3: ObjectStore, tmp_path: Path, policy: DataPolicy
) -> None:
    policy = replace(policy, s3_endpoint_url=s3.endpoint_url, credentials_dir=str(tmp_path))
    (tmp_path / "lab.json").write_text(json.dumps({"key": s3.key, "secret": s3.secret}))
    (tmp_path / "lab.json").chmod(0o600)
    s3.put("set/b/1.png", picture("png"))
    s3.put(f"set/{name}", picture("png"))
    data = Data(source="s3://bucket/set", format="images", credentials="lab")
    outcome(datasets.open_images, data, policy)


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_tokenizer_is_read_or_is_bad_data(
    seed: int, tmp_path: Path, policy: DataPolicy
) -> None:
    (tmp_path / "t.txt").write_text(hostile.TEXT)
    path = tmp_path / "tokenizer.json"
    path.write_bytes(damaged(hostile.tokenizer(), seed) if seed else hostile.tokenizer())
    data = Data(source=(tmp_path / "t.txt").as_uri())
    error = raised_by(datasets.open_text, data, policy, path.as_uri())
    if error is not None:
        assert seed
        assert isinstance(error, DataError)
        assert str(error).startswith(path.as_uri())


def test_a_tokenizer_may_not_ask_for_a_model_of_any_size(
    tmp_path: Path, policy: DataPolicy
) -> None:
    (tmp_path / "t.txt").write_text(hostile.TEXT)
    path = tmp_path / "tokenizer.json"
    path.write_bytes(hostile.tokenizer().replace(b'"Karren": 5', b'"Karren": 4000000000'))
    with pytest.raises(DataError, match="has a token with the id 4,000,000,000"):
        datasets.open_text(Data(source=(tmp_path / "t.txt").as_uri()), policy, path.as_uri())
    assert text.MAX_VOCABULARY > 1_000_000


class PanicException(BaseException):
    """Stands for the error that Rust libraries raise."""


RAISED = (
    *(ValueError("x"), OverflowError("x"), MemoryError(), KeyError("x"), AssertionError()),
    *(UnicodeDecodeError("utf-8", b"", 0, 1, "x"), struct.error("x"), RecursionError("x")),
    *(PanicException("x"), OSError("broken data stream")),
)


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_what_a_library_raises_while_it_reads_is_the_datas_fault(error: BaseException) -> None:
    expected = rf"^s3://b/x: can't be read \({type(error).__name__}"
    with pytest.raises(DataError, match=expected) as found, reading("s3://b/x"):
        raise error
    assert found.value.__cause__ is error, "the log has its traceback"


@pytest.mark.parametrize(
    "error",
    [
        *(OSError(28, "No space left on device"), PermissionError(13, "Permission denied")),
        *(OSError(24, "Too many open files"), RuntimeError("can't start new thread")),
    ],
)
def test_what_this_node_lacks_is_no_fault_of_the_data(error: Exception) -> None:
    with pytest.raises(StorageError) as found, reading("s3://b/x"):
        raise error
    assert cause_of(found.value) is Cause.INFRASTRUCTURE


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (errno.EIO, Cause.INFRASTRUCTURE),
        (errno.ESTALE, Cause.INFRASTRUCTURE),
        (errno.EACCES, Cause.BAD_DATA),
    ],
)
def test_a_disk_that_fails_while_a_folder_is_listed_is_no_fault_of_the_data(
    number: int, cause: Cause, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: str) -> None:
        raise OSError(number, os.strerror(number), folder)

    origin = LocalOrigin(tmp_path.as_uri(), DataPolicy.open(), suffixes=(".png",))
    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(DataError, match=f"can't be read: {os.strerror(number)}") as found:
        origin.listing()
    assert cause_of(found.value) is cause


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), ImportError("no s3fs")])
def test_an_interrupt_and_a_missing_library_are_passed_on(error: BaseException) -> None:
    with pytest.raises(type(error)), reading("s3://b/x"):
        raise error


def test_text_from_outside_is_shown_on_one_line() -> None:
    chance = random.Random(1)
    for _ in range(200):
        found = errors.printable("".join(chr(chance.randrange(0x2100)) for _ in range(50)))
        assert found.isprintable()
        found.encode()
    assert errors.printable("Öl\n\ud800") == r"Öl\n\ud800"


def test_the_damage_is_the_same_for_a_seed() -> None:
    content = FORMATS["csv"].content
    assert damaged(content, 7) == damaged(content, 7) != content
    assert np.unique([len(damaged(content, seed)) for seed in SEEDS]).size > 2
