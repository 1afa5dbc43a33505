"""Secrets are read only from private files, and their values are masked in all output."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ray_workers.shared.secret_files import MAX_BYTES, Masker, SecretUnavailable, read_secrets


def lay(folder: Path, name: str, data: bytes, mode: int = 0o600) -> None:
    (folder / name).write_bytes(data)
    (folder / name).chmod(mode)


def test_a_secret_is_its_file_without_the_last_newline(tmp_path: Path) -> None:
    lay(tmp_path, "TOKEN", b"a b\nc\r\n", 0o400)
    lay(tmp_path, "EMPTY", b"")
    assert read_secrets(str(tmp_path), ["TOKEN", "EMPTY"]) == {"TOKEN": "a b\nc", "EMPTY": ""}


def test_an_owners_secret_is_for_that_owner_alone_and_comes_first(tmp_path: Path) -> None:
    own = tmp_path / "owners" / "ann@lab.org"
    own.mkdir(parents=True)
    lay(tmp_path, "SHARED", b"of all")
    lay(tmp_path, "BOTH", b"of all")
    lay(own, "BOTH", b"of ann")
    lay(own, "MINE", b"of ann")
    names = ["SHARED", "BOTH", "MINE"]
    found = read_secrets(str(tmp_path), names, "ann@lab.org")
    assert found == {"SHARED": "of all", "BOTH": "of ann", "MINE": "of ann"}
    for other in ("bob", None, "ann@lab.org/", "../owners/ann@lab.org", ".", ""):
        assert read_secrets(str(tmp_path), ["BOTH"], other) == {"BOTH": "of all"}
        with pytest.raises(SecretUnavailable, match="MINE"):
            read_secrets(str(tmp_path), ["MINE"], other)
    (own / "BOTH").chmod(0o644)
    with pytest.raises(SecretUnavailable, match="0600"):
        read_secrets(str(tmp_path), ["BOTH"], "ann@lab.org")


def test_what_may_not_be_read_is_refused_without_its_value(tmp_path: Path) -> None:
    lay(tmp_path, "OPEN", b"canary", 0o640)
    lay(tmp_path, "LARGE", b"canary" * MAX_BYTES)
    lay(tmp_path, "BINARY", b"canary\xff")
    lay(tmp_path, "NUL", b"canary\0")
    (tmp_path / "LINK").symlink_to(tmp_path / "NUL")
    (tmp_path / "FOLDER").mkdir(mode=0o700)
    os.mkfifo(tmp_path / "PIPE", 0o600)
    names = ("OPEN", "LARGE", "BINARY", "NUL", "LINK", "FOLDER", "PIPE", "NONE", "../NUL")
    for name in names:
        with pytest.raises(SecretUnavailable) as refused:
            read_secrets(str(tmp_path), [name])
        assert "canary" not in str(refused.value), name
    with pytest.raises(SecretUnavailable, match="DRAY_SECRETS_DIR"):
        read_secrets(None, ["TOKEN"])


def test_values_and_their_lines_are_masked_the_longest_first() -> None:
    masker = Masker({"A": "hunter2", "B": "hunter2-and-more", "C": "first line\nsecond line"})
    assert masker.text("x hunter2-and-more, hunter2 y") == "x ***, *** y"
    assert masker.data(b"\xffsecond line\xff") == b"\xff***\xff"
    assert masker.longest == len("first line\nsecond line")
    indented = Masker({"A": "{\n      \n    }"})
    assert indented.text("        x = {1:     }") == "        x = {1:     }"
    plain = Masker({"A": "abc", "B": ""})
    assert (plain.text("abc"), plain.longest) == ("abc", 0)
