"""Code that a node fetches: commits of git repositories, and archives."""

from __future__ import annotations

import hashlib
import io
import json
import socket
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ray_workers.node.folders import git_commit, remote_code
from ray_workers.node.folders.code_cache import CodeCache
from ray_workers.node.folders.git_commit import CodeRefused, CodeUnreachable
from ray_workers.shared.node_needs import DataPolicy, RemoteCodeRef
from tests.unit.workers.node.folders.git_server import GitServer, git, repository, serving

FILES = {
    "train.py": "print(1)\n",
    "pkg/net.py": "x = 1  # $Id$\n",
    ".hidden": "y",
    "empty": "",
    ".gitattributes": "* text eol=crlf filter=bad ident\n",
}
LOCAL = replace(DataPolicy.open(), private_hosts=("127.0.0.1",))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[GitServer]:
    (tmp_path / "served" / "files").mkdir(parents=True)
    with serving(tmp_path / "served") as found:
        yield found


def of_git(server: GitServer, commit: str, policy: DataPolicy = LOCAL) -> RemoteCodeRef:
    return RemoteCodeRef(
        git=f"{server.url}/repo",
        commit=commit,
        url=None,
        sha256=None,
        credentials=None,
        policy=policy,
        limit_bytes=1 << 20,
    )


def fetched(code: RemoteCodeRef, folder: Path, limit_s: float = 60.0) -> dict[str, str]:
    target, scratch = folder / "target", folder / "scratch"
    target.mkdir()
    scratch.mkdir()
    remote_code.fetch(code, target, scratch, limit_s)
    return below(target)


def below(folder: Path) -> dict[str, str]:
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes().decode() for path in paths}


def refused(code: RemoteCodeRef, folder: Path) -> str:
    with pytest.raises(CodeRefused) as caught:
        fetched(code, folder)
    assert not below(folder / "target")
    return str(caught.value)


def test_the_files_of_a_commit_are_its_very_bytes(server: GitServer, tmp_path: Path) -> None:
    root = server.folder / "repo"
    commit = repository(root, FILES)
    (root / "train.py").write_text("print(2)\n")
    git(root, "commit", "--quiet", "--all", "--message=later")
    found = fetched(of_git(server, commit), tmp_path)
    assert found == FILES


def test_files_that_may_be_run_stay_so_and_links_within_become_files(
    server: GitServer, tmp_path: Path
) -> None:
    root = server.folder / "repo"
    links = {"a/link": "-> ../pkg/net.py", "both": "-> pkg"}
    repository(root, {**FILES, **links})
    git(root, "update-index", "--chmod=+x", "train.py")
    git(root, "commit", "--quiet", "--message=x")
    found = fetched(of_git(server, git(root, "rev-parse", "HEAD")), tmp_path)
    assert found == {**FILES, "a/link": FILES["pkg/net.py"], "both/net.py": FILES["pkg/net.py"]}
    modes = {name: (tmp_path / "target" / name).stat().st_mode & 0o777 for name in found}
    assert modes.pop("train.py") == 0o755
    assert set(modes.values()) == {0o644}


@pytest.mark.parametrize(
    ("goal", "words"),
    [
        ("/etc/passwd", "points outside"),
        ("../../x", "points outside"),
        ("pkg/..", "does not point to a file"),
        ("nowhere", "does not point to a file"),
        ("link", "does not point to a file"),
    ],
)
def test_a_link_that_leads_elsewhere_refuses_the_whole(
    goal: str, words: str, server: GitServer, tmp_path: Path
) -> None:
    commit = repository(server.folder / "repo", {**FILES, "link": f"-> {goal}"})
    assert words in refused(of_git(server, commit), tmp_path)


def of_tree(root: Path, entries: list[tuple[str, str, str]]) -> str:
    """A commit whose tree has these (mode, object, name), however wrong."""
    raw = b"".join(
        f"{mode} {name}\0".encode() + bytes.fromhex(object_id) for mode, object_id, name in entries
    )
    words = ("hash-object", "-t", "tree", "-w", "--literally", "--stdin")
    tree = git(root, *words, given=raw)
    commit = git(root, "commit-tree", tree, "-m", "x")
    git(root, "update-ref", "refs/heads/other", commit)
    return commit


def test_trees_that_no_checkout_should_see_are_refused(server: GitServer, tmp_path: Path) -> None:
    root = server.folder / "repo"
    repository(root, FILES)
    blob = git(root, "rev-parse", "HEAD:train.py")
    for number, name in enumerate(("..", ".git", "a\\b", "\u202egnp")):
        commit = of_tree(root, [("100644", blob, name)])
        folder = tmp_path / str(number)
        folder.mkdir()
        assert refused(of_git(server, commit), folder)


def test_names_that_look_alike_are_refused(server: GitServer, tmp_path: Path) -> None:
    commit = repository(server.folder / "repo", {"\u00e9": "1", "e\u0301": "2"})
    assert "can't both be files" in refused(of_git(server, commit), tmp_path)


def test_a_tree_that_holds_itself_many_times_ends_at_the_limit(
    server: GitServer, tmp_path: Path
) -> None:
    root = server.folder / "repo"
    repository(root, FILES)
    tree = git(root, "rev-parse", "HEAD^{tree}")
    for _ in range(9):
        lines = "".join(f"040000 tree {tree}\tfolder{number}\n" for number in range(10))
        tree = git(root, "mktree", given=lines.encode())
    commit = git(root, "commit-tree", tree, "-m", "bomb")
    git(root, "update-ref", "refs/heads/bomb", commit)
    assert "too large or contains too many names" in refused(of_git(server, commit), tmp_path)


def test_more_bytes_than_code_may_have_are_refused(server: GitServer, tmp_path: Path) -> None:
    root = server.folder / "repo"
    packed = repository(root, {"zeros": "\0" * (2 << 20)})
    assert "2,097,152 bytes" in refused(of_git(server, packed), tmp_path)
    noise = "".join(hashlib.sha256(str(n).encode()).hexdigest() for n in range(50_000))
    sent = repository(root, {"noise": noise})
    (tmp_path / "other").mkdir()
    assert "DRAY_CODE_LIMIT_BYTES" in refused(of_git(server, sent), tmp_path / "other")


def test_a_submodule_is_left_out_and_its_address_not_asked(
    server: GitServer, tmp_path: Path
) -> None:
    root = server.folder / "repo"
    inner = repository(server.folder / "inner", FILES)
    module = f'[submodule "sub"]\n\tpath = sub\n\turl = {server.url}/inner\n'
    repository(root, {**FILES, ".gitmodules": module})
    git(root, "update-index", "--add", "--cacheinfo", f"160000,{inner},sub")
    git(root, "commit", "--quiet", "--message=x")
    found = fetched(of_git(server, git(root, "rev-parse", "HEAD")), tmp_path)
    assert set(found) == {*FILES, ".gitmodules"}
    assert not any("inner" in path for path in server.seen)


def test_a_missing_commit_is_reported_in_the_words_of_git(
    server: GitServer, tmp_path: Path
) -> None:
    repository(server.folder / "repo", FILES)
    assert "not our ref " + "a" * 40 in refused(of_git(server, "a" * 40), tmp_path)


def test_a_repository_that_is_not_there_is_refused(server: GitServer, tmp_path: Path) -> None:
    assert "not found" in refused(of_git(server, "a" * 40), tmp_path)


def test_a_redirect_is_not_followed(server: GitServer, tmp_path: Path) -> None:
    commit = repository(server.folder / "repo", FILES)
    with serving(server.folder) as other:
        server.redirect_to = other.url
        refused(of_git(server, commit), tmp_path)
        assert server.seen
        assert not other.seen


def test_a_server_in_trouble_may_be_tried_again(server: GitServer, tmp_path: Path) -> None:
    server.status = 503
    with pytest.raises(CodeUnreachable, match="503"):
        fetched(of_git(server, "a" * 40), tmp_path)


def test_a_server_that_does_not_answer_is_left_at_the_limit(
    server: GitServer, tmp_path: Path
) -> None:
    server.is_stopped = True
    with pytest.raises(CodeUnreachable, match=r"after 0\.5 s"):
        fetched(of_git(server, "a" * 40), tmp_path, limit_s=0.5)


def test_a_closed_port_may_be_tried_again(server: GitServer, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # without listening
        gone = replace(
            of_git(server, "a" * 40), git=f"http://127.0.0.1:{taken.getsockname()[1]}/repo"
        )
        with pytest.raises(CodeUnreachable, match=r"(?i)connect"):
            fetched(gone, tmp_path)


def test_addresses_that_jobs_may_not_read_from_are_not_asked(
    server: GitServer, tmp_path: Path
) -> None:
    commit = repository(server.folder / "repo", FILES)
    assert "the machine itself" in refused(of_git(server, commit, DataPolicy.open()), tmp_path)
    assert not server.seen


def test_git_asks_the_address_that_was_checked(
    server: GitServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that resolves to another address at a second lookup is not followed there."""
    commit = repository(server.folder / "repo", FILES)
    sockaddr = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))
    monkeypatch.setattr(git_commit.socket, "getaddrinfo", lambda *_, **__: [sockaddr])
    url = server.url.replace("127.0.0.1", "code.example.invalid") + "/repo"
    named = replace(of_git(server, commit), git=url)
    assert fetched(named, tmp_path) == FILES
    (tmp_path / "other").mkdir()
    shut = replace(named, policy=DataPolicy.open())
    assert "the machine itself" in refused(shut, tmp_path / "other")


def test_plain_http_is_for_hosts_of_the_operator(
    tmp_path: Path, server: GitServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sockaddr = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("8.8.8.8", 0))
    monkeypatch.setattr(git_commit.socket, "getaddrinfo", lambda *_, **__: [sockaddr])
    public = replace(of_git(server, "a" * 40), git="http://code.example.org/repo")
    assert "only read over https://" in refused(public, tmp_path)


def test_credentials_are_sent_to_their_hosts_and_never_shown(
    server: GitServer, tmp_path: Path
) -> None:
    commit = repository(server.folder / "repo", FILES)
    server.token = "Basic c2VjcmV0"
    assert "code.credentials" in refused(of_git(server, commit), tmp_path)
    folder = tmp_path / "credentials"
    folder.mkdir()
    path = folder / "mine.json"
    host = server.url.removeprefix("http://")
    text = {"headers": {"Authorization": server.token}, "hosts": [host], "plain_http": True}
    path.write_text(json.dumps(text))
    path.chmod(0o600)
    policy = replace(LOCAL, credentials_dir=str(folder))
    named = replace(of_git(server, commit, policy), credentials="mine")
    (tmp_path / "b").mkdir()
    assert fetched(named, tmp_path / "b") == FILES
    path.write_text(json.dumps({**text, "hosts": ["other.example.org"]}))
    (tmp_path / "c").mkdir()
    reason = refused(named, tmp_path / "c")
    assert "not for 127.0.0.1" in reason
    assert server.token not in reason


def test_a_node_without_git_reports_it(
    server: GitServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no git" in refused(of_git(server, "a" * 40), tmp_path)


def test_a_git_that_looks_hosts_up_by_itself_is_not_used(
    server: GitServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "git"
    old.write_text("#!/bin/sh\necho git version 2.34.1\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "git 2.37 or newer is needed" in refused(of_git(server, "a" * 40), tmp_path)
    assert not server.seen


def packed(members: list[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, goal: str = "") -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.linkname = kind, goal
    return found


def of_archive(server: GitServer, content: bytes) -> RemoteCodeRef:
    (server.folder / "files" / "code.tar.gz").write_bytes(content)
    return replace(
        of_git(server, ""),
        git=None,
        commit=None,
        url=f"{server.url}/files/code.tar.gz",
        sha256=hashlib.sha256(content).hexdigest(),
    )


def test_an_archive_becomes_its_files(server: GitServer, tmp_path: Path) -> None:
    files = [(member(name), text.encode()) for name, text in FILES.items()]
    tool = member("tool.sh")
    tool.mode = 0o6775
    content = packed([(member("pkg", tarfile.DIRTYPE), b""), *files, (tool, b"#!/bin/sh\n")])
    assert fetched(of_archive(server, content), tmp_path) == FILES | {"tool.sh": "#!/bin/sh\n"}
    target = tmp_path / "target"
    modes = {name: (target / name).stat().st_mode & 0o7777 for name in ("tool.sh", "train.py")}
    assert modes == {"tool.sh": 0o755, "train.py": 0o644}


def test_an_archive_of_another_hash_is_refused(server: GitServer, tmp_path: Path) -> None:
    code = replace(of_archive(server, packed([(member("a"), b"1")])), sha256="0" * 64)
    assert "which differs from script.code.sha256" in refused(code, tmp_path)


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([(member("../a"), b"1")], "outside the target folder"),
        ([(member("/a"), b"1")], "outside the target folder"),
        ([(member("a", tarfile.SYMTYPE, "/etc"), b"")], "is a link"),
        ([(member("a", tarfile.LNKTYPE, "b"), b"")], "is a link"),
        ([(member("a", tarfile.CHRTYPE), b"")], "not a regular file"),
        ([(member("a", tarfile.FIFOTYPE), b"")], "not a regular file"),
        ([(member("a", tarfile.XHDTYPE), b" " * (2 << 20))], "too long"),
        ([], "no file"),
    ],
)
def test_a_hostile_archive_is_refused_whole(
    members: list[tuple[tarfile.TarInfo, bytes]], words: str, server: GitServer, tmp_path: Path
) -> None:
    assert words in refused(of_archive(server, packed(members)), tmp_path)


def test_an_archive_of_folders_without_end_is_refused(
    server: GitServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray_workers.node.folders import code_sources

    monkeypatch.setattr(code_sources, "MAX_FILES", 2)
    content = packed([(member(f"d{number}", tarfile.DIRTYPE), b"") for number in range(5)])
    assert "more than 4 files and folders" in refused(of_archive(server, content), tmp_path)


def test_two_members_of_one_name_are_refused(server: GitServer, tmp_path: Path) -> None:
    content = packed([(member("a"), b"1"), (member("a"), b"2")])
    with pytest.raises(CodeRefused, match="can't both be files"):
        fetched(of_archive(server, content), tmp_path)


def test_an_archive_that_unpacks_to_too_much_is_refused(server: GitServer, tmp_path: Path) -> None:
    content = packed([(member("zeros"), b"\0" * (32 << 20))])
    with pytest.raises(CodeRefused, match="DRAY_CODE_LIMIT_BYTES"):
        fetched(of_archive(server, content), tmp_path)


def test_each_start_puts_the_same_bytes_back_without_asking_again(
    server: GitServer, tmp_path: Path
) -> None:
    code = of_git(server, repository(server.folder / "repo", FILES))
    cache, directory = CodeCache(tmp_path / "cache"), tmp_path / "jobs" / "job-1"
    cache.put_remote_into(code, directory)
    asked = len(server.seen)
    (directory / "train.py").write_text("spoiled")
    (directory / "left.txt").write_text("left")
    cache.put_remote_into(code, directory)
    assert below(directory) == {**FILES, "left.txt": "left"}
    assert len(server.seen) == asked
    with pytest.raises(CodeRefused, match="not our ref"):
        cache.put_remote_into(replace(code, commit="a" * 40), directory)
