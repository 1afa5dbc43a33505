"""The files that are uploaded, compared with the files that Git lists."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dray.code import git_files
from dray.code.packing import pack
from dray.errors import SpecError
from tests.marks import soak


@pytest.fixture(autouse=True)
def _no_settings_of_a_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Prevent Git from using the settings of the user who runs the tests."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GIT_CONFIG_GLOBAL", str(home / "gitconfig"))
        patch.setenv("XDG_CONFIG_HOME", str(home))
        yield


def git(folder: Path, *command: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "protocol.file.allow=always")
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *command], check=True, capture_output=True
    )
    return os.fsdecode(done.stdout)


def put(root: Path, *names: str, **texts: str) -> None:
    for name, text in {**dict.fromkeys(names, "x"), **texts}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def repository(root: Path, *names: str, ignore: str = "") -> Path:
    root.mkdir(parents=True, exist_ok=True)
    git(root, "init", "-q")
    put(root, *names)
    if ignore:
        (root / ".gitignore").write_text(ignore)
    return root


def packed(root: Path, *include: str) -> list[str]:
    return [file.path for file in pack(root, include).files]


def packed_or_none(root: Path) -> list[str]:
    """Like `packed`, but returns an empty list if there is no file to upload."""
    try:
        return sorted(packed(root))
    except SpecError as error:
        if "no files to upload" not in str(error):
            raise
        return []


def listed(root: Path) -> list[str]:
    """Return the files that Git lists and that exist."""
    command = ("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    paths = set(git(root, *command).split("\0")) - {""}
    return sorted(path for path in paths if (root / path).is_file())


NAMES = ("a", "b", "ab", "data", "x.csv", "y.txt", ".gitkeep", "a b", "#a", "!a", "a]", "[a]", "é")
PIECES = (
    *("*", "**", "?", "/", "/", "a", "b", "data", ".csv", "x", "[ab]", "[!a]", "[^a-c]", "[]a]"),
    *("[[:alpha:]]", "[[:digit:]x]", "[[:nope:]]", "[a-", "[z-a]", "\\", "\\a", "\\*", " ", "\\ "),
    *(".gitkeep", "é", "**/", "/**", "/**/", "[a-\\c]", "[\\]]", "[--a]", "[", "]", "[/]", "\t"),
)
WHOLE = (
    "data/**",
    "!data/**/",
    "!.gitkeep",
    "*",
    "!*/",
    "/*",
    "!/data",
    "!",
    "/",
    "#a",
    "**",
    "a/",
)


def drawn_file(draw: random.Random) -> bytes:
    lines = []
    for _ in range(draw.randint(1, 5)):
        if draw.random() < 0.3:
            line = draw.choice(WHOLE)
        else:
            line = "".join(draw.choices(PIECES, k=draw.randint(1, 4)))
        line = draw.choice(("", "", "", "!", "/")) + line + draw.choice(("", "", "", "/", " "))
        lines.append(line.encode())
    start = b"\xef\xbb\xbf" if draw.random() < 0.05 else b""
    return start + draw.choice((b"\n", b"\n", b"\r\n")).join(lines) + draw.choice((b"", b"\n"))


def draw_tree(draw: random.Random, root: Path, depth: int = 0) -> None:
    root.mkdir(exist_ok=True)
    for name in draw.sample(NAMES, draw.randint(2, 6)):
        if depth < 3 and draw.random() < 0.45:
            draw_tree(draw, root / name, depth + 1)
        else:
            (root / name).write_text("x")
    if depth == 0 or draw.random() < 0.2:
        (root / ".gitignore").write_bytes(drawn_file(draw))


@pytest.mark.parametrize("num_trees", [60, soak(5_000)])
def test_a_folder_without_a_repository_follows_the_rules_of_git(
    num_trees: int, tmp_path: Path
) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    git(tmp_path, "init", "-q", "--bare", "oracle")
    for number in range(num_trees):
        root = tmp_path / "tree"
        draw_tree(random.Random(f"{seed}/{number}"), root)
        oracle = (
            f"--git-dir={tmp_path / 'oracle'}",
            f"--work-tree={root}",
            "-c",
            "core.bare=false",
        )
        command = ("ls-files", "-z", "--others", "--exclude-standard")
        by_git = sorted(set(git(root, *oracle, *command).split("\0")) - {""})
        rules = {str(file): file.read_bytes() for file in root.rglob(".gitignore")}
        assert packed_or_none(root) == by_git, f"tree {number}: {rules}"
        shutil.rmtree(root)


@pytest.mark.parametrize("num_trees", [8, soak(500)])
def test_a_repository_uploads_what_git_lists(num_trees: int, tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    for number in range(num_trees):
        draw = random.Random(f"{seed}/{number}")
        root = tmp_path / "tree"
        draw_tree(draw, root)
        git(root, "init", "-q")
        files = [str(each.relative_to(root)) for each in root.rglob("*") if each.is_file()]
        files = [each for each in files if not each.startswith(".git/")]
        tracked = draw.sample(files, len(files) // 3)
        if tracked:
            git(root, "--literal-pathspecs", "add", "--force", "--", *tracked)
        for gone in tracked[::3]:
            (root / gone).unlink()
        folders = [root, *(each for each in root.iterdir() if each.is_dir())]
        for folder in (each for each in folders if each.name != ".git"):
            assert packed_or_none(folder) == listed(folder), f"tree {number}, {folder}"
        shutil.rmtree(root)


def test_tracked_files_come_along_and_secrets_stay_here_also_if_tracked(tmp_path: Path) -> None:
    root = repository(
        tmp_path / "r",
        *("t.py", "weights.bin", "other.bin", ".env", "tls.pem", "sub/w.bin", "gone.py"),
        ignore="*.bin\n",
    )
    git(root, "add", "--force", "t.py", "weights.bin", ".env", "tls.pem", "sub/w.bin", "gone.py")
    (root / "gone.py").unlink()
    assert packed(root) == [".gitignore", "sub/w.bin", "t.py", "weights.bin"]
    (root / ".drayignore").write_text("/weights.bin\n!other.bin\n")
    assert packed(root) == [".drayignore", ".gitignore", "other.bin", "sub/w.bin", "t.py"]


def test_drayignore_opens_a_folder_that_git_ignores(tmp_path: Path) -> None:
    names = ("t.py", "build/net.py", "build/net.pyc", "build/deep/x.py", "out/a", "kept/a.csv")
    root = repository(tmp_path / "r", *names, ignore="/build/\nout/\n*.pyc\n*.csv\n")
    (root / ".drayignore").write_text("!/build/\n!a.csv\n")
    opened = ["build/deep/x.py", "build/net.py", "kept/a.csv", "t.py"]
    assert packed(root) == [".drayignore", ".gitignore", *opened]
    assert packed(root / "build") == ["deep/x.py", "net.py"]
    with pytest.raises(SpecError, match="no files to upload"):
        pack(root / "out")


def test_the_rules_that_only_git_knows_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = repository(tmp_path / "r", "t.py", "a.mine", "b.local", "c.users", "job/d.users")
    (root / ".git/info/exclude").write_text("*.local\n")
    (tmp_path / "ignored").write_text("*.mine\n")
    git(root, "config", "core.excludesFile", str(tmp_path / "ignored"))
    assert packed(root) == ["c.users", "job/d.users", "t.py"]
    assert packed(root / "job") == ["d.users"]
    git(root, "config", "--unset", "core.excludesFile")
    (tmp_path / "git").mkdir()
    (tmp_path / "git/ignore").write_text("*.users\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert packed(root) == ["a.mine", "t.py"]
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "none"))  # as in a hook
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    assert packed(root) == ["a.mine", "t.py"]


def test_repositories_inside_of_one_are_uploaded_by_their_own_rules(tmp_path: Path) -> None:
    library = repository(tmp_path / "library", "lib.py", "lib.log", ignore="*.tmp\n")
    git(library, "add", "--force", ".")
    git(library, "commit", "-qm", "a")
    root = repository(tmp_path / "r", "t.py", "t.log", ignore="*.log\n/hidden/\n")
    git(root, "submodule", "--quiet", "add", str(library), "vendored")
    git(root, "submodule", "--quiet", "add", str(library), "empty")
    git(root, "add", ".")
    git(root, "commit", "-qm", "a")
    git(root, "submodule", "--quiet", "deinit", "--force", "empty")
    for name in ("nested", "hidden"):
        git(tmp_path, "clone", "-q", str(library), str(root / name))
    put(root / "vendored", "new.py", "new.log", "new.tmp")
    expected = [".gitignore", ".gitmodules", "t.py"]
    expected += [f"nested/{name}" for name in (".gitignore", "lib.log", "lib.py")]
    added = (".gitignore", "lib.log", "lib.py", "new.log", "new.py")
    expected += [f"vendored/{name}" for name in added]
    assert packed(root) == sorted(expected)
    (root / ".drayignore").write_text("*.log\nnested/\n")
    left = [each for each in expected if not each.endswith(".log") and "nested" not in each]
    assert packed(root) == sorted([*left, ".drayignore"])
    assert packed(root / "vendored") == list(added)  # the root of a separate repository
    git(root, "worktree", "add", "-q", "--detach", str(tmp_path / "further"))
    assert packed(tmp_path / "further") == [".gitignore", ".gitmodules", "t.py"]


def test_links_stay_links_and_a_link_leads_to_the_root(tmp_path: Path) -> None:
    root = repository(tmp_path / "r", "real/a.py", "real/b.log", "old/c.py", ignore="*.log\n")
    git(root, "add", ".")
    shutil.rmtree(root / "old")
    (root / "old").symlink_to("real")
    (root / "alias.py").symlink_to("real/a.py")
    (tmp_path / "door").symlink_to(root / "real")
    assert packed(root) == [".gitignore", "alias.py", "real/a.py"]
    assert packed(tmp_path / "door") == ["a.py"]
    assert packed(tmp_path / "door", str(tmp_path / "door/b.log")) == ["a.py", "b.log"]


def test_a_repository_starts_no_program(tmp_path: Path) -> None:
    root = repository(tmp_path / "r", "t.py")
    git(root, "add", ".")
    trap = tmp_path / "trap"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/sprung\n")
    trap.chmod(0o755)
    for name in (
        "core.fsmonitor",
        "core.pager",
        "core.sshCommand",
        "filter.x.clean",
        "core.editor",
    ):
        git(root, "-c", "core.fsmonitor=false", "config", name, str(trap))
    (root / ".gitattributes").write_text("* filter=x\n")
    before = (root / ".git/index").read_bytes()
    os.utime(root / "t.py", (1, 1))
    assert packed(root) == [".gitattributes", "t.py"]
    assert not (tmp_path / "sprung").exists()
    assert (root / ".git/index").read_bytes() == before


def fake_git(folder: Path, script: str) -> str:
    """Return a search path with this program as `git`."""
    folder.mkdir()
    (folder / "git").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "git").chmod(0o755)
    return f"{folder}:/bin:/usr/bin"


def test_without_git_the_ignore_files_decide_and_a_note_states_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("t.py", "sub/a.bin", "sub/b.py", "c.local", "sub/inner/x.bin")
    root = repository(tmp_path / "r", *names, ignore="*.bin\n/out/\n")
    put(root, "out/job/a.py", ".git/info/exclude", **{".git/info/exclude": "*.local\n"})
    git(root / "sub/inner", "init", "-q")
    git(root, "add", "--force", "sub/a.bin")
    monkeypatch.setenv("PATH", str(tmp_path))
    found = pack(root)
    assert [each.path for each in found.files] == [
        ".gitignore",
        "sub/b.py",
        "sub/inner/x.bin",
        "t.py",
    ]
    assert len(found.notes) == 2
    assert "can't start git: No such file" in found.notes[0]
    assert packed(root / "sub") == ["b.py", "inner/x.bin"]
    with pytest.raises(SpecError, match="no files to upload"):
        pack(root / "out/job")
    refusal = "fatal: detected dubious ownership in repository"
    monkeypatch.setenv("PATH", fake_git(tmp_path / "bin", f"echo '{refusal}' >&2; exit 128"))
    assert refusal in pack(root).notes[0]
    put(tmp_path / "plain", "t.py")
    assert pack(tmp_path / "plain").notes == ()


def test_a_git_that_hangs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = repository(tmp_path / "r", "t.py")
    monkeypatch.setattr(git_files, "LIMIT_S", 0.2)
    monkeypatch.setenv("PATH", fake_git(tmp_path / "bin", "exec sleep 30"))
    began = time.monotonic()
    with pytest.raises(SpecError, match=r"timed out after 0\.2 s"):
        pack(root)
    assert time.monotonic() - began < 10


def test_names_of_any_bytes_are_compared(tmp_path: Path) -> None:
    root = repository(tmp_path / "r", "t.py", "a\tb.py", 'q".py', ignore="*.txt\n")
    Path(os.fsdecode(bytes(root) + b"/\xff.txt")).write_text("x")
    with pytest.raises(SpecError, match="its path contains"):
        pack(root)
    (root / "a\tb.py").unlink()
    assert packed(root) == [".gitignore", 'q".py', "t.py"]
    Path(os.fsdecode(bytes(root) + b"/\xff.py")).write_text("x")
    with pytest.raises(SpecError, match="is not UTF-8"):
        pack(root)


def test_the_commit_of_a_work_tree_is_recorded(tmp_path: Path) -> None:
    root = repository(tmp_path / "r", "a.py", "sub/b.py", ignore="ignored\n")
    assert git_files.state(root) is None  # there is no commit
    git(root, "checkout", "-q", "-b", "topic/ü")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    commit = git(root, "rev-parse", "HEAD").strip()
    clean = {"commit": commit, "dirty": False, "branch": "topic/ü"}
    assert git_files.state(root) == clean
    put(root, "ignored")
    assert git_files.state(root) == clean
    put(root, **{"sub/b.py": "changed"})
    assert git_files.state(root) == {**clean, "dirty": True}
    put(root, "other/c.py")
    git(root, "checkout", "-q", "--", "sub")
    # Only the folder that is uploaded counts.
    assert git_files.state(root / "sub") == clean
    assert git_files.state(root) == {**clean, "dirty": True}
    git(root, "checkout", "-q", "--detach")
    assert git_files.state(root / "sub") == {"commit": commit, "dirty": False}
    assert pack(root / "sub").git == {"commit": commit, "dirty": False}
    assert git_files.state(tmp_path) is None


def test_comparing_files_with_the_commit_runs_no_filter(tmp_path: Path) -> None:
    root = repository(tmp_path / "r", "a.py")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    trace = tmp_path / "trace"
    for kind in ("clean", "process"):
        git(root, "config", f"filter.my filter.{kind}", f"touch '{trace}'; cat")
    (root / ".git" / "info").mkdir(exist_ok=True)
    (root / ".git" / "info" / "attributes").write_text('*.py filter="my filter"\n*.py filter=x\n')
    git(root, "config", "filter.x.clean", f"touch '{trace}'; cat")
    put(root, **{"a.py": "y"})
    state = git_files.state(root)
    assert state is not None
    assert state["dirty"]
    assert not trace.exists()
