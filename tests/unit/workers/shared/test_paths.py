"""Sockets of a node have short paths, wherever its temporary folder is."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_workers.shared import paths
from ray_workers.shared.paths import UntrustedFolder

NODE = ("d" * 12, "0" * 56)
ATTEMPT = (*NODE, "job-" + "j" * 26, 12345)
SESSION = "session_2026-11-24_06-36-55_233754_4194304"


@pytest.fixture
def short_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Replaces /tmp, whose path is a little shorter."""
    with tempfile.TemporaryDirectory(prefix="d", dir="/tmp") as name:
        monkeypatch.setattr(paths, "SHORT_TMP", Path(name))
        yield Path(name)


@pytest.fixture
def long_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / ("x" * (120 - len(os.fsencode(tmp_path))))
    folder.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def _listen(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def test_every_socket_of_a_node_can_be_bound_below_a_long_temporary_folder(
    long_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _listen(Path(paths.socket_path(*NODE)))
    _listen(paths.temp_dir(*ATTEMPT) / "pymp-01234567" / "listener-01234567")
    _listen(paths.temp_dir(*ATTEMPT) / "torch-shm-dir-012345" / "manager.sock")
    _listen(paths.machine_root() / "ray-012345" / SESSION / "sockets" / "dash_TaskEventsHead")
    assert [path.name for path in long_tmp.iterdir()] == [f"dray-{os.getuid()}"]


def test_the_longest_paths_fit_below_the_longest_root() -> None:
    root = "/" + "r" * (paths.SOCKET_PATH_BYTES - paths.BYTES_BELOW_ROOT - 1)
    ray = f"{root}/ray-012345/{SESSION}/sockets/dash_TaskEventsHead"
    assert len(ray) <= paths.SOCKET_PATH_BYTES
    link_of_any_user = f"/tmp/dray-{2**32 - 1}/0123"
    assert len(link_of_any_user) <= len(root)


def test_all_processes_get_the_same_short_path(long_tmp: Path, short_tmp: Path) -> None:
    root = paths.machine_root()
    assert root == paths.machine_root()
    assert root.is_relative_to(short_tmp)
    assert root.resolve() == long_tmp / f"dray-{os.getuid()}"
    program = f"""
import pathlib
from ray_workers.shared import paths
paths.SHORT_TMP = pathlib.Path({str(short_tmp)!r})
print(paths.machine_root())
"""
    environment = {**os.environ, "TMPDIR": str(long_tmp)}
    other = subprocess.run(
        [sys.executable, "-c", program],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert other.stdout.strip() == str(root)


def test_two_long_folders_have_links_of_their_own(
    long_tmp: Path, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = {paths.machine_root()}
    taken = short_tmp / f"dray-{os.getuid()}"
    for name in ("y", "z"):
        monkeypatch.setattr(tempfile, "tempdir", str(long_tmp / name))
        links.add(paths.machine_root())
    assert len({link.resolve() for link in links}) == 3
    # If something else has the name, the next name is used.
    other = paths.machine_root()
    target = other.readlink()
    other.unlink()
    other.write_text("taken")
    assert paths.machine_root() != other
    assert paths.machine_root().readlink() == target
    assert other.read_text() == "taken"
    assert all(path.stat().st_uid == os.getuid() for path in taken.iterdir())


def test_links_to_folders_that_are_gone_do_not_pile_up(
    long_tmp: Path, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = paths.machine_root()
    (long_tmp / f"dray-{os.getuid()}").rmdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long_tmp / "y"))
    second = paths.machine_root()
    assert list(first.parent.iterdir()) == [second]


def test_a_link_is_not_put_where_others_could_change_it(long_tmp: Path, short_tmp: Path) -> None:
    (short_tmp / f"dray-{os.getuid()}").mkdir()
    (short_tmp / f"dray-{os.getuid()}").chmod(0o777)
    with pytest.raises(UntrustedFolder, match="can be written to by other users"):
        paths.machine_root()


def test_a_short_temporary_folder_needs_no_link(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/")
    assert paths.machine_root() == Path(f"/tmp/dray-{os.getuid()}")
    assert not list(short_tmp.iterdir())


def test_a_process_with_its_own_temporary_folder_knows_that_of_its_node(
    monkeypatch: pytest.MonkeyPatch, short_tmp: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "attempt"))
    monkeypatch.setenv(paths.NODE_TMPDIR, str(tmp_path / "node"))
    assert paths.machine_root().resolve() == tmp_path / "node" / f"dray-{os.getuid()}"
    assert not (tmp_path / "attempt").exists()
