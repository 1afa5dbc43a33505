"""The token in DRAY_HOME is created once, can be read only by its user, and is never another user's
token."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dray import home_token as found
from service.config import tokens_file
from service.config.tokens_file import HomeTokenUnusable
from tests.unit.workers.other_user import NOBODY, needs_root


def test_the_first_start_writes_it_and_later_ones_keep_it(tmp_path: Path) -> None:
    home = tmp_path / "home"
    before = os.umask(0)
    try:
        token = tokens_file.ensure(home)
    finally:
        os.umask(before)
    assert token.startswith(found.PREFIX)
    assert len(token) > len(found.PREFIX) + 40
    path = found.path_in(home)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert tokens_file.ensure(home) == token == found.read(home)
    assert [entry.name for entry in home.iterdir()] == [found.FILE_NAME]


def test_services_that_start_at_once_have_one_token(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        tokens = set(threads.map(tokens_file.ensure, [tmp_path / "home"] * 32))
    assert len(tokens) == 1


def test_a_file_system_without_hard_links_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    token = tokens_file.ensure(tmp_path)
    assert found.read(tmp_path) == token
    assert [entry.name for entry in tmp_path.iterdir()] == [found.FILE_NAME]


def _open_to_others(path: Path) -> None:
    path.write_text(f"{found.PREFIX}known\n")
    path.chmod(0o640)


def _linked(path: Path) -> None:
    target = path.with_name("elsewhere")
    target.write_text(f"{found.PREFIX}known\n")
    target.chmod(0o600)
    path.symlink_to(target)


def _fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def _garbage(path: Path) -> None:
    path.touch(0o600)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (_open_to_others, "is accessible to other users"),
        (_linked, "is a symbolic link"),
        (_fifo, "is not a file"),
        (_garbage, "does not contain a valid token"),
    ],
)
def test_a_file_that_others_may_have_made_or_read_is_refused(
    tmp_path: Path, make: object, why: str
) -> None:
    assert callable(make)
    make(found.path_in(tmp_path))
    with pytest.raises(HomeTokenUnusable, match=f"token {why}: delete this file"):
        tokens_file.ensure(tmp_path)


@needs_root
def test_another_users_token_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens_file.ensure(tmp_path)
    os.chown(found.path_in(tmp_path), NOBODY, NOBODY)
    with pytest.raises(HomeTokenUnusable, match=f"user with id {NOBODY}"):
        tokens_file.ensure(tmp_path)
    monkeypatch.setenv("DRAY_HOME", str(tmp_path))
    assert found.own() is None
