"""Which files of a folder are uploaded, and how they are described."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tracemalloc
from pathlib import Path

import pytest

from dray.code import packing
from dray.code.manifest import PART_BYTES, FileEntry, code_id, collision_in, fault_of
from dray.code.packing import pack
from dray.errors import SpecError


def put(root: Path, files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def packed(root: Path, *include: str) -> list[str]:
    return [file.path for file in pack(root, include).files]


def test_git_and_dray_agree_on_what_is_ignored(tmp_path: Path) -> None:
    put(
        tmp_path,
        {
            # Git ignores the last lines.
            ".gitignore": "\ufeff*.log\n/data/\n!keep.log\nsub/*.bin\n# a comment\n\\#odd\r\n"
            "!\nfoo\\\n[z-a]\n",
            "sub/.gitignore": "!a.bin\nlocal*\n",
            **dict.fromkeys(
                [
                    *("train.py", "a.log", "keep.log", "data/x.csv", "sub/data/y.csv", "#odd"),
                    *("sub/a.bin", "sub/b.bin", "sub/localthing/z.py", "sub/deep/c.bin", "é.py"),
                ],
                "x",
            ),
        },
    )
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    listed = subprocess.run(
        ["git", "-C", str(tmp_path), "ls-files", "-z", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
    ).stdout
    by_git = sorted(listed.decode().split("\0")[:-1])
    assert packed(tmp_path) == by_git
    assert "sub/a.bin" in by_git


def test_drayignore_has_the_last_word(tmp_path: Path) -> None:
    put(tmp_path, {".gitignore": "build/\n", "build/net.py": "x", "a.csv": "1", "t.py": "x"})
    put(
        tmp_path,
        {".drayignore": "!build/\n*.csv\n", "sub/.gitignore": "!*.csv\n", "sub/b.csv": "1"},
    )
    assert packed(tmp_path) == [
        *(".drayignore", ".gitignore", "build/net.py", "sub/.gitignore", "t.py")
    ]


def test_the_rules_of_the_repository_above_hold_below(tmp_path: Path) -> None:
    put(tmp_path, {".git/HEAD": "", ".gitignore": "*.tmp\n", "job/a.tmp": "1", "job/t.py": "x"})
    assert packed(tmp_path / "job") == ["t.py"]
    put(tmp_path / "elsewhere" / "job", {"a.tmp": "1"})
    (tmp_path / "elsewhere" / ".git").mkdir()
    assert packed(tmp_path / "elsewhere" / "job") == ["a.tmp"]


KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n"
SECRETS = {
    ".env": "TOKEN=1",
    ".env.local": "TOKEN=1",
    "id_ed25519": KEY,
    "conf/tls.pem": KEY,
    "conf/OLD.PEM": KEY,
    "deploy_key": KEY,
    ".git-credentials": "https://ann:token@host",
    ".aws/credentials": "x",
    ".venv/bin/python": "x",
    "myenv/pyvenv.cfg": "x",
    ".git/config": "x",
}


def test_secrets_and_environments_are_left_out_unless_they_are_named(tmp_path: Path) -> None:
    put(tmp_path, {**SECRETS, "train.py": "x", ".env.example": "TOKEN=", "keys.py": f"K='''{KEY}'"})
    found = pack(tmp_path)
    assert [file.path for file in found.files] == [".env.example", "keys.py", "train.py"]
    assert {one.path for one in found.left_out} == {
        *(".env", ".env.local", "id_ed25519", "conf/tls.pem", "conf/OLD.PEM", "deploy_key"),
        *(".venv", "myenv", ".git", ".git-credentials", ".aws"),
    }
    named = packed(tmp_path, ".env", "conf/tls.pem", "deploy_key", str(tmp_path / ".venv"))
    assert {".env", "conf/tls.pem", "deploy_key", ".venv/bin/python"} <= set(named)
    assert ".env.local" not in named


def test_an_ignored_file_that_is_named_is_packed(tmp_path: Path) -> None:
    put(tmp_path, {".gitignore": "out/\n", "out/a/w.bin": "x", "out/b.bin": "x", "t.py": "x"})
    assert packed(tmp_path, "out/a/w.bin") == [".gitignore", "out/a/w.bin", "t.py"]
    with pytest.raises(SpecError, match="no such file in"):
        pack(tmp_path, ["out/none"])
    with pytest.raises(SpecError, match="is not in"):
        pack(tmp_path, ["../x"])


def test_links_within_the_folder_are_followed_and_others_left_out(tmp_path: Path) -> None:
    outside = tmp_path / "outside.py"
    outside.write_text("secret")
    root = tmp_path / "job"
    put(root, {"real.py": "x"})
    (root / "alias.py").symlink_to("real.py")
    (root / "out.py").symlink_to(outside)
    (root / "dangling").symlink_to("nowhere")
    (root / "folder").symlink_to(tmp_path)
    (root / "itself").symlink_to("itself")
    found = pack(root)
    assert [file.path for file in found.files] == ["alias.py", "real.py"]
    assert {one.path for one in found.left_out} == {"out.py", "dangling", "folder", "itself"}


def test_a_link_is_no_way_around_what_is_left_out(tmp_path: Path) -> None:
    put(tmp_path, {".env": "TOKEN=1", ".git/config": "token", "venv/pyvenv.cfg": "x", "t.py": "x"})
    (tmp_path / "settings").symlink_to(".env")
    (tmp_path / "remotes").symlink_to(".git/config")
    (tmp_path / "home.cfg").symlink_to("venv/pyvenv.cfg")
    assert packed(tmp_path) == ["t.py"]
    assert packed(tmp_path, "settings") == ["settings", "t.py"]


def test_files_are_described_in_parts_and_can_be_read_back(tmp_path: Path) -> None:
    content = bytes(range(256)) * (PART_BYTES // 256) + b"tail"
    put(tmp_path, {"big.bin": content, "empty": b"", "run.sh": "#!/bin/sh"})
    (tmp_path / "run.sh").chmod(0o755)
    found = pack(tmp_path)
    big, empty, script = found.files
    assert (big.size_bytes, len(big.parts), empty.parts) == (len(content), 2, ())
    assert (script.is_executable, big.is_executable) == (True, False)
    assert b"".join(found.read(part) for part in big.parts) == content
    assert [found.size_of(part) for part in big.parts] == [PART_BYTES, 4]
    assert big.parts[1] == hashlib.sha256(b"tail").hexdigest()


def test_a_log_that_grows_meanwhile_is_sent_as_it_was_packed(tmp_path: Path) -> None:
    put(tmp_path, {"service.log": "started\n"})
    found = pack(tmp_path)
    with (tmp_path / "service.log").open("a") as log:
        log.write("a request\n")
    assert found.read(found.files[0].parts[0]) == b"started\n"


def test_a_file_that_changes_meanwhile_is_not_sent(tmp_path: Path) -> None:
    put(tmp_path, {"a.py": "x = 1"})
    found = pack(tmp_path)
    put(tmp_path, {"a.py": "x = 2"})
    with pytest.raises(SpecError, match=r"a\.py changed during the upload"):
        found.read(found.files[0].parts[0])
    (tmp_path / "a.py").unlink()
    with pytest.raises(SpecError, match=r"can't read .*a\.py: No such file"):
        found.read(found.files[0].parts[0])


def test_the_id_follows_from_every_path_mode_and_byte() -> None:
    one = FileEntry("a", 1, False, ("00",))
    other = FileEntry("b", 1, False, ("11",))
    ids = {
        code_id([one, other]),
        code_id([one]),
        code_id([FileEntry("c", 1, False, ("00",)), other]),
        code_id([FileEntry("a", 1, True, ("00",)), other]),
        code_id([FileEntry("a", 1, False, ("01",)), other]),
    }
    assert len(ids) == 5
    assert code_id([one, other]) == code_id([other, one])


@pytest.mark.parametrize(
    "path",
    [
        "/a",
        "a/../b",
        "..",
        "./a",
        "a//b",
        "",
        "a\\b",
        "a\nb",
        "a\u202eb",
        "x" * 256,
        "a/" * 600 + "b",
    ],
)
def test_a_path_that_leads_out_or_that_no_disk_takes_is_refused(path: str) -> None:
    assert fault_of(path) is not None


def test_paths_that_can_not_be_together_collide() -> None:
    assert collision_in(["a", "b/a", "b/c", "d"]) is None
    assert collision_in(["a", "b", "a"]) == ("a", "a")
    assert collision_in(["a/b", "a"]) == ("a", "a/b")
    assert collision_in(["a", "a-b", "a.b", "a/b/c"]) == ("a", "a/b/c")
    assert collision_in(["a-b", "a/b", "a.b", "a b/a"]) is None
    assert collision_in(["caf\u00e9.py", "cafe\u0301.py"]) is not None


def test_deep_paths_are_compared_in_little_memory() -> None:
    paths = [f"{number:04}/" + "a/" * 500 + "b" for number in range(500)]
    tracemalloc.start()
    try:
        assert collision_in(paths) is None
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


def test_an_empty_or_missing_folder_and_too_many_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SpecError, match="no files to upload"):
        pack(tmp_path)
    with pytest.raises(SpecError, match="is not a folder"):
        pack(tmp_path / "none")
    monkeypatch.setattr(packing, "MAX_FILES", 2)
    put(tmp_path, {"a": "1", "b": "2", "c": "3"})
    with pytest.raises(SpecError, match="more than 2 files"):
        pack(tmp_path)


def test_a_name_that_is_not_utf_8_is_refused_unless_it_is_ignored(tmp_path: Path) -> None:
    put(tmp_path, {"t.py": "x"})
    Path(os.fsdecode(bytes(tmp_path) + b"/\xff.txt")).write_text("x")
    with pytest.raises(SpecError, match="is not UTF-8"):
        pack(tmp_path)
    put(tmp_path, {".drayignore": "*.txt\n"})
    assert packed(tmp_path) == [".drayignore", "t.py"]


def test_large_files_are_mentioned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "LARGE_BYTES", 3)
    put(tmp_path, {"a": "12", "b": "1234"})
    assert [file.path for file in pack(tmp_path).large] == ["b"]
